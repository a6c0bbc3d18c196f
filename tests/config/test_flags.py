from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.files import read_args_file
from parakit.config.flags import Flags, drop_flags, format_flags, merge_flags

WORDS = st.text("abc0", min_size=1, max_size=4)
GROUP = st.lists(st.tuples(WORDS.map("--{}".format), st.lists(WORDS, max_size=3)), max_size=6)


def flatten(group: list[tuple[str, list[str]]]) -> list[str]:
    return [word for name, values in group for word in (name, *values)]


def test_a_file_is_read_as_arguments_without_its_comments(tmp_path: Path) -> None:
    file = tmp_path / "m.args"
    file.write_text("# a model\n--num-layers 4  # few\n\n--fp16\n--name 'two words'\n")
    assert read_args_file(file) == ("--num-layers", "4", "--fp16", "--name", "two words")


def test_an_unclosed_quote_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "m.args"
    file.write_text("--a 1\n--b 'x\n")
    with pytest.raises(ValueError, match=r"m\.args:2: No closing quotation; close the quote\."):
        read_args_file(file)


def test_a_later_flag_replaces_an_earlier_one_with_all_its_values() -> None:
    merged = merge_flags(["--lr", "1", "--betas", "0.9", "0.95"], ["--lr=2"], ["--betas", "0.8"])
    assert merged == ("--lr", "2", "--betas", "0.8")


def test_flag_is_dropped_regardless_of_how_its_value_is_written() -> None:
    assert drop_flags(["--lr=2", "--on", "--lr", "3"], ["--lr"]) == ("--on",)


@given(GROUP, GROUP)
def test_merging_keeps_the_value_of_the_last_occurrence(
    first: list[tuple[str, list[str]]], second: list[tuple[str, list[str]]]
) -> None:
    plain, merged = flatten(first) + flatten(second), merge_flags(flatten(first), flatten(second))
    names = {word for word in plain if word.startswith("--")}
    assert sorted(word for word in merged if word.startswith("--")) == sorted(names)
    assert all(Flags(plain).text(name, "?") == Flags(merged).text(name, "?") for name in names)


def test_look_ups_fall_back_to_the_default() -> None:
    flags = Flags(["--layers", "4", "--rate=0.5", "--on"])
    assert (flags.integer("--layers", 1), flags.number("--rate", 1.0), flags.has("--on")) == (
        4,
        0.5,
        True,
    )
    assert (flags.integer("--width", 7), flags.text("--name", "n"), flags.has("--off")) == (
        7,
        "n",
        False,
    )


def test_flags_from_a_dictionary_keep_zero_and_omit_unset_values() -> None:
    arguments = {"--lr": 0, "--bf16": True, "--fp16": False, "--seed": None, "--dropout": 0.0}
    assert format_flags(arguments) == ("--lr", "0", "--bf16", "--dropout", "0.0")

"""Texts of DATA= and values of --data-path, as Megatron reads them."""

from pathlib import Path

import pytest

from parakit.config import blend, setting
from parakit.config.blend import BlendPart, format_blend, pair_weights, parse_blend
from parakit.config.setting import SettingError, parse_setting
from parakit.config.settings import DATA


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What get_blend_from_list of Megatron 0.19 makes of each.
        ("30 a 70 b", [("30", "a"), ("70", "b")]),
        ("1e-1 a 0.9 b/c", [("1e-1", "a"), ("0.9", "b/c")]),
        ("a b", [(None, "a"), (None, "b")]),
        ("a b c", [(None, "a"), (None, "b"), (None, "c")]),
        ("2 a", [("2", "a")]),
    ],
)
def test_weights_are_those_that_megatron_reads(
    text: str, expected: list[tuple[str | None, str]]
) -> None:
    parts = pair_weights(text.split())
    assert [(part.weight, part.prefix) for part in parts] == expected
    assert text.split(maxsplit=1)[0] == "a" or parse_blend(text) == parts
    assert text[0] == "a" or len(parts) == 1 or parse_blend(format_blend(parts)) == parts


@pytest.mark.parametrize(
    "text", ["0.3 a b", "0.3 a 0.7", "a 0.7 b 0.3", "0 a 1 b", "-1 a 2 b", "a 0.5 0.5 b"]
)
def test_weights_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"^DATA=.* has (a|no) weight .* DATA='0.3 a 0.7 b'\.$"):
        parse_setting(DATA, text)


def test_names_of_a_blend_are_found_like_a_single_name() -> None:
    assert (
        parse_setting(DATA, "0.3 mine 0.7 /data/b") == "0.3 owt-ds/mine_text_document 0.7 /data/b"
    )
    assert parse_setting(DATA, "mine") == "owt-ds/mine_text_document"


def test_names_without_weights_are_a_blend_if_all_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blend, "ROOT", tmp_path)
    monkeypatch.setattr(setting, "ROOT", tmp_path)
    (tmp_path / "owt-ds").mkdir()
    for name in "ab":
        (tmp_path / "owt-ds" / f"{name}_text_document.idx").touch()
    assert parse_setting(DATA, "a b") == "owt-ds/a_text_document owt-ds/b_text_document"
    assert len(parse_blend("owt-ds/a_text_document owt-ds/b_text_document")) == 2
    assert parse_blend('odd, "place here/x') == (BlendPart('odd, "place here/x'),)
    assert parse_setting(DATA, "some/my data") == "some/my data"


def test_a_single_data_set_may_have_blanks_in_its_path(tmp_path: Path) -> None:
    (tmp_path / "my data.idx").touch()
    prefix = str(tmp_path / "my data")
    assert parse_blend(parse_setting(DATA, prefix)) == (BlendPart(prefix),)

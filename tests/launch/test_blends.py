"""Runs on several data sets that Megatron blends."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.run import Status, read_run
from parakit.config.errors import LaunchError
from parakit.config.flags import Flags, values_by_flag
from parakit.config.run import Backend
from parakit.data import open_dataset
from parakit.launch import data
from parakit.launch.compose import Launch
from parakit.launch.execute import execute_launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.run_folder import _identify_dataset
from parakit.launch.train import compose_job, describe_chosen_split
from parakit.logs.runs import load_folder
from tests.small import SMALL, write_documents


@pytest.fixture
def parts(tmp_path: Path) -> tuple[str, str]:
    return (
        write_documents(tmp_path / "a", [300] * 40),
        write_documents(tmp_path / "b", [200] * 40, first_token=7),
    )


def composed(tmp_path: Path, **changes: object) -> Launch:
    options = replace(Options(runs=tmp_path / "runs", extra=SMALL), **changes)  # type: ignore[arg-type]
    return compose_job(parse_target("train-dp2-gpt2-tiny-2cpu").with_options(options))


def data_values(launch: Launch) -> list[str]:
    return values_by_flag(launch.arguments())["--data-path"]


def test_a_blend_reaches_megatron_with_its_weights_and_each_part_is_hashed(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    launch = composed(tmp_path, data=f"0.3 {parts[0]} 0.7 {parts[1]}")
    assert data_values(launch) == ["0.3", parts[0], "0.7", parts[1]]
    identity = _identify_dataset(launch)
    assert identity.parts is not None
    assert [(part.prefix, part.weight) for part in identity.parts] == [
        (parts[0], "0.3"),
        (parts[1], "0.7"),
    ]
    hashes = [open_dataset(Path(part)).content_sha256 for part in parts]
    assert [part.sha256 for part in identity.parts] == hashes
    other_texts = (f"0.4 {parts[0]} 0.6 {parts[1]}", f"0.3 {parts[1]} 0.7 {parts[0]}", parts[0])
    digests = {_identify_dataset(composed(tmp_path, data=other)).sha256 for other in other_texts}
    assert len(digests | {identity.sha256}) == 4
    write_documents(Path(parts[1]), [201] * 40)
    assert _identify_dataset(launch).sha256 != identity.sha256


def test_flags_of_megatron_name_the_same_blend_and_are_recorded_as_what_they_said(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    text = f"0.3 {parts[0]} 0.7 {parts[1]}"
    file = tmp_path / "blend.txt"
    file.write_text(text.replace(" ", "\n"))
    expected = composed(tmp_path, data=text)
    for flags in (("--data-path", *text.split()), ("--data-args-path", str(file))):
        launch = composed(tmp_path, extra=(*SMALL, *flags))
        assert data_values(launch) == data_values(expected)
        assert not Flags(launch.arguments()).has("--data-args-path")
        assert _identify_dataset(launch) == _identify_dataset(expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train-data-path", "x"), "EXTRA= has --train-data-path, and the kit trains on"),
        (("--per-split-data-args-path", "x"), "EXTRA= has --per-split-data-args-path"),
        (("--data-args-path", "/nowhere"), "--data-args-path /nowhere cannot be read"),
        (
            ("--data-path", "0.3", "a", "b", "c"),
            "EXTRA= names data sets, and 0.3 a b c has no weight",
        ),
    ],
)
def test_data_that_cannot_be_meant_is_one_sentence(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        composed(tmp_path, extra=(*SMALL, *flags))


def test_each_data_set_of_a_blend_is_checked_and_the_split_fits_all(tmp_path: Path) -> None:
    large = write_documents(tmp_path / "large", [300] * 4000)
    small = write_documents(tmp_path / "small", [300] * 12)
    launch = composed(tmp_path, data=f"1 {large} 1 {small}")
    assert Flags(launch.arguments()).text("--split") == "10,1,1"
    assert f"Data set {small} is too small for --split" in describe_chosen_split(launch)
    check_launch(launch)
    missing = composed(tmp_path, data=f"1 {large} 1 {tmp_path}/gone")
    with pytest.raises(LaunchError, match=r"gone\.idx does not exist"):
        check_launch(missing)


def test_a_backend_that_reads_one_data_set_refuses_a_blend(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    launch = composed(tmp_path, data=" ".join(parts), backend=Backend.NATIVE)
    with pytest.raises(LaunchError, match="BACKEND=native reads one data set"):
        check_launch(launch)


def test_the_kits_own_samples_of_a_blend_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(data, "_is_complete", lambda prefix: asked.append(prefix) or True)
    assert not data.make_sample(f"1 {data.SAMPLE} 2 {data.UNIQUE_SAMPLE}", None)  # type: ignore[arg-type]
    assert asked == [data.SAMPLE, data.UNIQUE_SAMPLE]


@pytest.mark.ranks
def test_a_blend_is_trained_and_each_part_is_hashed_in_run_json(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    blend = f"0.3 {parts[0]} 0.7 {parts[1]}"
    losses = []
    for data_text in (blend, parts[0]):
        launch = composed(
            tmp_path,
            data=data_text,
            iterations=3,
            global_batch_size=8,
            shared_start=True,
            ledger=False,
        )
        folder, status = execute_launch(launch, tmp_path / "runs", Console(quiet=True), "dp2")
        assert status.status is Status.OK, status.reason
        iterations = load_folder(folder).log.iterations
        losses.append([iteration.lm_loss for iteration in iterations])
        record = read_run(folder)
        if data_text == blend:
            assert record.dataset is not None
            assert record.dataset.parts is not None
            hashes = [open_dataset(Path(part)).content_sha256 for part in parts]
            assert [part.sha256 for part in record.dataset.parts] == hashes
            assert [part.weight for part in record.dataset.parts] == ["0.3", "0.7"]
    assert len(losses[0]) == 3
    assert losses[0] != losses[1], "Megatron drew samples of the second part, too"

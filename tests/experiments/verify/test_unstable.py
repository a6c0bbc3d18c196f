"""A strategy that is not the same twice is reported as such, and no innocent iteration is blamed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.capture import CapturedRank
from parakit.artifacts.verdict import VerifyOutcome
from parakit.experiments.verify.pairs import LaunchPair
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from parakit.launch import SMALL_SAMPLE, Options, make_sample, parse_target, read_patch_file
from parakit.verify import Capture, find_unstable_iteration
from parakit.verify.captured import RankCapture
from tests.verify.captures import rank

RACE = Path(__file__).with_name("race.py")


def capture(*hashes_of_ranks: str) -> Capture:
    """Return a capture of ranks with these hashes, one letter per iteration."""
    ranks: list[CapturedRank] = [rank(weight_hashes=tuple(hashes)) for hashes in hashes_of_ranks]
    folder = Path("capture")
    return Capture(folder, tuple(RankCapture(folder, described, ()) for described in ranks))


@pytest.mark.parametrize(
    ("captures", "iteration"),
    [
        ((capture("abc"), capture("ab")), None),
        ((capture("abc"), capture("ax")), 1),
        ((capture("abc", "abc"), capture("ab", "xb")), 0),
        ((capture("abcd"), capture("ab"), capture("abx")), 2),
        ((capture("abcd"), capture("abx"), capture("ax")), 1),
        ((capture(""), capture("abc")), None),
        ((capture("abc"),), None),
    ],
)
def test_first_iteration_with_other_weights_in_two_runs(
    captures: tuple[Capture, ...], iteration: int | None
) -> None:
    assert find_unstable_iteration(captures) == iteration


@pytest.mark.ranks
def test_a_race_before_the_examined_iteration_is_named_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACE_MARKER", str(tmp_path / "race"))
    make_sample(SMALL_SAMPLE, Console(quiet=True))
    options = Options(
        data=SMALL_SAMPLE, extra=("--vocab-size", "1024"), patch_file=read_patch_file(str(RACE))
    )
    job = parse_target("train-tp2-gpt2-tiny-2cpu", options)
    with closing(ForkedRanks()) as ranks:
        verdict = Verifier(tmp_path, ranks).verify(LaunchPair(job)).verdict
    assert verdict.verdict is VerifyOutcome.DIFFERS
    assert verdict.kind is not None
    assert verdict.kind.startswith("not the same twice: weights after iteration 1 differ")
    assert verdict.module == "decoder.layers.1.input_layernorm.weight"
    assert verdict.iteration == 1

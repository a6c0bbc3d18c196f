"""Verdicts and copies against what Megatron does with its own checkpoints at two ranks."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.run import CHECKPOINTS_FOLDER, LOG_FILE
from parakit.artifacts.torch_dist import TRACKER_FILE
from parakit.checkpoint import reshard_command as reshard
from parakit.checkpoint.checks import find_problems, judge_loading
from parakit.checkpoint.contents import read_contents
from parakit.launch.options import Saving
from tests.checkpoint.forked import Runs, forked
from tests.checkpoint.test_inspect import FORMS, UNDER, UNTIED

pytestmark = pytest.mark.slow

IGNORED = "vs (2, 1) from checkpoint): RNG state will be ignored"
SAVED, LAST = 4, 8
PRINTED = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with forked(tmp_path_factory.mktemp("runs")) as made:
        yield made


def saved(runs: Runs, strategy: str, model: str = "gpt2-tiny") -> Path:
    target = f"train-{strategy}-{model}-2cpu"
    return runs.train(target, iterations=LAST, saving=Saving(SAVED, 2))


def alone(run: Path, folder: Path) -> Path:
    """The run's checkpoint of iteration 4 without the later one."""
    name = f"iter_{SAVED:07d}"
    shutil.copytree(run / CHECKPOINTS_FOLDER / name, folder / name)
    (folder / TRACKER_FILE).write_text(str(SAVED))
    return folder


def printed(run: Path) -> dict[int, tuple[str, ...]]:
    """Loss and gradient norm of iterations 5, 7 and 8, as they stand in the log.

    The second line after a start averages the first two iterations, in a run that resumes alone.
    """
    printed_values = {
        int(line[0]): line[1:] for line in PRINTED.findall((run / LOG_FILE).read_text())
    }
    return {number: printed_values[number] for number in (SAVED + 1, *range(SAVED + 3, LAST + 1))}


def test_megatron_keeps_or_ignores_what_the_verdict_says(runs: Runs, tmp_path: Path) -> None:
    run = saved(runs, "tp2")
    folder = alone(run, tmp_path)
    contents = read_contents(folder)
    assert find_problems(contents, reads_pieces=True) == ()
    assert contents.states == ("optimizer", "scheduler", "random")
    for strategy in ("pp2", "dp2", "tp2"):
        log = (runs.resume(run, strategy, folder, LAST) / LOG_FILE).read_text()
        verdict = judge_loading(contents, strategy).verdict
        assert verdict == ("loads without random states" if IGNORED in log else "loads"), strategy


@pytest.mark.parametrize("form", FORMS)
def test_megatron_loads_what_the_verdict_says_it_loads(runs: Runs, form: str) -> None:
    """Of the table of verdicts each cell, with the flags that the verdict prints."""
    extra = (UNTIED,) if "untied" in form else ()
    first = "dp2-zero1" if "zero1" in form else "tp2"
    saving = runs.train(
        f"train-{first}-gpt2-tiny-2cpu", iterations=2, saving=Saving(2), extra=extra
    )
    folder = saving / CHECKPOINTS_FOLDER
    contents = read_contents(folder)
    load = ("--load", str(folder), "--exit-on-missing-checkpoint")
    for strategy, expected in zip(UNDER, FORMS[form], strict=True):
        verdict = judge_loading(contents, strategy)
        assert verdict.verdict.partition(" ")[0] == expected, strategy
        # What is refused is tried too, with the strategy's own flags.
        target, flags = f"train-{strategy}-gpt2-tiny-2cpu", (*extra, *load, *verdict.flags)
        flags = flags if verdict.flags else (*flags, "--no-load-optim")
        if expected == "loads":
            run = runs.train(target, iterations=3, shared_start=False, extra=flags)
            assert "successfully loaded checkpoint" in (run / LOG_FILE).read_text(), strategy
            continue
        with pytest.raises(AssertionError):
            runs.train(target, iterations=3, shared_start=False, extra=flags)
        log = (max(runs.folder.glob("2*")) / LOG_FILE).read_text()
        assert re.search(r"KeyError: '(model|output_layer\.weight)'", log), strategy


RANK_FILES = {
    "tp2": ("refuses", "loads", "refuses", "refuses", "refuses", "refuses", "refuses"),
    "dp2": ("loads", "refuses", "refuses", "loads", "refuses", "refuses", "refuses"),
}
"""Whether a checkpoint of the format `torch` loads under each of `UNDER`, by the strategy that saved it."""


@pytest.mark.parametrize("first", RANK_FILES)
def test_megatron_loads_the_rank_files_that_the_verdict_says_it_loads(
    runs: Runs, first: str
) -> None:
    legacy = ("--ckpt-format", "torch")
    saving = runs.train(
        f"train-{first}-gpt2-tiny-2cpu",
        iterations=2,
        saving=Saving(2),
        shared_start=False,  # The shared initial checkpoint has another format.
        extra=legacy,
    )
    folder = saving / CHECKPOINTS_FOLDER
    contents = read_contents(folder)
    assert find_problems(contents, reads_pieces=True) == ()
    load = ("--load", str(folder), "--exit-on-missing-checkpoint")
    for strategy, expected in zip(UNDER, RANK_FILES[first], strict=True):
        verdict = judge_loading(contents, strategy)
        assert verdict.verdict.partition(" ")[0] == expected, strategy
        if expected == "loads":
            target, flags = f"train-{strategy}-gpt2-tiny-2cpu", (*load, *verdict.flags)
            run = runs.train(target, iterations=3, shared_start=False, extra=flags)
            assert "successfully loaded checkpoint" in (run / LOG_FILE).read_text(), strategy


@pytest.mark.parametrize(
    ("first", "second", "model"),
    [
        ("zero1", "tp2", "gpt2-tiny"),
        ("tp2", "zero1", "gpt2-tiny"),
        ("pp2", "dp2", "gpt2-tiny"),
        ("ep2", "dp2", "moe-tiny"),
        ("vpp2", "pp2", "gpt2-tiny"),
    ],
)
def test_training_from_a_copy_prints_the_losses_to_the_last_digit(
    runs: Runs, tmp_path: Path, first: str, second: str, model: str
) -> None:
    """Those of the run that was not stopped, from a copy, and from one there and back.

    Where Megatron can load the checkpoint itself, it prints the same. It cannot where one of the two
    layouts alone shards optimizer states, or has experts in an optimizer of their own.
    """
    run = saved(runs, first, model)
    original, there, back = alone(run, tmp_path / "own"), tmp_path / "there", tmp_path / "back"
    for source, strategy, to in ((original, second, there), (there, first, back)):
        assert reshard(str(source), strategy, str(to), Console(quiet=True)) == 0
    assert printed(runs.resume(run, first, back, LAST)) == printed(run)
    assert printed(runs.resume(run, second, there, LAST)) == printed(run)
    if not {"zero1", "ep2"} & {first, second}:
        assert printed(runs.resume(run, second, original, LAST)) == printed(run)

"""`DRY_RUN=1`: the command, and every reason why the run itself would be refused."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.run import DeviceKind
from parakit.launch.data import DEFAULT_DATA, make_sample
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job, start_job

DryRun = Callable[..., int]


@pytest.fixture
def dry_run(sample_prefix: Path, tmp_path: Path) -> DryRun:
    """Train a target with DRY_RUN=1, on the sample unless told otherwise."""

    def run(name: str, **changes: object) -> int:
        options = Options(data=str(sample_prefix), runs=tmp_path / "runs", dry_run=True)
        options = replace(options, **changes)  # type: ignore[arg-type]
        target = parse_target(name, options)
        return start_job(target.with_options(options), Console(quiet=True))

    return run


@pytest.mark.parametrize(
    ("target", "changes", "sentence"),
    [
        ("train-dp2-gpt2-tiny-2cpu", {"global_batch_size": 7}, "7"),
        (
            "train-dp2-gpt2-tiny-2cpu",
            {"data": "owt-ds/none"},
            "owt-ds/none.*; run 'make prepare-ds .* NAME=none'",
        ),
        ("train-dp64-gpt2-tiny-64gpu", {}, r"Needs 64 GPUs, found"),
    ],
)
def test_a_dry_run_shows_the_command_and_refuses_what_the_run_would(
    dry_run: DryRun,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    target: str,
    changes: dict[str, object],
    sentence: str,
) -> None:
    assert dry_run(target, **changes) == 2
    printed = capsys.readouterr()
    assert re.search(sentence, printed.err)
    assert "-m megatron_patches" in printed.out
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_refusal_before_the_command(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    assert dry_run("train-dp64-gpt2-tiny-64gpu") == 2
    assert screen.getvalue().startswith("Needs 64 GPUs, found")
    assert "-m megatron_patches" in screen.getvalue()


def test_a_dry_run_says_that_the_data_make_another_model(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("train-dp2-llama3-8b-2gpu", data=None) == 2
    sentences = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert " 7,391," in sentences[0]


def test_a_flag_that_the_kit_does_not_know_is_named_and_not_refused(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ("--app-tag-run-name", "1", "--window-size", "16,0")
    assert dry_run("train-dp2-gpt2-tiny-2cpu", extra=extra) == 0
    command, *sentences = capsys.readouterr().out.splitlines()
    assert command.endswith(
        "--app-tag-run-name 1 --window-size 16,0 --tensorboard-dir '<run folder>/tensorboard'"
    )
    assert [line.partition(":")[0] for line in sentences] == [
        "# This kit does not know --app-tag-run-name"
    ]


def test_a_schedule_that_never_leaves_its_warm_up_is_said_with_what_fits_it_to_the_run(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def said(**changes: object) -> list[str]:
        dry_run("train-dp2-mine-2cpu", model=str(file), **changes)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]

    file = tmp_path / "mine.args"
    file.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64\n"
        "--max-position-embeddings 64 --micro-batch-size 2\n"
    )
    assert said(iterations=30) == [
        "# The learning rate reaches 4.2e-06 of its 6e-05: the schedule's warm-up takes 430 iterations, "
        'and the run ends after 30; EXTRA="--lr-decay-iters 30" fits the schedule to the run.'
    ]
    assert said(iterations=30, extra=("--lr-decay-iters", "30")) == []
    assert said(iterations=300) == []
    with file.open("a") as more:
        more.write("--train-iters 500 --lr-decay-iters 500 --lr-warmup-fraction .01\n")
    assert said(iterations=30) == []
    assert said(iterations=600) == [
        "# The learning rate reaches its minimum after 500 of 600 iterations; "
        'EXTRA="--lr-decay-iters 600" fits the schedule to the run.'
    ]


def test_a_flag_that_no_megatron_has_is_refused_with_the_near_one(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    target, mine = "train-dp2-gpt2-tiny-2cpu", ("--swigluu", "--my-own-flag", "2")
    assert dry_run(target, extra=mine) == 2
    assert capsys.readouterr().err.splitlines() == [
        "Megatron (0.14 to 0.20) has no flag --swigluu; did you mean --swiglu?",
        "Megatron (0.14 to 0.20) has no flag --my-own-flag; leave it out.",
    ]


def test_a_value_that_is_no_number_is_refused_before_ranks_start(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ("--lr", "abc", "--lr-warmup-iters", "1.5", "--clip-grad", "--moe-layer-freq", "[1,0]")
    assert dry_run("train-dp2-gpt2-tiny-2cpu", extra=mine) == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "--clip-grad has no value; it takes a number.",
        "Megatron's flag --lr takes a number, not 'abc'; correct the value.",
        "Megatron's flag --lr-warmup-iters takes a whole number, not '1.5'; correct the value.",
    ]


def test_a_checkout_may_have_flags_of_its_own(
    dry_run: DryRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = tmp_path / "fork"
    package = checkout / "megatron" / "core" / "package_info.py"
    package.parent.mkdir(parents=True)
    package.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\nPRE_RELEASE = ''\nmy_own_flag: int = 1\n")
    (checkout / "pretrain_gpt.py").write_text("pretrain()")
    target, mine = "train-dp2-gpt2-tiny-2cpu", ("--swigluu", "--my-own-flag", "2")
    assert dry_run(target, extra=mine, megatron_lm=checkout) == 2
    refusal = capsys.readouterr().err.strip()
    assert re.search(r"^Megatron [^\n]* has no flag --swigluu[^\n]*$", refusal)


def test_interleaved_stages_run_at_the_models_own_batch(dry_run: DryRun) -> None:
    assert dry_run("train-vpp2-gpt2-tiny-2cpu") == 0


@pytest.fixture
def fresh_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit in which no data set was made yet."""
    for module in ("parakit.launch.data", "parakit.launch.preflight"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    return tmp_path


SAMPLE = DEFAULT_DATA[DeviceKind.CPU]


def test_a_dry_run_makes_no_sample_and_does_not_ask_for_one(
    dry_run: DryRun, fresh_clone: Path
) -> None:
    assert dry_run("train-dp2-gpt2-tiny-2cpu", data=None) == 0
    assert dry_run("train-dp2-gpt2-tiny-2cpu", data=None, shared_start=False) == 0
    assert list(fresh_clone.iterdir()) == []


def test_a_run_makes_the_sample_where_it_is_missing(
    fresh_clone: Path, monkeypatch: pytest.MonkeyPatch, sample_prefix: Path
) -> None:
    made: list[str] = []

    def make(*arguments: str) -> int:
        made.append(arguments[-1])
        folder = fresh_clone / "owt-ds"
        for file in sample_prefix.parent.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        return 0

    monkeypatch.setattr("parakit.launch.data.call_module", make)
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    launch = compose_job(target.with_options(Options(shared_start=False)))
    for _ in range(2):
        make_sample(launch.data, Console(quiet=True))
    assert made == ["owt-ds/sample"]
    assert (fresh_clone / f"{SAMPLE}.idx").is_file()
    assert not list(fresh_clone.glob("owt-ds/*.lock"))


def test_a_sample_that_cannot_be_made_is_a_sentence(
    fresh_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.launch.data.call_module", lambda *_: 1)
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    launch = compose_job(target)
    with pytest.raises(LaunchError, match=f"{SAMPLE} could not be made, for the reason above; try"):
        make_sample(launch.data, Console(quiet=True))

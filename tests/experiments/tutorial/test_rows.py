import csv
import subprocess
from dataclasses import replace

import pytest

from parakit.cli.options import find_command
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flags import values_by_flag
from parakit.config.strategy import parallelism_from_flags
from parakit.experiments.tutorial.commands import train_row
from parakit.experiments.tutorial.rows import (
    FOLDER,
    TutorialRow,
    find_row,
    read_rows,
    rows_of_chapter,
)
from parakit.launch import Options, compose_job

WITHOUT_VALUE = ("--bf16", "--log-throughput")
TRAINING = {
    "--train-iters": "100",
    "--weight-decay": "0.1",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.95",
    "--init-method-std": "0.006",
    "--clip-grad": "1.0",
    "--lr": "6.0e-5",
    "--lr-decay-style": "cosine",
    "--min-lr": "6.0e-6",
    "--lr-warmup-fraction": ".001",
    "--lr-decay-iters": "430000",
    "--split": "949,50,1",
    "--log-interval": "1",
    "--save-interval": "0",
    "--eval-iters": "10",
}
SHAPES = {
    "gpt2-xl": (48, 1600, 25),
    "gpt2-xl-62": (62, 1600, 25),
    "gpt2-1.2b": (40, 1536, 16),
    "gpt2-2.5b": (54, 1920, 20),
    "gpt2-4.2b": (64, 2304, 24),
    "gpt2-8.3b": (72, 3072, 32),
    "gpt-22b": (48, 6144, 64),
}
ADDED = {
    # The kit's tokenizer, data cache, seed and end of a run, and Megatron's default dropout.
    *("--tokenizer-type", "--vocab-size", "--data-cache-path", "--seed", "--exit-interval"),
    *("--attention-dropout", "--hidden-dropout", "--data-path", "--tensorboard-dir"),
    # Without Transformer Engine and Apex, as on the machine of the tests.
    *("--transformer-impl", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-gradient-accumulation-fusion", "--no-rope-fusion"),
    "--no-create-attention-mask-in-dataloader",
}


def read_lines() -> list[dict[str, str]]:
    with (FOLDER / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def published_flags(line: dict[str, str]) -> dict[str, list[str]]:
    """Return the flags of the published script, from the columns of a line of rows.csv."""
    chapter, seq = line["id"][0], line["seq_length"]
    values = {name: [value] for name, value in TRAINING.items()} | {
        name: [] for name in WITHOUT_VALUE
    }
    if line["model"] in SHAPES:
        shape = zip(
            ("--num-layers", "--hidden-size", "--num-attention-heads"),
            SHAPES[line["model"]],
            strict=True,
        )
        values |= {name: [str(value)] for name, value in shape}
    values |= {
        "--seq-length": [seq],
        "--max-position-embeddings": [seq],
        "--micro-batch-size": [line["micro_batch"]],
        "--global-batch-size": [line["global_batch"]],
        "--attention-backend": ["flash" if chapter == "3" else "auto"],
        "--eval-interval": ["25" if chapter == "3" else "50"],
    }
    row_flags = values_by_flag(line["flags"].split())
    degrees = parallelism_from_flags(
        ("--num-layers", "72", *line["flags"].split()), int(line["gpus"])
    )
    assert degrees.world_size == int(line["gpus"])
    values |= {name: list(value) for name, value in row_flags.items()}
    label = line["label"]
    for name, key in (("tensor-model", "TP"), ("pipeline-model", "PP"), ("context", "CP")):
        degree = f"{label}, ".replace(f"V{key}", "-").partition(f"{key} ")[2].partition(",")[0]
        # "CP 1" and chapters without the degree have 1; ETP is another flag.
        is_degree = chapter in {"TP": "24", "PP": "4", "CP": "3"}[key]
        values[f"--{name}-parallel-size"] = [degree if is_degree and degree else "1"]
    if "SP" in label.split(", ") or chapter == "5":
        values["--sequence-parallel"] = []
    return values


@pytest.mark.parametrize("line", read_lines(), ids=lambda line: line["id"])
def test_flags_of_a_run_equal_the_published_scripts(line: dict[str, str]) -> None:
    row = find_row(line["id"])
    launch = compose_job(row.make_job(Options()))
    assert launch.devices == int(line["gpus"])
    flags = {name: list(value) for name, value in values_by_flag(launch.arguments()).items()}
    published = published_flags(line)
    if row.id in ("282", "283"):
        published["--tensor-model-parallel-size"] = ["8"]
    assert {name: flags.get(name) for name in published} == published
    assert flags.keys() - published.keys() <= ADDED


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.id)
def test_flags_of_a_run_give_its_strategy(row: TutorialRow) -> None:
    flags = (*row.loaded_model.flags, *row.parallel_flags)
    parallelism = parallelism_from_flags(flags, row.gpus)
    if row.id == "121":  # One rank has nothing to shard with.
        parallelism = replace(parallelism, sharding=row.parallelism.sharding)
    assert parallelism == row.parallelism


def test_there_are_66_runs_and_four_went_out_of_memory() -> None:
    assert len(read_rows()) == 66
    out_of_memory = [row.id for row in read_rows() if row.ran_out_of_memory]
    assert out_of_memory == ["121", "281", "301", "505"]
    assert len(rows_of_chapter("sp")) == 3


def test_id_and_published_name_start_the_same_run() -> None:
    assert find_row("446") is find_row("446-gpt2-8.3B-tpsp2-pp4-vpp6-m4")
    command = find_command("446-gpt2-8.3B-tpsp2-pp4-vpp6-m4")
    assert command is not None
    assert command is find_command("446")


def test_unknown_id_and_wrong_name_are_refused_with_the_right_ones() -> None:
    with pytest.raises(LaunchError, match=r"no run 447; its ids that begin with 44 are 442, 443"):
        find_row("447")
    with pytest.raises(LaunchError, match=r"446 is 446-gpt2-8.3B-tpsp2-pp4-vpp6-m4, not 446-vpp6"):
        find_row("446-vpp6")
    with pytest.raises(
        LaunchError, match=r"no chapter vpp; its chapters are dp, tp, sp, cp, pp, ep"
    ):
        rows_of_chapter("vpp")


def test_dry_run_prints_the_command_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr("parakit.launch.devices.visible_gpus", tuple)
    assert train_row("446", Options(dry_run=True), Console(markup=False)) == 2
    printed = capsys.readouterr()
    assert "Needs 8 GPUs" in printed.err
    assert "--num-layers-per-virtual-pipeline-stage 6" in printed.out


def test_callers_variables_count_most() -> None:
    options = Options(iterations=200, micro_batch_size=4, dropout=0.0, extra=("--lr", "1e-4"))
    flags = values_by_flag(compose_job(find_row("446").make_job(options)).arguments())
    assert (flags["--train-iters"], flags["--exit-interval"]) == (["200"], ["200"])
    assert (flags["--micro-batch-size"], flags["--lr"]) == (["4"], ["1e-4"])
    assert flags["--hidden-dropout"] == ["0.0"]


def test_make_lists_every_run_as_a_target_for_completion() -> None:
    database = subprocess.run(
        ["make", "--print-data-base", "--question", "no-such-target"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    targets = {line.partition(":")[0] for line in database}
    assert {row.name for row in read_rows()} <= targets
    assert "id-target" not in targets

import json
from argparse import Namespace

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.flags import values_by_flag
from parakit.config.run import DeviceKind
from parakit.config.strategy import parallelism_from_flags
from parakit.experiments.commands import reproduce, run_named_experiment
from parakit.experiments.tutorial.chapters import read_chapters
from parakit.experiments.tutorial.claims import evaluate_expression
from parakit.experiments.tutorial.experiment import load_chapter, make_small_job
from parakit.experiments.tutorial.predict import describe_run, predict_rows, summarise_errors
from parakit.experiments.tutorial.rows import (
    CHAPTERS,
    TutorialRow,
    find_row,
    read_rows,
    rows_of_chapter,
)
from parakit.launch import Options, compose_job

CONSOLE = Console(markup=False)


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.id)
def test_small_job_has_the_degrees_and_micro_batches_of_the_row(row: TutorialRow) -> None:
    job = make_small_job(row, Options())
    launch = compose_job(job)
    split = launch.spec.parallelism
    assert (job.devices, job.device) == (row.gpus, DeviceKind.CPU)
    assert split == parallelism_from_flags(launch.flags, row.gpus)
    assert launch.spec.batch.micro_batch_size * row.micro_batches * split.data == row.global_batch
    if row.chapter == "pp":
        assert split.virtual_stages == row.parallelism.virtual_stages
    if row.chapter == "ep":
        assert (split.expert, split.expert_tensor) == (
            row.parallelism.expert,
            row.parallelism.expert_tensor,
        )


def test_chapter_has_its_rows_and_needs_enough_devices() -> None:
    chapter = load_chapter("tp", Options(), devices="2cpu")
    assert [cell.label for cell in chapter.cells] == [
        row.id for row in rows_of_chapter("tp") if row.gpus <= 2
    ]
    assert chapter.report == "tutorial-tp"
    with pytest.raises(LaunchError, match="DEVICES=2cpu is too few"):
        load_chapter("pp", Options(), devices="2cpu")


def test_variables_of_the_tutorial_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(LaunchError, match="on CPU ranks alone; add DEVICES=8cpu"):
        load_chapter("pp", Options(), model="gpt2-tiny")
    with pytest.raises(
        LaunchError, match="is of a mixture of experts, and MODEL=gpt2-tiny is none"
    ):
        load_chapter("ep", Options(), devices="8cpu", model="gpt2-tiny")
    unset = {"name": None, "chapter": None, "devices": None, "model": None}
    for variable, message in (
        ({"chapter": "pp"}, "CHAPTER= is of the tutorial, not of published"),
        ({"devices": "8cpu"}, "DEVICES= is for the tutorial; add NAME=tutorial"),
        ({"name": "zero"}, "NAME=zero was not published"),
        ({"name": "tutorial-pp", "chapter": "tp"}, "two chapters; leave one out"),
        ({"name": "tutorial", "chapter": "vpp"}, "no chapter vpp"),
    ):
        with pytest.raises(LaunchError, match=message):
            reproduce(Namespace(**unset | variable), Options(), CONSOLE)


def test_chapter_without_gpus_says_what_to_run_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("parakit.launch.devices.visible_gpus", tuple)
    arguments = Namespace(name="tutorial-sp", chapter=None, devices=None, model=None)
    assert reproduce(arguments, Options(dry_run=True), CONSOLE) == 2
    assert "DEVICES=8cpu' runs a chapter in small on CPU ranks" in capsys.readouterr().err


def test_prediction_prints_published_predicted_and_what_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = Namespace(gpu="h100", model=None, dtype=None, json=True)
    assert run_named_experiment("tutorial-sp", Options(), CONSOLE, variables=arguments) == 0
    lost, sequence, recomputed = json.loads(capsys.readouterr().out)
    assert (lost["published_memory_gb"], lost["fits"]) == (None, "does not fit")
    assert sequence["ran"] == "TP 8 with SP"
    assert recomputed["ran"] == "TP 8, full recomputation"
    for row in (sequence, recomputed):
        assert abs(row["memory_error"]) < 0.1
        assert abs(row["time_error"]) < 0.2
    arguments.json = False
    run_named_experiment("tutorial-sp", Options(), CONSOLE, variables=arguments)
    text = " ".join(capsys.readouterr().out.split())
    assert "Predicted not to fit, as published: 281." in text


def test_what_ran_differs_from_the_label_where_the_label_is_wrong() -> None:
    assert "1F1B" in describe_run(find_row("458"))
    assert "9 virtual stages of 2 layers" in describe_run(find_row("442"))
    assert "ZeRO-1" in describe_run(find_row("115"))
    assert describe_run(find_row("511")) == "DP 8, EP 4, ETP 2, ZeRO-1"


def test_summary_names_out_of_memory_runs_that_are_missed() -> None:
    text = summarise_errors(predict_rows([find_row("121"), find_row("111")], "h100"))
    assert "121" in text.partition("Median")[2]


def test_chapters_have_a_lesson_per_row_and_arithmetic_in_their_plots() -> None:
    assert [chapter.name for chapter in read_chapters()] == list(CHAPTERS)
    for chapter in read_chapters():
        ids = [row_id for names in chapter.lessons for row_id in names.split()]
        assert sorted(ids) == sorted(row.id for row in rows_of_chapter(chapter.name))
        for lesson in chapter.lessons.values():
            assert lesson.count(". ") == 1, lesson
        for plot in chapter.plots:
            for series in plot.series:
                assert all(evaluate_expression(text) > 0 for _, text in series.points)


def test_small_run_keeps_the_flag_of_virtual_stages() -> None:
    flags = values_by_flag(compose_job(make_small_job(find_row("446"), Options())).flags)
    assert flags["--num-layers-per-virtual-pipeline-stage"] == ["6"]
    assert flags["--num-layers"] == ["72"]


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.id)
def test_small_run_overlaps_gathers_of_weights_only_with_the_distributed_optimizer(
    row: TutorialRow,
) -> None:
    # Megatron's arguments.py refuses --overlap-param-gather without it.
    flags = values_by_flag(compose_job(make_small_job(row, Options())).flags)
    if "--overlap-param-gather" in flags:
        assert "--use-distributed-optimizer" in flags

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from parakit.artifacts import run as records
from parakit.artifacts.run import Resumption, Status
from parakit.config.published import load_published
from parakit.logs.runs import Run, load_folder
from parakit.reporting.analyse.parity import loss_curve, resumption_sentence
from parakit.reporting.analyse.report import build_report
from parakit.reporting.render.charts import draw_losses
from tests.reporting.factory import iteration_line, log_text, run_record, write_run

PARENT, CHILD = "20260101T000000Z-tp2", "20260101T010000Z-pp2"


@pytest.fixture
def family(tmp_path: Path) -> tuple[Run, Run]:
    """TP 2, killed after iteration 5, and PP 2, gone on with it from iteration 4 to 8."""
    lines = [iteration_line(number, loss=10 - 0.1 * number) for number in range(1, 6)]
    parent = write_run(tmp_path, run_record(PARENT, "tp2"), "\n".join(lines) + "\n", Status.CRASHED)
    record = run_record(CHILD, "dp2", resumptions=(Resumption(PARENT, 4),))
    later = [iteration_line(number, loss=20 - 0.1 * number) for number in range(5, 9)]
    child = write_run(tmp_path, record, "\n".join(later) + "\n")
    return load_folder(parent), load_folder(child)


def test_a_run_in_another_layout_continues_its_parents_curve_from_the_checkpoint(
    family: tuple[Run, Run],
) -> None:
    parent, child = family
    curve = loss_curve(child)
    assert sorted(curve) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (curve[4], curve[5]) == (9.6, 19.5)
    assert child.restarts == (5,)
    assert f"resumes from iteration 4 of {PARENT}" in child.notes
    assert (parent.earlier_iterations, parent.restarts) == ((), ())


def test_its_times_are_its_own(family: tuple[Run, Run]) -> None:
    _, child = family
    assert set(child.window.iterations) <= {5, 6, 7, 8}


def test_iterations_that_were_trained_twice_are_compared(family: tuple[Run, Run]) -> None:
    parent, child = family
    assert resumption_sentence(parent) == ""
    assert resumption_sentence(child) == (
        "Iterations 5 to 5 were trained before and after it resumed: their losses (1 compared) are "
        "different by up to 10,000,000 units of the last printed digit."
    )
    as_before = msgspec.structs.replace(child.replaced_iterations[0], lm_loss=19.5)
    assert "are the same to" in resumption_sentence(
        replace(child, replaced_iterations=(as_before,))
    )


def test_a_missing_parent_is_reported(tmp_path: Path) -> None:
    record = run_record(CHILD, "dp2", resumptions=(Resumption(PARENT, 4),))
    child = load_folder(write_run(tmp_path, record, log_text([1, 1])))
    assert any("is not beside it" in note for note in child.notes)
    assert child.earlier_iterations == ()


@pytest.mark.parametrize("name", [CHILD, "../elsewhere", "~later"])
def test_what_can_be_no_parent_is_none(tmp_path: Path, name: str) -> None:
    record = run_record(CHILD, "dp2", resumptions=(Resumption(name, 4),))
    assert load_folder(write_run(tmp_path, record, log_text([1, 1]))).earlier_iterations == ()


def test_a_grandparents_part_belongs_to_the_curve_too(
    tmp_path: Path, family: tuple[Run, Run]
) -> None:
    record = run_record("20260101T020000Z-cp2", "cp2", resumptions=(Resumption(CHILD, 6),))
    grandchild = load_folder(write_run(tmp_path, record, iteration_line(7, loss=1.0) + "\n"))
    assert [iteration.iteration for iteration in grandchild.earlier_iterations] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_restart_is_marked_in_the_picture(family: tuple[Run, Run]) -> None:
    entries = build_report("r", [family[1]], load_published()).entries
    figure = Figure()
    draw_losses(figure, entries)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["resumed"]
    assert [line.get_xdata()[0] for line in axes.lines[1:]] == [4.5]


def test_a_log_that_was_added_to_is_one_curve_with_a_restart(tmp_path: Path) -> None:
    first = log_text([1.0] * 6).replace("[exiting program at iteration 6]", "killed")
    again = "------------------------ arguments ------------------------\n" + "\n".join(
        iteration_line(number, loss=5.0) for number in range(5, 9)
    )
    record = run_record(CHILD, resumptions=(Resumption(CHILD, 4),))
    run = load_folder(write_run(tmp_path, replace(record), first + again + "\n"))
    assert sorted(loss_curve(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.restarts == (5,)
    assert records.read_run(tmp_path / CHILD).resumptions == (Resumption(CHILD, 4),)
    assert [line.iteration for line in run.replaced_iterations] == [5, 6]

from pathlib import Path

import msgspec
import pytest

from parakit.config.strategy import Parallelism, PipelineSchedule
from parakit.costs.schedules import Pass
from parakit.reporting.explain.timelines import (
    TraceSpan,
    read_trace,
    select_passes,
    traced_idle_over_work,
)
from tests.reporting.ledger_factory import write_trace

PP2 = Parallelism(pipeline=2)
F, B = "forward-compute", "backward-compute"


def spans(rank: int, order: str) -> list[tuple[int, str, str, float, float]]:
    """One millisecond a pass, in an order such as `FFBB`."""
    names = {"F": (F, "forward"), "B": (B, "backward")}
    return [(rank, *names[kind], float(i), i + 1.0) for i, kind in enumerate(order)]


def labels(pieces: tuple[TraceSpan, ...], rank: int) -> list[str]:
    return [
        f"{p.step.direction}{p.step.microbatch + 1}" + "'" * p.step.chunk
        for p in select_passes(pieces)
        if p.rank == rank and p.step
    ]


def test_first_and_last_stage_number_their_passes_as_1f1b_orders_them(tmp_path: Path) -> None:
    write_trace(tmp_path, *spans(0, "FFBFBFBB"), *spans(1, "FBFBFBFB"))
    pieces = read_trace(tmp_path, PP2, 4)
    assert labels(pieces, 0) == ["F1", "F2", "B1", "F3", "B2", "F4", "B3", "B4"]
    assert labels(pieces, 1) == ["F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4"]


def test_interleaved_passes_carry_their_virtual_stage(tmp_path: Path) -> None:
    write_trace(tmp_path, *spans(0, "FFFFBBBB"))
    split = Parallelism(pipeline=2, virtual_stages=2)
    assert labels(read_trace(tmp_path, split, 2), 0) == [
        *("F1", "F2", "F1'", "F2'"),
        *("B1'", "B2'", "B1", "B2"),
    ]
    assert split.executed_schedule is PipelineSchedule.INTERLEAVED


def test_more_passes_than_the_schedule_has_stay_without_a_number(tmp_path: Path) -> None:
    write_trace(tmp_path, *spans(0, "FBFB"))
    pieces = select_passes(read_trace(tmp_path, Parallelism(), 1))
    assert [piece.step is None for piece in pieces] == [False, False, True, True]
    assert pieces[1].step is not None
    assert pieces[1].step.direction is Pass.BACKWARD


def test_idle_is_what_a_rank_does_not_compute_between_first_forward_and_last_backward(
    tmp_path: Path,
) -> None:
    write_trace(
        tmp_path,
        *((0, F, "forward", 0, 1), (0, B, "backward", 4, 6)),
        *((1, F, "forward", 1, 2), (1, B, "backward", 2, 4)),
        (1, "optimizer", "optimizer", 8, 9),
    )
    assert traced_idle_over_work(read_trace(tmp_path, PP2, 1)) == {0: 1.0, 1: 1.0}
    assert traced_idle_over_work(()) == {}


def test_call_names_its_group(tmp_path: Path) -> None:
    write_trace(tmp_path, (0, "all_reduce dp_cp", "communication", 0, 1))
    (piece,) = read_trace(tmp_path, Parallelism(), 1)
    assert (piece.is_call, piece.group, piece.milliseconds) == (True, "dp_cp", 1.0)


def test_missing_and_foreign_traces_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path, PP2, 1)
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(msgspec.DecodeError):
        read_trace(tmp_path, PP2, 1)

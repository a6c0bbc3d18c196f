from pathlib import Path

import pytest

from parakit.artifacts.measurements import CommunicationRecord, RankCommunication
from parakit.config.run import DeviceKind
from parakit.reporting.explain.timelines import (
    NoTraceError,
    build_scene,
    draw_timelines,
    find_run,
    write_timeline,
)
from tests.program import run_report as main
from tests.reporting.explain.test_trace import spans
from tests.reporting.ledger_factory import (
    call,
    load,
    report_of,
    write,
    write_calls,
    write_trace,
)


@pytest.fixture
def pp2(tmp_path: Path) -> Path:
    folder = write(tmp_path, "pp2")
    shifted = [(r, n, c, a + 1, b + 1) for r, n, c, a, b in spans(1, "FBFBFBFB")]
    write_trace(folder, *spans(0, "FFBFBFBB"), *shifted, (1, "optimizer", "optimizer", 9, 10))
    return folder


@pytest.mark.usefixtures("laid_out_charts")
def test_picture_has_every_rank_the_ideal_schedule_and_its_idle_time(pp2: Path) -> None:
    path, text = write_timeline(load(pp2)[0])
    svg = path.read_text()
    assert path.name == "timeline.svg"
    for wanted in ("rank 0", "rank 1", "stage 1", "ideal 1F1B", "idle", "optimizer"):
        assert wanted in svg, wanted
    # 8 of 9 ms are worked; ideally 8 of 10, which is (p−1)/m: one definition of the bubble.
    assert "rank 0 12%, rank 1 12%" in text
    assert "the bubble of 1F1B is 25% of the work" in text


@pytest.mark.usefixtures("laid_out_charts")
def test_picture_of_one_pipeline_stage_has_no_ideal(tmp_path: Path) -> None:
    folder = write(tmp_path, "tp2")
    write_trace(folder, *spans(0, "FBFB"), *spans(1, "FBFB"))
    path, text = write_timeline(load(folder)[0])
    assert "ideal" not in path.read_text()
    assert "Idle" not in text


def test_calls_in_groups_of_one_rank_are_left_out(pp2: Path) -> None:
    write_trace(pp2, *spans(0, "F"), (0, "broadcast tp", "communication", 0, 1))
    alone = CommunicationRecord(
        (RankCommunication(0, 9, 0, (call("dp_cp", "all_reduce", 4),)),),
    )
    write_calls(pp2, alone)
    assert any(piece.is_call for piece in build_scene(load(pp2)[0]).pieces)
    single = call("tp", "broadcast", 4)
    object.__setattr__(single, "ranks", 1)
    write_calls(pp2, CommunicationRecord((RankCommunication(0, 9, 0, (single,)),)))
    assert not any(piece.is_call for piece in build_scene(load(pp2)[0]).pieces)


def test_report_draws_the_runs_that_left_a_trace(pp2: Path, tmp_path: Path) -> None:
    other, broken = write(tmp_path, "tp2"), write(tmp_path, "cp2")
    (broken / "trace.json").write_text("{")
    charts = draw_timelines(report_of(pp2, other, broken).entries)
    assert [chart.title for chart in charts] == ["Iteration of pp2 ×2, gpt2-tiny"]


@pytest.mark.parametrize("text", [None, "{", '{"traceEvents": []}'])
def test_run_without_a_usable_trace_is_a_sentence(tmp_path: Path, text: str | None) -> None:
    folder = write(tmp_path, "pp2")
    if text is not None:
        (folder / "trace.json").write_text(text)
    with pytest.raises(NoTraceError, match="run-pp2"):
        build_scene(load(folder)[0])


def test_newest_run_of_a_target_is_found(tmp_path: Path) -> None:
    for name in ("20260101T000000Z-pp2-gpt2-tiny-2cpu", "20260102T000000Z-pp2-gpt2-tiny-2cpu"):
        write(tmp_path, "pp2").rename(tmp_path / name)
    assert find_run("trace-pp2-gpt2-tiny-2cpu", tmp_path).path.name.startswith("20260102")
    assert find_run(str(tmp_path / "20260101T000000Z-pp2-gpt2-tiny-2cpu"), tmp_path).path.exists()
    with pytest.raises(NoTraceError, match="There is no run of tp2-gpt2-tiny-2cpu"):
        find_run("tp2-gpt2-tiny-2cpu", tmp_path)


def test_command_says_where_picture_and_trace_are(
    pp2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(pp2)]) == 0
    printed = capsys.readouterr().out
    assert str(pp2 / "timeline.svg") in printed
    assert str(pp2 / "trace.json") in printed
    assert main(["trace", "--runs", str(tmp_path / "none")]) == 1


def test_trace_of_a_gpu_is_the_hosts_and_its_caption_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2", device=DeviceKind.GPU)
    write_trace(folder, *spans(0, "FB"), *spans(1, "FB"))
    _, text = write_timeline(load(folder)[0])
    assert "kernels were launched then" in text
    assert "Idle" not in text

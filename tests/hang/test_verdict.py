"""Made-up jobs, each with one thing wrong: who is named, and who is not."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts.run import ASKED_FILE, STOPPED_FILE
from parakit.hang.command import why_hang
from parakit.hang.dumps import UnreadableDumpError, read_dump
from parakit.hang.evidence import Frame, RankEvidence, RecordedCall, StepStage
from parakit.hang.gather import gather_evidence
from parakit.hang.page import render_page
from parakit.hang.place import locate_call_in_step
from parakit.hang.verdict import HangKind, HangOutcome, HangVerdict, judge_hang
from parakit.hang.waits import is_in_collective
from tests.hang.made import DATA, SECOND, START, TENSOR, WORLD, Job, four, step

WAITING = """Current thread 0x7f (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 4174 in wait
  File "/venv/megatron/core/pipeline_parallel/p2p_communication.py", line 440 in {}
  File "/venv/megatron/core/schedules.py", line 7 in forward_backward
"""
WORKING = """Thread 0x7e (most recent call first):
  File "/venv/threading.py", line 359 in wait

Current thread 0x7f (most recent call first):
  File "/venv/site/megatron/training/utils.py", line 12 in get_batch
  File "/venv/site/megatron/training/training.py", line 5 in train_step
"""


def verdict(job: Job, folder: Path, **more: tuple[int, ...]) -> HangVerdict:
    return judge_hang(gather_evidence([job.write(folder, **more)]))


def test_the_rank_that_never_entered_is_named_with_group_call_and_all_who_wait(
    tmp_path: Path,
) -> None:
    job = four()
    job.call((0, 1), "1")
    job.call((2, 3), "2")
    job.call((2,), "2", done=False)
    job.call((0, 1), "1")
    for _ in range(2):
        job.call((0, 1), "1")
    job.call((0,), "3", done=False, size=100, line=2, function="train_step")
    job.call((1,), "4", done=False, size=100, line=2, function="train_step")
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.verdict, hang_verdict.kind) == (HangOutcome.HANG, HangKind.NEVER_ENTERED)
    assert (hang_verdict.culprits, hang_verdict.suspects, hang_verdict.waiting) == (
        (3,),
        (),
        (0, 1, 2),
    )
    assert hang_verdict.sentence.startswith(
        "Rank 3 (dp 1, tp 1) never entered all_reduce no. 14 of its tensor-parallel group, in which "
        "rank 2 waits (forward (mlp), mappings.py:1 in _reduce)"
    )
    assert hang_verdict.sentence.endswith("3 ranks wait for rank 3, in 3 groups.")
    assert hang_verdict.module == "mlp"
    evidence = replace(gather_evidence([tmp_path]), stage=StepStage(4, 1))
    assert "forward of layer 2 (mlp)" in judge_hang(evidence).sentence


@pytest.mark.parametrize(
    ("more", "differs"),
    [({"size": 8}, "size"), ({"dtype": "Half"}, "dtype"), ({"operation": "barrier"}, "operation")],
)
def test_another_call_is_shown_beside_the_usual_one(
    tmp_path: Path, more: dict[str, int | str], differs: str
) -> None:
    job = four()
    job.call((0,), "1", done=False)
    job.call((1,), "1", done=False, **more)  # type: ignore[arg-type]
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.kind, hang_verdict.culprits) == (HangKind.OTHER_COLLECTIVE, (1,))
    assert f"another {differs}" in hang_verdict.sentence


def test_a_rank_that_skipped_a_call_is_told_from_the_one_that_waits_in_it(tmp_path: Path) -> None:
    job = four()
    for _ in range(3):
        job.call((0, 1), "1")
    job.call((1,), "1", done=False)
    job.call((0,), "3", done=False, size=100, line=2, function="train_step")
    for _ in range(4):
        job.call((2, 3), "2")
    job.call((2,), "3", size=100, line=2, function="train_step")
    job.call((3,), "4", size=100, line=2, function="train_step", done=False)
    job.call((2,), "0", size=1, line=3, function="train_step", done=False)
    job.entries[0][-1].update(state="completed", retired=True)
    job.call((0,), "0", size=1, line=3, function="train_step", done=False)
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.kind, hang_verdict.culprits) == (HangKind.OTHER_COLLECTIVE, (0,))
    assert "left the order of calls" in hang_verdict.sentence


def test_a_call_that_all_entered_and_nobody_completed_accuses_nobody(tmp_path: Path) -> None:
    job = four()
    job.call((0, 1), "1", done=False)
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.kind, hang_verdict.culprits, hang_verdict.suspects) == (
        HangKind.NOT_COMPLETED,
        (),
        (0, 1),
    )


def test_the_one_whose_device_has_not_begun_what_others_have_is_named(tmp_path: Path) -> None:
    job = four()
    job.call((0, 1), "1", done=False)
    job.entries[0][-1]["state"] = "started"
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.culprits, hang_verdict.waiting) == ((1,), (0,))
    assert (
        "Rank 1 (dp 0, tp 1) entered, and its device never began, all_reduce"
        in hang_verdict.sentence
    )


def test_calls_that_a_coalescing_manager_joined_fit_together(tmp_path: Path) -> None:
    job = four()
    job.call(range(4), "0", size=7)
    job.call(range(4), "0", size=9)
    for rank in range(4):
        job.entries[rank][-1]["collective_seq_id"] -= 1
    job.call((0,), "1", done=False)
    assert verdict(job, tmp_path).kind is HangKind.NEVER_ENTERED


def test_a_file_older_than_its_calls_says_nothing_of_when_it_was_dumped(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", done=False)
    for rank in range(4):
        dump = job.dump(rank)
        del dump["dumped_ns"]
        path = tmp_path / f"_dump_{rank}"
        path.write_text(json.dumps(dump))
        os.utime(path, (0, 0))
    assert judge_hang(gather_evidence([tmp_path])).culprits == (1,)


def test_a_rank_whose_dump_is_missing_is_named_only_if_others_wait_for_it(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", done=False)
    assert verdict(job, tmp_path, without=(1,)).culprits == (1,)
    job = Job({"0": (WORLD, range(4))})
    job.call(range(4), "0")
    job.call((0, 1), "0", done=False)
    hang_verdict = verdict(job, tmp_path / "two", without=(2, 3))
    assert (hang_verdict.culprits, hang_verdict.suspects) == ((), (2, 3))


def test_two_roots_are_both_named(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", done=False)
    job.call((2,), "2", done=False)
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.kind, hang_verdict.culprits) == (HangKind.TWO_ROOTS, (1, 3))


def test_a_job_at_work_and_one_that_ended_accuse_nobody(tmp_path: Path) -> None:
    job = four()
    assert verdict(job, tmp_path / "ended").verdict is HangOutcome.NONE
    job.call((0,), "1", done=False)
    job.entries[0][-1]["time_created_ns"] = START + 59 * SECOND
    hang_verdict = verdict(job, tmp_path / "at work")
    assert (hang_verdict.verdict, hang_verdict.culprits, hang_verdict.suspects) == (
        HangOutcome.SLOW,
        (),
        (),
    )


def test_pauses_that_come_back_are_no_hang(tmp_path: Path) -> None:
    job = Job({"0": (WORLD, (0, 1))})
    for number in range(4):
        job.call((0, 1), "0")
        for rank in (0, 1):
            job.entries[rank][-1]["time_created_ns"] = START + (number - 4) * 30 * SECOND
    job.call((0,), "0", done=False)
    job.entries[0][-1]["time_created_ns"] = START
    assert verdict(job, tmp_path).verdict is HangOutcome.SLOW


def test_what_the_launcher_saw_stopped_is_named_though_it_went_on_for_its_dump(
    tmp_path: Path,
) -> None:
    job = four()
    step(job)
    (job.write(tmp_path) / STOPPED_FILE).write_text("2")
    hang_verdict = judge_hang(gather_evidence([tmp_path]))
    assert (hang_verdict.culprits, "stopped by a signal" in hang_verdict.sentence) == ((2,), True)


def test_stages_wait_for_each_other_by_their_stacks(tmp_path: Path) -> None:
    job = Job({"0": ("PIPELINE_MODEL_PARALLEL_GROUP", (0, 1, 2))})
    job.call((0, 1, 2), "0", "broadcast")
    job.write(tmp_path)
    (tmp_path / "rank0.txt").write_text(WAITING.format("recv_backward"))
    (tmp_path / "rank1.txt").write_text(WAITING.format("send_forward_recv_backward"))
    (tmp_path / "rank2.txt").write_text(WORKING)
    hang_verdict = judge_hang(gather_evidence([tmp_path]))
    assert (hang_verdict.culprits, hang_verdict.waiting) == ((2,), (0, 1))
    assert "Rank 2 is in data loading, utils.py:12 in get_batch." in hang_verdict.sentence


def test_a_rank_that_nobody_waits_for_yet_is_a_root_once_it_was_silent_for_long(
    tmp_path: Path,
) -> None:
    job = four()
    job.call((0,), "1", done=False)
    job.write(tmp_path)
    (tmp_path / "rank2.txt").write_text(WORKING)
    assert judge_hang(gather_evidence([tmp_path])).culprits == (1, 2)


def test_what_ended_ranks_that_raised_is_the_one_that_left_nothing(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1")
    job.write(tmp_path, without=(1,))
    raising = WORKING.replace("in get_batch", "in _distributed_excepthook")
    (tmp_path / "rank0.txt").write_text(raising)
    (tmp_path / "rank2.txt").write_text(WAITING.format("x"))
    (tmp_path / "rank3.txt").write_text(WAITING.format("x"))
    assert judge_hang(gather_evidence([tmp_path])).culprits == (1,)


def test_who_waits_for_what_all_entered_waits_for_the_network(tmp_path: Path) -> None:
    job = four()
    job.call((0, 1), "1", "broadcast", done=False)
    job.entries[0][-1].update(state="completed", retired=True)
    job.call((0,), "1", "broadcast", done=False)
    hang_verdict = verdict(job, tmp_path)
    assert (hang_verdict.kind, hang_verdict.culprits) == (HangKind.NOT_COMPLETED, ())


def test_of_a_failed_run_the_one_without_calls_is_named_if_all_others_were_in_order(
    tmp_path: Path,
) -> None:
    job = four()
    step(job)
    job.call((0, 1), "1")
    job.call((2, 3), "2")
    evidence = replace(gather_evidence([job.write(tmp_path, without=(1,))]), is_over=True)
    hang_verdict = judge_hang(evidence)
    assert (hang_verdict.kind, hang_verdict.culprits) == (HangKind.OTHER_COLLECTIVE, (1,))
    evidence = replace(gather_evidence([job.write(tmp_path / "two", without=(1, 3))]), is_over=True)
    assert judge_hang(evidence).verdict is HangOutcome.UNDECIDED


def test_in_backward_the_module_is_that_of_the_call_that_usually_follows(tmp_path: Path) -> None:
    job = four()
    job.call((0, 1), "1")
    job.call((0,), "1", done=False)
    job.write(tmp_path)
    backward = WORKING.replace("in get_batch", "in backward")
    (tmp_path / "rank1.txt").write_text(backward.replace("training/utils", "core/layers"))
    for rank in (0, 1):
        calls = job.entries[rank]
        for call in calls:
            call["frames"][-1]["name"] = "backward_step"
    hang_verdict = judge_hang(gather_evidence([job.write(tmp_path)]))
    assert (hang_verdict.culprits, hang_verdict.module) == ((1,), "mlp")


def test_the_page_has_a_row_a_rank_and_says_what_each_did(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", done=False)
    job.call((2,), "2", done=False)
    job.call((3,), "2", size=8, done=False)
    evidence = gather_evidence([job.write(tmp_path)])
    page = render_page(evidence, judge_hang(evidence))
    assert "Tensor-parallel group: ranks 0 and 1" in page
    for cell in ('class="waits"', 'class="absent"', "all_reduce of [8] Float</td>"):
        assert cell in page


def test_stacks_alone_name_the_one_that_is_in_no_collective(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.txt").write_text(WAITING.format("x"))
    threads = [
        {"thread_name": "MainThread", "frames": [{"name": "f", "filename": "/a.py", "line": 3}]}
    ]
    (tmp_path / "rank2.json").write_text(json.dumps(threads))
    assert judge_hang(gather_evidence([tmp_path])).culprits == (2,)


FILES_THAT_COUNT_CALLS = (
    "/kit/src/parakit/accounting/process_groups.py",
    "/venv/lib/python3.12/site-packages/parakit/accounting/process_groups.py",
    "/kit/tools/ledger/process_groups.py",  # kits before src/parakit
)


@pytest.mark.parametrize("file", FILES_THAT_COUNT_CALLS)
def test_a_wait_that_the_kit_counts_is_one(file: str) -> None:
    counting = Frame("wait", file, 1)
    exchange = Frame("_communicate", "/megatron/core/pipeline_parallel/p2p_communication.py", 413)
    layer = Frame("forward", "/megatron/core/transformer/mlp.py", 300)
    assert is_in_collective((counting, exchange))
    assert not is_in_collective((counting, layer))
    assert not is_in_collective((counting,))


@pytest.mark.parametrize("file", FILES_THAT_COUNT_CALLS)
def test_a_dump_is_read_without_frames_of_the_kits_counting(tmp_path: Path, file: str) -> None:
    dump = four().dump(0)
    for call in dump["entries"]:
        call["frames"].insert(0, {"name": "counted", "filename": file, "line": 1})
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump))
    evidence = RankEvidence(0)
    read_dump(path, evidence)
    functions = {frame.function for call in evidence.calls for frame in call.frames}
    assert "_reduce" in functions
    assert "counted" not in functions


def test_watchdogs_lines_stand_for_dumps_that_are_not_there(tmp_path: Path) -> None:
    job = Job({"1": (TENSOR, (0, 1)), "2": (DATA, (0,))})
    job.call((0, 1), "1")
    job.write(tmp_path, without=(1,))
    line = (
        "[rank1]:[E1124 ProcessGroupNCCL.cpp:629] [PG ID 3 PG GUID 1(TENSOR_MODEL_PARALLEL_GROUP) "
        "Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, "
        "NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )
    (tmp_path / "train.log").write_text(f"{line}\n")
    hang_verdict = judge_hang(gather_evidence([tmp_path]))
    assert (hang_verdict.culprits, hang_verdict.call) == ((0,), "all_reduce no. 2")


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("it ran",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps({"entries": [Harmful()]}),
        pickle.dumps(four().dump(0))[:-40],
        pickle.dumps({"entries": [{"record_id": 0}]}),
        pickle.dumps([1]),
        b"\x80\x04]r\xf0\xff\xff\xff.",
        b'{"entries": [}',
    ],
)
def test_a_file_that_is_no_whole_dump_is_named_and_the_rest_is_used(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    job = four()
    job.call((0,), "1", done=False)
    job.write(tmp_path, without=(3,))
    (tmp_path / "rank3.pkl").write_bytes(content)
    page = tmp_path / "page.html"
    assert why_hang([str(tmp_path)], json=True, page=str(page)) == 0
    assert '<th class="culprit">1</th>' in page.read_text()
    printed = capsys.readouterr()
    assert json.loads(printed.out)["culprits"] == [1]
    assert printed.err.count("\n") == 1
    assert "rank3.pkl is no complete flight recorder dump" in printed.err
    assert "it ran" not in printed.out


def test_a_page_in_no_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDumpError, match=r"--page .* is in a folder that does not exist"):
        why_hang([str(tmp_path)], page=str(tmp_path / "none/page.html"))


def test_json_dumps_say_the_same(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", done=False)
    for rank in range(4):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(job.dump(rank)))
    assert judge_hang(gather_evidence([tmp_path])) == verdict(job, tmp_path / "pickles")


def test_a_folder_without_evidence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDumpError, match="has no flight recorder dump, no stack"):
        gather_evidence([tmp_path])


def test_code_that_torch_called_back_does_not_wait_but_the_kits_counting_does() -> None:
    inside = [
        Frame("irecv", "/site/torch/distributed/distributed_c10d.py", 1),
        Frame("_communicate", "/m/megatron/core/pipeline_parallel/p2p_communication.py", 2),
    ]
    assert is_in_collective(inside)
    assert is_in_collective([Frame("counted", "/kit/src/parakit/accounting/record.py", 3), *inside])
    assert not is_in_collective([Frame("stall", "/home/me/hook.py", 3), *inside])
    assert not is_in_collective([])


def test_stages_that_are_in_the_same_exchange_accuse_nobody(tmp_path: Path) -> None:
    job = Job({"0": ("PIPELINE_MODEL_PARALLEL_GROUP", (0, 1))})
    job.call((0, 1), "0", "broadcast")
    job.write(tmp_path)
    (tmp_path / "rank0.txt").write_text(WAITING.format("recv_backward"))
    (tmp_path / "rank1.txt").write_text(WAITING.format("recv_forward"))
    hang_verdict = judge_hang(gather_evidence([tmp_path]))
    assert (hang_verdict.kind, hang_verdict.culprits, hang_verdict.suspects) == (
        HangKind.NOT_COMPLETED,
        (),
        (0, 1),
    )
    assert (hang_verdict.call, hang_verdict.module) == (
        "exchange between stages",
        "pipeline exchange",
    )


def test_interleaved_stages_wait_for_a_handle_in_the_schedule(tmp_path: Path) -> None:
    job = Job({"0": ("PIPELINE_MODEL_PARALLEL_GROUP", (0, 1))})
    job.call((0, 1), "0", "broadcast")
    job.write(tmp_path)
    (tmp_path / "rank0.txt").write_text(WORKING)
    (tmp_path / "rank1.txt").write_text(
        "Current thread 0x7f (most recent call first):\n"
        '  File "/m/megatron/core/pipeline_parallel/schedules.py", line 9 in pp_pre_forward\n'
    )
    assert judge_hang(gather_evidence([tmp_path])).culprits == (0,)


def test_the_size_that_a_rank_never_used_names_it_though_the_other_is_dead(tmp_path: Path) -> None:
    job = four()
    job.call((0,), "1", size=8, done=False)
    evidence = gather_evidence([job.write(tmp_path, without=(1, 2, 3))])
    assert judge_hang(replace(evidence, is_over=True)).culprits == (0,)
    job = four()
    job.call((0,), "1", done=False)
    evidence = gather_evidence([job.write(tmp_path / "in order", without=(1, 2, 3))])
    assert judge_hang(replace(evidence, is_over=True)).kind is not HangKind.OTHER_COLLECTIVE


def test_calls_of_backward_are_modules_and_layers_by_their_order() -> None:
    frames = (
        Frame("backward", "/x/megatron/core/tensor_parallel/layers.py", 750),
        Frame("backward_step", "/x/megatron/core/pipeline_parallel/schedules.py", 5),
    )
    reduced = RecordedCall("1", TENSOR, "all_reduce", 1, ((4,),), frames=frames)
    clipped = RecordedCall("2", "MODEL_PARALLEL_GROUP", "all_reduce", 1, ((1,),))
    clipped = replace(clipped, frames=(Frame("clip_grad_norm", "/x/megatron/optimizer.py", 1),))
    # Two micro batches of two layers: output layer, then MLP and attention of each.
    calls = [*[reduced] * 10, clipped, *[reduced] * 10]
    step_places = [locate_call_in_step(calls, at, StepStage(2, 2)) for at in range(11, 21)]
    layers = [None, 2, 2, 1, 1]
    modules = ["output_layer", "mlp", "self_attention", "mlp", "self_attention"]
    assert [step_place.module for step_place in step_places] == modules * 2
    assert [step_place.layer for step_place in step_places] == layers * 2
    assert [step_place.micro_batch for step_place in step_places] == [1] * 5 + [2] * 5


def write_revived_job(folder: Path, asked_seconds: float) -> Path:
    """Write a job whose rank 1 left its wait in C code when it was asked for its stack after these seconds."""
    job = four()
    job.call((0,), "1")
    job.call((1,), "1")
    for rank in (0, 1, 2, 3):
        job.call((rank,), "0", size=1, line=3, function="train_step")
    for rank, calls in job.entries.items():
        calls[-1]["time_created_ns"] = START + int((asked_seconds + 1) * SECOND)
        if rank == 1:
            calls[-2]["time_created_ns"] = START + int((asked_seconds + 0.5) * SECOND)
    job.write(folder)
    (folder / ASKED_FILE).write_text(str(START + int(asked_seconds * SECOND)))
    waiting = WAITING.replace("p2p_communication", "mappings").replace(
        "pipeline_parallel", "tensor"
    )
    for rank in (0, 2, 3):
        (folder / f"rank{rank}.txt").write_text(waiting.format("_reduce"))
    hook = WORKING.replace("site/megatron/training/utils.py", "home/me/hook.py").replace(
        "get_batch", "stall"
    )
    (folder / "rank1.txt").write_text(hook)
    return folder


def test_rank_that_its_signal_revived_is_named_by_what_was_before_the_signal(
    tmp_path: Path,
) -> None:
    verdict_on_job = judge_hang(gather_evidence([write_revived_job(tmp_path, 40)]))
    assert verdict_on_job.culprits == (1,)
    assert "hook.py:12 in stall, called by training.py:5 in train_step" in verdict_on_job.sentence
    assert verdict_on_job.next_step.startswith("Look at that line")


def test_job_at_work_that_is_asked_for_stacks_is_no_hang(tmp_path: Path) -> None:
    folder = write_revived_job(tmp_path, 2)
    assert judge_hang(gather_evidence([folder])).verdict is HangOutcome.SLOW


def test_minute_beyond_usual_pauses_is_a_sign_of_a_hang(tmp_path: Path) -> None:
    job = Job({"0": (WORLD, (0, 1))})
    for number in range(4):
        job.call((0, 1), "0")
        for rank in (0, 1):
            job.entries[rank][-1]["time_created_ns"] = START + (number - 6) * 36 * SECOND
    job.call((0,), "0", done=False)
    job.entries[0][-1]["time_created_ns"] = START - 40 * SECOND
    assert verdict(job, tmp_path).culprits == (1,)


def test_rank_that_left_is_named_and_not_those_that_lost_their_connection(tmp_path: Path) -> None:
    job = Job({"0": (WORLD, range(4))})
    for _ in range(3):
        job.call(range(4), "0")
    # Ranks 1 and 3 raised in the next call, which then counts as completed, and wrote their dumps at once.
    job.call((0,), "0", done=False)
    job.call((1, 3), "0")
    for rank in (1, 3):
        path = tmp_path / f"rank{rank}.pkl"
        failed_ns = job.entries[rank][-1]["time_created_ns"] + SECOND
        path.write_bytes(pickle.dumps(job.dump(rank) | {"dumped_ns": failed_ns}))
    (tmp_path / "rank0.pkl").write_bytes(pickle.dumps(job.dump(0)))
    (tmp_path / ASKED_FILE).write_text(str(START + 20 * SECOND))
    hang_verdict = judge_hang(gather_evidence([tmp_path]))
    assert (hang_verdict.culprits, hang_verdict.waiting) == ((2,), (0,))

"""What torch writes into logs about calls that hang, in the words of its versions since 1.12."""

import json
from pathlib import Path

import pytest

from parakit.hang.command import why_hang
from parakit.hang.evidence import UNNAMED_GROUP, Progress
from parakit.hang.gather import gather_evidence
from parakit.hang.verdict import HangVerdict, judge_hang
from parakit.hang.watchdog import ReportedTimeout, read_watchdog

CAUGHT = "Watchdog caught collective operation timeout: WorkNCCL("
TIMED_OUT = "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
SIZES = "NumelIn=4, NumelOut=4, "
DUMP_SIGNAL = (
    "Received a dump signal due to a collective timeout from {} and we will try our best to dump the "
    "debug info. Last enqueued NCCL work: {}, last completed NCCL work: {}.This is most likely caused by"
)


def one_timeout(*lines: str) -> ReportedTimeout:
    (timed_out,) = read_watchdog(lines).timeouts
    return timed_out


def judge_log(folder: Path, *lines: str, name: str = "train.log") -> HangVerdict:
    (folder / name).write_text("\n".join(lines) + "\n")
    return judge_hang(gather_evidence([folder]))


@pytest.mark.parametrize(
    ("lines", "rank", "group", "number", "progress"),
    [
        # 1.12 counts no calls, and up to 2.1 nothing says whose rank it is.
        ((f"[E ProcessGroupNCCL.cpp:737] [Rank 1] {CAUGHT}OpType=ALLREDUCE, {TIMED_OUT}",),
         1, UNNAMED_GROUP, 0, None),
        ((f"[E ProcessGroupNCCL.cpp:821] [Rank 1] {CAUGHT}SeqNum=7, OpType=ALLREDUCE, "
          f"TensorShape=[4], {TIMED_OUT}",),
         1, UNNAMED_GROUP, 7, None),
        # 2.2
        ((f"[rank5]:[E ProcessGroupNCCL.cpp:523] [Rank 1] {CAUGHT}SeqNum=7, OpType=ALLREDUCE, "
          f"{SIZES}{TIMED_OUT}",),
         5, "unknown to rank 5", 7, None),
        # 2.3: what nobody completed is memory that nobody wrote.
        ((f"[rank5]:[E ProcessGroupNCCL.cpp:574] [Rank 1] {CAUGHT}SeqNum=1, OpType=ALLREDUCE, "
          f"{SIZES}{TIMED_OUT}",
          "[rank5]:[E ProcessGroupNCCL.cpp:1537] [PG 9 Rank 1] Timeout at NCCL work: 1, last enqueued "
          "NCCL work: 1, last completed NCCL work: 3452013982."),
         5, "9", 1, Progress(1, -1)),
        # 2.4
        ((f"[rank1]:[E1003 18:37:01 ProcessGroupNCCL.cpp:607] [Rank 1] {CAUGHT}SeqNum=7, "
          f"OpType=ALLREDUCE, {SIZES}{TIMED_OUT}",
          "[rank1]:[E1003 18:37:01 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 1] Exception "
          "(either an error or timeout) detected by watchdog at work: 7, last enqueued NCCL work: 8, "
          "last completed NCCL work: 6."),
         1, "0", 7, Progress(8, 6)),
        # 2.5 and 2.6
        ((f"[rank3]:[E219 08:58:32 ProcessGroupNCCL.cpp:616] [Rank 3] {CAUGHT}SeqNum=31, "
          f"OpType=ALLREDUCE, {SIZES}{TIMED_OUT}",
          "[rank3]:[E219 08:58:32 ProcessGroupNCCL.cpp:1834] [PG ID 2 PG GUID 3 Rank 3] Timeout at "
          "NCCL work: 31, last enqueued NCCL work: 58, last completed NCCL work: -1."),
         3, "3", 31, Progress(58, -1)),
        # 2.7 and later
        ((f"[rank1]:[E1218 20:27:21 ProcessGroupNCCL.cpp:632] [Rank 1] {CAUGHT}SeqNum=1, "
          f"OpType=ALLREDUCE, {SIZES}{TIMED_OUT}",
          "[rank1]:[E1218 20:27:21 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 1]  failure "
          "detected by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last "
          "completed work: -1"),
         1, "1", 1, Progress(547, -1)),
    ],
)  # fmt: skip
def test_a_timeout_is_read_in_the_words_of_each_version(
    lines: tuple[str, ...], rank: int, group: str, number: int, progress: Progress | None
) -> None:
    timed_out = one_timeout(*lines)
    assert (timed_out.rank, timed_out.call.operation) == (rank, "all_reduce")
    assert (timed_out.call.group, timed_out.call.number) == (group, number)
    assert timed_out.progress == progress


def test_counts_of_a_timeout_whose_first_line_was_cut_off_stand_for_its_call() -> None:
    timed_out = one_timeout(
        "[rank1]:[E ProcessGroupNCCL.cpp:1540] [PG 1 Rank 1] Timeout at NCCL work: 7, last enqueued "
        "NCCL work: 8, last completed NCCL work: 6."
    )
    assert (timed_out.rank, str(timed_out.call)) == (1, "collective no. 7")


def test_the_rank_that_was_asked_for_a_dump_and_never_entered_the_call_is_named(
    tmp_path: Path,
) -> None:
    lines = []
    for rank in (0, 2):
        speaker = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
        lines += [
            f"[rank{rank}]:[E] [Rank {rank}] {CAUGHT}SeqNum=1, OpType=ALLREDUCE, {SIZES}{TIMED_OUT}",
            f"[rank{rank}]:[E] {speaker}  failure detected by watchdog at work sequence id: 1 PG "
            "status: last enqueued work: 1, last completed work: -1",
        ]
    dumped = DUMP_SIGNAL.format(" rank 0", -1, -1)
    lines.append(f"[rank1]:[E] [PG ID 0 PG GUID 0(default_pg) Rank 1] {dumped}")
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2))
    assert "Rank 1 never entered all_reduce no. 1 of its group of all ranks" in verdict.sentence


def test_a_log_that_is_named_after_a_rank_is_of_that_rank(tmp_path: Path) -> None:
    line = f"[E] [PG 3 Rank 1] {CAUGHT}SeqNum=7, OpType=ALLREDUCE, {SIZES}{TIMED_OUT}"
    assert judge_log(tmp_path, line, name="rank7.log").waiting == (7,)


@pytest.mark.parametrize(
    ("report", "culprits", "suspects"),
    [
        ("Rank 3 failed to pass monitoredBarrier in 2000 ms", (3,), ()),
        ("Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms", (), (2, 3)),
    ],
)
def test_ranks_that_never_came_to_a_monitored_barrier_are_said(
    tmp_path: Path, report: str, culprits: tuple[int, ...], suspects: tuple[int, ...]
) -> None:
    verdict = judge_log(tmp_path, f"[rank0]: RuntimeError: [Rank 0]: {report}")
    assert (verdict.culprits, verdict.suspects, verdict.waiting) == (culprits, suspects, (0,))


def test_a_barrier_of_some_ranks_counts_them_within_their_group() -> None:
    line = "[rank4]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"
    assert read_watchdog([line]).absent == []


@pytest.mark.parametrize("number", ["", "SequenceNumber=5, "])
def test_a_mismatch_that_torch_found_says_both_calls(tmp_path: Path, number: str) -> None:
    devices = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda)"
    verdict = judge_log(
        tmp_path,
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        f"CollectiveFingerPrint({number}OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float, "
        f"{devices}), but Rank 2 is running collective: CollectiveFingerPrint({number}"
        f"OpType=BROADCAST, TensorShape=[8, 2], TensorDtypes=Float, {devices}).",
    )
    assert (verdict.culprits, verdict.suspects) == ((), (0, 2))
    assert "Rank 0 called all_reduce of [4] Float" in verdict.sentence
    assert "where rank 2 called broadcast of [8, 2] Float: another operation" in verdict.sentence


def test_calls_of_two_numbers_that_torch_compared_accuse_nobody(tmp_path: Path) -> None:
    verdict = judge_log(
        tmp_path,
        "[rank3]: RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=18, OpType=ALLREDUCE, TensorShape=[4], "
        "TensorDtypes=Float), but Rank 0 is running collective: CollectiveFingerPrint("
        "SequenceNumber=22, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float).",
    )
    assert verdict.culprits == ()
    assert verdict.suspects == (0, 3)
    assert "Rank 0 called all_reduce of [4] Float as no. 22" in verdict.sentence
    assert (
        "where rank 3 called all_reduce of [4] Float as no. 18: another number" in verdict.sentence
    )


def test_an_answer_without_a_name_says_who_waits_in_what_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(
        f"[E] [Rank 1] {CAUGHT}OpType=ALLREDUCE, {TIMED_OUT}\n"
        f"[E] [Rank 3] {CAUGHT}SeqNum=7, OpType=BROADCAST, {TIMED_OUT}\n"
    )
    assert why_hang([str(tmp_path)], json=True) == 1
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert (answer["culprits"], answer["waiting"]) == ([], [1, 3])
    assert "Rank 1 is in all_reduce of a group that the log does not name" in answer["sentence"]
    assert (
        "rank 3 is in broadcast no. 7 of a group that the log does not name" in answer["sentence"]
    )
    assert "train.log counts ranks within a group that it does not name" in printed.err


def test_stacks_that_all_wait_say_where_and_which_rank_left_nothing(tmp_path: Path) -> None:
    stack = (
        'Thread 1 (idle): "MainThread"\n    {} (torch/distributed/distributed_c10d.py:9)\n    {}\n'
    )
    training = "train_step (megatron/training/training.py:1234)"
    (tmp_path / "rank0.txt").write_text(stack.format("all_reduce", training))
    (tmp_path / "rank1.txt").write_text(stack.format("all_reduce", training))
    (tmp_path / "rank2.txt").write_text(stack.format("barrier", training))
    verdict = judge_hang(gather_evidence([tmp_path]))
    assert why_hang([str(tmp_path)]) == 1
    caller = "called in the training step, training.py:1234 in train_step"
    assert f"Ranks 0 and 1 are in all_reduce, {caller}; rank 2 is in barrier, {caller}." in (
        verdict.sentence
    )


def test_a_job_at_work_names_nobody_and_exits_with_1(tmp_path: Path) -> None:
    stack = 'Thread 1 (active): "MainThread"\n    f (megatron/training/training.py:9)\n'
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.txt").write_text(stack)
    assert why_hang([str(tmp_path)]) == 1
    assert (
        "Ranks 0 and 1 are in training.py:9 in f."
        in judge_hang(gather_evidence([tmp_path])).sentence
    )


def describe_timeout(rank: int, number: int, sizes: str = SIZES, time: str = "10:00:00") -> str:
    """Return the two lines of a rank whose call in the group of all ranks timed out."""
    prefix = f"[rank{rank}]:[E419 {time}.858931807 ProcessGroupNCCL.cpp:616]"
    return (
        f"{prefix} [Rank {rank}] {CAUGHT}SeqNum={number}, OpType=ALLREDUCE, {sizes}{TIMED_OUT}\n"
        f"{prefix} [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an error or timeout) detected "
        f"by watchdog at work: {number}, last enqueued NCCL work: {number}, last completed NCCL work: {number - 1}."
    )


def test_only_rank_without_lines_is_suspect_and_not_named(tmp_path: Path) -> None:
    verdict = judge_log(tmp_path, *(describe_timeout(rank, 7) for rank in (1, 2, 3)))
    assert (verdict.culprits, verdict.suspects, verdict.waiting) == ((), (0,), (1, 2, 3))
    assert "Rank 0 left nothing, and ranks 1, 2 and 3 wait for it in all_reduce no. 7" in (
        verdict.sentence
    )


def test_number_alone_is_no_other_operation(tmp_path: Path) -> None:
    counts = describe_timeout(1, 7).splitlines()[1]
    verdict = judge_log(tmp_path, describe_timeout(0, 7), counts)
    assert verdict.kind is None
    assert "Ranks 0 and 1 are in all_reduce no. 7" in verdict.sentence


def test_sizes_that_differ_without_a_dtype_are_a_mismatch(tmp_path: Path) -> None:
    other_sizes = "NumelIn=9, NumelOut=9, "
    verdict = judge_log(tmp_path, describe_timeout(0, 7), describe_timeout(1, 7, other_sizes))
    assert (verdict.culprits, verdict.suspects) == ((), (0, 1))
    assert verdict.sentence.endswith("where rank 1 called all_reduce of [9]: another size.")


def test_sizes_of_all_gather_show_how_many_ranks_wait(tmp_path: Path) -> None:
    gathered = [
        describe_timeout(rank, 7, "NumelIn=2, NumelOut=8, ").replace("ALLREDUCE", "_ALLGATHER_BASE")
        for rank in (0, 2)
    ]
    verdict = judge_log(tmp_path, *gathered)
    assert (verdict.suspects, verdict.waiting) == ((1, 3), (0, 2))


def test_groups_that_each_rank_numbers_itself_are_not_joined(tmp_path: Path) -> None:
    lines = [
        f"[rank{rank}]:[E] [PG 1 Rank {rank % 2}] Timeout at NCCL work: {number}, last enqueued NCCL work: "
        f"{number}, last completed NCCL work: {number - 1}."
        for rank, number in ((0, 7), (1, 7), (2, 9))
    ]
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.suspects) == ((), ())


def test_line_that_terminal_wrapped_is_read_whole(tmp_path: Path) -> None:
    text = (
        describe_timeout(0, 7)
        .replace("NumelOut=4", "Num\nelOut=4")
        .replace("last completed", "\nlast completed")
    )
    (timeout,) = read_watchdog(text.splitlines()).timeouts
    assert (timeout.call.number, timeout.progress) == (7, Progress(7, 6))


DESYNC = """     - [0] Timeout at collective: ALLREDUCE, #7
     - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
         [2] finished collective #6, but didn't join collective #7 (count from 1)
     - Snapshot of ranks' latest states:
       #7 started ranks:
         [0,1,3] started ALLREDUCE
       #6 finished ranks:
         [2] finished ALLREDUCE"""
NEVER_JOINED = """     - [0] Timeout at collective: ALLREDUCE, #1
     - To our best knowledge, ranks [2] are the lagging ranks that caused this timeout. They never joined any
     - Snapshot of ranks' latest states:
       #1 started ranks:
         [0,1,3] started ALLREDUCE"""


@pytest.mark.parametrize(("report", "number"), [(DESYNC, 7), (NEVER_JOINED, 1)])
def test_rank_that_torchs_report_on_group_calls_lagging_is_named(
    tmp_path: Path, report: str, number: int
) -> None:
    verdict = judge_log(tmp_path, describe_timeout(0, number), report)
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1, 3))
    assert f"never entered all_reduce no. {number}" in verdict.sentence


@pytest.mark.parametrize(("time", "culprits"), [("09:58:00", (3,)), ("10:08:00", ())])
def test_rank_whose_watchdog_was_blocked_is_named_if_that_came_before_timeouts(
    tmp_path: Path, time: str, culprits: tuple[int, ...]
) -> None:
    stuck = (
        f"[rank3]:[E419 {time}.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    )
    lines = [describe_timeout(rank, 7) for rank in (0, 1, 2)]
    assert judge_log(tmp_path, stuck, *lines).culprits == culprits


def test_folder_of_torchrun_shows_rank_of_log(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0/7"
    folder.mkdir(parents=True)
    line = f"[E] [PG 3 Rank 1] {CAUGHT}SeqNum=7, OpType=ALLREDUCE, {SIZES}{TIMED_OUT}\n"
    (folder / "stderr.log").write_text(line)
    assert judge_hang(gather_evidence([tmp_path])).waiting == (7,)


def test_lines_without_a_group_are_not_compared(tmp_path: Path) -> None:
    """Rank 0 is the first rank of each of its groups, so that its line may be of another one than rank 1's."""
    lines = [
        f"[rank{rank}]:[E] [Rank {rank}] {CAUGHT}SeqNum=7, OpType=ALLREDUCE, NumelIn={size}, NumelOut={size}, "
        f"{TIMED_OUT}"
        for rank, size in ((0, 4), (1, 9))
    ]
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.suspects, verdict.kind) == ((), (), None)


def test_error_of_rank_in_log_names_it(tmp_path: Path) -> None:
    error = (
        "[rank2]: Traceback (most recent call last):\n"
        '[rank2]:   File "/home/me/train.py", line 7, in <module>\n'
        "[rank2]: ValueError: the sample is damaged"
    )
    verdict = judge_log(tmp_path, error, *(describe_timeout(rank, 7) for rank in (0, 1)))
    assert verdict.culprits == (2,)
    assert "Its log reports: ValueError: the sample is damaged" in verdict.sentence


def test_killed_process_whose_machine_is_unknown_is_reported_and_not_named(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "E0419 10:10:00.858000 1200 torch/distributed/elastic/multiprocessing/api.py:882] failed "
        f"(exitcode: -9) local_rank: 2 (pid: 1236) of binary: python\n{describe_timeout(0, 7)}\n"
    )
    evidence = gather_evidence([tmp_path])
    assert judge_hang(evidence).culprits == ()
    assert "The process with local rank 2 was killed by SIGKILL" in evidence.refused[0]


def begin_call(rank: int, number: int, call: str, group_rank: int | None = None) -> str:
    """Return the line of a rank that begins a call, as torch 2.15 writes it."""
    number_in_group = rank if group_rank is None else group_rank
    return (
        f"[rank{rank}]:[I1129 12:16:01.759382845 ProcessGroupWrapper.cpp:724] [Rank {number_in_group}] Running "
        f"collective: CollectiveFingerPrint(SequenceNumber={number}{call})"
    )


REDUCE = (
    ", OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float "
    "(default), device=cuda)"
)
SEND_OUT = (
    ", OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long, TensorDeviceTypes=TensorOptions()"
)
WAIT_FOR_ALL = "OpType=BARRIER"


def test_rank_that_begins_another_call_than_all_others_is_named(tmp_path: Path) -> None:
    lines = [begin_call(rank, 3, WAIT_FOR_ALL) for rank in (2, 0, 1)]
    lines += [begin_call(rank, 4, SEND_OUT if rank == 1 else REDUCE) for rank in (1, 2, 0)]
    verdict = judge_log(tmp_path, *lines)
    assert verdict.culprits == (1,)
    assert "called broadcast of [1] Long as no. 4" in verdict.sentence
    assert "called all_reduce of [4] Float: another operation." in verdict.sentence


def test_begun_calls_are_compared_across_a_log_per_rank(tmp_path: Path) -> None:
    for rank in range(3):
        lines = [begin_call(rank, 3, WAIT_FOR_ALL)]
        lines += [begin_call(rank, 4, SEND_OUT if rank == 2 else REDUCE)]
        (tmp_path / f"rank{rank}.log").write_text("\n".join(lines) + "\n")
    assert judge_hang(gather_evidence([tmp_path])).culprits == (2,)


def test_single_lines_of_ranks_are_not_compared_because_they_may_be_of_several_groups(
    tmp_path: Path,
) -> None:
    lines = [begin_call(rank, 4, SEND_OUT if rank == 0 else REDUCE) for rank in (0, 1, 2)]
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.suspects) == ((), ())


def test_rank_that_began_no_last_call_is_suspect_because_the_log_may_be_cut(tmp_path: Path) -> None:
    lines = [begin_call(rank, number, WAIT_FOR_ALL) for number in (2, 3) for rank in (0, 1, 2)]
    lines += [begin_call(rank, 4, REDUCE) for rank in (0, 2)]
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.suspects) == ((), (1,))
    assert (
        "Ranks 0 and 2 began all_reduce of [4] Float no. 4 last; rank 1 began barrier no. 3 last."
        in (verdict.sentence)
    )
    assert why_hang([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "line_of_subgroup", [begin_call(0, 0, REDUCE), begin_call(2, 4, SEND_OUT, group_rank=1)]
)
def test_begun_calls_of_several_groups_are_not_compared(
    tmp_path: Path, line_of_subgroup: str
) -> None:
    lines = [begin_call(rank, 3, WAIT_FOR_ALL) for rank in (0, 1)]
    lines += [line_of_subgroup, begin_call(1, 4, REDUCE)]
    verdict = judge_log(tmp_path, *lines)
    assert (verdict.culprits, verdict.suspects, verdict.kind) == ((), (), None)
    assert "rank 1 began all_reduce of [4] Float no. 4 last" in verdict.sentence


def test_absent_rank_of_monitored_barrier_is_named_with_its_last_call(tmp_path: Path) -> None:
    lines = [begin_call(rank, 3, WAIT_FOR_ALL) for rank in (0, 1, 2)]
    lines += [begin_call(rank, 4, REDUCE) for rank in (0, 2)]
    lines += ["[rank0]:[E] [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 8000 ms"]
    verdict = judge_log(tmp_path, *lines)
    assert verdict.culprits == (1,)
    assert "Rank 1 began barrier no. 3 last." in verdict.sentence


def test_counts_of_unfinished_calls_are_no_proof_that_no_rank_waits(tmp_path: Path) -> None:
    signal = DUMP_SIGNAL.format(" rank 13", 1261, 1259)
    line = f"[rank0]:[E804 23:05:54 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 0] {signal}"
    verdict = judge_log(tmp_path, line)
    assert verdict.culprits == ()
    assert "Rank 0 is in collective no. 1260 of the group of all ranks." in verdict.sentence
    assert "Rank 13 reported a timeout first: add the log of rank 13." in verdict.sentence
    assert "No rank is in an unfinished call" not in verdict.sentence


def test_rank_with_a_blocked_watchdog_is_not_said_to_have_left_nothing(tmp_path: Path) -> None:
    blocked = (
        "[rank2]:[E419 10:08:00.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 2] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    )
    verdict = judge_log(tmp_path, describe_timeout(1, 7), describe_timeout(3, 7), blocked)
    assert (verdict.culprits, verdict.suspects) == ((), (0, 2))
    assert "No call of ranks 0 and 2 is known, and ranks 1 and 3 wait for them" in verdict.sentence
    assert "The watchdog of rank 2 was blocked, after the timeout." in verdict.sentence


@pytest.mark.parametrize(
    ("size_in", "size_out", "says"),
    [
        (2, 16, "where rank 1 called all_gather of [4]: another size."),
        (16, 2, "where rank 1 called reduce_scatter of [32]: another size."),
    ],
)
def test_sizes_of_joined_collectives_are_compared_if_they_show_the_operation(
    tmp_path: Path, size_in: int, size_out: int, says: str
) -> None:
    lines = [
        describe_timeout(rank, 7, f"NumelIn={factor * size_in}, NumelOut={factor * size_out}, ")
        for rank, factor in ((0, 1), (1, 2))
    ]
    verdict = judge_log(tmp_path, *(line.replace("ALLREDUCE", "COALESCED") for line in lines))
    assert (verdict.culprits, verdict.suspects) == ((), (0, 1))
    assert verdict.sentence.endswith(says)


def test_messages_that_are_joined_may_have_any_size(tmp_path: Path) -> None:
    lines = [
        describe_timeout(rank, 7, f"NumelIn={size}, NumelOut={size}, ")
        for rank, size in ((0, 4), (1, 9))
    ]
    verdict = judge_log(tmp_path, *(line.replace("ALLREDUCE", "COALESCED") for line in lines))
    assert verdict.kind is None


TRACE = """[rank9]:[E607 23:46:59 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective:
#0 all_reduce from /env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4186
#1 finish from /home/me/trainer.py:12
#2 main from /home/me/trainer.py:40
"""


def test_stack_of_the_call_that_timed_out_says_where_its_rank_waits(tmp_path: Path) -> None:
    prefix = (
        "[rank9]:[E607 23:46:59 ProcessGroupNCCL.cpp:733] [PG ID 0 PG GUID 0(default_pg) Rank 9]"
    )
    trace = TRACE.replace("733]", "733] [PG ID 0 PG GUID 0(default_pg) Rank 9]")
    for text in (trace, trace.replace("collective:\n", "collective: \n")):
        verdict = judge_log(tmp_path, describe_timeout(9, 7), text, f"{prefix} First PG to signal")
        assert "in all_reduce no. 7" in verdict.sentence
        assert "trainer.py:12 in finish" in verdict.sentence


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112], "
            "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default)))",
            "torch found that broadcast of [34112] Float of rank 0 differs",
        ),
        (
            "collective: CollectiveFingerPrint(SequenceNumber=21, OpType=BROADCAST, TensorShape=[1], "
            "TensorDtypes=Long, TensorDeviceTypes=TensorOptions(dtype=float (default), memory_format",
            "torch found that broadcast of [1] Long as no. 21 of rank 0 differs",
        ),
    ],
)
def test_one_side_of_a_mismatch_is_reported_and_names_nobody(
    tmp_path: Path, call: str, says: str
) -> None:
    line = f"RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running {call}"
    verdict = judge_log(tmp_path, line)
    assert (verdict.culprits, verdict.suspects) == ((), ())
    assert says in verdict.sentence
    assert why_hang([str(tmp_path)]) == 1

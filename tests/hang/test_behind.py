"""Jobs in which the device of a rank stopped inside collectives that its whole group had entered."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from parakit.hang.gather import gather_evidence
from parakit.hang.verdict import HangVerdict, judge_hang
from tests.hang.made import Job, four

NOT_COMPLETED_HERE = "entered, completed by the others, not by this rank"


def counted_job() -> Job:
    job = four()
    job.has_status = True
    return job


def call_without_device(
    job: Job, ranks: Sequence[int], group: str, broken: Sequence[int], operation: str = "all_reduce"
) -> None:
    """Make all ranks enter a call that the devices of all but `broken` complete."""
    job.call(ranks, group, operation)
    for rank in broken:
        job.entries[rank][-1].update(state="scheduled", retired=False)


def judge_job(job: Job, folder: Path) -> HangVerdict:
    return judge_hang(gather_evidence([job.write(folder)]))


def test_a_rank_whose_device_failed_in_calls_that_its_peers_completed_is_named(
    tmp_path: Path,
) -> None:
    job = counted_job()
    for _ in range(3):
        call_without_device(job, (0, 1), "1", broken=[1])
    call_without_device(job, (1, 3), "4", broken=[1])
    # The host of rank 1 came no further, and its peers wait for its next calls.
    job.call((0,), "1", done=False)
    job.call((3,), "4", done=False)
    verdict = judge_job(job, tmp_path)
    assert (verdict.culprits, verdict.suspects, verdict.kind) == ((1,), (), NOT_COMPLETED_HERE)
    assert verdict.waiting == (0, 3)
    assert verdict.sentence.startswith(
        "Rank 1 (dp 0, tp 1) entered all_reduce no. 13 of its tensor-parallel group and did not "
        "complete it; rank 0 did."
    )
    assert "Rank 1 is 4 calls behind, in 2 groups." in verdict.sentence
    assert "CUDA error" in verdict.next_step


def test_two_devices_that_failed_are_both_named_though_one_host_went_on(tmp_path: Path) -> None:
    job = counted_job()
    for _ in range(2):
        call_without_device(job, (0, 1), "1", broken=[1])
        call_without_device(job, (2, 3), "2", broken=[3])
        call_without_device(job, (1, 3), "4", broken=[1, 3])
    # Rank 3 itself waits for rank 1.
    job.call((3,), "4", done=False)
    job.call((0,), "1", done=False)
    verdict = judge_job(job, tmp_path)
    assert (verdict.culprits, verdict.kind) == ((1, 3), NOT_COMPLETED_HERE)


def test_a_rank_that_never_came_to_another_call_is_named_as_well(tmp_path: Path) -> None:
    job = counted_job()
    for _ in range(2):
        call_without_device(job, (0, 1), "1", broken=[1])
    job.call((2,), "2", done=False)
    verdict = judge_job(job, tmp_path)
    assert (verdict.culprits, verdict.kind) == ((1, 3), "two roots")


@pytest.mark.parametrize(
    ("operation", "num_calls", "has_status"),
    [
        # A call of another size than its peer's ends at one rank, too.
        ("all_reduce", 1, True),
        # The root of a broadcast completes it before the others receive it.
        ("broadcast", 3, True),
        # gloo has no device: a message was lost.
        ("all_reduce", 3, False),
    ],
)
def test_a_rank_that_is_behind_for_another_reason_is_not_accused(
    tmp_path: Path, operation: str, num_calls: int, has_status: bool
) -> None:
    job = counted_job()
    job.has_status = has_status
    for _ in range(num_calls):
        call_without_device(job, (0, 1), "1", broken=[1], operation=operation)
    job.call((0, 1), "1", done=False)
    verdict = judge_job(job, tmp_path)
    assert (verdict.culprits, verdict.suspects) == ((), (0, 1))

"""What real NCCL left of hangs: two and four ranks of gpt2-tiny on one H200 (torch 2.11, NCCL 2.30.7).

`nccl.tar.xz` holds dumps, stacks and logs, without torch's own frames.
"""

import shutil
import tarfile
from pathlib import Path

import pytest

from parakit.artifacts.run import LOG_FILE, Status
from parakit.hang.gather import gather_evidence
from parakit.hang.verdict import HangKind, HangVerdict, judge_hang
from parakit.hang.watchdog import read_watchdog
from parakit.launch.supervise.exit_status import classify_exit
from parakit.logs.diagnosis import diagnose_log

RECORDED = Path(__file__).parent / "nccl.tar.xz"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nccl")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def verdict(*places: Path) -> HangVerdict:
    return judge_hang(gather_evidence(places))


@pytest.mark.parametrize(
    ("case", "culprit", "kind", "module"),
    [
        # A rank of tp2 leaves out a reduction of its MLP.
        ("skip", 1, HangKind.OTHER_COLLECTIVE, "mlp"),
        # The first stage of pp2 stops in a batch of messages, after the first of them.
        ("sleep", 0, HangKind.NEVER_ENTERED, "pipeline exchange"),
        ("loop", 1, HangKind.NEVER_ENTERED, "gradient buffer"),
        # The same until NCCL's watchdog ends them: tp2dp2, and tp2 in backward.
        ("skip-watchdog", 2, HangKind.OTHER_COLLECTIVE, "mlp"),
        ("sleep-watchdog", 1, HangKind.NEVER_ENTERED, "mlp"),
    ],
)
def test_the_rank_that_hung_is_named(
    cases: Path, case: str, culprit: int, kind: HangKind, module: str
) -> None:
    hang_verdict = verdict(cases / case)
    assert (hang_verdict.culprits, hang_verdict.suspects, hang_verdict.kind) == (
        (culprit,),
        (),
        kind,
    )
    assert hang_verdict.module == module


def test_dumps_without_what_is_done_still_say_how_far_each_rank_came(cases: Path) -> None:
    slept, skipped = (verdict(cases / f"{kind}-active-only") for kind in ("sleep", "skip"))
    assert slept.culprits == (1,)
    assert "left nothing" not in slept.sentence
    assert (skipped.culprits, skipped.suspects, skipped.kind) == ((), (2, 3), None)
    assert "Rank 2 completed all_reduce no. 113" in skipped.sentence
    assert (
        "The last calls in this group: rank 2 completed no. 113 and entered no. 115; "
        "rank 3 completed no. 112 and entered no. 116." in skipped.sentence
    )


def test_of_a_log_alone_no_group_is_taken_for_whole(cases: Path) -> None:
    slept = verdict(cases / "sleep-active-only" / LOG_FILE)
    assert (slept.culprits, slept.kind) == ((), None)
    assert verdict(cases / "skip-active-only" / LOG_FILE).suspects == (2, 3)


CAUGHT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=610, OpType=ALLREDUCE, NumelIn=4, "
    "NumelOut=4, Timeout(ms)=600000) ran for 600018 milliseconds before timing out."
)
LATER = {
    "": None,
    "[PG ID 2 PG GUID 9(TP) Rank 3] Exception (either an error or timeout) detected by watchdog at "
    "work: 610, last enqueued NCCL work: 612, last completed NCCL work: 609.": (
        "9",
        "TP",
        (612, 609),
    ),
    "[PG ID 1 PG GUID 5 Rank 3]  failure detected by watchdog at work sequence id: 610 PG status: last "
    "enqueued work: 611, last completed work: 609": ("5", "", (611, 609)),
}


@pytest.mark.parametrize("later", LATER)
def test_the_group_of_a_timeout_is_what_a_later_line_says_or_is_not_known(later: str) -> None:
    """torch 2.4 and 2.7 to 2.11; ranks are counted within the group."""
    lines = [f"[rank7]:[E ProcessGroupNCCL.cpp:607] [Rank 3] {CAUGHT}", f"[rank7]:[E] {later}"]
    (timed_out,) = read_watchdog(lines).timeouts
    known = (timed_out.call.group, timed_out.call.description, timed_out.progress)
    assert (timed_out.rank, timed_out.call.number) == (7, 610)
    assert known == (LATER[later] or ("unknown to rank 7", "", None))


def test_a_timeouts_line_that_counts_within_a_group_accuses_no_rank() -> None:
    assert read_watchdog([f"[E] [PG ID 2 PG GUID 9 Rank 3] {CAUGHT}"]).timeouts == []
    (of_all,) = read_watchdog([f"[E] [PG ID 0 PG GUID 0(default_pg) Rank 3] {CAUGHT}"]).timeouts
    assert of_all.rank == 3


@pytest.mark.parametrize("case", ["skip-active-only", "sleep-active-only"])
def test_what_the_watchdog_brought_about_is_not_taken_for_the_cause(cases: Path, case: str) -> None:
    """After a timeout the loss was NaN, and torchrun killed a rank that did not end."""
    status = diagnose_log(cases / case / LOG_FILE, 1, interrupted=False)
    assert (status.status, status.rank) == (Status.CRASHED, None)
    assert "NCCL timeout: it waited 60 s in ALLREDUCE no. " in status.reason


def test_a_run_that_the_watchdog_ended_says_who_hung(cases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(cases / "skip-watchdog", folder)
    status = classify_exit(folder, 1, interrupted=False)
    assert (status.status, status.rank) == (Status.CRASHED, 2)
    assert status.reason.startswith("Hang: Rank 2 (dp 1, tp 0) left the order of calls.")
    assert status.reason.endswith("it waited 60 s in ALLREDUCE no. 113 after iteration 2")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        # torch up to 1.12 numbers no calls; what terminated the process is in the line after.
        (
            ("terminate called after throwing an instance of 'c10::DistBackendError'",),
            "NCCL timeout",
        ),
        (
            (
                "[rank3]:[E] [PG ID 0 Rank 3] Process group watchdog thread terminated with exception: "
                "CUDA error: an illegal memory access was encountered",
            ),
            "rank 3: fatal: CUDA error: an illegal memory access was encountered",
        ),
    ],
)
def test_what_came_before_a_timeout_is_its_cause(
    tmp_path: Path, before: tuple[str, ...], reason: str
) -> None:
    log = tmp_path / LOG_FILE
    message = f"  what():  [Rank 1] {CAUGHT.replace('SeqNum=610, ', '')}"
    log.write_text("\n".join((*before, message, "")))
    status = diagnose_log(log, 1, interrupted=False)
    assert status.status is Status.CRASHED
    assert reason in status.reason

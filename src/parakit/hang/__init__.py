"""Why a training job hangs: which rank stopped, which ranks wait for it, and in which part of the step.

This package decides the cause from flight-recorder dumps, Python stacks and logs. It loads no torch and does not
touch the job.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.hang.diagnosis import HangDiagnosis, diagnose_hang
    from parakit.hang.dumps import UnreadableDumpError
    from parakit.hang.gather import gather_evidence
    from parakit.hang.order import find_mismatch
    from parakit.hang.slow import SlowRank, find_slow_rank
    from parakit.hang.verdict import HangKind, HangOutcome, HangVerdict, judge_hang
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "HangDiagnosis",
    "HangKind",
    "HangOutcome",
    "HangVerdict",
    "SlowRank",
    "UnreadableDumpError",
    "diagnose_hang",
    "find_mismatch",
    "find_slow_rank",
    "gather_evidence",
    "judge_hang",
]

"""Compare two captures of one iteration: which tensor is wrong first, and how it is wrong.

This package finds the part of the reference's tensor that each rank holds, decides how far rounding may move
the tensor, and classifies a larger error. It reads captures that other packages wrote, and launches nothing.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.verify.captured import Capture, VerifyError, read_capture
    from parakit.verify.compare import NORM, Drift, measure_drift
    from parakit.verify.comparison import CaptureComparison
    from parakit.verify.findings import Finding, FindingStatus, list_findings
    from parakit.verify.kinds import name_factor
    from parakit.verify.page import write_page
    from parakit.verify.parts import (
        explain_by_parts,
        is_right_without_loss,
        name_wrong_loss,
        needs_parts,
    )
    from parakit.verify.reassemble import reassemble_to_one_rank
    from parakit.verify.tolerance import find_token_loss_tolerance
    from parakit.verify.verdict import (
        Judgement,
        confirm,
        count_seeds,
        find_unstable_iteration,
        judge,
        refuse_comparison,
        report_unstable_runs,
        write_forced,
        write_verdict,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "NORM",
    "Capture",
    "CaptureComparison",
    "Drift",
    "Finding",
    "FindingStatus",
    "Judgement",
    "VerifyError",
    "confirm",
    "count_seeds",
    "explain_by_parts",
    "find_token_loss_tolerance",
    "find_unstable_iteration",
    "is_right_without_loss",
    "judge",
    "list_findings",
    "measure_drift",
    "name_factor",
    "name_wrong_loss",
    "needs_parts",
    "read_capture",
    "reassemble_to_one_rank",
    "refuse_comparison",
    "report_unstable_runs",
    "write_forced",
    "write_page",
    "write_verdict",
]

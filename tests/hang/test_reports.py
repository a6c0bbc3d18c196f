"""Thirty public reports: the verdict on the lines that people pasted, beside the answer that their thread reached."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from parakit.hang.diagnosis import diagnose_hang

REPORTS = yaml.safe_load((Path(__file__).parent / "reports.yaml").read_text())
LATER_REPORTS = yaml.safe_load((Path(__file__).parent / "later_reports.yaml").read_text())
ALL_REPORTS = REPORTS + LATER_REPORTS
UNANSWERED: tuple[str, ...] = ()
"""Reports whose answer the tool does not reach. It names no wrong rank in them."""


@dataclass(frozen=True)
class ReportedHang:
    """Verdict on one report, and what it is compared with."""

    report: dict[str, Any]
    culprits: tuple[int, ...]
    suspects: tuple[int, ...]
    text: str

    @property
    def names_wrong_rank(self) -> bool:
        """True if a rank is named that the thread does not hold responsible."""
        return not {*self.culprits} <= {*self.report["named"]}

    @property
    def is_answered(self) -> bool:
        """True if the verdict holds the answer of the thread."""
        has_ranks = {*self.report["among"]} <= {*self.culprits, *self.suspects}
        is_said = self.report["says"].lower() in self.text.lower()
        return has_ranks and is_said and not self.names_wrong_rank


def judge_report(report: dict[str, Any], folder: Path) -> ReportedHang:
    for name, text in report["files"].items():
        (folder / name).write_text(text)
    diagnosis = diagnose_hang([folder])
    verdict = diagnosis.verdict
    return ReportedHang(report, verdict.culprits, verdict.suspects, diagnosis.text)


@pytest.mark.parametrize("report", ALL_REPORTS, ids=[report["name"] for report in ALL_REPORTS])
def test_report_gets_answer_of_its_thread(report: dict[str, Any], tmp_path: Path) -> None:
    judged = judge_report(report, tmp_path)
    assert not judged.names_wrong_rank, judged.text
    assert judged.is_answered or report["name"] in UNANSWERED, judged.text


def test_no_more_than_five_reports_stay_unanswered() -> None:
    assert (len(REPORTS), len(LATER_REPORTS)) == (20, 10)
    assert len(UNANSWERED) <= 5

"""What others report of resumed runs and of fine-tuning: each report is seen, or not, as the table of reports says."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parakit.config.files import ROOT, read_yaml
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from parakit.launch import SMALL_SAMPLE
from parakit.launch.job import parse_target
from tests.verify.bench import Bench

LOSSES = ROOT / "examples/losses"
PAGE = ROOT / "docs/upstream/README.md"


@dataclass(frozen=True)
class Report:
    """A report, and the verification that shows whether Megatron does what it claims."""

    thread: str
    strategy: str
    flags: str
    patch: str = ""
    """File of `LOSSES` for strategy and reference; empty for Megatron's own loss."""
    resumed: str = ""
    own_flags: str = ""
    devices: int = 2
    verdict: str = "held"
    says: str = ""
    model: str = field(default="gpt2-tiny")

    def is_as_stated(self, bench: Bench) -> str:
        """Return an empty text if the verdict is the stated one, else the verdict's sentence."""
        verdict = bench.verify(
            *(self.strategy, self.model, self.devices, shlex.split(self.flags)),
            LOSSES / self.patch if self.patch else None,
            iteration=None,
            own_arguments=shlex.split(self.own_flags),
            resumed=self.resumed,
            both=True,
        ).verdict
        is_stated = verdict.verdict == self.verdict and self.says in verdict.sentence
        return "" if is_stated else f"{self}: {verdict.sentence}"


def read_reports() -> list[Report]:
    return [Report(**entry) for entry in read_yaml(Path(__file__).with_name("reports.yaml"))]


def test_every_report_is_on_the_page_with_a_strategy_and_a_loss_that_exist() -> None:
    page = PAGE.read_text()
    for report in read_reports():
        repository, number = report.thread.split("#")
        assert repository in page
        assert f"#{number}" in page
        assert (
            parse_target(f"train-{report.strategy}-gpt2-tiny-{report.devices}cpu").flags is not None
        )
        assert not report.patch or (LOSSES / report.patch).is_file()


def test_every_loss_is_of_a_report() -> None:
    modules = {"__init__.py", "rollouts.py"}
    losses = {path.name for path in LOSSES.glob("*.py")} - modules
    assert losses == {report.patch for report in read_reports()} - {""}


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_report_is_seen_as_stated(tmp_path: Path) -> None:
    with closing(ForkedRanks()) as ranks:
        bench = Bench(SMALL_SAMPLE, Verifier(tmp_path, ranks), small=True)
        wrong = [report.is_as_stated(bench) for report in read_reports()]
    assert not any(wrong), "\n".join(filter(None, wrong))

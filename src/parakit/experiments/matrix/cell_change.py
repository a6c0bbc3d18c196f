"""Compare what one cell of the parity matrix does in two versions of Megatron.

The cell is trained twice in each version. The first run counts parameters, losses, calls and memory. The second run
captures the tensors of one iteration, which are compared as in any verification: the older version is the reference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from parakit.accounting import collect_rank_records
from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryRecord,
    RankMemory,
    read_measurements,
)
from parakit.artifacts.run import LEDGER_FOLDER
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.strategy import parse_strategy
from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.verify.command import train_and_judge
from parakit.experiments.verify.pairs import Verification, compose_pair, share_initial_weights
from parakit.experiments.verify.reasons import shorten_reason, strip_paths_and_numbers
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.formatting.units import amount, plural
from parakit.launch import Launch, Options
from parakit.logs import scrape_log

ITERATIONS = 3
"""Iterations of a run. The recorder needs three, because it counts the calls of iterations after the first."""
SHOWN_CALLS = 3
"""Most kinds of calls that a sentence names."""
SMALLEST_MEMORY_CHANGE = 0.01
"""Fraction of a peak below which its change is not reported: a few temporary scalars are no change of memory."""
_MAX_REASON_LENGTH = 300


class ChangeStatus(StrEnum):
    """Result of comparing a cell in two versions."""

    SAME = "same"
    CHANGED = "changed"
    RUNS_IN_NEITHER = "in neither version"


class Aspect(StrEnum):
    """Aspect of a cell that can change."""

    RUN = "run"
    """One version trains the cell, and the other one does not."""
    PARAMETERS = "parameters"
    LOSSES = "losses"
    TENSORS = "tensors"
    CALLS = "messages"
    MEMORY = "memory"


@dataclass(frozen=True)
class CellChange:
    """Stored result of a cell."""

    id: str
    family: str
    layout: str
    levels: tuple[str, ...]
    """Paths `factor/level` of the levels that are not a feature's default."""
    status: ChangeStatus
    sentences: Mapping[Aspect, str] = field(default_factory=dict)
    """What changed, a sentence per aspect; empty if nothing did."""
    worst_ratio: float | None = None
    """Largest error of a tensor over its tolerance; None if the tensors were not compared."""
    reason: str = ""
    """Why neither version trains the cell, or why its tensors were not compared; empty otherwise."""
    findings: tuple[str, ...] = ()
    """Sentences on known findings that one version alone has and that show in this cell."""

    @property
    def name(self) -> str:
        """Layout, family and levels, such as `tp2 dense, norm/rms`."""
        return ", ".join((f"{self.layout} {self.family}", *self.levels))

    @property
    def line(self) -> str:
        """Name, status, and all sentences as one line."""
        details = [f"{aspect}: {sentence}" for aspect, sentence in self.sentences.items()]
        details += [self.reason] if self.reason else []
        return "; ".join((f"{self.name}: {self.status}", *details, *self.findings))


class CallKind(NamedTuple):
    """Calls that are counted together."""

    operation: str
    group: str
    phase: str
    dtype: str

    @property
    def text(self) -> str:
        """Kind of call as in `all_reduce (fp32) over tp in forward`."""
        return f"{self.operation} ({self.dtype}) over {self.group} in {self.phase}"


class CallTotal(NamedTuple):
    """Number and bytes of calls of one kind, over all ranks and one iteration."""

    calls: int
    payload_bytes: int

    @property
    def text(self) -> str:
        """Number and bytes as in `4 calls of 2.0 MiB`."""
        return (
            f"{plural(self.calls, 'call')} of {amount(self.payload_bytes)}"
            if self.calls
            else "none"
        )


NO_CALLS = CallTotal(0, 0)


@dataclass(frozen=True)
class CountedRun:
    """Figures of one run of a cell in one version."""

    failure: str = ""
    """Why the run could not be composed or ended; empty if it ended well."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Printed number of parameters by model-parallel rank."""
    losses: tuple[float | None, ...] = ()
    """Printed loss of each iteration."""
    calls: Mapping[CallKind, CallTotal] = field(default_factory=dict)
    memory: tuple[RankMemory, ...] = ()
    """Memory of each rank at its peak."""


@dataclass(frozen=True)
class VersionRunner:
    """Trains cells in one version of Megatron."""

    ranks: ForkedRanks
    options: Options
    """Options of all runs, which name this version."""

    def compose(self, cell: MatrixCell, folder: Path) -> Verification:
        """Return the launches of a cell, in which strategy and reference are the cell's strategy.

        The reference of a Megatron-FSDP strategy is one rank, because Megatron-FSDP cannot be a reference.

        Args:
            cell: The cell. The flags of its strategy apply to both runs.
            folder: Folder for initial checkpoints.

        Raises:
            LaunchError: This version, or the kit, refuses the cell.
        """
        pair = cell.make_pair(replace(self.options, runs=folder))
        options = pair.job.options
        shared_options = replace(
            options,
            extra=(*options.extra, *cell.strategy_flags),
            iterations=ITERATIONS,
            # Versions may draw the masks of dropout in another order, which is no change of what they compute.
            dropout=0.0,
        )
        reference = "" if is_megatron_fsdp(cell) else cell.layout.strategy
        return compose_pair(
            replace(pair, job=pair.job.with_options(shared_options), flags=(), reference=reference)
        )

    def count(self, launch: Launch, folder: Path) -> CountedRun:
        """Train a launch and return its printed figures, its calls and its memory.

        Args:
            launch: The run.
            folder: Folder for the log and the records of the ranks.
        """
        ledger = folder / LEDGER_FOLDER
        ledger.mkdir(parents=True)
        log = folder / "log.txt"
        failure = self.ranks.run(launch, log, {variables.LEDGER: str(ledger.resolve())})
        if failure:
            return CountedRun(failure)
        collect_rank_records(folder)
        scraped = scrape_log(log)
        return CountedRun(
            parameters={
                f"rank (tp {count.tensor_rank}, pp {count.pipeline_rank})": count.parameters
                for count in scraped.parameters
            },
            losses=tuple(iteration.lm_loss for iteration in scraped.iterations),
            calls=add_up_calls(read_measurements(folder, CommunicationRecord)),
            memory=read_measurements(folder, MemoryRecord).ranks,
        )


def is_megatron_fsdp(cell: MatrixCell) -> bool:
    """Return True if the strategy of a cell shards with Megatron-FSDP."""
    layout = cell.layout
    return parse_strategy(layout.strategy, layout.devices).sharding.is_megatron_fsdp


def add_up_calls(record: CommunicationRecord) -> dict[CallKind, CallTotal]:
    """Return number and bytes of the calls of all ranks in one iteration, by the kind of call."""
    totals: dict[CallKind, CallTotal] = {}
    for rank in record.ranks:
        for call in rank.calls:
            kind = CallKind(
                str(call.operation), group=call.group, phase=str(call.phase), dtype=call.dtype
            )
            total = totals.get(kind, NO_CALLS)
            payload_bytes = total.payload_bytes + call.calls * call.payload_bytes
            totals[kind] = CallTotal(total.calls + call.calls, payload_bytes)
    return totals


@dataclass(frozen=True)
class CellComparer:
    """Compares cells in two versions of Megatron."""

    old: VersionRunner
    new: VersionRunner
    folder: Path
    """Folder for initial checkpoints, logs and tensors. Only initial checkpoints stay in it."""

    def compare_cell(self, cell: MatrixCell, findings: tuple[str, ...] = ()) -> CellChange:
        """Train a cell in both versions and return what changed.

        Args:
            cell: The cell. The flags of its strategy apply to both runs.
            findings: Sentences on known findings, which are stored with the result.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            change = self._compare_in_folder(cell, Path(scratch))
        return replace(change, findings=findings)

    def _compare_in_folder(self, cell: MatrixCell, scratch: Path) -> CellChange:
        """Compare a cell; `scratch` is an empty folder for logs and tensors."""
        change = CellChange(
            cell.id,
            family=cell.family.name,
            layout=cell.layout.name,
            levels=tuple(level.path for level in cell.levels),
            status=ChangeStatus.SAME,
        )
        old_verification, old_failure = self._start(cell, self.old)
        new_verification, new_failure = self._start(cell, self.new)
        if old_verification is None or new_verification is None:
            return self._judge_failures(change, old_failure, new_failure)
        # Both versions start from the weights that the older one has written.
        new_strategy = share_initial_weights(old_verification.reference, new_verification.strategy)
        old = self.old.count(old_verification.strategy, scratch / "old")
        new = self.new.count(new_strategy, scratch / "new")
        if old.failure or new.failure:
            return self._judge_failures(change, old.failure, new.failure)

        sentences = compare_counted_runs(old, new)
        if is_megatron_fsdp(cell):
            reason = "tensors not compared: Megatron-FSDP cannot be a reference"
            return _add_sentences(replace(change, reason=reason), sentences)
        verification = replace(old_verification, strategy=new_strategy)
        verdict = self._judge_tensors(verification, self.new, scratch)
        if verdict.stage is CaptureStage.LOG:
            sentences.setdefault(Aspect.LOSSES, describe_printed_difference(verdict.logged or ""))
        elif verdict.verdict is VerifyOutcome.DIFFERS:
            # Some faults need no reference, such as two parameters with equal initial values. They are no change if
            # the older version has them, too.
            (scratch / "repeated").mkdir()
            old_verdict = self._judge_tensors(old_verification, self.old, scratch / "repeated")
            if is_same_fault(verdict, old_verdict):
                change = replace(change, reason=f"in both versions: {verdict.sentence}")
            else:
                sentences[Aspect.TENSORS] = verdict.sentence
        elif verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
            change = replace(change, reason=verdict.sentence)
        return _add_sentences(replace(change, worst_ratio=verdict.worst_ratio), sentences)

    def _start(self, cell: MatrixCell, runner: VersionRunner) -> tuple[Verification | None, str]:
        """Compose a cell's launches and write their initial checkpoint; return the launches, or None and the reason."""
        try:
            verification = runner.compose(cell, self.folder)
            runner.ranks.ensure_start(verification.reference)
        except LaunchError as error:
            return None, str(error)
        return verification, ""

    def _judge_tensors(
        self, verification: Verification, strategy_runner: VersionRunner, scratch: Path
    ) -> VerifyVerdict:
        """Return the verdict on the tensors of a cell in one version, with those of the older one as the reference.

        Args:
            verification: Its reference is the cell in the older version.
            strategy_runner: The version that trains the strategy of the verification.
            scratch: Folder for tensors and logs.
        """

        def train(part: str, launch: Launch) -> str:
            runner = self.old if part.startswith("reference") else strategy_runner
            return runner.ranks.capture(launch, scratch / f"{part}.txt", scratch / part)

        return train_and_judge(verification, scratch, train).verdict

    @staticmethod
    def _judge_failures(change: CellChange, old_failure: str, new_failure: str) -> CellChange:
        """Return the change of a cell that at least one version does not train.

        If both versions fail, they behave the same only if they fail for the same reason.
        """
        sentences: dict[Aspect, str] = {}
        if old_failure and new_failure:
            if strip_paths_and_numbers(old_failure) == strip_paths_and_numbers(new_failure):
                status = ChangeStatus.RUNS_IN_NEITHER
                return replace(change, status=status, reason=_shorten(new_failure))
            reasons = f"{_shorten(old_failure)}, and now: {_shorten(new_failure)}"
            sentences[Aspect.RUN] = f"fails for another reason; before: {reasons}"
        elif new_failure:
            sentences[Aspect.RUN] = f"fails in the newer version: {_shorten(new_failure)}"
        else:
            sentences[Aspect.RUN] = f"failed in the older version: {_shorten(old_failure)}"
        return _add_sentences(change, sentences)


def _add_sentences(change: CellChange, sentences: Mapping[Aspect, str]) -> CellChange:
    """Return a change with its sentences in the order of `Aspect`; it is `changed` if there is any."""
    ordered = {aspect: sentences[aspect] for aspect in Aspect if aspect in sentences}
    status = ChangeStatus.CHANGED if ordered else ChangeStatus.SAME
    return replace(change, status=status, sentences=ordered)


def is_same_fault(verdict: VerifyVerdict, other: VerifyVerdict) -> bool:
    """Return True if two verdicts name the same wrong tensor with the same kind of error."""
    fault = (verdict.stage, verdict.module, verdict.tensor, verdict.kind)
    return fault == (other.stage, other.module, other.tensor, other.kind)


def describe_printed_difference(logged: str) -> str:
    """Return a verdict's sentence on a printed value, with the older version in place of the reference.

    The verdict calls the value wrong, which a comparison of two versions does not know, so this part is left out.
    """
    difference, _, _ = logged.partition(";")
    return difference.replace("the reference's log", "the older version's log")


def compare_counted_runs(old: CountedRun, new: CountedRun) -> dict[Aspect, str]:
    """Return a sentence for each aspect in which two runs that ended well differ; empty if none does."""
    sentences = {
        Aspect.PARAMETERS: compare_parameters(old.parameters, new.parameters),
        Aspect.LOSSES: compare_losses(old.losses, new.losses),
        Aspect.CALLS: compare_calls(old.calls, new.calls),
        Aspect.MEMORY: compare_memory(old.memory, new.memory),
    }
    return {aspect: sentence for aspect, sentence in sentences.items() if sentence}


def compare_parameters(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Return the first rank with another number of parameters as a sentence; empty if there is none."""
    for rank in sorted(old.keys() | new.keys()):
        if old.get(rank) != new.get(rank):
            old_number = f"{old[rank]:,}" if rank in old else "none"
            new_number = f"{new[rank]:,}" if rank in new else "none"
            return f"{new_number} on {rank} instead of {old_number}"
    return ""


def compare_losses(old: Sequence[float | None], new: Sequence[float | None]) -> str:
    """Return the first iteration with another printed loss as a sentence; empty if there is none."""
    if len(old) != len(new):
        return f"{plural(len(new), 'iteration')} printed instead of {len(old)}"
    for number, (old_loss, new_loss) in enumerate(zip(old, new, strict=True), start=1):
        if old_loss != new_loss:
            return f"{new_loss} instead of {old_loss} in iteration {number}"
    return ""


def compare_calls(old: Mapping[CallKind, CallTotal], new: Mapping[CallKind, CallTotal]) -> str:
    """Return the kinds of calls that differ most in bytes, at most SHOWN_CALLS; empty if all are equal."""
    totals: dict[CallKind, tuple[CallTotal, CallTotal]] = {}
    for kind in sorted(old.keys() | new.keys()):
        old_total, new_total = old.get(kind, NO_CALLS), new.get(kind, NO_CALLS)
        if old_total != new_total:
            totals[kind] = (old_total, new_total)

    def count_changed_bytes(kind: CallKind) -> int:
        old_total, new_total = totals[kind]
        return abs(new_total.payload_bytes - old_total.payload_bytes)

    sentences = []
    for kind in sorted(totals, key=count_changed_bytes, reverse=True)[:SHOWN_CALLS]:
        old_total, new_total = totals[kind]
        sentences.append(f"{kind.text}: {new_total.text} instead of {old_total.text}")
    num_hidden = len(totals) - len(sentences)
    if num_hidden:
        sentences.append(f"and {plural(num_hidden, 'further kind')} of calls")
    return ", ".join(sentences)


def compare_memory(old: Sequence[RankMemory], new: Sequence[RankMemory]) -> str:
    """Return a sentence on the rank with the largest change of peak memory, with the changes of its categories.

    The sentence is empty if no peak changed by SMALLEST_MEMORY_CHANGE or more.
    """
    old_by_rank = {memory.rank: memory for memory in old}
    new_by_rank = {memory.rank: memory for memory in new}
    common = sorted(old_by_rank.keys() & new_by_rank.keys())
    if not common:
        return ""

    def measure_change(rank: int) -> int:
        return abs(new_by_rank[rank].peak_bytes - old_by_rank[rank].peak_bytes)

    rank = max(common, key=measure_change)
    before, after = old_by_rank[rank], new_by_rank[rank]
    if measure_change(rank) < SMALLEST_MEMORY_CHANGE * before.peak_bytes:
        return ""
    categories = []
    for category in sorted(before.categories.keys() | after.categories.keys()):
        added = after.categories.get(category, 0) - before.categories.get(category, 0)
        if added:
            sign = "+" if added > 0 else "−"
            categories.append(f"{category.replace('_', ' ')} {sign}{amount(abs(added))}")
    peaks = f"{amount(after.peak_bytes)} instead of {amount(before.peak_bytes)}"
    return f"peak of rank {rank} {peaks} ({', '.join(categories)})"


def _shorten(failure: str) -> str:
    """Return a failure as a result stores it."""
    return shorten_reason(failure, _MAX_REASON_LENGTH)

"""Runs as rows: a configuration with everything that is said of it; every table is columns over it.

Figures of the newest run are read off its log and ledgers when they are asked for; None is "not known".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parakit.artifacts.measurements import (
    MemoryCategory,
    TimeRecord,
    TokenCounts,
    count_tokens_per_expert,
)
from parakit.config.flags import Flags
from parakit.config.published import Figure, Published
from parakit.config.run import Backend, RunSpec, Transport
from parakit.formatting.units import MIB
from parakit.logs import Run, load_runs
from parakit.native import MUON_RULE_FLAG
from parakit.reporting.analyse.comparability import SpeedComparison
from parakit.reporting.analyse.configurations import (
    Configuration,
    device_scatter,
    estimate_pooled_runs,
    group_into_rows,
)
from parakit.reporting.analyse.parity import (
    Parity,
    judge_parity,
    last_digit_unit,
    loss_curve,
    single_step_losses,
)
from parakit.reporting.analyse.published import (
    Match,
    find_published_figure,
    match_figure,
    published_baseline_ratio,
)
from parakit.reporting.analyse.rates import Rates, compute_rates
from parakit.reporting.analyse.statistics import Estimate, TimeComparison, estimate_time
from parakit.reporting.analyse.time_shares import (
    compute_time_shares,
    idle_over_work,
    mean,
    pass_seconds,
    pass_seconds_without_communication,
)
from parakit.reporting.analyse.within_run import ChangeWithinRun, find_changes_within_run

ACCURACY = "next token accuracy"


_SHARDED_BY = {
    "zero1": "distributed optimizer of",
    "zero2": "Megatron-FSDP optim_grads of",
    "zero3": "Megatron-FSDP optim_grads_params of",
    "fsdp2": "torch FSDP2, wrapped by",
}


@dataclass(frozen=True)
class Entry:
    """One configuration with all its results."""

    label: str
    """How it is called in tables and charts."""
    configuration: Configuration
    parity: Parity
    published: Published
    """Figures of write-ups, of which one may be of such a run."""
    speed: SpeedComparison | None = None
    """Against the cohort's reference; None for the reference itself."""

    @property
    def run(self) -> Run:
        """The newest run."""
        return self.configuration.newest

    @property
    def spec(self) -> RunSpec | None:
        """What was trained."""
        return self.run.spec

    @property
    def strategy(self) -> str:
        """Its name; empty where that is not known."""
        return self.run.strategy

    @property
    def backend(self) -> str:
        """Who trained it; empty where that is not known."""
        return self.spec.backend if self.spec else ""

    @property
    def status(self) -> str:
        """How the newest run ended."""
        return self.run.status.status.value

    @property
    def estimate(self) -> Estimate | None:
        """Of iteration times, in milliseconds."""
        return self.configuration.estimate

    @cached_property
    def implementation(self) -> str:
        """Whose code sharded or trained, with its version and commit; empty of a foreign log."""
        record = self.run.record
        if record is None:
            return ""
        kit = f"this kit at {(record.kit_commit or 'no commit')[:12]}"
        if record.spec.backend == Backend.DEEPSPEED:
            return f"DeepSpeed {record.software.get('deepspeed', '')}, model of {kit}"
        if record.spec.backend != Backend.MEGATRON:
            return f"PyTorch {record.software.get('torch', '')}, {kit}"
        commit = record.entry.megatron_commit
        origin = f"commit {commit}" if commit else "the PyPI wheel"
        megatron = f"Megatron-LM {record.entry.megatron_version} ({origin})"
        part = _SHARDED_BY.get(record.spec.parallelism.sharding.value)
        return f"{part} {megatron}" if part else megatron

    @cached_property
    def optimizer(self) -> str:
        """As people call it; Megatron's Muon decays matrices and updates norms at Muon's rate."""
        record = self.run.record
        if record is None or Flags(record.argv).text("--optimizer") != "muon":
            return "AdamW" if record else ""
        megatrons = record.spec.backend == Backend.MEGATRON or MUON_RULE_FLAG in record.argv
        return "Megatron's Muon" if megatrons else "Muon + AdamW"

    @cached_property
    def activation(self) -> str:
        """Between the matrices of an MLP or expert; empty of a foreign log."""
        flags = Flags(self.run.record.argv) if self.run.record else None
        known = {"--swiglu": "SwiGLU", "--silu": "SiLU"}
        named = (name for flag, name in known.items() if flags and flags.has(flag))
        return next(named, "GELU" if flags else "")

    @property
    def time_ms(self) -> float | None:
        """Median of iteration times."""
        return self.estimate.median if self.estimate else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of that, with 95%."""
        found = self.estimate
        known = found and found.low is not None and found.high is not None
        return (found.low, found.high) if known else None  # type: ignore[union-attr,return-value]

    @property
    def per_token(self) -> TimeComparison | None:
        """Its time a token over the reference's; None where nothing is compared."""
        return self.speed.per_token if self.speed else None

    @property
    def judged_time(self) -> TimeComparison | None:
        """The comparison whose verdict counts: per device where the numbers of devices differ."""
        return self.speed.judged_time if self.speed else None

    @cached_property
    def rates(self) -> Rates:
        """Of the newest run at the row's time."""
        return compute_rates(self.run, self.time_ms)

    @cached_property
    def changes_within_run(self) -> tuple[ChangeWithinRun, ...]:
        """What changes in the newest run's iteration times while it is on."""
        return find_changes_within_run(self.run)

    @cached_property
    def figure(self) -> Figure | None:
        """What was published of such a run."""
        return find_published_figure(self.run, self.published)

    @cached_property
    def matches(self) -> tuple[Match, ...]:
        """The figure's quantities beside the row's."""
        measured = self.time_ms, self.device_bytes
        return match_figure(self.run, self.figure, *measured) if self.figure else ()

    @property
    def published_ratio(self) -> float | None:
        """The figure's time a sample over its own baseline's; beside `per_token`."""
        return published_baseline_ratio(self.figure, self.published) if self.figure else None

    @property
    def samples_per_second(self) -> float | None:
        """Over all devices."""
        samples = self.run.global_batch_size or 0
        return samples * 1000 / self.time_ms if self.time_ms else None

    @cached_property
    def processor_ms(self) -> Estimate | None:
        """Of an iteration's processor time in milliseconds, over the threads that train of all ranks."""
        ledgers = [run.time_record[0] for run in self.configuration.runs if run.has_measurements]
        by_rank = [[rank.processor_seconds for rank in times.ranks] for times in ledgers if times]
        found = [[1000 * sum(s) for s in zip(*ranks, strict=False)] for ranks in by_rank]
        return estimate_time(list(filter(None, found)), scatter=device_scatter(self.run.device))

    @cached_property
    def losses(self) -> Mapping[int, float]:
        """Training loss by iteration, where a line is of one iteration alone."""
        return loss_curve(self.run)

    @cached_property
    def final_loss(self) -> float | None:
        """Loss of the last line that is of a whole step alone."""
        _, losses = single_step_losses(self.run.log.iterations)
        return float(losses[-1]) if len(losses) else None

    @cached_property
    def validation_loss(self) -> float | None:
        """Of the last evaluation."""
        return self._score("lm loss")

    @cached_property
    def accuracy(self) -> float | None:
        """Share of next tokens named right, at the last evaluation; Megatron does not print it."""
        return self._score(ACCURACY)

    def _score(self, name: str) -> float | None:
        found = self.run.log.validation
        return found[-1].losses.get(name) if found else None

    @cached_property
    def routing(self) -> Mapping[int, TokenCounts]:
        """What the routers chose in each iteration, over all ranks; empty without a ledger."""
        return (
            count_tokens_per_expert(self.run.measurements.routing)
            if self.run.measurements.routing
            else {}
        )

    @cached_property
    def memory_by_rank(self) -> Mapping[int, int]:
        """Peak bytes, by the memory ledger or the device's allocator.

        Megatron prints the allocator's only on ranks that are first of their DP group.
        """
        if peaks := self.run.measurements.peak_memory_bytes_by_rank:
            return peaks
        found: dict[int, int] = {}
        for reading in self.run.log.memory:
            # Ranks without a device's allocator print zeros.
            if math.isfinite(reading.max_allocated_mib) and reading.max_allocated_mib > 0:
                size = round(reading.max_allocated_mib * MIB)
                found[reading.rank] = max(found.get(reading.rank, 0), size)
        return found

    @property
    def device_bytes(self) -> int | None:
        """The device's own largest reading; a CPU rank's resident memory is no such reading."""
        return None if self.run.device == "cpu" else self.run.samples.peak_memory_bytes

    @cached_property
    def peak_bytes(self) -> int | None:
        """Of the rank that holds most."""
        return max(self.memory_by_rank.values(), default=None)

    @property
    def peak_rank(self) -> int | None:
        """The rank that holds most, of several the first."""
        by_rank = self.memory_by_rank
        return max(by_rank, key=lambda rank: (by_rank[rank], -rank), default=None)

    @cached_property
    def weight_bytes(self) -> tuple[int, ...]:
        """By rank, as the memory ledger counts them."""
        by_rank = sorted(self.run.measurements.memory_categories_by_rank.items())
        return tuple(held[MemoryCategory.WEIGHTS] for _, held in by_rank)

    @cached_property
    def sent_bytes(self) -> int | None:
        """What the busiest rank puts on the wire in an iteration, by the ledger."""
        return max(self.run.measurements.sent_bytes_by_rank.values(), default=None)

    @cached_property
    def nccl_bytes(self) -> int | None:
        """What the same calls would be with NCCL's rings."""
        record = self.run.measurements.communication
        ranks = record.ranks if record else ()
        return max((rank.wire_bytes_over(Transport.NCCL) for rank in ranks), default=None)

    @property
    def largest_parameters(self) -> int | None:
        """Parameters of the rank that holds most, as Megatron printed them."""
        return max((count.parameters for count in self.run.log.parameters), default=None)

    @property
    def times(self) -> TimeRecord | None:
        """The newest run's time ledger."""
        return self.run.time_record[0]

    @cached_property
    def communication_seconds(self) -> float | None:
        """The mean rank waits for communication, in an iteration."""
        if self.times is None:
            return None
        return mean(sum(rank.communication_seconds.values()) for rank in self.times.ranks)

    @property
    def implied_gigabits(self) -> float | None:
        """Bandwidth in Gbit/s that the bytes sent and the time spent on them imply."""
        if not self.sent_bytes or not self.communication_seconds:
            return None
        return self.sent_bytes * 8 / self.communication_seconds / 1e9

    @cached_property
    def pass_seconds_without_communication(self) -> float | None:
        """Forward and backward of an iteration without the communication inside them; mean rank."""
        return (
            mean(map(pass_seconds_without_communication, self.times.ranks)) or None
            if self.times
            else None
        )

    @cached_property
    def overhead(self) -> float | None:
        """The iteration over those passes, less one; both from the same clock readings."""
        if self.times is None or not self.pass_seconds_without_communication:
            return None
        return (
            mean(rank.iteration_seconds for rank in self.times.ranks)
            / self.pass_seconds_without_communication
            - 1
        )

    @cached_property
    def published_fractions(self) -> tuple[float, ...]:
        """Forward, backward and optimizer, of their sum; mean over the ranks. Empty without a ledger."""
        found = (
            [rank.published_fractions for rank in compute_time_shares(self.times)]
            if self.times
            else []
        )
        return tuple(mean(column) for column in zip(*found, strict=True))

    @cached_property
    def bubble(self) -> float | None:
        """Idle over working time of a pipeline, mean over its ranks."""
        if self.times is None or self.spec is None or self.spec.parallelism.pipeline == 1:
            return None
        busy = [rank for rank in self.times.ranks if pass_seconds(rank) > 0]
        return mean(map(idle_over_work, busy)) if busy else None


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Labels of entries, with their models where these differ."""
    models = len({entry.run.model for entry in entries}) > 1
    return [f"{e.run.model} {e.label}" if models and e.run.model else e.label for e in entries]


def loss_differences(entries: Sequence[Entry]) -> list[tuple[int, Run, list[int], list[float]]]:
    """Of each entry whose losses were judged its place, the run, and where it is off its reference's.

    Iterations, and differences in units of the last printed digit; nothing where all are 0.
    """
    runs = {run.name: run for entry in entries for run in entry.configuration.runs}
    found = []
    for place, parity in enumerate(entry.parity for entry in entries):
        if parity.compared and parity.reference in runs:
            judged = runs[parity.judged]
            ours, theirs = loss_curve(judged), loss_curve(runs[parity.reference])
            steps = sorted(ours.keys() & theirs.keys())
            units = [(ours[step] - theirs[step]) / last_digit_unit(theirs[step]) for step in steps]
            found.append((place, judged, steps, units))
    return found if any(any(units) for *_, units in found) else []


def build_entries_from_folders(groups: Sequence[Sequence[Path]]) -> list[Entry | None]:
    """A row for each group of run folders, newest first, whatever a report would pool.

    Parity is that of a report of all of them. None where no folder can be read.
    """
    return build_entries([load_runs(folders)[0] for folders in groups])


def build_entries(groups: Sequence[Sequence[Run]]) -> list[Entry | None]:
    """The same of runs that were read."""
    every = group_into_rows([run for runs in groups for run in runs], all_conditions=True)
    verdicts = zip(every, judge_parity(every), strict=True)
    parities = {run.name: parity for row, parity in verdicts for run in row.runs}
    rows: list[Entry | None] = []
    for runs in groups:
        if not runs:
            rows.append(None)
            continue
        name, row = runs[0].name, Configuration(tuple(reversed(runs)), estimate_pooled_runs(runs))
        rows.append(Entry(name, row, parities.get(name, Parity()), Published()))
    return rows

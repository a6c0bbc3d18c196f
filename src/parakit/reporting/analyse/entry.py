"""Represent a row of a report: a configuration with all its figures. Every table is columns over rows.

Figures of the newest run are read from its log and measurements on first access. An unknown figure is None.
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
"""Name of the evaluation score that the kit's patch prints."""


_SHARDED_BY = {
    "zero1": "distributed optimizer of",
    "zero2": "Megatron-FSDP optim_grads of",
    "zero3": "Megatron-FSDP optim_grads_params of",
    "fsdp2": "torch FSDP2, wrapped by",
}


@dataclass(frozen=True)
class Entry:
    """Row of a report: one configuration with its verdicts and figures."""

    label: str
    """Name of the row in tables and charts."""
    configuration: Configuration
    parity: Parity
    published: Published
    """All published figures, of which one may match the row."""
    speed: SpeedComparison | None = None
    """Comparison with the row's reference; None for the reference itself."""

    @property
    def run(self) -> Run:
        """Newest run of the configuration."""
        return self.configuration.newest

    @property
    def spec(self) -> RunSpec | None:
        """Trained configuration; None if it is unknown."""
        return self.run.spec

    @property
    def strategy(self) -> str:
        """Name of the strategy; empty if it is unknown."""
        return self.run.strategy

    @property
    def backend(self) -> str:
        """Backend that trained the run; empty if it is unknown."""
        return self.spec.backend if self.spec else ""

    @property
    def status(self) -> str:
        """Status of the newest run, such as `ok` or `crashed`."""
        return self.run.status.status.value

    @property
    def estimate(self) -> Estimate | None:
        """Milliseconds per iteration with their interval; None if no run has a usable time."""
        return self.configuration.estimate

    @cached_property
    def implementation(self) -> str:
        """Program that sharded the model or trained it, with version and commit; empty for a foreign log."""
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
        """Usual name of the optimizer; empty for a foreign log.

        Muon has two names, because Megatron's version also decays weight matrices and updates norms at Muon's
        learning rate.
        """
        record = self.run.record
        if record is None:
            return ""
        if Flags(record.argv).text("--optimizer") != "muon":
            return "AdamW"
        follows_megatron = record.spec.backend == Backend.MEGATRON or MUON_RULE_FLAG in record.argv
        return "Megatron's Muon" if follows_megatron else "Muon + AdamW"

    @cached_property
    def activation(self) -> str:
        """Activation function between the matrices of an MLP or expert; empty for a foreign log."""
        if self.run.record is None:
            return ""
        flags = Flags(self.run.record.argv)
        if flags.has("--swiglu"):
            return "SwiGLU"
        return "SiLU" if flags.has("--silu") else "GELU"

    @property
    def time_ms(self) -> float | None:
        """Median milliseconds per iteration; None if no run has a usable time."""
        return self.estimate.median if self.estimate else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of `time_ms`; None if there are too few samples."""
        estimate = self.estimate
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return estimate.low, estimate.high

    @property
    def per_token(self) -> TimeComparison | None:
        """Time per token over the reference's; None if the row is compared with no other."""
        return self.speed.per_token if self.speed else None

    @property
    def judged_time(self) -> TimeComparison | None:
        """Comparison on which the verdict rests: per device if the numbers of devices differ."""
        return self.speed.judged_time if self.speed else None

    @cached_property
    def rates(self) -> Rates:
        """Tokens/s, FLOPs and utilisation of the newest run at the row's time."""
        return compute_rates(self.run, self.time_ms)

    @cached_property
    def changes_within_run(self) -> tuple[ChangeWithinRun, ...]:
        """Changes of the iteration time within the newest run, in the order of iterations."""
        return find_changes_within_run(self.run)

    @cached_property
    def figure(self) -> Figure | None:
        """Published figure of the row's strategy; None if there is none."""
        return find_published_figure(self.run, self.published)

    @cached_property
    def matches(self) -> tuple[Match, ...]:
        """Quantities of the published figure with the row's own and a verdict each."""
        measured = self.time_ms, self.device_bytes
        return match_figure(self.run, self.figure, *measured) if self.figure else ()

    @property
    def published_ratio(self) -> float | None:
        """Published time per sample over its own baseline's; None without a figure."""
        return published_baseline_ratio(self.figure, self.published) if self.figure else None

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second over all devices; None without a time."""
        samples = self.run.global_batch_size or 0
        return samples * 1000 / self.time_ms if self.time_ms else None

    @cached_property
    def processor_ms(self) -> Estimate | None:
        """Processor time per iteration in milliseconds, summed over the training threads of all ranks.

        None means that no run with usable times has a time record.
        """
        samples_by_run = []
        for run in self.configuration.runs:
            if not run.has_measurements:
                continue
            time_record, _ = run.time_record
            if time_record is None:
                continue
            seconds_by_rank = [rank.processor_seconds for rank in time_record.ranks]
            # Ranks may have recorded different numbers of iterations; those that all have are summed.
            samples = [1000 * sum(seconds) for seconds in zip(*seconds_by_rank, strict=False)]
            if samples:
                samples_by_run.append(samples)
        return estimate_time(samples_by_run, scatter=device_scatter(self.run.device))

    @cached_property
    def losses(self) -> Mapping[int, float]:
        """Training loss by iteration, from lines that are no average over several iterations."""
        return loss_curve(self.run)

    @cached_property
    def final_loss(self) -> float | None:
        """Loss of the last line that is no average and no skipped step; None without such a line."""
        _, losses = single_step_losses(self.run.log.iterations)
        return float(losses[-1]) if len(losses) else None

    @cached_property
    def validation_loss(self) -> float | None:
        """Validation loss of the last evaluation; None without one."""
        return self._score("lm loss")

    @cached_property
    def accuracy(self) -> float | None:
        """Fraction of next tokens that are predicted right, at the last evaluation; None without one."""
        return self._score(ACCURACY)

    def _score(self, name: str) -> float | None:
        """Return a score of the last evaluation by its name; None without one."""
        evaluations = self.run.log.validation
        return evaluations[-1].losses.get(name) if evaluations else None

    @cached_property
    def routing(self) -> Mapping[int, TokenCounts]:
        """Tokens per expert in each iteration, over all ranks; empty without a `routing.json`."""
        return (
            count_tokens_per_expert(self.run.measurements.routing)
            if self.run.measurements.routing
            else {}
        )

    @cached_property
    def memory_by_rank(self) -> Mapping[int, int]:
        """Peak bytes by rank, from `memory.json`, or else from the allocator's lines in the log.

        Megatron prints the allocator's peak only on the first rank of each data-parallel group. Ranks without a value
        are left out.
        """
        if peaks := self.run.measurements.peak_memory_bytes_by_rank:
            return peaks
        peak_by_rank: dict[int, int] = {}
        for reading in self.run.log.memory:
            # Ranks without a device's allocator print zeros.
            if math.isfinite(reading.max_allocated_mib) and reading.max_allocated_mib > 0:
                size = round(reading.max_allocated_mib * MIB)
                peak_by_rank[reading.rank] = max(peak_by_rank.get(reading.rank, 0), size)
        return peak_by_rank

    @property
    def device_bytes(self) -> int | None:
        """Largest memory reading of the device itself; None for CPU ranks."""
        return None if self.run.device == "cpu" else self.run.samples.peak_memory_bytes

    @cached_property
    def peak_bytes(self) -> int | None:
        """Peak bytes of the rank with the highest peak; None if no rank's peak is known."""
        return max(self.memory_by_rank.values(), default=None)

    @property
    def peak_rank(self) -> int | None:
        """Rank with the highest peak, the lowest number of equal ones; None if no rank's peak is known."""
        by_rank = self.memory_by_rank
        return max(by_rank, key=lambda rank: (by_rank[rank], -rank), default=None)

    @cached_property
    def weight_bytes(self) -> tuple[int, ...]:
        """Bytes of weights by rank, from `memory.json`; empty without that file."""
        by_rank = sorted(self.run.measurements.memory_categories_by_rank.items())
        return tuple(held[MemoryCategory.WEIGHTS] for _, held in by_rank)

    @cached_property
    def sent_bytes(self) -> int | None:
        """Bytes that the busiest rank sends per iteration, from `comm.json`; None without that file."""
        return max(self.run.measurements.sent_bytes_by_rank.values(), default=None)

    @cached_property
    def nccl_bytes(self) -> int | None:
        """Bytes that the busiest rank would send per iteration by NCCL's rings; None without `comm.json`."""
        record = self.run.measurements.communication
        ranks = record.ranks if record else ()
        return max((rank.wire_bytes_over(Transport.NCCL) for rank in ranks), default=None)

    @property
    def largest_parameters(self) -> int | None:
        """Largest number of parameters that Megatron printed for a rank; None if it printed none."""
        return max((count.parameters for count in self.run.log.parameters), default=None)

    @property
    def times(self) -> TimeRecord | None:
        """Time record (`time.json`) of the newest run; None without a usable one."""
        return self.run.time_record[0]

    @cached_property
    def communication_seconds(self) -> float | None:
        """Seconds per iteration in communication calls, mean over ranks; None without a time record."""
        if self.times is None:
            return None
        return mean(sum(rank.communication_seconds.values()) for rank in self.times.ranks)

    @property
    def implied_gigabits(self) -> float | None:
        """Bandwidth in Gbit/s: bytes sent over the seconds in calls; None if one of them is unknown."""
        if not self.sent_bytes or not self.communication_seconds:
            return None
        return self.sent_bytes * 8 / self.communication_seconds / 1e9

    @cached_property
    def pass_seconds_without_communication(self) -> float | None:
        """Seconds per iteration in forward and backward without communication, mean over ranks."""
        return (
            mean(map(pass_seconds_without_communication, self.times.ranks)) or None
            if self.times
            else None
        )

    @cached_property
    def overhead(self) -> float | None:
        """Iteration time divided by `pass_seconds_without_communication`, minus 1.

        None means that the run has no time record, or that its passes took no time.
        """
        if self.times is None or not self.pass_seconds_without_communication:
            return None
        return (
            mean(rank.iteration_seconds for rank in self.times.ranks)
            / self.pass_seconds_without_communication
            - 1
        )

    @cached_property
    def published_fractions(self) -> tuple[float, ...]:
        """Forward, backward and optimizer as fractions of their sum, mean over ranks; empty without times."""
        shares = compute_time_shares(self.times) if self.times else ()
        fractions = [rank.published_fractions for rank in shares]
        return tuple(mean(column) for column in zip(*fractions, strict=True))

    @cached_property
    def bubble(self) -> float | None:
        """Idle time over working time of a pipeline, mean over ranks; None without a pipeline or times."""
        if self.times is None or self.spec is None or self.spec.parallelism.pipeline == 1:
            return None
        busy = [rank for rank in self.times.ranks if pass_seconds(rank) > 0]
        return mean(map(idle_over_work, busy)) if busy else None


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Return the labels of rows; with their models if the rows have several."""
    models = len({entry.run.model for entry in entries}) > 1
    return [f"{e.run.model} {e.label}" if models and e.run.model else e.label for e in entries]


@dataclass(frozen=True)
class LossDifference:
    """Losses of one run minus those of its reference."""

    index: int
    """Index of the row in the report."""
    run: Run
    """Run of the row on which the verdict rests."""
    iterations: list[int]
    units: list[float]
    """Difference per iteration, in units of the last printed digit."""
    losses: list[float]
    """Difference per iteration as it is."""


def loss_differences(entries: Sequence[Entry]) -> list[LossDifference]:
    """Return, for each row whose losses were compared, its losses minus those of its reference run.

    Rows without a comparison are left out. The list is empty if all differences are 0.
    """
    runs = {run.name: run for entry in entries for run in entry.configuration.runs}
    differences = []
    for index, entry in enumerate(entries):
        parity = entry.parity
        if not parity.compared or parity.reference not in runs:
            continue
        run = runs[parity.judged]
        losses, reference_losses = loss_curve(run), loss_curve(runs[parity.reference])
        iterations = sorted(losses.keys() & reference_losses.keys())
        loss_changes, units = [], []
        for iteration in iterations:
            loss_change = losses[iteration] - reference_losses[iteration]
            loss_changes.append(loss_change)
            units.append(loss_change / last_digit_unit(reference_losses[iteration]))
        differences.append(LossDifference(index, run, iterations, units=units, losses=loss_changes))
    any_loss_differs = any(any(difference.units) for difference in differences)
    return differences if any_loss_differs else []


def build_entries_from_folders(groups: Sequence[Sequence[Path]]) -> list[Entry | None]:
    """Return one entry per group of run folders; None for a group without a readable folder.

    Each group becomes one row, even if a report would split or join its runs. Losses are judged as in a report on
    the runs of all groups.

    Args:
        groups: Folders of each row, the newest first.
    """
    return build_entries([load_runs(folders)[0] for folders in groups])


def build_entries(groups: Sequence[Sequence[Run]]) -> list[Entry | None]:
    """Return one entry per group of runs, which lists the newest run first; an empty group gives None.

    Losses are judged as in a report on the runs of all groups.
    """
    all_runs = [run for runs in groups for run in runs]
    report_rows = group_into_rows(all_runs, all_conditions=True)
    parity_by_run = {}
    for row, parity in zip(report_rows, judge_parity(report_rows), strict=True):
        for run in row.runs:
            parity_by_run[run.name] = parity
    entries: list[Entry | None] = []
    for runs in groups:
        if not runs:
            entries.append(None)
            continue
        newest_name = runs[0].name
        oldest_first = tuple(reversed(runs))
        row = Configuration(oldest_first, estimate_pooled_runs(runs))
        parity = parity_by_run.get(newest_name, Parity())
        entries.append(Entry(newest_name, row, parity, Published()))
    return entries

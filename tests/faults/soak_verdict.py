"""Verdict on the readings of a soak: what grew, what became slower, and whether the losses agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from parakit.artifacts.run import Status
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import bracketed, change, count, megabytes
from parakit.logs.runs import load_folder
from parakit.reporting.analyse.parity import loss_curve
from parakit.reporting.analyse.statistics import ON_CPU_RANKS, TimeComparison, TimeVerdict
from tests.bench.within_runs import compare_within_runs

UNDISTURBED, DISTURBED = "undisturbed", "disturbed"
"""Names of the two runs' folders."""

MEMORY_LIMIT = 0.01
"""Fraction by which the minimum of the last third may exceed the maximum of the first third."""
MEMORY_FLOOR_BYTES = 1 << 20
"""Bytes below which memory of a small process does not count as growth, because allocators use blocks of this size."""

_FEWEST_WINDOWS = 3


@dataclass(frozen=True)
class ProcessReading:
    """A process of a run at a moment; a line of `readings.csv`."""

    run: str
    attempt: int
    seconds: float
    """Seconds since the start of the soak."""
    iteration: int
    process: str
    memory_bytes: int
    """Resident memory."""
    descriptors: int
    """Open file descriptors."""
    processor_seconds: float
    control_seconds: float
    """Processor time that a fixed piece of work took at this moment."""
    load: float
    """Load of the machine over a minute."""


@dataclass(frozen=True)
class Fault:
    """A process that was killed."""

    seconds: float
    iteration: int
    killed: str
    status: Status
    reason: str
    over_seconds: float
    """Seconds until no process of the run remained."""


@dataclass(frozen=True)
class Steadiness:
    """A process of the undisturbed run: its minimum memory and median descriptors in the first and the last
    third of its readings.

    Memory of a save or an evaluation is temporary, while a leak raises the minimum. The first quarter of the
    readings is left out, because caches fill and the optimizer state is created.
    """

    process: str
    memory_bytes: tuple[int, int]
    fluctuation_bytes: int
    """Difference between maximum and minimum memory in the first third."""
    descriptors: tuple[int, int]

    @property
    def growth(self) -> float:
        """Growth of memory as a ratio."""
        first, last = self.memory_bytes
        return last / first

    @property
    def is_steady(self) -> bool:
        """True if descriptors did not grow, and memory did not exceed its earlier peak by more than the limit."""
        first, last = self.memory_bytes
        highest = first + self.fluctuation_bytes
        memory = last - highest <= max(MEMORY_FLOOR_BYTES, MEMORY_LIMIT * highest)
        return memory and self.descriptors[1] <= self.descriptors[0]


@dataclass(frozen=True)
class Losses:
    """Comparison of the disturbed run's losses with those of the undisturbed run."""

    compared: int
    first_other: int | None
    """The first iteration whose losses differ in a digit."""
    last: int
    """The last iteration compared."""
    end: int
    """The last one of the undisturbed run."""


@dataclass(frozen=True)
class SoakVerdict:
    """Verdict on both runs of a soak."""

    processes: tuple[Steadiness, ...]
    wall: TimeComparison | None
    """Ratio of iteration time of the second half over the first; None with too few iterations."""
    processor: TimeComparison | None
    """Ratio of the ranks' processor time relative to the control, second half over first."""
    losses: Losses
    faults: tuple[Fault, ...]
    load: tuple[float, float]

    @property
    def slows(self) -> bool:
        """True if the processor time per iteration grew by more than the scatter of repeats."""
        comparison = self.processor
        if comparison is None or comparison.verdict is not TimeVerdict.SLOWER:
            return False
        return comparison.ratio > 1 + ON_CPU_RANKS.assumed

    @property
    def recovered(self) -> bool:
        """True if the disturbed run passed the iteration of every fault, or reached the end."""
        last = self.losses.last
        return last == self.losses.end or all(fault.iteration < last for fault in self.faults)

    @property
    def held(self) -> bool:
        """True if the soak passed every check."""
        good = self.losses.first_other is None and self.recovered
        return good and not self.slows and all(process.is_steady for process in self.processes)

    def render(self, title: str) -> str:
        """Return the verdict as Markdown."""
        parts = [f"# Soak: {title}", "\n".join(f"- {sentence}" for sentence in self.sentences())]
        parts.append(markdown_table(Table(_PROCESSES, self.processes)))
        if self.faults:
            parts.append(markdown_table(Table(_FAULTS, self.faults)))
        return "\n\n".join(parts)

    def sentences(self) -> list[str]:
        """Yield sentences on losses, times and load."""
        low, high = self.load
        drifts = "the run becomes slower" if self.slows else "no drift"
        drifts = drifts if self.processor else "not judged"
        return [
            self._of_losses(),
            "Processor time of an iteration over that of a fixed piece of work, second half over "
            f"first: {_ratio(self.processor)}; {drifts} (called above "
            f"{ON_CPU_RANKS.assumed:.1%}, by which repeats scatter).",
            f"Wall time of an iteration, second half over first: {_ratio(self.wall)}. "
            f"The machine's load was {low:.1f} to {high:.1f}.",
        ]

    def _of_losses(self) -> str:
        faults = f"after {len(self.faults)} faults"
        if self.losses.first_other is not None:
            return f"Losses {faults} differ from iteration {self.losses.first_other} on."
        compared = f"{self.losses.compared} compared, to iteration {self.losses.last}"
        if not self.recovered:
            return f"The run did not come beyond its last fault {faults}: {compared}."
        return f"Losses {faults}: {compared}, all equal to the last digit."


def judge(
    folder: Path, readings: Sequence[ProcessReading], faults: Sequence[Fault], every: int
) -> SoakVerdict:
    """Judge the two runs in a soak's folder. Each window of `every` iterations contains a save."""
    alone = [reading for reading in readings if reading.run == UNDISTURBED]
    wall, processor = drift(alone, every)
    loads = [reading.load for reading in readings]
    return SoakVerdict(
        processes=steadiness(alone),
        wall=wall,
        processor=processor,
        losses=compare_losses(
            loss_curve(load_folder(folder / UNDISTURBED)),
            loss_curve(load_folder(folder / DISTURBED)),
        ),
        faults=tuple(faults),
        load=(min(loads), max(loads)),
    )


def compare_losses(whole: dict[int, float], resumed: dict[int, float]) -> Losses:
    """Compare losses at the iterations for which both runs have a line that is not an average."""
    common = sorted(whole.keys() & resumed.keys())
    other = next((number for number in common if whole[number] != resumed[number]), None)
    return Losses(len(common), other, max(common, default=0), max(whole, default=0))


def steadiness(readings: Sequence[ProcessReading]) -> tuple[Steadiness, ...]:
    """Return the steadiness of each process with enough readings since the first iteration."""
    trained = [reading for reading in readings if reading.iteration]
    processes = []
    for process in sorted({reading.process for reading in trained}):
        readings_of_process = [reading for reading in trained if reading.process == process]
        settled = readings_of_process[len(readings_of_process) // 4 :]
        third = len(settled) // 3
        if third:
            ends = settled[:third], settled[-third:]
            first, last = (min(item.memory_bytes for item in end) for end in ends)
            highest = max(item.memory_bytes for item in ends[0])
            before, after = (int(median(item.descriptors for item in end)) for end in ends)
            processes.append(Steadiness(process, (first, last), highest - first, (before, after)))
    return tuple(processes)


def drift(
    readings: Sequence[ProcessReading], every: int
) -> tuple[TimeComparison | None, TimeComparison | None]:
    """Return the ratio of the second half over the first for wall time and for processor time over the control's.

    In windows of `every` iterations, the first of which is left out.
    """
    moments: dict[float, list[ProcessReading]] = {}
    for reading in readings:
        if reading.iteration and reading.process.startswith("rank "):
            moments.setdefault(reading.seconds, []).append(reading)
    ranks = max(map(len, moments.values()), default=0)
    whole = [moment for moment in moments.values() if len(moment) == ranks]
    # np.interp needs increasing numbers, so the first reading of each iteration is used.
    rising = {moment[0].iteration: moment for moment in reversed(whole)}
    numbers = sorted(rising)
    edges = np.arange(2 * every, (numbers or [0])[-1] + 1, every)
    half = (len(edges) - 1) // 2
    if half < _FEWEST_WINDOWS:
        return None, None
    seconds = [rising[number][0].seconds for number in numbers]
    spent = [sum(reading.processor_seconds for reading in rising[number]) for number in numbers]
    control = [rising[number][0].control_seconds for number in numbers]
    # A reading of the control is a momentary value, so the median of a window's readings is used.
    middle = [
        median([c for n, c in zip(numbers, control, strict=True) if low <= n < high] or control)
        for low, high in pairwise(edges)
    ]
    wall = np.diff(np.interp(edges, numbers, seconds))
    processor = np.diff(np.interp(edges, numbers, spent)) / np.array(middle)
    return _halves(wall, half), _halves(processor, half)


def _halves(windows: np.ndarray[tuple[int], np.dtype[np.float64]], half: int) -> TimeComparison:
    values = windows.tolist()
    return compare_within_runs([values[:half]], [values[-half:]], np.median)


def _ratio(comparison: TimeComparison | None) -> str:
    if comparison is None:
        return "too few iterations"
    return f"×{bracketed(comparison.ratio, comparison.low, comparison.high, '.3f')}, {comparison.verdict}"


_PROCESSES: tuple[Column[Steadiness], ...] = (
    Column("Process", lambda row: row.process),
    Column("Least memory, first third", lambda row: row.memory_bytes[0], megabytes),
    Column("last third", lambda row: row.memory_bytes[1], megabytes),
    Column("Growth", lambda row: row.growth, lambda ratio: change(ratio, 2)),
    Column("Fluctuation", lambda row: row.fluctuation_bytes, megabytes),
    Column("File descriptors", lambda row: f"{row.descriptors[0]} to {row.descriptors[1]}"),
    Column("Verdict", lambda row: "steady" if row.is_steady else "grows"),
)
_FAULTS: tuple[Column[Fault], ...] = (
    Column("After", lambda row: f"{row.seconds:.0f} s"),
    Column("Iteration", lambda row: row.iteration, count),
    Column("Killed", lambda row: row.killed),
    Column("Over in", lambda row: f"{row.over_seconds:.1f} s"),
    Column("Status", lambda row: row.status),
    Column("Reason", lambda row: row.reason),
)

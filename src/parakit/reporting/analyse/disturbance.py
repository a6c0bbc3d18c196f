"""Whether other programs slowed a run on CPU ranks down, by the fraction of a core that its ranks got.

The time ledger is the better witness. A rank that computes and waits for no other rank has a core for 95% of that time
or more, if the machine does nothing else. With four busy loops on two cores it has a core for 34 to 66%. Runs without
processor times in their ledger are judged by `samples.csv`. There a rank that waits for others looks the same as a rank
that got no core. So only the busiest rank is judged. Its median was 63 to 94% in undisturbed runs of the six
strategies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from parakit.logs import Run

LEAST_COMPUTING_FRACTION = 0.8
"""Fraction of its computing time for which a rank of an undisturbed run has a core, at least."""
LEAST_SAMPLED_FRACTION = 0.5
"""Fraction of a core that the busiest rank of an undisturbed run uses, at least."""
_LEAST_SAMPLES = 3
_LEAST_COMPUTING = 0.1
"""Fraction of an iteration; a rank that computes for less is not judged, clocks are too coarse."""


def ranks_and_cores(run: Run) -> tuple[int, int] | None:
    """Return the CPU ranks on one machine and its cores; None for GPUs and foreign logs."""
    if run.record is None or run.spec is None or run.device != "cpu":
        return None
    machines = len(run.record.host.nodes) or 1
    return -(-run.spec.parallelism.world_size // machines), run.record.host.cores


def has_more_ranks_than_cores(run: Run) -> bool:
    """Return True if CPU ranks had to take turns on the cores, whatever else the machine did."""
    known = ranks_and_cores(run)
    return known is not None and known[0] > known[1]


def why_disturbed(run: Run) -> str:
    """Return how little of a core a CPU rank got, such as `rank 1 got 34% of a core`; empty if ranks got enough.

    If the run recorded processor times, the rank that got the least is named. Otherwise samples of the processes
    are used, and the busiest rank is named. The text is also empty for GPUs, for foreign logs, and without
    processor times and samples.
    """
    known = ranks_and_cores(run)
    if known is None:
        return ""
    ranks, cores = known
    # Where ranks take turns each gets less than a core without any other program.
    turn = min(1.0, cores / ranks)
    computing = dict(_computing_fractions(run))
    if computing:
        rank = min(computing, key=lambda rank: computing[rank])
        if computing[rank] < LEAST_COMPUTING_FRACTION * turn:
            return f"rank {rank} got {computing[rank]:.0%} of a core"
        return ""
    sampled = dict(_sampled_fractions(run))
    rank = max(sampled, key=lambda rank: sampled[rank], default=-1)
    if sampled and sampled[rank] < LEAST_SAMPLED_FRACTION * turn:
        return f"rank {rank}, the busiest, got {sampled[rank]:.0%} of a core"
    return ""


def _computing_fractions(run: Run) -> Iterator[tuple[int, float]]:
    """Yield each rank with the processor time over the time in which it waited for no other rank."""
    record, _ = run.time_record
    for rank in record.ranks if record else ():
        computing_seconds = rank.iteration_seconds - sum(rank.communication_seconds.values())
        if rank.processor_seconds and computing_seconds > _LEAST_COMPUTING * rank.iteration_seconds:
            yield rank.rank, statistics.fmean(rank.processor_seconds) / computing_seconds


def _sampled_fractions(run: Run) -> Iterator[tuple[int, float]]:
    """Yield each rank with the fraction of a core that it used while it trained, as a median of samples.

    A rank with too few samples is left out. A resumed run yields nothing, because its samples are only of the
    last start.
    """
    lines = run.log.iterations
    times_ms = lines.values("elapsed_ms")[lines.known("elapsed_ms")]
    if run.restarts or not len(times_ms):
        return
    for series in run.samples.series:
        # The samples end with the ranks; before they train they import Megatron and read files.
        first = series.seconds[-1] - float(times_ms.sum()) / 1000
        readings = zip(series.seconds, series.utilisation_percent, strict=True)
        used = [use / 100 for second, use in readings if second > first and use is not None]
        if len(used) >= _LEAST_SAMPLES:
            yield series.rank, statistics.median(used)

"""Names for the rows of a report: short, and no two alike within one table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tools.report.analyse.configurations import Configuration
from tools.report.analyse.no_te import patches
from tools.report.read.runs import Run


def labels(rows: Sequence[Configuration]) -> list[str]:
    """`tp2 ×2`, with what tells it from others of that name: version, batch, …, else the run."""
    result = [_plain(row.newest) for row in rows]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        setup = row.newest.setup
        groups[setup.model, setup.device, setup.dtype, result[place]].append(place)
    for places in groups.values():
        if len(places) > 1:
            runs = [rows[place].newest for place in places]
            for place, suffix in zip(places, _suffixes(runs), strict=True):
                result[place] += f" {suffix}"
    return result


def link_rate(run: Run) -> str:
    """The limit of the link between the run's two halves, in words."""
    bits = run.record.spec.link_bits_per_second if run.record else None
    if bits is None:
        return "unshaped"
    return f"at {bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"at {bits / 1e6:g} Mbit/s"


def _plain(run: Run) -> str:
    setup = run.setup
    if not setup.strategy:
        return run.name
    return setup.strategy + (f" ×{setup.world_size}" if setup.world_size else "")


def _suffixes(runs: Sequence[Run]) -> list[str]:
    for tell in _TELLS:
        found = [tell(run) for run in runs]
        if len(set(found)) == len(found) and all(found):
            return found
    varying = [tell for tell in _TELLS if len({tell(run) for run in runs}) > 1]
    joined = [" ".join(filter(None, (tell(run) for tell in varying))) for run in runs]
    distinct = len(set(joined)) == len(joined) and all(joined)
    return joined if distinct else [run.name for run in runs]


def _batch(run: Run) -> str:
    batch = run.setup.batch
    return f"batch {batch.micro_batch_size}/{batch.global_batch_size}" if batch else ""


_TELLS: tuple[Callable[[Run], str], ...] = (
    _batch,
    lambda run: f"seq {run.setup.seq_length}" if run.setup.seq_length else "",
    lambda run: run.setup.megatron.split(" ")[0],
    lambda run: run.setup.backend,
    lambda run: link_rate(run) if run.record else "",
    lambda run: f"patches {patches(run)}",
    lambda run: f"recompute {run.setup.recompute or 'none'}",
    lambda run: run.status.status.value,
    lambda run: run.record.host.name if run.record else "",
)

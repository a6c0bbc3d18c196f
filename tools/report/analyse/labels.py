"""Names for the rows of a report: short, and no two alike within one table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tools.report.analyse.configurations import Configuration
from tools.report.read.runs import Run
from tools.spec.run import RunSpec


def labels(rows: Sequence[Configuration]) -> list[str]:
    """`tp2 ×2`, with what tells it from others of that name: version, batch, …, else the run."""
    result = [_plain(row.newest) for row in rows]
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        run = row.newest
        dtype = run.spec.dtype if run.spec else ""
        groups[run.model, run.device, dtype, result[place]].append(place)
    for places in groups.values():
        if len(places) > 1:
            runs = [rows[place].newest for place in places]
            for place, suffix in zip(places, _suffixes(runs), strict=True):
                result[place] += f" {suffix}"
    return result


def link_rate(spec: RunSpec) -> str:
    """The limit of the link between the two halves of the ranks, in words."""
    bits = spec.link_bits_per_second
    if bits is None:
        return "unshaped"
    return f"at {bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"at {bits / 1e6:g} Mbit/s"


def fused_patches(spec: RunSpec | None) -> str:
    """The names of `FUSED=`, or `none`."""
    return (",".join(spec.fused) if spec else "") or "none"


def _plain(run: Run) -> str:
    return f"{run.strategy} ×{run.spec.parallelism.world_size}" if run.spec else run.name


def _suffixes(runs: Sequence[Run]) -> list[str]:
    for tell in _TELLS:
        found = [tell(run) for run in runs]
        if len(set(found)) == len(found) and all(found):
            return found
    varying = [tell for tell in _TELLS if len({tell(run) for run in runs}) > 1]
    joined = [" ".join(filter(None, (tell(run) for tell in varying))) for run in runs]
    distinct = len(set(joined)) == len(joined) and all(joined)
    return joined if distinct else [run.name for run in runs]


def _of_spec(tell: Callable[[RunSpec], str]) -> Callable[[Run], str]:
    return lambda run: tell(run.spec) if run.spec else ""


_TELLS: tuple[Callable[[Run], str], ...] = (
    _of_spec(lambda spec: f"batch {spec.batch.micro_batch_size}/{spec.batch.global_batch_size}"),
    _of_spec(lambda spec: f"seq {spec.shape.seq_length}"),
    lambda run: run.megatron.split(" ")[0],
    _of_spec(lambda spec: spec.backend),
    lambda run: link_rate(run.record.spec) if run.record else "",
    lambda run: f"patches {fused_patches(run.spec)}",
    _of_spec(lambda spec: f"recompute {spec.recompute}"),
    lambda run: run.status.status.value,
    lambda run: run.record.host.name if run.record else "",
)

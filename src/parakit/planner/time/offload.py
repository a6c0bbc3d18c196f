"""Seconds that a micro batch waits for activations on their way to the host and back.

Copies run on streams of their own, at the rate of the host's link or of its memory, whichever is less;
copy engines take nothing from arithmetic. The rates are the vendor's (`hardware.yaml`), so the times are
lower bounds.
"""

from __future__ import annotations

from parakit.config.hardware import HostRates
from parakit.config.run import RunSpec
from parakit.costs import offloaded_bytes


def exposed_copy_seconds(
    spec: RunSpec, pipeline_rank: int, passes: tuple[float, float], host: HostRates
) -> float:
    """Of one micro batch on one rank, whose layers take `passes` seconds forward and backward."""
    chunks = spec.layers_per_chunk(pipeline_rank)
    copied = sum(offloaded_bytes(spec, layers).copied for layers in chunks)
    rate = min(host.link_bytes_per_second, host.memory_bytes_per_second)
    if copied and spec.offload.layers:
        layers, gone = chunks[0], min(spec.offload.layers, chunks[0])
        each = copied / gone / rate
        forward, backward = (seconds / layers for seconds in passes)
        return _gone_in_time(layers, gone, forward, each) + _back_in_time(
            layers, gone, backward, each
        )
    # What forward does not hide, backward's first reload waits for: each group is read back after it
    # has gone (`bulk_reload_group`).
    return sum(max(0.0, copied / rate - seconds) for seconds in passes)


def _gone_in_time(layers: int, gone: int, layer: float, copy: float) -> float:
    """Forward's waits with whole layers offloaded: a layer is copied from when the next begins and has
    gone when one begins that takes its place on the device (Transformer Engine, `cpu_offload.py:
    _default_offload_sync_init`)."""
    waited = stream = 0.0
    done: list[float] = []
    for place in range(layers):
        if 0 < place <= gone:
            stream = max(stream, place * layer + waited) + copy
            done.append(stream)
        leaving = place - (layers - gone)
        if leaving >= 0:
            waited += max(0.0, done[leaving] - (place * layer + waited))
    return waited


def _back_in_time(layers: int, gone: int, layer: float, copy: float) -> float:
    """Backward's: a layer comes back from when one begins that leaves it its place."""
    waited = stream = 0.0
    done: dict[int, float] = {}
    for past, place in enumerate(reversed(range(layers))):
        coming = place - (layers - 1 - gone)
        if 0 <= coming < gone:
            stream = max(stream, past * layer + waited) + copy
            done[coming] = stream
        if place < gone:
            waited += max(0.0, done[place] - (past * layer + waited))
    return waited

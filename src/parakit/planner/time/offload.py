"""Exposed seconds of a micro batch for copies between host and device: offloaded activations and the attention mask.

Copies run at the rate of the host's link or of the host's memory, whichever is less. The rates are the vendor's
(`hardware.yaml`), so the times are lower bounds. Copies of activations run on streams of their own, and copy engines
take nothing from computation. The copy of the mask runs before a micro batch begins.
"""

from __future__ import annotations

from parakit.config.hardware import HostRates
from parakit.config.run import RunSpec
from parakit.costs import offloaded_bytes


def exposed_copy_seconds(
    spec: RunSpec, pipeline_rank: int, passes: tuple[float, float], host: HostRates
) -> float:
    """Return the seconds that one micro batch waits for copies of activations on a pipeline rank.

    Args:
        spec: The run. Its field `offload` states which activations move to the host.
        pipeline_rank: The pipeline rank.
        passes: Seconds of forward, and of backward, through all layers of the rank.
        host: Rates of the host.
    """
    chunks = spec.layers_per_chunk(pipeline_rank)
    copied = sum(offloaded_bytes(spec, layers).copied for layers in chunks)
    rate = _copy_rate(host)
    if copied and spec.offload.layers:
        layers = chunks[0]
        offloaded = min(spec.offload.layers, layers)
        copy_seconds = copied / offloaded / rate
        forward, backward = (seconds / layers for seconds in passes)
        forward_wait = _forward_wait_seconds(layers, offloaded, forward, copy_seconds)
        return forward_wait + _backward_wait_seconds(layers, offloaded, backward, copy_seconds)
    # A group of activations is read back only after it has gone (`bulk_reload_group`), so the copies that forward
    # does not overlap delay the first reload in backward.
    return sum(max(0.0, copied / rate - seconds) for seconds in passes)


def attention_mask_bytes(spec: RunSpec) -> int:
    """Return the bytes of the attention mask that Megatron's loader creates for a micro batch.

    The mask has one byte per pair of tokens of a sample (Megatron's `gpt_dataset.py`).
    """
    return spec.batch.micro_batch_size * spec.shape.seq_length**2


def attention_mask_copy_seconds(spec: RunSpec, host: HostRates | None) -> float:
    """Return the seconds to copy the attention mask of a micro batch to the device.

    Each CP rank receives the mask of the full sequence. The result is 0 if the rates of the host are unknown.
    """
    return attention_mask_bytes(spec) / _copy_rate(host) if host else 0.0


def _copy_rate(host: HostRates) -> float:
    """Return the rate in bytes per second of a copy between a device and the memory of its host."""
    return min(host.link_bytes_per_second, host.memory_bytes_per_second)


def _forward_wait_seconds(
    layers: int, offloaded: int, layer_seconds: float, copy_seconds: float
) -> float:
    """Return the seconds that forward waits if the first `offloaded` of a rank's layers move to the host.

    The copy of a layer starts when the next layer begins. A later layer takes over the memory of the copied layer. The
    later layer waits until the copy has ended (Transformer Engine, `cpu_offload.py: _default_offload_sync_init`).
    """
    waited = stream_free_at = 0.0
    copy_end_by_layer: list[float] = []
    layers_on_device = _count_layers_on_device(layers, offloaded)
    for layer in range(layers):
        begins_at = layer * layer_seconds + waited
        if 0 < layer <= offloaded:
            stream_free_at = max(stream_free_at, begins_at) + copy_seconds
            copy_end_by_layer.append(stream_free_at)
        replaced_layer = layer - layers_on_device
        if replaced_layer >= 0:
            waited += max(0.0, copy_end_by_layer[replaced_layer] - begins_at)
    return waited


def _count_layers_on_device(layers: int, offloaded: int) -> int:
    """Return how many of a rank's layers the device holds at once: the others, but at least the one in computation."""
    return max(1, layers - offloaded)


def _backward_wait_seconds(
    layers: int, offloaded: int, layer_seconds: float, copy_seconds: float
) -> float:
    """Return the seconds that backward waits if the first `offloaded` of a rank's layers are on the host.

    Backward runs from the last layer to the first. Each layer that ends frees memory on the device for one layer on the
    host. The last layer that is still on the host is then copied back, while backward computes the next layer. Backward
    waits before a layer whose copy has not ended.
    """
    waited = stream_free_at = 0.0
    copy_end_by_layer: dict[int, float] = {}
    layers_on_device = _count_layers_on_device(layers, offloaded)
    for layer in reversed(range(layers)):
        layers_done = layers - 1 - layer
        begins_at = layers_done * layer_seconds + waited
        # The layer that ended before this one freed memory for one layer on the host.
        copied_layer = layer + 1 - layers_on_device
        if 0 <= copied_layer < offloaded:
            stream_free_at = max(stream_free_at, begins_at) + copy_seconds
            copy_end_by_layer[copied_layer] = stream_free_at
        if layer < offloaded:
            waited += max(0.0, copy_end_by_layer[layer] - begins_at)
    return waited

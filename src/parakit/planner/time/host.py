"""The host's part of a layer: the kernels and collective calls that it launches one after another."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, sqrt

from parakit.config.model import ATTENTION, EXPERTS, MAMBA, MLP, MTP
from parakit.config.run import DeviceKind, RunSpec
from parakit.costs import CollectiveCall
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.traffic import softmax_is_fused

_TORCH_SOFTMAX_KERNELS = 0.15
"""More kernels of a layer, of about a hundred: two casts, scale, mask and softmax, three to make the
mask, and the gradients of five (`fused_softmax.py: forward_torch_softmax`)."""

_LOOP = 5.9
"""An iteration's data, schedule, checks and log line, in layers' host times: 9.4 of PyTorch's encoder
layers where a layer of Megatron is 1.6 (`src/parakit/launch/calibrate.py`, measured on an H200)."""
_UPDATE = 0.14
"""More for each layer: its dozen tensors pass the checks, the norm, the optimizer and the copies one by
one (measured: 48 ms between the last backward and the next forward of 36 layers, 18 of them for want of
one kernel for all norms, where a layer's host time was 2.75 ms)."""

_NORMS_ONE_BY_ONE = 0.18
"""More for each layer without Transformer Engine and Apex: the gradient's norm is read from the device
tensor by tensor (`core/utils.py: local_multi_tensor_l2_norm`): those 18 ms."""
_SHARE_OF_LAYER = {MAMBA: 0.5, ATTENTION: 0.5, MLP: 0.5, MTP: 0.5, EXPERTS: 2 / 3}
"""Kernels of a hybrid's block for those of a transformer's layer, of experts for one with experts: half,
but experts are all that a layer with them has beyond a dense one (`_EXPERT_KERNELS`)."""
_EXPERT_KERNELS = 1.5
"""Kernels of a layer of experts for one of a dense layer: router, permutations and grouped products."""
_UNCAPTURED_KERNELS = 0.5
"""What of them a graph of attention and the router leaves: as many as a dense layer's MLP has."""
_EACH_EXPERT_KERNELS = 0.13
"""More for each of a rank's experts where they run one after another (Megatron's `SequentialMLP`)."""
_OWN_KERNELS = 0.06
"""More for each where one call computes all: two products, forward and twice backward, of about a
hundred kernels of a layer (Transformer Engine's `GroupedLinear` starts them one by one on a few
streams). As many again in fewer bits: a cast of each one's operand."""


def iteration_host_seconds(spec: RunSpec, cluster: Cluster) -> float:
    """The host's time for an iteration beside its layers, while the device has no work."""
    loop, layer = cluster.calibration.iteration_host_seconds, cluster.constants.layer_launch_seconds
    if cluster.device.key == "cpu":
        return (loop or 0.0) / cluster.core_fraction
    layers = spec.num_layers_on_stage(0) * max(1.0, len(spec.shape.blocks) / 2)
    apart = cluster.execution.torch_kernels and "multi_tensor" not in spec.fused
    update = _UPDATE + _NORMS_ONE_BY_ONE * apart
    return (_LOOP * layer if loop is None else loop) + update * layer * layers


def launch_seconds(spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall]) -> float:
    """The host's time for one layer and micro batch; CUDA graphs take it away.

    Forward is about a third of the kernels, and recomputing launches them again. A call starts when
    the slowest host of its ranks has launched it: how far that one lies behind the average grows with
    the root of the logarithm of their number, as the largest of so many chances does.
    """
    if cluster.execution.graphs:
        return 0.0
    kernels = 1.0 if softmax_is_fused(spec) else 1.0 + _TORCH_SOFTMAX_KERNELS
    waits = sum(call.calls * sqrt(log2(call.ranks)) for call in calls if call.ranks > 1)
    constants = cluster.constants
    kernels *= _SHARE_OF_LAYER.get(spec.shape.blocks, 1.0)
    if spec.shape.experts:
        kernels *= _kernels_of_experts(spec, cluster)
    launches = constants.layer_launch_seconds * kernels * (3 + _launched_again(spec)) / 3
    return launches + waits * constants.call_launch_seconds


def runs_ahead(spec: RunSpec, cluster: Cluster) -> bool:
    """Whether the host launches a layer while the device works on what came before.

    Routing tells it how many tokens each expert gets, for which it waits; padded to a capacity they
    are known (`token_dispatcher.py: cuda_sync_point`).
    """
    told = bool(spec.shape.experts) and not spec.expert_load.pads_to_capacity
    return cluster.calibration.launch_beside_work and not (told or cluster.execution.blocking)


def _kernels_of_experts(spec: RunSpec, cluster: Cluster) -> float:
    """Kernels of a layer of experts that the host launches, for one of a dense layer."""
    own = spec.shape.experts / spec.parallelism.expert
    if spec.device is DeviceKind.CPU:
        return _EXPERT_KERNELS * (1 + _EACH_EXPERT_KERNELS * own)
    shared = _UNCAPTURED_KERNELS if cluster.execution.captured else _EXPERT_KERNELS
    return shared + own * _OWN_KERNELS * (2 if spec.fp8_recipe else 1)


def _launched_again(spec: RunSpec) -> float:
    """Of a layer's forward kernels, those that are launched once more in backward: an MLP's or experts',
    in the shares above. Other modules have one to six, which are not counted."""
    shape, again = spec.shape, spec.recompute.recomputes
    if again():
        return 1.0
    inside, share = ("moe", 2 / 3) if shape.experts else ("mlp", 0.5)
    if shape.blocks:
        share = 1.0 if shape.blocks in (MLP, EXPERTS) else 0.0
    return share if again(inside) else 0.0

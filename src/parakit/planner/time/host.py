"""Seconds of the host for a layer and for an iteration: it launches kernels and collectives one after another.

Times are multiples of two constants of the machine, the host's time for one layer (about a hundred kernels) and for
one collective call.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, sqrt

from parakit.config.model import ATTENTION, EXPERTS, MAMBA, MLP, MTP
from parakit.config.run import DeviceKind, RunSpec
from parakit.costs import CollectiveCall
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.traffic import softmax_is_fused

_TORCH_SOFTMAX_KERNELS = 0.15
"""Further kernels of a layer with PyTorch's softmax, as a fraction of a layer's: two casts, scale, mask and softmax,
three to make the mask, and the gradients of five (`fused_softmax.py: forward_torch_softmax`)."""

_LOOP_LAYERS = 5.9
"""Host time of an iteration's data, schedule, checks and log line, in layers' host times: 9.4 of PyTorch's encoder
layers where a layer of Megatron is 1.6 (`src/parakit/launch/calibrate.py`, measured on an H200)."""
_UPDATE_LAYERS = 0.14
"""Further host time per layer, in layers' host times: the layer's dozen tensors pass checks, norm, optimizer and copies
one by one. Measured: 48 ms between the last backward and the next forward of 36 layers, where a layer's
host time was 2.75 ms; 18 of the 48 ms are missing with one kernel for all norms."""

_SEPARATE_NORM_LAYERS = 0.18
"""Further host time per layer without Transformer Engine and Apex, in layers' host times: the gradient's norm is read
from the device tensor by tensor (`core/utils.py: local_multi_tensor_l2_norm`), which is those 18 ms."""
_FRACTION_OF_LAYER = {MAMBA: 0.5, ATTENTION: 0.5, MLP: 0.5, MTP: 0.5, EXPERTS: 2 / 3}
"""Kernels of a hybrid's block as a fraction of a transformer layer's, for experts of a layer with experts. It is half
for all but experts, which are all that a layer with experts has beyond a dense one (`_EXPERT_KERNELS`)."""
_EXPERT_KERNELS = 1.5
"""Kernels of a layer with experts over those of a dense layer: router, permutations and grouped products."""
_UNCAPTURED_KERNELS = 0.5
"""Kernels of a layer with experts outside a CUDA graph of attention and router, over those of a dense layer: as many as
a dense layer's MLP has."""
_SEPARATE_EXPERT_KERNELS = 0.13
"""Further kernels per local expert where experts run one after another (Megatron's `SequentialMLP`)."""
_GROUPED_EXPERT_KERNELS = 0.06
"""Further kernels per local expert where one call computes all of them: two products, forward and twice backward, of
about a hundred kernels of a layer (Transformer Engine's `GroupedLinear` starts them one by one on a few streams). The
number doubles with fp8, which casts each expert's operand."""


def iteration_host_seconds(spec: RunSpec, cluster: Cluster) -> float:
    """Return the seconds per iteration in which the device waits for the host, outside the layers.

    The host then runs the training loop and launches the update.
    """
    loop, layer = cluster.calibration.iteration_host_seconds, cluster.constants.layer_launch_seconds
    if cluster.device.key == "cpu":
        return (loop or 0.0) / cluster.core_fraction
    layers = spec.num_layers_on_stage(0) * max(1.0, len(spec.shape.blocks) / 2)
    has_separate_norms = cluster.execution.torch_kernels and "multi_tensor" not in spec.fused
    update_layers = _UPDATE_LAYERS + _SEPARATE_NORM_LAYERS * has_separate_norms
    return (_LOOP_LAYERS * layer if loop is None else loop) + update_layers * layer * layers


def launch_seconds(spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall]) -> float:
    """Return the seconds that the host needs to launch the kernels of one layer and its collective `calls`.

    The time is for forward and backward of one micro batch. It is 0 with CUDA graphs. Forward has about a third of a
    layer's kernels, and recomputation launches these kernels a second time. A call waits for the slowest host of its
    ranks. The expected delay of the slowest host grows like the square root of the logarithm of the number of ranks, so
    the launch time of a call is multiplied by this root.
    """
    if cluster.execution.graphs:
        return 0.0
    kernels = 1.0 if softmax_is_fused(spec) else 1.0 + _TORCH_SOFTMAX_KERNELS
    call_launches = sum(call.calls * sqrt(log2(call.ranks)) for call in calls if call.ranks > 1)
    constants = cluster.constants
    kernels *= _FRACTION_OF_LAYER.get(spec.shape.blocks, 1.0)
    if spec.shape.experts:
        kernels *= _expert_layer_kernels(spec, cluster)
    launches = (
        constants.layer_launch_seconds * kernels * (3 + _recomputed_kernel_fraction(spec)) / 3
    )
    return launches + call_launches * constants.call_launch_seconds


def host_runs_ahead(spec: RunSpec, cluster: Cluster) -> bool:
    """Return True if the host launches kernels of a layer while the device still computes earlier kernels.

    The result is False if the host has to wait for the device in each layer. This is the case for experts, because the
    host needs the number of tokens per expert. If inputs are padded to a capacity, the number is known without waiting
    (`token_dispatcher.py: cuda_sync_point`).
    """
    waits_for_routing = bool(spec.shape.experts) and not spec.expert_load.pads_to_capacity
    is_blocking = waits_for_routing or cluster.execution.blocking
    return cluster.calibration.launch_beside_work and not is_blocking


def _expert_layer_kernels(spec: RunSpec, cluster: Cluster) -> float:
    """Return the kernels of a layer with experts that the host launches, over those of a dense layer."""
    local_experts = spec.shape.experts / spec.parallelism.expert
    if spec.device is DeviceKind.CPU:
        return _EXPERT_KERNELS * (1 + _SEPARATE_EXPERT_KERNELS * local_experts)
    common = _UNCAPTURED_KERNELS if cluster.execution.captured else _EXPERT_KERNELS
    return common + local_experts * _GROUPED_EXPERT_KERNELS * (2 if spec.fp8_recipe else 1)


def _recomputed_kernel_fraction(spec: RunSpec) -> float:
    """Return the fraction of a layer's forward kernels that backward launches a second time, for recomputation.

    Recomputation of the full layer and of the MLP or the experts is counted. Other modules are ignored, because they
    have at most six kernels.
    """
    shape, is_recomputed = spec.shape, spec.recompute.recomputes
    if is_recomputed():
        return 1.0
    module, fraction = ("moe", 2 / 3) if shape.experts else ("mlp", 0.5)
    if shape.blocks:
        fraction = 1.0 if shape.blocks in (MLP, EXPERTS) else 0.0
    return fraction if is_recomputed(module) else 0.0

"""Seconds of the host: it launches the kernels and collectives of a layer, a micro batch and an iteration in order.

The host launches ahead of the device. A pass (forward or backward of one micro batch on a pipeline stage) therefore
takes as long as the slower of the two: the host that launches the kernels, or the device that runs them. Only
launches that nothing hides are added. Times are multiples of two constants of the machine and its software: the
host's time for one layer (about a hundred kernels) and for one collective call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2, sqrt

from parakit.config.model import ATTENTION, EXPERTS, MAMBA, MLP, MTP
from parakit.config.run import DeviceKind, RunSpec, TokenDispatcher
from parakit.costs import CollectiveCall, list_adapted_linears
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
_FRACTION_OF_LAYER = {MAMBA: 0.5, ATTENTION: 0.5, MLP: 0.5, MTP: 0.5, EXPERTS: 0.8}
"""Kernels of a hybrid's block as a fraction of a transformer layer's, for experts of a layer with experts. It is half
for all but experts, which are a layer with experts without attention (`_EXPERT_KERNELS`)."""
_EXPERT_KERNELS = 2.5
"""Kernels of a layer with experts over those of a dense layer: router, losses of the router, permutations and the
dispatcher. With this number, mixtures and dense models of published runs have one host time per layer."""
_UNCAPTURED_KERNELS = 0.5
"""Kernels of a layer with experts outside a CUDA graph of attention, router and preprocessing, over those of a dense
layer: as many as a dense layer's MLP has."""
_CPU_EXPERT_KERNELS = 1.5
"""The same on CPU ranks, whose experts run one after another (Megatron's `SequentialMLP`)."""
_SEPARATE_EXPERT_KERNELS = 0.13
"""Further kernels per local expert of `SequentialMLP`."""
_GROUPED_EXPERT_KERNELS = 0.04
"""Further kernels per local expert where one call computes all of them: two products, forward and twice backward, of
about a hundred kernels of a layer. Transformer Engine's `GroupedLinear` starts them one by one on a few streams, but
from C++, so that six kernels cost as much as four. The number doubles with fp8, which casts each expert's operand."""
_ADAPTER_KERNELS = 0.1
"""Further kernels per LoRA adapter, of about a hundred kernels of a layer: two products, the factor alpha/rank and the
addition in forward, and four products, the factor and the addition of input gradients in backward."""
_FORWARD_LAUNCH_FRACTION = 0.4
"""Forward's fraction of a layer's host time, without recomputation. Forward has a third of the kernels, but Python
launches more of them than in backward. The value was chosen with the steps of vuiseng9/megatron-tutorials in sight,
which take 200 to 210 ms from TP 1 to TP 8."""
_RING_STEP_LAYERS = 0.25
"""Further host time per further step of the context ring, in layers' host times: keys and values are sent, attention
runs once more, and its result is added to the sum; in backward gradients are sent too. The value, the next one and the
four after it were chosen like `_FORWARD_LAUNCH_FRACTION`."""
_CONTEXT_CALL_LAYERS = 0.8
"""Further host time per layer of the all-gather and the all-to-all of context parallelism, in layers' host times: the
calls, and the kernels that reorder tensors before and after them."""
_MICRO_BATCH_LAYERS = 2.0
"""Host time of a micro batch outside its layers, in layers' host times: tokens, embedding, output layer and loss."""
_BLOCKING_EXCHANGE_LAYERS = 2.0
"""Host time per micro batch to exchange tensors with the neighbouring stages in 1F1B, in layers' host times. The host
waits for the device after each exchange (`p2p_communication.py: torch.cuda.synchronize` with `batch_p2p_comm`)."""
_CHUNK_EXCHANGE_LAYERS = 0.5
"""The same per virtual stage in the interleaved schedule, whose host does not wait (`--overlap-p2p-communication`)."""
_ROUTING_WAIT = 0.2
"""Fraction of a layer's launches that the device waits for if the layer has experts. The host waits for the number of
tokens per expert, so that the device has run out of kernels when the host launches the next ones. The value was
chosen with the errors of published mixtures in sight."""


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Seconds in which the host launches the two passes of one micro batch."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: HostSeconds) -> HostSeconds:
        return HostSeconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> HostSeconds:
        return HostSeconds(times * self.forward, times * self.backward)


NO_HOST_SECONDS = HostSeconds()


def split_launch_seconds(spec: RunSpec, seconds: float) -> HostSeconds:
    """Return the launch seconds of a layer by pass. Backward has the launches of recomputed kernels."""
    forward = seconds * _FORWARD_LAUNCH_FRACTION / (1 + _recomputed_kernel_fraction(spec) / 3)
    return HostSeconds(forward, seconds - forward)


def unhidden_launch_seconds(
    spec: RunSpec, cluster: Cluster, launches: float, expert_seconds: float
) -> float:
    """Return the launch seconds of a layer that the device waits for, however long its own work takes.

    These are all launches if the host and the device never work at the same time: on CPU ranks, and with blocking
    launches. For experts they are `_ROUTING_WAIT` of the launches, because the host needs the number of tokens per
    expert. If inputs are padded to a capacity, the number is known without waiting (`token_dispatcher.py:
    cuda_sync_point`).

    The host waits just before it launches the first all-to-all of a layer (`token_dispatcher.py: before_ep_alltoall`,
    read in core 0.8, 0.12, 0.14 and 0.19). The device runs this all-to-all, and the gather of expert tensor parallelism
    (ETP) after it, while the host launches the next kernels. So the seconds of these collectives are subtracted.
    Nothing is subtracted for DeepEP and HybridEP, because the errors on Blackwell rise with it (`readings/README.md`).

    Args:
        spec: The run.
        cluster: The cluster.
        launches: Seconds of all launches of the layer per micro batch.
        expert_seconds: Seconds per micro batch of the layer's collectives between experts, in all passes.
    """
    if cluster.execution.blocking or not cluster.calibration.launch_beside_work:
        return launches
    waits_for_routing = bool(spec.shape.experts) and not spec.expert_load.pads_to_capacity
    if not waits_for_routing:
        return 0.0
    overlapped = 0.0
    if spec.token_dispatcher is TokenDispatcher.ALL_TO_ALL:
        # Forward and its recomputation wait. Each of them and backward send the tokens twice: to the experts and back.
        forwards = 2 if spec.recompute.recomputes("moe") else 1
        overlapped = expert_seconds * forwards / (2 * forwards + 2)
    return max(0.0, _ROUTING_WAIT * launches - overlapped)


def micro_batch_host_seconds(spec: RunSpec, cluster: Cluster) -> HostSeconds:
    """Return the seconds of the host per micro batch on a pipeline stage, outside the layers.

    The seconds are 0 with CUDA graphs, and for times that are sums of layers' profiles. They are also 0 on CPU ranks,
    whose measured iteration has them.
    """
    execution, split = cluster.execution, spec.parallelism
    if execution.graphs or execution.summed_profiles or cluster.device.key == "cpu":
        return NO_HOST_SECONDS
    layers = _MICRO_BATCH_LAYERS
    if split.virtual_stages > 1:
        layers += _CHUNK_EXCHANGE_LAYERS * split.virtual_stages
    elif split.pipeline > 1:
        layers += _BLOCKING_EXCHANGE_LAYERS
    seconds = layers * cluster.constants.layer_launch_seconds
    return HostSeconds(seconds / 2, seconds / 2)


def context_launch_seconds(spec: RunSpec, cluster: Cluster) -> float:
    """Return the further seconds of the host per layer and micro batch for context parallelism.

    The seconds are 0 with CUDA graphs and in layers without attention. For a run without a chosen algorithm they are
    those of the algorithm with the fewest.
    """
    ranks = spec.parallelism.context
    if ranks == 1 or not spec.shape.heads or cluster.execution.graphs:
        return 0.0
    layers = ring_layers = _RING_STEP_LAYERS * (ranks - 1)
    if not spec.cp_comm_type:
        layers = min(ring_layers, _CONTEXT_CALL_LAYERS)
    elif spec.cp_comm_type in ("all_gather", "a2a"):
        layers = _CONTEXT_CALL_LAYERS
    return layers * cluster.constants.layer_launch_seconds


def iteration_host_seconds(spec: RunSpec, cluster: Cluster, optimizer_seconds: float) -> float:
    """Return the seconds per iteration in which the device waits for the host, outside the micro batches.

    The host then runs the training loop and launches the update, which runs while the host launches the rest of it.
    A CUDA graph of the iteration leaves only the update to the host.

    Args:
        spec: The run.
        cluster: The cluster.
        optimizer_seconds: Seconds of the update on the device.
    """
    loop, layer = cluster.calibration.iteration_host_seconds, cluster.constants.layer_launch_seconds
    if cluster.device.key == "cpu":
        return (loop or 0.0) / cluster.core_fraction
    layers = spec.num_layers_on_stage(0) * max(1.0, len(spec.shape.blocks) / 2)
    has_separate_norms = cluster.execution.torch_kernels and "multi_tensor" not in spec.fused
    update_layers = _UPDATE_LAYERS + _SEPARATE_NORM_LAYERS * has_separate_norms
    update = update_layers * layer * layers
    if not cluster.execution.summed_profiles:
        update = max(0.0, update - optimizer_seconds)
    if cluster.execution.graphs:
        return update
    return (_LOOP_LAYERS * layer if loop is None else loop) + update


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
    if spec.lora:
        kernels += _ADAPTER_KERNELS * len(list_adapted_linears(spec.shape, spec.lora))
    launches = (
        constants.layer_launch_seconds * kernels * (3 + _recomputed_kernel_fraction(spec)) / 3
    )
    return launches + call_launches * constants.call_launch_seconds


def _expert_layer_kernels(spec: RunSpec, cluster: Cluster) -> float:
    """Return the kernels of a layer with experts that the host launches, over those of a dense layer."""
    local_experts = spec.shape.experts / spec.parallelism.expert
    if spec.device is DeviceKind.CPU:
        return _CPU_EXPERT_KERNELS * (1 + _SEPARATE_EXPERT_KERNELS * local_experts)
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

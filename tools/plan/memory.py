"""What one rank holds at its fullest, by component, and what that figure assumes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tools.plan.activations import (
    backward_temporary_bytes,
    embedding_bytes,
    head_bytes,
    layer_activation_bytes,
    layers_in_flight,
    logit_elements,
    logits_bytes,
    residual_bytes,
)
from tools.plan.parameters import Parameters, layer_parameters, rank_parameters
from tools.spec.model import Model
from tools.spec.run import RunSpec, spec_of_model
from tools.spec.strategy import Batch, Parallelism, Sharding

MIB = 2**20

DEVICE_BASE_BYTES = 3870 * MIB
"""Fitted once, over all eight published readings: CUDA context, cuBLAS and cuDNN workspaces, NCCL
buffers and the allocator's unusable remainders on a GPU."""

LOGIT_SLACK_BYTES = 2
"""Fitted once, over the same readings, a logit on the rank: a block of the half-precision logits'
size that the caching allocator cannot reuse once Adam's state sits among the activations' blocks
(inferred)."""

CPU_PROCESS_BYTES = 900 * MIB
"""Resident size of a CPU rank before it builds a model: Python, torch, Megatron."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes a parameter, by what they hold."""

    weights: int
    gradients: int
    main_parameters: int
    gradient_copies: int
    """fp32 copies of half-precision gradients, alive from the optimizer step to the next zero_grad;
    their blocks stay reserved."""
    adam: int = 8


PRECISIONS = {
    "fp16": Precision(weights=2, gradients=2, main_parameters=4, gradient_copies=4),
    "bf16": Precision(weights=2, gradients=4, main_parameters=4, gradient_copies=0),
    "fp32": Precision(weights=4, gradients=4, main_parameters=0, gradient_copies=0),
}
"""`Float16OptimizerWithFloat16Params` and `FP32Optimizer` (`megatron/core/optimizer/optimizer.py`):
20, 18 and 16 bytes a parameter. bf16 accumulates gradients in fp32 unless told otherwise."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at its peak, by component."""

    weights: int
    gradients: int
    main_parameters: int
    optimizer_state: int
    activations: int
    """Of all layers and micro batches in flight, the embedding and the head."""
    temporaries: int
    """The larger of the loss's logits and one layer's gradients of activations."""
    communication: int
    """Pipeline messages, gathered units of ZeRO-3 and FSDP2, gradient buckets of ZeRO-2."""
    allocator: int
    """Context, workspaces, and blocks reserved but not usable; see the assumptions."""

    @property
    def total(self) -> int:
        """Bytes as the device itself reports them."""
        return self.live + self.allocator

    @property
    def live(self) -> int:
        """Bytes of live tensors: what a memory ledger sees."""
        return self.state + self.activations + self.temporaries + self.communication

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.main_parameters + self.optimizer_state


COMPONENTS = tuple(field.name for field in fields(RankMemory))

ASSUMPTIONS = (
    "Activations are arXiv:2205.05198's, tensor by tensor; kernels' workspaces are not counted.",
    "The peak is at the loss or at the first layer's backward, after Adam's state exists.",
    "The two constants of the allocator component were chosen after seeing the eight published "
    "H200 readings, once for all of them; other devices may differ by a gigabyte or two.",
    "Experts are taken to be loaded evenly.",
    "ZeRO-3 and FSDP2 hold two unsharded layers at a time, ZeRO-2 one layer's gradients.",
)


def memory_of_rank(
    configuration: RunSpec, pipeline_rank: int = 0, *, on_cpu: bool = False
) -> RankMemory:
    """Peak of one pipeline rank (all its TP, CP and DP ranks are alike).

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    parallelism = configuration.parallelism
    parameters = rank_parameters(configuration.shape, parallelism, pipeline_rank)
    precision = PRECISIONS[configuration.dtype]
    weights, gradients, optimizer = _shards(parallelism)
    last = pipeline_rank == parallelism.pipeline - 1
    allocator = CPU_PROCESS_BYTES if on_cpu else _allocator_bytes(configuration, parameters, last)
    return RankMemory(
        weights=precision.weights * _held(parameters, parallelism, weights),
        gradients=precision.gradients * _held(parameters, parallelism, gradients),
        main_parameters=_main_parameter_bytes(precision, parallelism)
        * _held(parameters, parallelism, optimizer),
        optimizer_state=precision.adam * _held(parameters, parallelism, optimizer),
        activations=activation_bytes(configuration, pipeline_rank),
        temporaries=_temporary_bytes(configuration, last),
        communication=_communication_bytes(configuration),
        allocator=allocator,
    )


def activation_bytes(configuration: RunSpec, pipeline_rank: int = 0) -> int:
    """Kept for backward at the fullest moment of a pipeline rank."""
    layers = layers_in_flight(configuration, pipeline_rank)
    kept = layers * layer_activation_bytes(configuration)
    flights = max(1, layers // configuration.layers_a_stage)
    if pipeline_rank == 0:
        kept += flights * embedding_bytes(configuration)
    if pipeline_rank == configuration.parallelism.pipeline - 1:
        kept += head_bytes(configuration)
    return kept


def fullest_rank(configuration: RunSpec) -> tuple[int, RankMemory]:
    """The pipeline rank with the highest peak: the first, or the last with its logits."""
    ranks = {0, configuration.parallelism.pipeline - 1}
    by_rank = {rank: memory_of_rank(configuration, rank) for rank in ranks}
    return max(by_rank.items(), key=lambda item: item[1].total)


def held_parameters(configuration: RunSpec, pipeline_rank: int = 0) -> tuple[int, int]:
    """Parameters whose optimizer state a rank holds, and those whose gradients it holds."""
    parallelism = configuration.parallelism
    parameters = rank_parameters(configuration.shape, parallelism, pipeline_rank)
    _, gradients, optimizer = _shards(parallelism)
    return _held(parameters, parallelism, optimizer), _held(parameters, parallelism, gradients)


def estimate_peak_bytes(
    model: Model,
    parallelism: Parallelism,
    batch: Batch,
    dtype: str | None = None,
    *,
    on_cpu: bool = True,
) -> int:
    """Peak of the fullest rank in bytes, for a preflight.

    On a CPU: unfused attention, the process itself included, no allocator slack.
    """
    configuration = replace(
        spec_of_model(model, parallelism, batch),
        dtype=dtype or ("fp32" if on_cpu else model.dtype),
        fused_attention=not on_cpu,
    )
    ranks = range(parallelism.pipeline)
    return max(memory_of_rank(configuration, rank, on_cpu=on_cpu).total for rank in ranks)


def _shards(parallelism: Parallelism) -> tuple[bool, bool, bool]:
    """Whether weights, gradients and optimizer are sharded over the data-parallel ranks."""
    sharding = parallelism.sharding
    everything = sharding in {Sharding.ZERO3, Sharding.FSDP2}
    gradients = everything or sharding is Sharding.ZERO2
    return everything, gradients, gradients or sharding is Sharding.ZERO1


def _main_parameter_bytes(precision: Precision, parallelism: Parallelism) -> int:
    """Megatron-FSDP's optimizer updates an fp32 copy of the weights also where they are fp32
    (`param_and_grad_buffer.py: main_weight_buffer`)."""
    megatron_fsdp = parallelism.sharding in {Sharding.ZERO2, Sharding.ZERO3}
    return precision.main_parameters or (4 if megatron_fsdp else 0)


def _held(parameters: Parameters, parallelism: Parallelism, sharded: bool) -> int:
    """Elements a rank holds; Megatron shards over DP×CP, and experts over what EP leaves of it."""
    if not sharded:
        return parameters.total
    ranks = parallelism.data * parallelism.context
    shared = -(-parameters.shared // ranks)
    return shared + -(-parameters.experts // parallelism.copies_of_experts)


def _temporary_bytes(configuration: RunSpec, last: bool) -> int:
    loss = logits_bytes(configuration) if last else 0
    return max(loss, backward_temporary_bytes(configuration))


def _communication_bytes(configuration: RunSpec) -> int:
    parallelism, precision = configuration.parallelism, PRECISIONS[configuration.dtype]
    pipeline = 2 * residual_bytes(configuration) if parallelism.pipeline > 1 else 0
    if parallelism.sharding in {Sharding.NONE, Sharding.ZERO1}:
        return pipeline
    split = (parallelism.tensor, parallelism.expert, parallelism.expert_tensor)
    layer = layer_parameters(configuration.shape, 1, *split).total
    if parallelism.sharding is Sharding.ZERO2:
        return pipeline + precision.gradients * layer
    return pipeline + 2 * layer * (precision.weights + precision.gradients)


def _allocator_bytes(configuration: RunSpec, parameters: Parameters, last: bool) -> int:
    precision, parallelism = PRECISIONS[configuration.dtype], configuration.parallelism
    optimizer_sharded = _shards(parallelism)[2]
    copies = precision.gradient_copies * _held(parameters, parallelism, optimizer_sharded)
    logits = LOGIT_SLACK_BYTES * logit_elements(configuration) if last else 0
    return DEVICE_BASE_BYTES + copies + logits

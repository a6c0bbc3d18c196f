"""Describe the rank that is captured: its position in every group, its modules, what is not captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from megatron_patches.capture.parameters import ParameterMap
from megatron_patches.capture.probes import (
    describe_module,
    global_names,
    list_modules,
    locate_function,
)
from parakit.accounting import list_optimizers
from parakit.artifacts.capture import (
    BUCKETS,
    CLIPPING,
    COUNTED_ONCE,
    INITIAL,
    RATE_SLOTS,
    CapturedRank,
    CaptureStage,
)

_FUNCTIONS = {
    BUCKETS: "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    CaptureStage.REDUCED_GRADIENTS: "distributed.finalize_model_grads:finalize_model_grads",
    COUNTED_ONCE: "optimizer.optimizer:MegatronOptimizer.get_grads_for_grad_norm",
    CaptureStage.NORM: "optimizer.clip_grads:get_grad_norm_fp32",
    CLIPPING: "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    **dict.fromkeys(RATE_SLOTS, "optimizer:_get_param_groups"),
    INITIAL: "tensor_parallel.random:model_parallel_cuda_manual_seed",
}
"""Function of `megatron.core` that computes the tensors of a stage or slot, where no module does."""


def gather_module_names(chunks: list[torch.nn.Module]) -> list[dict[str, str]]:
    """Return the global name of each module by its name in the chunk, one dictionary per chunk.

    Layers are numbered over pipeline stages and virtual stages, experts over expert-parallel ranks. All
    ranks must call this function together, because they exchange their numbers of layers.
    """
    from megatron.core import mpu

    layers_per_chunk = []
    for chunk in chunks:
        decoder = getattr(chunk, "decoder", None)
        layers_per_chunk.append(len(getattr(decoder, "layers", ())))
    local_stage = mpu.get_pipeline_model_parallel_rank()
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (local_stage, layers_per_chunk))
    layers_by_stage: dict[int, list[int]] = dict(gathered)
    layers_before = []
    num_layers = 0
    # Layers continue from the last stage's first chunk to the first stage's second chunk, and so on.
    for chunk_number in range(len(chunks)):
        for stage in sorted(layers_by_stage):
            if stage == local_stage:
                layers_before.append(num_layers)
            num_layers += layers_by_stage[stage][chunk_number]
    experts = getattr(chunks[0].config, "num_moe_experts", None) or 0
    expert_rank = mpu.get_expert_model_parallel_rank()
    experts_before = expert_rank * experts // mpu.get_expert_model_parallel_world_size()
    return global_names(chunks, layers_before, experts_before)


def describe_rank(
    chunks: list[torch.nn.Module],
    names: list[dict[str, str]],
    parameters: ParameterMap,
    norm_groups: tuple[tuple[int, ...], ...],
    optimizer: Any,
    loss_scales: tuple[float, ...],
    weight_hashes: tuple[str, ...],
) -> CapturedRank:
    """Return the content of `rank.json`: the rank's position in every group, the batch, the modules.

    Args:
        chunks: Chunks of the model.
        names: Global names of the modules (`gather_module_names`).
        parameters: The captured parameters.
        norm_groups: Ranks over which gradient norms were summed, one tuple per group.
        optimizer: Megatron's optimizer.
        loss_scales: Loss scale of each iteration under fp16; empty without fp16.
        weight_hashes: Hash of the initial weights, and of the weights after each iteration; may be empty.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    data, context = _find_position("data"), _find_position("context")
    tensor = _find_position("tensor_model")
    return CapturedRank(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        iteration=args.curr_iteration + 1,
        tensor=tensor,
        pipeline=_find_position("pipeline_model"),
        virtual_stages=len(chunks),
        context=context,
        data=data,
        expert=_find_position("expert_model"),
        expert_tensor=_find_position("expert_tensor"),
        expert_sources=_expert_sources((data[0], context[0], tensor[0])),
        sequence_parallel=bool(args.sequence_parallel),
        gated=bool(getattr(chunks[0].config, "gated_linear_unit", False)),
        sequence_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        micro_batches=get_num_microbatches(),
        per_token_loss=bool(args.calculate_per_token_loss),
        clip_gradient=float(args.clip_grad),
        hidden_dropout=float(args.hidden_dropout),
        attention_dropout=float(args.attention_dropout),
        vocabulary=int(getattr(args, "vocab_size", None) or args.padded_vocab_size),
        dtype=str(args.params_dtype).removeprefix("torch."),
        loss_scales=loss_scales,
        weight_hashes=weight_hashes,
        modules={name: describe_module(module) for name, module in list_modules(chunks, names)},
        functions=_find_functions(chunks[0].config, optimizer),
        router_groups=_find_router_groups(args),
        norm_groups=norm_groups,
        notes=tuple(_describe_gaps(parameters)),
    )


def _find_position(group: str) -> tuple[int, int]:
    """Return this rank's number in a parallel group, and the group's size."""
    from megatron.core import mpu

    function = f"get_{group}_parallel"
    return getattr(mpu, f"{function}_rank")(), getattr(mpu, f"{function}_world_size")()


def _find_router_groups(args: Any) -> tuple[int, int] | None:
    """Return the number of groups of experts and the number of groups that a router chooses; None without groups."""
    num_groups = getattr(args, "moe_router_num_groups", None)
    num_chosen = getattr(args, "moe_router_group_topk", None)
    return (num_groups, num_chosen) if num_groups and num_chosen else None


def _find_functions(config: Any, optimizer: Any) -> dict[str, str]:
    """Return file and line of the function that computes each stage's or slot's tensors.

    A function that this Megatron does not have is left out.
    """
    is_fused = getattr(config, "cross_entropy_loss_fusion", False)
    loss_module = "fusions.fused_cross_entropy" if is_fused else "tensor_parallel.cross_entropy"
    optimizer_class = type(list_optimizers(optimizer)[0])
    optimizer_module = optimizer_class.__module__.removeprefix("megatron.core.")
    optimizer_name = f"{optimizer_module}:{optimizer_class.__name__}"
    functions = {
        CaptureStage.LOSS: f"{loss_module}:_VocabParallelCrossEntropy.forward",
        CaptureStage.ACTIVATION_GRADIENTS: f"{loss_module}:_VocabParallelCrossEntropy.backward",
        **_FUNCTIONS,
        CaptureStage.OPTIMIZER_STATE: f"{optimizer_name}.step",
        CaptureStage.WEIGHTS: f"{optimizer_name}.step_with_ready_grads",
    }
    sources = {}
    for stage_or_slot, target in functions.items():
        module_name, _, path = target.partition(":")
        # Some versions of Megatron lack a module or a function of that name.
        with suppress(ImportError, AttributeError):
            module = import_module(f"megatron.core.{module_name}")
            source = locate_function(attrgetter(path)(module))
            if source:
                sources[stage_or_slot] = source
    return sources


def _expert_sources(position: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return the positions of the ranks that send tokens to this rank's experts.

    The order is that in which the tokens of these ranks follow one another in the experts' input tensor. A position
    is a rank's number in its data-, context- and tensor-parallel group, and `position` is that of this rank.
    All ranks must call this function together, because they exchange their positions.
    """
    from megatron.core import mpu
    from megatron.training import get_args

    positions: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(positions, position)
    ranks = torch.distributed.get_process_group_ranks(
        mpu.get_expert_tensor_and_model_parallel_group()
    )
    if get_args().moe_token_dispatcher_type == "allgather":
        return tuple(positions[rank] for rank in ranks)
    # Other dispatchers send tokens between expert-parallel ranks first, and then gather them over
    # tensor-parallel ranks. In the group, the tensor-parallel ranks are neighbours (stride 1), and
    # expert-parallel ranks have a stride of the number of tensor-parallel ranks.
    num_tensor_ranks = mpu.get_expert_tensor_parallel_world_size()
    source_ranks: list[int] = []
    for tensor_rank in range(num_tensor_ranks):
        source_ranks += ranks[tensor_rank::num_tensor_ranks]
    return tuple(positions[rank] for rank in source_ranks)


def _describe_gaps(parameters: ParameterMap) -> Iterator[str]:
    """Yield a note for everything that is not captured, with the reason."""
    for name in parameters.unplaced:
        yield f"{name} has no place in sharded_state_dict"
    marks = {"is_torch_fsdp2_param": "torch FSDP2", "megatron_fsdp_slice": "Megatron-FSDP"}
    for mark, wrapper in marks.items():
        if any(hasattr(parameter, mark) for parameter in parameters.parameters):
            yield f"local gradients: {wrapper} reduces them within the backward pass"

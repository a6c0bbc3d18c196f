"""Which rank is captured: its place in every group, the names of its modules, what is not captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch

from megatron_patches.capture.parameters import ParameterMap
from megatron_patches.capture.probes import described, global_names, modules_of, source_of
from parakit.accounting import optimizers
from parakit.artifacts.capture import (
    BUCKETS,
    CLIPPING,
    COUNTED_ONCE,
    INITIAL,
    RATE_SLOTS,
    CapturedRank,
    Stage,
)

_FUNCTIONS = {
    BUCKETS: "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    Stage.REDUCED_GRADIENTS: "distributed.finalize_model_grads:finalize_model_grads",
    COUNTED_ONCE: "optimizer.optimizer:MegatronOptimizer.get_grads_for_grad_norm",
    Stage.NORM: "optimizer.clip_grads:get_grad_norm_fp32",
    CLIPPING: "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    **dict.fromkeys(RATE_SLOTS, "optimizer:_get_param_groups"),
    INITIAL: "tensor_parallel.random:model_parallel_cuda_manual_seed",
}
"""What computes a stage's tensors, or those of a slot, where no module does."""


def module_names(chunks: list[torch.nn.Module]) -> list[dict[str, str]]:
    """Global names of the modules: layers are counted over pipeline stages and virtual stages."""
    from megatron.core import mpu

    counts = [len(getattr(getattr(one, "decoder", None), "layers", ())) for one in chunks]
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    here = (mpu.get_pipeline_model_parallel_rank(), counts)
    torch.distributed.all_gather_object(of_ranks, here)
    of_stages = dict(of_ranks)
    in_order = [
        (chunk, stage, of_stages[stage][chunk])
        for chunk in range(len(chunks))
        for stage in sorted(of_stages)
    ]
    sums = accumulate((count for *_, count in in_order), initial=0)
    before = {(chunk, stage): so_far for (chunk, stage, _), so_far in zip(in_order, sums)}  # noqa: B905
    experts = getattr(chunks[0].config, "num_moe_experts", None) or 0
    experts_before = (
        mpu.get_expert_model_parallel_rank() * experts // mpu.get_expert_model_parallel_world_size()
    )
    return global_names(
        chunks, [before[number, here[0]] for number in range(len(chunks))], experts_before
    )


def captured_rank(
    chunks: list[torch.nn.Module],
    names: list[dict[str, str]],
    parameters: ParameterMap,
    norm_groups: tuple[tuple[int, ...], ...],
    optimizer: Any,
    loss_scales: tuple[float, ...],
) -> CapturedRank:
    """What `rank.json` says of this rank: its place in every group, the batch, the modules."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    def place(group: str) -> tuple[int, int]:
        of = f"get_{group}_parallel"
        return getattr(mpu, f"{of}_rank")(), getattr(mpu, f"{of}_world_size")()

    args = get_args()
    data, tensor, context = place("data"), place("tensor_model"), place("context")
    of_groups = ("moe_router_num_groups", "moe_router_group_topk")
    groups: Any = tuple(getattr(args, name, None) for name in of_groups)
    return CapturedRank(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        iteration=args.curr_iteration + 1,
        tensor=tensor,
        pipeline=place("pipeline_model"),
        virtual_stages=len(chunks),
        context=context,
        data=data,
        expert=place("expert_model"),
        expert_tensor=place("expert_tensor"),
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
        modules={name: described(module) for name, module in modules_of(chunks, names)},
        functions=_functions(chunks[0].config, optimizer),
        router_groups=groups if all(groups) else None,
        norm_groups=norm_groups,
        notes=tuple(_notes(parameters)),
    )


def _functions(config: Any, optimizer: Any) -> dict[str, str]:
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    place = "fusions.fused_cross_entropy" if fused else "tensor_parallel.cross_entropy"
    update = type(optimizers(optimizer)[0])
    name = f"{update.__module__.removeprefix('megatron.core.')}:{update.__name__}"
    found = {
        Stage.LOSS: f"{place}:_VocabParallelCrossEntropy.forward",
        Stage.ACTIVATION_GRADIENTS: f"{place}:_VocabParallelCrossEntropy.backward",
        **_FUNCTIONS,
        Stage.OPTIMIZER_STATE: f"{name}.step",
        Stage.WEIGHTS: f"{name}.step_with_ready_grads",
    }
    sources = {}
    for what, name in found.items():
        module, _, function = name.partition(":")
        with suppress(ImportError, AttributeError):  # Not every Megatron has one of that name.
            source = source_of(attrgetter(function)(import_module(f"megatron.core.{module}")))
            if source:
                sources[what] = source
    return sources


def _expert_sources(here: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """Places of the ranks that send tokens to this rank's experts, in the order of their rows."""
    from megatron.core import mpu
    from megatron.training import get_args

    places: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(places, here)
    ranks = torch.distributed.get_process_group_ranks(
        mpu.get_expert_tensor_and_model_parallel_group()
    )
    size = mpu.get_expert_tensor_parallel_world_size()
    if get_args().moe_token_dispatcher_type != "allgather":
        # Sent over expert-parallel ranks first, what arrives is gathered over tensor-parallel ones.
        ranks = [rank for number in range(size) for rank in ranks[number::size]]
    return tuple(places[rank] for rank in ranks)


def _notes(parameters: ParameterMap) -> Iterator[str]:
    """What is not captured, and why."""
    for name in parameters.unplaced:
        yield f"{name} has no place in sharded_state_dict"
    marks = {"is_torch_fsdp2_param": "torch FSDP2", "megatron_fsdp_slice": "Megatron-FSDP"}
    for mark, wrapper in marks.items():
        if any(hasattr(one, mark) for one in parameters.parameters):
            yield f"local gradients: {wrapper} reduces them within the backward pass"

"""Enumeration of the legal combinations of parallel sizes, micro batch, recomputation, schedule and sharding.

A "split" is a product of parallel sizes without schedule and sharding. The search takes every split, and adds
micro batches, recomputation, virtual stages, shardings and the algorithm of context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parakit.config.model import ModelShape
from parakit.config.offload import NO_OFFLOAD
from parakit.config.peft import Lora
from parakit.config.recompute import Recompute
from parakit.config.replacing import replace, replace_cached
from parakit.config.run import DeviceKind, Fp8Recipe, RunSpec
from parakit.config.stages import EVEN_SPLIT, choose_stage_split, virtual_degrees
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs import CP_COMM_TYPES, adapter_rules, divisors

LARGEST_MICRO_BATCH = 64


def enumerate_splits(
    shape: ModelShape,
    devices: int,
    expert_tensor: int = 0,
    most_tensor: int | None = None,
    lora: Lora | None = None,
) -> Iterator[Parallelism]:
    """Yield every parallelism over `devices` ranks with which the model can be split.

    Heads, MLP columns and the sequence must be divisible. Layers may be placed unevenly on pipeline stages. Virtual
    stages and sharding are left out.

    Args:
        expert_tensor: Ranks over which each expert is split (ETP). 0 means that ETP is not stated: then experts are
            not split (ETP 1), or split as all other layers, which is Megatron's default.
        most_tensor: Largest degree of tensor parallelism; None for no limit.
        lora: Adapters that are trained; None trains all weights. Splits that adapters cannot have are left out.
    """
    for split in _enumerate_shape_splits(shape, devices, expert_tensor, most_tensor):
        if not any(adapter_rules(lora, split)):
            yield split


def _enumerate_shape_splits(
    shape: ModelShape, devices: int, expert_tensor: int, most_tensor: int | None
) -> Iterator[Parallelism]:
    """Yield every parallelism over `devices` ranks with which a shape can be split, as `enumerate_splits` does."""
    for tensor in divisors(devices, most_tensor):
        if shape.heads % tensor or shape.query_groups % tensor or shape.ffn_hidden % tensor:
            continue
        if shape.mamba and (shape.mamba.heads % tensor or shape.mamba.groups % tensor):
            continue
        for context in divisors(devices // tensor):
            if context > 1 and (shape.blocks or shape.seq_length % (2 * context)):
                continue
            for pipeline in divisors(devices // (tensor * context)):
                if choose_stage_split(shape.layers, pipeline) is None:
                    continue
                data = devices // (tensor * context * pipeline)
                plain = Parallelism(data, tensor=tensor, pipeline=pipeline, context=context)
                if shape.experts and tensor > 1 and not expert_tensor:
                    yield from _split_experts(shape, plain.with_expert_tensor(1))
                    yield from _split_indivisible_experts(shape, plain)
                else:
                    yield from _split_experts(shape, plain.with_expert_tensor(expert_tensor))


def list_micro_batch_sizes(
    split: Parallelism, global_batch: int, largest: int = LARGEST_MICRO_BATCH
) -> list[int]:
    """Return the micro batch sizes up to `largest` that divide the samples of a data-parallel rank.

    The list is empty if data parallelism does not divide the global batch.
    """
    if global_batch % split.data:
        return []
    return [size for size in divisors(global_batch // split.data) if size <= largest]


def build_unsharded_spec(
    template: RunSpec, split: Parallelism, size: int, recompute: Recompute
) -> RunSpec:
    """Return the run of a split with micro batch `size`, without sharding, offload and virtual stages.

    Context parallelism uses point-to-point communication (`p2p`).
    """
    return replace(
        template,
        parallelism=split,
        batch=Batch(size, template.batch.global_batch_size),
        recompute=recompute,
        offload=NO_OFFLOAD,
        cp_comm_type="p2p",
        stages=choose_stage_split(template.shape.layers, split.pipeline) or EVEN_SPLIT,
    )


def list_recomputes(template: RunSpec) -> list[Recompute]:
    """Return the recomputations that a search tries, from no recomputation to full recomputation.

    With fused attention, the scores are not recomputed, because fused attention stores none. Modules are recomputed
    only in models with experts or latent attention, because Transformer Engine's dense layers have no cheap modules to
    recompute.
    """
    if not template.fused_attention:
        return [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]
    return [Recompute.NONE, *_list_module_recomputes(template), Recompute.FULL]


def _list_module_recomputes(template: RunSpec) -> list[Recompute]:
    """Return the recomputations of single modules that a search tries, in the order of falling memory.

    Megatron refuses to recompute these modules with delayed scaling, and recomputes activations of experts only in
    grouped products, which need Transformer Engine.
    """
    shape = template.shape
    is_refused = template.fp8_recipe is Fp8Recipe.DELAYED or not template.fused_norms
    if shape.blocks or not shape.experts or is_refused:
        return []
    if not shape.latent:
        return [Recompute(frozenset({"layernorm", "moe_act"}))]
    up_projections = frozenset({"layernorm", "mla_up_proj"})
    return [Recompute(up_projections), Recompute(up_projections | {"moe_act", "mlp"})]


def enumerate_variants(plain: RunSpec, shardings: Sequence[Sharding] = ()) -> Iterator[RunSpec]:
    """Yield `plain` with each legal number of virtual stages and each of the shardings; none of them means all."""
    split = plain.parallelism
    for virtual in list_virtual_stages(plain.shape, split, plain.microbatches):
        for sharding in shardings or list_shardings(split, plain.lora):
            parallelism = replace_cached(split, virtual_stages=virtual, sharding=sharding)
            yield replace(plain, parallelism=parallelism)


def list_virtual_stages(
    shape: ModelShape, split: Parallelism, microbatches: int
) -> tuple[int, ...]:
    """Return the legal numbers of virtual stages per rank, smallest first.

    The result is `(1,)` without pipeline parallelism. It is also `(1,)` if the number of micro batches is no multiple
    of the stages, because the interleaved schedule then cannot run.
    """
    if split.pipeline == 1 or microbatches % split.pipeline:
        return (1,)
    stages = choose_stage_split(shape.layers, split.pipeline) or EVEN_SPLIT
    return virtual_degrees(stages, shape.layers, split.pipeline)


_FLAT_SHARDINGS = [sharding for sharding in Sharding if not sharding.is_torch_fsdp]
_UNWRAPPED_SHARDINGS = [sharding for sharding in _FLAT_SHARDINGS if not sharding.wraps_modules]


def list_shardings(split: Parallelism, lora: Lora | None = None) -> Sequence[Sharding]:
    """Return the shardings (ZeRO) that a search tries for a split, the sharding with the least memory last.

    Without data and context parallelism, only no sharding is tried. PyTorch's FSDP2 is left out, because Megatron
    unties the embeddings under it. With pipeline parallelism ZeRO-2 and ZeRO-3 are left out too. So they are with LoRA,
    because Megatron-Bridge's recipes for LoRA shard at most the optimizer.
    """
    if split.data * split.context == 1:
        return [Sharding.NONE]
    return _UNWRAPPED_SHARDINGS if split.pipeline > 1 or lora else _FLAT_SHARDINGS


def min_memory_variant(plain: RunSpec) -> RunSpec:
    """Return the variant of a run with the least memory: no virtual stages, and the most sharding."""
    return apply_sharding(plain, list_shardings(plain.parallelism, plain.lora)[-1])


def apply_sharding(plain: RunSpec, sharding: Sharding) -> RunSpec:
    """Return a run with a sharding."""
    return replace(plain, parallelism=replace_cached(plain.parallelism, sharding=sharding))


def list_cp_comm_types(template: RunSpec, split: Parallelism) -> tuple[str, ...]:
    """Return the values of `--cp-comm-type` that a search tries.

    Without context parallelism the result is `p2p` alone. All-to-all is included only if CP divides the key and
    value heads of a rank. The ring (`p2p`) is left out for models with sliding windows. CPU ranks and Megatron's own
    layers (`--transformer-impl local`) have `all_gather` alone.
    """
    if split.context == 1:
        return ("p2p",)
    if template.device is DeviceKind.CPU or not template.fused_norms:
        return ("all_gather",)
    comm_types = list(CP_COMM_TYPES)
    groups_per_rank = template.shape.query_groups // split.tensor
    if groups_per_rank % split.context:
        comm_types.remove("a2a")
    if template.shape.window:
        # Most releases of Transformer Engine refuse the ring with sliding windows (`context_parallel.py:
        # attn_forward_func_with_cp`).
        comm_types.remove("p2p")
    return tuple(comm_types)


def _split_experts(shape: ModelShape, plain: Parallelism) -> Iterator[Parallelism]:
    """Yield `plain` with each legal expert-parallel size, with and without sequence parallelism.

    A dense model has the expert-parallel size 1. A model with experts always has sequence parallelism if it has tensor
    parallelism. Nothing is yielded if an expert cannot be split over its expert-tensor-parallel ranks.
    """
    # If experts use fewer ranks of tensor parallelism, the other ranks are free for expert parallelism.
    ranks, expert_tensor = plain.data * plain.tensor, plain.effective_expert_tensor
    expert_sizes = [1]
    if shape.experts:
        if ranks % expert_tensor or shape.expert_ffn_hidden % expert_tensor:
            return
        expert_sizes = list(divisors(shape.experts))
    sequence_choices = _list_sequence_choices(shape, plain)
    for expert in expert_sizes:
        if ranks // expert_tensor % expert == 0:
            for sequence_parallel in sequence_choices:
                yield replace(plain, expert=expert, sequence_parallel=sequence_parallel)


def _split_indivisible_experts(shape: ModelShape, plain: Parallelism) -> Iterator[Parallelism]:
    """Yield `plain`, which splits experts as all other layers, where full experts cannot be on as many ranks.

    Where they can, EP times TP with full experts holds as many bytes per rank, computes larger matrix products and
    sends each token once instead of gathering it over TP (parallel folding, arXiv:2504.14960).
    """
    for split in _split_experts(shape, plain):
        if shape.experts % (split.expert * split.tensor):
            yield split


def _list_sequence_choices(shape: ModelShape, plain: Parallelism) -> list[bool]:
    """Return whether a search tries sequence parallelism: [False], [True], or both.

    The list is empty if a model with experts needs sequence parallelism, and TP does not divide the sequence.
    """
    tokens_per_rank = shape.seq_length // plain.context
    can_split_sequence = plain.tensor > 1 and tokens_per_rank % plain.tensor == 0
    needs_split = bool(shape.experts) and plain.tensor > 1
    choices = []
    if not needs_split:
        choices.append(False)
    if can_split_sequence:
        choices.append(True)
    return choices

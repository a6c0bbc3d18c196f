"""Every legal combination of degrees, micro batch, recomputation, schedule and sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parakit.config.model import ModelShape
from parakit.config.offload import NO_OFFLOAD
from parakit.config.recompute import Recompute
from parakit.config.replacing import replace, replace_cached
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.stages import EVEN_SPLIT, choose_stage_split, virtual_degrees
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs import CP_COMM_TYPES, divisors

LARGEST_MICRO_BATCH = 64


def enumerate_splits(
    shape: ModelShape, devices: int, expert_tensor: int = 0
) -> Iterator[Parallelism]:
    """Yield degrees that multiply to `devices` and divide what they split; no schedule, no sharding yet.

    Experts are split over `expert_tensor` ranks of TP; 0 takes the TP of all other layers.
    """
    for tensor in divisors(devices):
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
                plain = Parallelism(data, tensor, pipeline, context)
                yield from _split_experts(shape, plain.with_expert_tensor(expert_tensor))


def list_micro_batch_sizes(
    split: Parallelism, global_batch: int, largest: int = LARGEST_MICRO_BATCH
) -> list[int]:
    """Micro batch sizes that divide a data-parallel rank's share; empty if there is no share."""
    if global_batch % split.data:
        return []
    return [size for size in divisors(global_batch // split.data) if size <= largest]


def build_unsharded_spec(
    template: RunSpec, split: Parallelism, size: int, recompute: Recompute
) -> RunSpec:
    """One combination without sharding and with the plain schedule."""
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
    """What there is to choose; recomputing scores means something only where they are kept."""
    if template.fused_attention:
        return [Recompute.NONE, Recompute.FULL]
    return [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]


def enumerate_variants(plain: RunSpec) -> Iterator[RunSpec]:
    """A base with each number of virtual stages and each sharding."""
    split = plain.parallelism
    for virtual in list_virtual_stages(plain.shape, split, plain.microbatches):
        for sharding in list_shardings(split):
            parallelism = replace_cached(split, virtual_stages=virtual, sharding=sharding)
            yield replace(plain, parallelism=parallelism)


def list_virtual_stages(
    shape: ModelShape, split: Parallelism, microbatches: int
) -> tuple[int, ...]:
    """Numbers of virtual stages; interleaving needs micro batches in multiples of PP."""
    if split.pipeline == 1 or microbatches % split.pipeline:
        return (1,)
    stages = choose_stage_split(shape.layers, split.pipeline) or EVEN_SPLIT
    return virtual_degrees(stages, shape.layers, split.pipeline)


_FLAT = [sharding for sharding in Sharding if not sharding.is_torch_fsdp]
_UNWRAPPED = [sharding for sharding in _FLAT if not sharding.wraps_modules]


def list_shardings(split: Parallelism) -> Sequence[Sharding]:
    """Shardings that change anything; FSDP2 trains another (untied) model and is left out."""
    if split.data * split.context == 1:
        return [Sharding.NONE]
    return _UNWRAPPED if split.pipeline > 1 else _FLAT


def min_memory_variant(plain: RunSpec) -> RunSpec:
    """The variant that needs the least memory: plain schedule, everything sharded that can be."""
    split = plain.parallelism
    return replace(plain, parallelism=replace_cached(split, sharding=list_shardings(split)[-1]))


def list_cp_comm_types(template: RunSpec, split: Parallelism) -> tuple[str, ...]:
    """Context-parallel algorithms; all-to-all needs enough key/value heads. CPU ranks and Megatron's own
    layers (`--transformer-impl local`) gather."""
    if split.context == 1:
        return ("p2p",)
    if template.device is DeviceKind.CPU or not template.fused_norms:
        return ("all_gather",)
    exchange = (template.shape.query_groups // split.tensor) % split.context == 0
    known = CP_COMM_TYPES if exchange else CP_COMM_TYPES[:2]
    # Most releases of Transformer Engine refuse a ring over windows (`context_parallel.py:
    # attn_forward_func_with_cp`).
    return known[1:] if template.shape.window else known


def _split_experts(shape: ModelShape, plain: Parallelism) -> Iterator[Parallelism]:
    """With each EP, and with and without sequence parallelism, which experts under TP need."""
    part = shape.seq_length // plain.context
    choices = [False, True] if plain.tensor > 1 and part % plain.tensor == 0 else [False]
    if shape.experts and plain.tensor > 1:
        choices = choices[1:]
    # Experts over fewer ranks of TP leave the others to EP.
    ranks, split = plain.data * plain.tensor, plain.effective_expert_tensor
    if shape.experts and (ranks % split or shape.expert_ffn_hidden % split):
        return
    for expert in divisors(shape.experts) if shape.experts else [1]:
        if ranks // split % expert == 0:
            for sequence_parallel in choices:
                yield replace(plain, expert=expert, sequence_parallel=sequence_parallel)

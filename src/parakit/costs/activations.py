"""What forward saves for backward in layers, tensor by tensor, and where it is until then: on the
device, on its host, or nowhere and made again.

Activations are from arXiv:2205.05198 (its equations 1 to 4), written per tensor instead of per
coefficient so that other widths, dtypes, gated MLPs, grouped queries and dropout-free training follow;
at h→4h, two bytes and dropout the sum is the paper's sbh(34 + 5as/h), sbh(10 + 24/t + 5as/(ht)) under
TP and (sbh/t)(34 + 5as/h) under TP with SP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from parakit.config.model import ATTENTION, EXPERTS, MAMBA, MLP, MTP, LatentAttention, Mamba
from parakit.config.offload import OFFLOAD_MODULES
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, Fp8Recipe, RunSpec

_FP32_BYTES = 4

FP8_RECIPE_BYTES = {
    Fp8Recipe.NONE: 2.0,
    Fp8Recipe.DELAYED: 1.0,
    Fp8Recipe.TENSORWISE: 1.0,
    Fp8Recipe.BLOCKWISE: 1.03,
    Fp8Recipe.MXFP8: 1.03,
    Fp8Recipe.NVFP4: 0.56,
}
"""Of an operand's element, scales included."""


def layer_activation_bytes(spec: RunSpec) -> int:
    """Bytes that one layer saves of one micro batch, on one rank, here or on its host.

    Its input always; of all else what backward does not compute again. Of whole layers that are
    computed again a checkpoint's input.
    """
    if spec.recompute.is_full:
        inputs = [
            times * (2 if kind.shape.blocks == MTP else 1) for times, kind in spec.block_specs
        ]
        return sum(inputs) * residual_bytes(spec)
    return _layer_bytes(spec.one_layer_per_stage)


@lru_cache(maxsize=4096)
def _layer_bytes(spec: RunSpec) -> int:
    if len(spec.shape.blocks) > 1:
        return sum(times * _layer_bytes(kind) for times, kind in spec.block_specs)
    again = spec.recompute.modules
    return sum(tensor.size for tensor in _tensors(spec) if again.isdisjoint(tensor.modules))


def chunk_activation_bytes(spec: RunSpec, layers: int, dense: int = 0) -> int:
    """Bytes that a virtual stage of so many layers keeps of one micro batch on the device.

    The first `dense` of them are so; what of their tensors goes to the host is taken to be experts'.
    """
    checkpoints = spec.recompute.layers_per_checkpoint(layers)
    again = sum(checkpoints)
    found = len(checkpoints) * layer_activation_bytes(spec) if checkpoints else 0
    dense_kept = max(0, dense - again)
    whole = spec.without_recompute if spec.recompute.is_full else spec
    if others := layers - again - dense_kept:
        found += others * layer_activation_bytes(whole)
    if dense_kept:
        found += dense_kept * layer_activation_bytes(whole.with_dense_layers)
    return found - offloaded_bytes(spec, layers).freed if spec.offload else found


def recomputed_bytes(spec: RunSpec, layers: int = 1) -> int:
    """What a virtual stage of so many layers does not keep and backward makes again, at most at once.

    Backward ends with its first layer: what it has freed until then makes room for the layers of a
    checkpoint, which it computes all together.
    """
    if spec.recompute == Recompute.NONE:
        return 0
    if len(spec.shape.blocks) > 1:
        return max(recomputed_bytes(kind) for _, kind in spec.block_specs)
    whole = layer_activation_bytes(spec.without_recompute)
    kept, checkpoints = layer_activation_bytes(spec), spec.recompute.layers_per_checkpoint(layers)
    if not checkpoints:
        return 0 if spec.recompute.is_full else whole - kept
    freed = (layers - sum(checkpoints)) * whole
    # Of checkpoints of one size the last needs most: nothing of the others is free then.
    backward = checkpoints[::-1]
    needed = (size * whole - (1 + backward.index(size)) * kept for size in set(checkpoints))
    return max(0, max(needed) - freed)


class Offloaded(NamedTuple):
    """Bytes of one micro batch."""

    freed: int = 0
    """That the device no longer holds."""
    copied: int = 0
    """To the host and back: twice what two modules save, and also what backward makes again."""


def offloaded_bytes(spec: RunSpec, layers: int, first: bool = False) -> Offloaded:
    """What a virtual stage of so many layers gives to its host.

    Groups of tensors go, one a module and layer, in forward's order, up to the share that is asked for.
    Of the micro batch and virtual stage that backward begins with (`first`) the last of each module
    stay, so that nothing waits for them (`PipelineOffloadManager.post_warmup_callback`).
    Or whole layers go, from the first on (Transformer Engine, `cpu_offload.py`).
    """
    groups = _groups(spec)
    if not groups:
        return Offloaded()
    if spec.offload.layers:
        count = min(spec.offload.layers, layers)
    else:
        count = (layers - first) * len(groups)
        count -= int(count * (1 - spec.offload.fraction))
    whole, rest = divmod(max(0, count), len(groups))
    return Offloaded(*(whole * sum(each) + sum(each[:rest]) for each in zip(*groups, strict=True)))


def _groups(spec: RunSpec) -> list[Offloaded]:
    """What of one layer goes to the host, in the order in which forward comes to it."""
    offload = spec.offload
    if not offload:
        return []
    left, copied = Counter[str](), Counter[str]()
    for tensor in _tensors(spec):
        if tensor.elements < offload.min_elements:
            continue
        # Whatever is saved in a whole layer goes with it.
        savers = tensor.savers if not offload.layers else (OFFLOAD_MODULES[0],)
        going = [name for name in savers if offload.layers or name in offload.modules]
        for name in going:
            copied[name] += tensor.size
        if savers and len(going) == len(savers) and not spec.recompute.recomputes(*tensor.modules):
            left[going[-1]] += tensor.size
    return [Offloaded(left[name], copied[name]) for name in OFFLOAD_MODULES if copied[name]]


def residual_bytes(spec: RunSpec) -> int:
    """One hidden state of one micro batch on one rank: a layer's input, a pipeline message."""
    return spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards


class _Tensor(NamedTuple):
    """One that forward saves."""

    size: int
    """Bytes."""
    elements: int
    modules: tuple[str, ...] = ()
    """Of `--recompute-modules`, with which it is made again; in none, with its layer alone."""
    savers: tuple[str, ...] = ()
    """Of `--offload-modules`, those in which it is saved, in forward's order: it leaves the device when
    all of them are offloaded."""


def _saved(spec: RunSpec, elements: int, modules: tuple[str, ...] = (), *savers: str) -> _Tensor:
    return _Tensor(spec.element_bytes * elements, elements, modules, savers)


def _operand(spec: RunSpec, elements: int, modules: tuple[str, ...] = (), *savers: str) -> _Tensor:
    """What linear layers keep of inputs for the gradients of their weights: quantised ones in the layout
    that backward reads, and those alone (Transformer Engine, `pytorch/module/linear.py`)."""
    if not spec.fp8_recipe:
        return _saved(spec, elements, modules, *savers)
    return _Tensor(int(FP8_RECIPE_BYTES[spec.fp8_recipe] * elements), elements, modules, savers)


def _tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Of a layer of one kind, its input first."""
    if spec.shape.blocks == MTP:
        yield from _joining(spec)
        return
    yield from _outside_tensor_parallel(spec)
    if spec.shape.mamba and spec.shape.blocks == MAMBA:
        yield from _mamba_tensors(spec, spec.shape.mamba)
        return
    if spec.shape.latent:
        yield from _latent_attention_tensors(spec, spec.shape.latent)
    else:
        yield from _attention_tensors(spec)
    yield _scores(spec)
    if spec.shape.experts:
        yield from _expert_tensors(spec)
    else:
        yield from _mlp_tensors(spec, spec.shape.ffn_hidden, ("mlp",))


_ALONE = ("layernorm",)


def norm_modules(spec: RunSpec) -> tuple[tuple[str, ...], ...]:
    """For each norm of a layer of one kind the modules that it is computed again with.

    Transformer Engine's dense linear layers have it in them: `layernorm` finds none there
    (`gpt_layer_specs.py`: `IdentityOp`), and `mlp` takes it along. Before experts and latent attention
    it stands alone.
    """
    shape = spec.shape
    before_attention = _ALONE if shape.latent or not spec.fused_norms else ()
    dense: tuple[str, ...] = ("mlp",) if spec.fused_norms else _ALONE
    before_mlp = _ALONE if shape.experts else dense
    by_block = {ATTENTION: before_attention, MLP: before_mlp, EXPERTS: before_mlp}
    if not shape.blocks:
        return before_attention, before_mlp
    return (by_block.get(shape.blocks, ()),) * shape.norms_per_layer


def norm_steps(spec: RunSpec) -> int:
    """Products that a norm is made of, each of which saves its input: on a CPU PyTorch's RMSNorm scales
    the hidden state, then multiplies it with the weight (`aten/src/ATen/native/layer_norm.cpp`)."""
    return 2 if spec.shape.rms_norm and spec.device is DeviceKind.CPU else 1


def _outside_tensor_parallel(spec: RunSpec) -> Iterator[_Tensor]:
    """Inputs and outputs of norms, masks of dropouts: what SP splits and TP does not.

    Outputs are inputs of linear layers; a router's, before experts, is not quantised.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards
    steps = norm_steps(spec)
    norms = norm_modules(spec)
    for place, modules in enumerate(norms):
        attends = place == 0 and spec.shape.blocks in ("", ATTENTION)
        inside = ("qkv_linear",) if attends else ()
        alone = ("attn_norm",) if attends else ("mlp_norm",)
        yield _saved(spec, elements, (), *(alone if modules == _ALONE else inside))
        routed = spec.shape.experts and place == len(norms) - 1
        yield (_saved if routed else _operand)(spec, elements, modules, *inside)
        if steps > 1:
            yield _saved(spec, elements, modules)
    if spec.dropout:
        yield _Tensor(spec.shape.residual_additions * elements, elements)


def _joining(spec: RunSpec) -> Iterator[_Tensor]:
    """What a depth of multi-token prediction keeps beside its layer: the inputs of three norms, which
    are the embeddings, the hidden states before and the layer's output; the projection's input, as wide
    as the first two together; its part of what the output layer reads, all depths' in one tensor
    (`multi_token_prediction.py`). Recomputed, it keeps the first two and the last, of which one is
    counted with the layer.

    The layer's input is a view of the projection's output, which sequence parallelism does not split.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden
    own = elements // spec.sequence_shards
    yield _saved(spec, 4 * own)
    yield _operand(spec, 2 * own)
    yield _saved(spec, elements - own)


def _mamba_tensors(spec: RunSpec, mamba: Mamba) -> Iterator[_Tensor]:
    """The input projection's output and the scan's; backward computes convolution and states again
    (`mamba_ssm: mamba_split_conv1d_scan_combined`). Behind them the output projection's input."""
    tensor = spec.parallelism.tensor
    yield _saved(spec, spec.micro_batch_tokens * (mamba.projected_columns + mamba.width) // tensor)
    yield _operand(spec, spec.micro_batch_tokens * mamba.width // tensor)


def _attention_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    shape = spec.shape
    # Unfused products take K and V repeated for each head (`repeat_interleave`).
    repeats = not spec.fused_attention and not spec.recompute.recomputes("core_attn")
    keys = shape.heads if repeats else shape.query_groups
    tensor = spec.parallelism.tensor
    for heads in (shape.heads, keys, keys):
        yield _saved(
            spec, spec.micro_batch_tokens * heads * shape.head_width // tensor, (), "core_attn"
        )
    if _keeps_whole_projection(spec) and keys == shape.query_groups:
        replaced = (shape.heads + keys) * shape.head_width
        yield _saved(spec, spec.micro_batch_tokens * replaced // tensor, (), "core_attn")
    attended = spec.micro_batch_tokens * shape.heads * shape.head_width // tensor
    yield from _attended(spec, attended)
    if spec.parallelism.context > 1 and spec.cp_comm_type == "a2a":
        # As heads have it, before it goes back to where its tokens are (`context_parallel.py`).
        yield _saved(spec, attended, (), "core_attn")


def _keeps_whole_projection(spec: RunSpec) -> bool:
    """Whether V, a view of what the projection made, keeps Q and K there too, beside their rotated
    copies.

    Transformer Engine's attention copies V (`dot_product_attention/utils.py: get_qkv_layout`), as does
    the dry run, and context parallelism gathers it; PyTorch's takes the view.
    """
    torchs = spec.device is DeviceKind.CPU or spec.fused_attention
    rotary = not spec.shape.positions
    return torchs and rotary and not spec.fused_norms and spec.parallelism.context == 1


def _attended(spec: RunSpec, elements: int) -> Iterator[_Tensor]:
    """Attention's output, which it keeps if it is fused, and the projection its own copy of in fewer
    bits."""
    own = ("core_attn",) if spec.fused_attention else ()
    if not spec.fp8_recipe:
        yield _saved(spec, elements, (), *own, "attn_proj")
        return
    yield _saved(spec, elements, ("core_attn",), *own)
    yield _operand(spec, elements, (), "attn_proj")


def _latent_attention_tensors(spec: RunSpec, latent: LatentAttention) -> Iterator[_Tensor]:
    """Queries and what keys and values share, compressed, before and behind a norm; both and the rotary
    part, once for each head, as they are multiplied (`multi_latent_attention.py`)."""
    own, again = spec.micro_batch_tokens // spec.sequence_shards, ("mla_up_proj",)
    for rank in (latent.query_rank, latent.key_value_rank):
        yield _saved(spec, own * rank, (), "qkv_linear")
        yield _operand(spec, own * rank, again if spec.fused_norms else (), "qkv_linear")
    yield _saved(spec, own * latent.rotary_width, (), "qkv_linear")
    heads = spec.micro_batch_tokens * spec.shape.heads // spec.parallelism.tensor
    key = latent.head_width + latent.rotary_width
    for width in (key, key, latent.value_width):
        yield _saved(spec, heads * width, again, "core_attn")
    yield from _attended(spec, heads * latent.value_width)


def _scores(spec: RunSpec) -> _Tensor:
    """Softmax statistics if attention is fused, else softmax, dropout mask and dropout output."""
    heads, own = spec.shape.heads // spec.parallelism.tensor, ("core_attn",)
    if spec.fused_attention:
        statistics = heads * spec.micro_batch_tokens
        return _Tensor(_FP32_BYTES * statistics, statistics, own, own)
    element = spec.element_bytes
    bytes_a_score = 2 * element + 1 if spec.dropout else element
    scores = heads * spec.micro_batch_tokens * spec.shape.seq_length
    return _Tensor(bytes_a_score * scores, scores, own, own)


def _mlp_tensors(spec: RunSpec, ffn: int, modules: tuple[str, ...]) -> Iterator[_Tensor]:
    """Both wide tensors."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    yield _saved(
        spec, spec.micro_batch_tokens * (ffn * (2 if shape.gated else 1) // tensor), modules
    )
    yield _operand(spec, spec.micro_batch_tokens * ffn // tensor, modules)


def _expert_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """The busiest rank's routed tokens as its experts read them, both wide tensors, and the router's
    scores.

    Dispatching, permuting and putting back in order save where each token went, and no tokens
    (Transformer Engine, `pytorch/permutation.py`: `row_id_map`; Megatron, `fused_a2a.py`: handles). An
    activation that no kernel multiplies with its probabilities is saved for their gradients
    (`experts.py: bias_act_func`), and what is clamped before as well as behind.
    """
    shape, split = spec.shape, spec.parallelism.effective_expert_tensor
    own, inside = spec.micro_batch_tokens // spec.sequence_shards, ("moe",)
    routed = round(own * split * shape.experts_per_token * spec.expert_receive_ratio)
    ffn = shape.expert_ffn_hidden // split
    first = shape.expert_ffn_hidden * (2 if shape.gated else 1) // split
    hidden = shape.latent_experts or shape.hidden  # Whole, as column-parallel layers read it.
    fused = "fused_group_mlp"
    permuted, wide = (fused,) * 2 if fused in spec.offload.modules else ("expert_fc1", "moe_act")
    yield _operand(spec, routed * hidden, inside, permuted)
    yield _saved(spec, routed * first, inside, wide)
    if shape.clamps_activations:
        yield _saved(spec, routed * first, ("moe", "moe_act"))
    if not shape.gated:
        yield _saved(spec, routed * ffn, ("moe", "moe_act"))
    yield _operand(spec, routed * ffn, ("moe", "moe_act"), fused)
    if shape.latent_experts:
        yield _saved(spec, own * shape.latent_experts, inside)
    scores = spec.micro_batch_tokens * shape.experts // spec.sequence_shards
    yield _Tensor(2 * _FP32_BYTES * scores, scores, inside)
    if shape.shared_expert_ffn:
        yield from _mlp_tensors(spec, shape.shared_expert_ffn, ("moe", "shared_experts"))

"""Activations that forward stores for backward, tensor by tensor: on the device, on its host, or
recomputed.

The formulas are arXiv:2205.05198's equations 1 to 4, written per tensor instead of per coefficient,
so that other widths, dtypes, gated MLPs, grouped queries and training without dropout follow. At
h→4h, two bytes and dropout, the sum is the paper's sbh(34 + 5as/h), under TP sbh(10 + 24/t +
5as/(ht)), and under TP with SP (sbh/t)(34 + 5as/h).
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
"""Bytes per element of a quantised operand, scales included."""


def layer_activation_bytes(spec: RunSpec) -> int:
    """Return the bytes that one layer of one rank stores per micro batch, on the device or on its
    host.

    They are the layer's input and all tensors that backward does not recompute. With full
    recomputation they are the input of one checkpoint.
    """
    if spec.recompute.is_full:
        inputs = [
            times * (2 if kind.shape.blocks == MTP else 1) for times, kind in spec.block_specs
        ]
        return sum(inputs) * residual_bytes(spec)
    return _layer_bytes(spec.one_layer_per_stage)


@lru_cache(maxsize=4096)
def _layer_bytes(spec: RunSpec) -> int:
    """Return the bytes that one layer stores per micro batch without full recomputation."""
    if len(spec.shape.blocks) > 1:
        return sum(times * _layer_bytes(kind) for times, kind in spec.block_specs)
    again = spec.recompute.modules
    return sum(tensor.size for tensor in _tensors(spec) if again.isdisjoint(tensor.modules))


def chunk_activation_bytes(spec: RunSpec, layers: int, dense: int = 0) -> int:
    """Return the bytes that a virtual stage of `layers` layers stores on the device per micro
    batch.

    The first `dense` layers are dense. All offloaded tensors are taken to be those of layers with
    experts.
    """
    checkpoints = spec.recompute.layers_per_checkpoint(layers)
    recomputed = sum(checkpoints)
    stored = len(checkpoints) * layer_activation_bytes(spec) if checkpoints else 0
    dense_kept = max(0, dense - recomputed)
    without_recompute = spec.without_recompute if spec.recompute.is_full else spec
    if layers_with_experts := layers - recomputed - dense_kept:
        stored += layers_with_experts * layer_activation_bytes(without_recompute)
    if dense_kept:
        stored += dense_kept * layer_activation_bytes(without_recompute.with_dense_layers)
    return stored - offloaded_bytes(spec, layers).freed if spec.offload else stored


def recomputed_bytes(spec: RunSpec, layers: int = 1) -> int:
    """Return the peak of the bytes that backward recomputes in a virtual stage of `layers` layers.

    Backward reaches the recomputed layers last. Activations of layers that it has freed by then
    make room for one checkpoint's layers, which are recomputed together.
    """
    if spec.recompute == Recompute.NONE:
        return 0
    if len(spec.shape.blocks) > 1:
        return max(recomputed_bytes(kind) for _, kind in spec.block_specs)
    full = layer_activation_bytes(spec.without_recompute)
    stored, checkpoints = layer_activation_bytes(spec), spec.recompute.layers_per_checkpoint(layers)
    if not checkpoints:
        return 0 if spec.recompute.is_full else full - stored
    freed = (layers - sum(checkpoints)) * full
    # Of checkpoints of one size the last needs most: nothing of the others is free then.
    backward = checkpoints[::-1]
    needed = (size * full - (1 + backward.index(size)) * stored for size in set(checkpoints))
    return max(0, max(needed) - freed)


class Offloaded(NamedTuple):
    """Offloaded bytes per micro batch."""

    freed: int = 0
    """Bytes that the device no longer stores."""
    copied: int = 0
    """Bytes copied to the host and back. A tensor that two modules store counts twice, and
    recomputed tensors count too.
    """


def offloaded_bytes(spec: RunSpec, layers: int, first: bool = False) -> Offloaded:
    """Return the bytes that a virtual stage of `layers` layers offloads to the host per micro
    batch.

    Groups of tensors, one per module and layer, are offloaded in forward's order up to the
    requested fraction. With `first`, for the micro batch and virtual stage that backward begins
    with, the last group of each module stays on the device
    (`PipelineOffloadManager.post_warmup_callback`). If full layers are offloaded, they go from the
    first layer on (Transformer Engine, `cpu_offload.py`).
    """
    groups = _offloaded_modules(spec)
    if not groups:
        return Offloaded()
    if spec.offload.layers:
        count = min(spec.offload.layers, layers)
    else:
        count = (layers - first) * len(groups)
        count -= int(count * (1 - spec.offload.fraction))
    full_layers, remaining_groups = divmod(max(0, count), len(groups))
    return Offloaded(
        *(
            full_layers * sum(sizes) + sum(sizes[:remaining_groups])
            for sizes in zip(*groups, strict=True)
        )
    )


def _offloaded_modules(spec: RunSpec) -> list[Offloaded]:
    """Return the offloaded bytes of one layer by module, in forward's order."""
    offload = spec.offload
    if not offload:
        return []
    freed, copied = Counter[str](), Counter[str]()
    for tensor in _tensors(spec):
        if tensor.elements < offload.min_elements:
            continue
        # Whatever is saved in a whole layer goes with it.
        savers = tensor.savers if not offload.layers else (OFFLOAD_MODULES[0],)
        offloading = [name for name in savers if offload.layers or name in offload.modules]
        for name in offloading:
            copied[name] += tensor.size
        if (
            savers
            and len(offloading) == len(savers)
            and not spec.recompute.recomputes(*tensor.modules)
        ):
            freed[offloading[-1]] += tensor.size
    return [Offloaded(freed[name], copied[name]) for name in OFFLOAD_MODULES if copied[name]]


def residual_bytes(spec: RunSpec) -> int:
    """Return the bytes of one hidden state of one micro batch on one rank: a layer's input, or a
    pipeline message.
    """
    return spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards


class _Tensor(NamedTuple):
    """A tensor that forward stores for backward."""

    size: int
    """Bytes."""
    elements: int
    modules: tuple[str, ...] = ()
    """Modules of `--recompute-modules` that recompute the tensor; empty if only full recomputation
    does.
    """
    savers: tuple[str, ...] = ()
    """Modules of `--offload-modules` that store the tensor, in forward's order. The tensor leaves
    the device if all of them are offloaded.
    """


def _stored_tensor(
    spec: RunSpec, elements: int, modules: tuple[str, ...] = (), *savers: str
) -> _Tensor:
    """Return a stored tensor in the type of activations."""
    return _Tensor(spec.element_bytes * elements, elements, modules, savers)


def _linear_input(
    spec: RunSpec, elements: int, modules: tuple[str, ...] = (), *savers: str
) -> _Tensor:
    """Return the input of a linear layer as stored for the gradient of its weight.

    A quantised input is stored only in the layout that backward reads (Transformer Engine,
    `pytorch/module/linear.py`).
    """
    if not spec.fp8_recipe:
        return _stored_tensor(spec, elements, modules, *savers)
    return _Tensor(int(FP8_RECIPE_BYTES[spec.fp8_recipe] * elements), elements, modules, savers)


def _tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of a layer of one kind, its input first."""
    if spec.shape.blocks == MTP:
        yield from _mtp_joining_tensors(spec)
        return
    yield from _norm_and_dropout_tensors(spec)
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
    """Return, for each norm of a layer of one kind, the modules that recompute its output.

    Transformer Engine's dense linear layers contain the preceding norm. There `layernorm`
    recomputes nothing (`gpt_layer_specs.py`: `IdentityOp`), and `mlp` recomputes the norm too.
    Norms before experts and latent attention are layers of their own.
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
    """Return the number of products in a norm, each of which stores its input.

    On a CPU, PyTorch's RMSNorm scales the hidden state and then multiplies it with the weight
    (`aten/src/ATen/native/layer_norm.cpp`).
    """
    return 2 if spec.shape.rms_norm and spec.device is DeviceKind.CPU else 1


def _norm_and_dropout_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield inputs and outputs of norms and masks of dropouts, which SP splits and TP does not.

    Outputs are inputs of linear layers and may be quantised; the input of a router is not.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards
    steps = norm_steps(spec)
    norms = norm_modules(spec)
    for index, modules in enumerate(norms):
        attends = index == 0 and spec.shape.blocks in ("", ATTENTION)
        inside = ("qkv_linear",) if attends else ()
        alone = ("attn_norm",) if attends else ("mlp_norm",)
        yield _stored_tensor(spec, elements, (), *(alone if modules == _ALONE else inside))
        routed = spec.shape.experts and index == len(norms) - 1
        yield (_stored_tensor if routed else _linear_input)(spec, elements, modules, *inside)
        if steps > 1:
            yield _stored_tensor(spec, elements, modules)
    if spec.dropout:
        yield _Tensor(spec.shape.residual_additions * elements, elements)


def _mtp_joining_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of a layer of multi-token prediction besides those of its
    transformer layer.

    They are the inputs of three norms (embeddings, preceding hidden states, the layer's output),
    the projection's input, which is as wide as the first two together, and its part of the output
    layer's input, which is one tensor for all MTP layers (`multi_token_prediction.py`). With
    recomputation, only the first two norms' inputs and the output layer's input are stored; one of
    them is counted with the layer.

    The layer's input is a view of the projection's output, which sequence parallelism does not
    split.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden
    elements_per_rank = elements // spec.sequence_shards
    yield _stored_tensor(spec, 4 * elements_per_rank)
    yield _linear_input(spec, 2 * elements_per_rank)
    yield _stored_tensor(spec, elements - elements_per_rank)


def _mamba_tensors(spec: RunSpec, mamba: Mamba) -> Iterator[_Tensor]:
    """Yield the stored tensors of a Mamba-2 mixer: outputs of the input projection and of the scan,
    and the output projection's input.

    Backward recomputes convolution and states (`mamba_ssm: mamba_split_conv1d_scan_combined`).
    """
    tensor = spec.parallelism.tensor
    yield _stored_tensor(
        spec, spec.micro_batch_tokens * (mamba.projected_columns + mamba.width) // tensor
    )
    yield _linear_input(spec, spec.micro_batch_tokens * mamba.width // tensor)


def _attention_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of attention without latent projections: Q, K, V and the output."""
    shape = spec.shape
    # Unfused products take K and V repeated for each head (`repeat_interleave`).
    repeats = not spec.fused_attention and not spec.recompute.recomputes("core_attn")
    keys = shape.heads if repeats else shape.query_groups
    tensor = spec.parallelism.tensor
    for heads in (shape.heads, keys, keys):
        yield _stored_tensor(
            spec, spec.micro_batch_tokens * heads * shape.head_width // tensor, (), "core_attn"
        )
    if _keeps_whole_projection(spec) and keys == shape.query_groups:
        replaced = (shape.heads + keys) * shape.head_width
        yield _stored_tensor(spec, spec.micro_batch_tokens * replaced // tensor, (), "core_attn")
    attended = spec.micro_batch_tokens * shape.heads * shape.head_width // tensor
    yield from _attention_output(spec, attended)
    if spec.parallelism.context > 1 and spec.cp_comm_type == "a2a":
        # As heads have it, before it goes back to where its tokens are (`context_parallel.py`).
        yield _stored_tensor(spec, attended, (), "core_attn")


def _keeps_whole_projection(spec: RunSpec) -> bool:
    """Return True if Q and K are stored twice: before rotation in the projection's output, and
    rotated.

    The projection's output stays because V is a view of it. Transformer Engine's attention copies V
    (`dot_product_attention/utils.py: get_qkv_layout`), as does the dry run, and context parallelism
    gathers V; PyTorch's attention takes the view.
    """
    torchs = spec.device is DeviceKind.CPU or spec.fused_attention
    rotary = not spec.shape.positions
    return torchs and rotary and not spec.fused_norms and spec.parallelism.context == 1


def _attention_output(spec: RunSpec, elements: int) -> Iterator[_Tensor]:
    """Yield attention's output, which fused attention stores, and the output projection's quantised
    copy.
    """
    storing_modules = ("core_attn",) if spec.fused_attention else ()
    if not spec.fp8_recipe:
        yield _stored_tensor(spec, elements, (), *storing_modules, "attn_proj")
        return
    yield _stored_tensor(spec, elements, ("core_attn",), *storing_modules)
    yield _linear_input(spec, elements, (), "attn_proj")


def _latent_attention_tensors(spec: RunSpec, latent: LatentAttention) -> Iterator[_Tensor]:
    """Yield the stored tensors of latent attention.

    They are the low-rank queries, keys and values before and after a norm, and the full queries,
    keys and values with the rotary part repeated per head, as they are multiplied
    (`multi_latent_attention.py`).
    """
    tokens, modules = spec.micro_batch_tokens // spec.sequence_shards, ("mla_up_proj",)
    for rank in (latent.query_rank, latent.key_value_rank):
        yield _stored_tensor(spec, tokens * rank, (), "qkv_linear")
        yield _linear_input(spec, tokens * rank, modules if spec.fused_norms else (), "qkv_linear")
    yield _stored_tensor(spec, tokens * latent.rotary_width, (), "qkv_linear")
    heads = spec.micro_batch_tokens * spec.shape.heads // spec.parallelism.tensor
    key = latent.head_width + latent.rotary_width
    for width in (key, key, latent.value_width):
        yield _stored_tensor(spec, heads * width, modules, "core_attn")
    yield from _attention_output(spec, heads * latent.value_width)


def _scores(spec: RunSpec) -> _Tensor:
    """Return the softmax statistics of fused attention, or else softmax, dropout mask and dropout
    output.
    """
    heads, modules = spec.shape.heads // spec.parallelism.tensor, ("core_attn",)
    if spec.fused_attention:
        statistics = heads * spec.micro_batch_tokens
        return _Tensor(_FP32_BYTES * statistics, statistics, modules, modules)
    element = spec.element_bytes
    bytes_per_score = 2 * element + 1 if spec.dropout else element
    scores = heads * spec.micro_batch_tokens * spec.shape.seq_length
    return _Tensor(bytes_per_score * scores, scores, modules, modules)


def _mlp_tensors(spec: RunSpec, ffn: int, modules: tuple[str, ...]) -> Iterator[_Tensor]:
    """Yield both wide tensors of an MLP: the input and the output of its activation."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    yield _stored_tensor(
        spec, spec.micro_batch_tokens * (ffn * (2 if shape.gated else 1) // tensor), modules
    )
    yield _linear_input(spec, spec.micro_batch_tokens * ffn // tensor, modules)


def _expert_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of experts on the busiest rank.

    They are routed tokens, both wide tensors, and the router's scores. Dispatching and permuting
    store where each token went, and no tokens (Transformer Engine, `pytorch/permutation.py`:
    `row_id_map`; Megatron, `fused_a2a.py`: handles). An activation that no kernel multiplies with
    its probabilities is stored for their gradients (`experts.py: bias_act_func`). A clamped
    activation is stored before and after clamping.
    """
    shape, split = spec.shape, spec.parallelism.effective_expert_tensor
    tokens, modules = spec.micro_batch_tokens // spec.sequence_shards, ("moe",)
    routed = round(tokens * split * shape.experts_per_token * spec.expert_receive_ratio)
    ffn = shape.expert_ffn_hidden // split
    first = shape.expert_ffn_hidden * (2 if shape.gated else 1) // split
    hidden = shape.latent_experts or shape.hidden  # Whole, as column-parallel layers read it.
    fused = "fused_group_mlp"
    permuted, wide = (fused,) * 2 if fused in spec.offload.modules else ("expert_fc1", "moe_act")
    yield _linear_input(spec, routed * hidden, modules, permuted)
    yield _stored_tensor(spec, routed * first, modules, wide)
    if shape.clamps_activations:
        yield _stored_tensor(spec, routed * first, ("moe", "moe_act"))
    if not shape.gated:
        yield _stored_tensor(spec, routed * ffn, ("moe", "moe_act"))
    yield _linear_input(spec, routed * ffn, ("moe", "moe_act"), fused)
    if shape.latent_experts:
        yield _stored_tensor(spec, tokens * shape.latent_experts, modules)
    scores = spec.micro_batch_tokens * shape.experts // spec.sequence_shards
    yield _Tensor(2 * _FP32_BYTES * scores, scores, modules)
    if shape.shared_expert_ffn:
        yield from _mlp_tensors(spec, shape.shared_expert_ffn, ("moe", "shared_experts"))

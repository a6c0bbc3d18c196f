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
from parakit.costs.adapters import list_adapted_linears

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
    """Return the bytes that one layer stores on one rank per micro batch, for its backward.

    The bytes are those of the layer's input and of all tensors that backward does not recompute. Tensors that are
    offloaded to the host are included. With full recomputation only the input of one checkpoint is counted.
    """
    if not spec.recompute.is_full:
        return _layer_bytes(spec.one_layer_per_stage)
    # A block that begins a layer of multi-token prediction has two inputs: hidden states and the
    # embeddings of the following tokens.
    inputs = sum(
        times * (2 if block_spec.shape.blocks == MTP else 1)
        for times, block_spec in spec.block_specs
    )
    return inputs * residual_bytes(spec)


@lru_cache(maxsize=4096)
def _layer_bytes(spec: RunSpec) -> int:
    """Return the bytes that one layer stores per micro batch without full recomputation."""
    if len(spec.shape.blocks) > 1:
        return sum(times * _layer_bytes(block_spec) for times, block_spec in spec.block_specs)
    recomputed_modules = spec.recompute.modules
    return sum(
        tensor.size for tensor in _tensors(spec) if recomputed_modules.isdisjoint(tensor.modules)
    )


def chunk_activation_bytes(spec: RunSpec, layers: int, dense: int = 0) -> int:
    """Return the bytes that a virtual stage of `layers` layers stores on the device per micro
    batch.

    The first `dense` layers are dense, and the others have experts. Only layers with experts are assumed to be
    offloaded.
    """
    # Full recomputation covers the first layers of the stage. Each of its checkpoints stores one
    # input. The layers after the last checkpoint store all activations.
    checkpoints = spec.recompute.layers_per_checkpoint(layers)
    recomputed_layers = sum(checkpoints)
    stored_bytes = len(checkpoints) * layer_activation_bytes(spec) if checkpoints else 0
    stored_dense_layers = max(0, dense - recomputed_layers)
    stored_other_layers = layers - recomputed_layers - stored_dense_layers
    storing_spec = spec.without_recompute if spec.recompute.is_full else spec
    if stored_other_layers:
        stored_bytes += stored_other_layers * layer_activation_bytes(storing_spec)
    if stored_dense_layers:
        stored_bytes += stored_dense_layers * layer_activation_bytes(storing_spec.with_dense_layers)
    if spec.offload:
        stored_bytes -= offloaded_bytes(spec, layers).freed
    return stored_bytes


def recomputed_bytes(spec: RunSpec, layers: int = 1) -> int:
    """Return the bytes by which recomputation in backward raises the peak of a virtual stage of
    `layers` layers.

    The result is 0 if nothing is recomputed. The layers of one checkpoint are recomputed together. Backward
    reaches the recomputed layers last, so the activations that backward has freed by then are subtracted.
    """
    if spec.recompute == Recompute.NONE:
        return 0
    if len(spec.shape.blocks) > 1:
        return max(recomputed_bytes(block_spec) for _, block_spec in spec.block_specs)
    full_layer_bytes = layer_activation_bytes(spec.without_recompute)
    stored_bytes = layer_activation_bytes(spec)
    if not spec.recompute.is_full:
        return full_layer_bytes - stored_bytes
    checkpoints = spec.recompute.layers_per_checkpoint(layers)
    if not checkpoints:
        return 0
    layers_after_checkpoints = layers - sum(checkpoints)
    freed_bytes = layers_after_checkpoints * full_layer_bytes
    # Backward recomputes the last checkpoint first. By then it has freed the inputs of that
    # checkpoint and of those already passed. Among checkpoints with equally many layers, the first
    # in backward needs the most memory, so one checkpoint of each size is enough.
    in_backward_order = checkpoints[::-1]
    needed_bytes = 0
    for size in set(checkpoints):
        freed_inputs = 1 + in_backward_order.index(size)
        needed_bytes = max(needed_bytes, size * full_layer_bytes - freed_inputs * stored_bytes)
    return max(0, needed_bytes - freed_bytes)


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

    Without offloading all figures are 0. Each module of each layer has one group of tensors. Groups are
    offloaded in forward's order up to the requested fraction. If full layers are offloaded instead, offloading
    begins with the first layer (Transformer Engine, `cpu_offload.py`).

    Args:
        first: True for the micro batch and virtual stage with which backward begins. The last group of each
            module then stays on the device (`PipelineOffloadManager.post_warmup_callback`).
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
    freed = full_layers * sum(group.freed for group in groups)
    freed += sum(group.freed for group in groups[:remaining_groups])
    copied = full_layers * sum(group.copied for group in groups)
    copied += sum(group.copied for group in groups[:remaining_groups])
    return Offloaded(freed, copied)


def _offloaded_modules(spec: RunSpec) -> list[Offloaded]:
    """Return the offloaded bytes of one layer, one entry per module, in forward's order.

    Modules without an offloaded tensor have no entry. The list is empty without offloading.
    """
    offload = spec.offload
    if not offload:
        return []
    freed, copied = Counter[str](), Counter[str]()
    for tensor in _tensors(spec):
        if tensor.elements < offload.min_elements:
            continue
        if offload.layers:
            # A layer that is offloaded as one unit takes all its tensors with it. They are counted
            # under a single module.
            savers: tuple[str, ...] = OFFLOAD_MODULES[:1]
            offloading = savers
        else:
            savers = tensor.savers
            offloading = tuple(name for name in savers if name in offload.modules)
        for name in offloading:
            copied[name] += tensor.size
        # A tensor leaves the device only with the last module that stores the tensor.
        all_offload = bool(savers) and len(offloading) == len(savers)
        if all_offload and not spec.recompute.recomputes(*tensor.modules):
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
    spec: RunSpec,
    elements: int,
    linears: tuple[str, ...],
    modules: tuple[str, ...] = (),
    *savers: str,
) -> _Tensor:
    """Return the stored input of a linear layer, from which backward computes the weight's gradient.

    With FP8 only the quantised input is stored, in the layout that backward reads (Transformer Engine,
    `pytorch/module/linear.py`). A frozen layer stores no input (`backward_needs_input` there), but its adapter does,
    in half precision. Without an adapter the result is an empty tensor.

    Args:
        linears: Names in Megatron-Core of the linear layers that read this input.
        modules: Modules whose recomputation also recomputes this input, so that it need not be stored.
        savers: Modules that store the input and can offload it.
    """
    if spec.lora and not set(linears).intersection(spec.lora.targets):
        return _Tensor(0, 0, modules, savers)
    if spec.lora or not spec.fp8_recipe:
        return _stored_tensor(spec, elements, modules, *savers)
    return _Tensor(int(FP8_RECIPE_BYTES[spec.fp8_recipe] * elements), elements, modules, savers)


def _norm_output(
    spec: RunSpec,
    elements: int,
    linears: tuple[str, ...],
    modules: tuple[str, ...] = (),
    *savers: str,
) -> _Tensor:
    """Return the stored output of a norm, which is the input of linear layers, as `_linear_input` does.

    `elements` are those of one sequence-parallel rank. An adapter reads and stores the gathered output of all these
    ranks (`megatron/bridge/peft/utils.py: return_layernorm_output_gathered`).
    """
    gathered_elements = elements * spec.sequence_shards if spec.lora else elements
    return _linear_input(spec, gathered_elements, linears, modules, *savers)


def _adapter_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the outputs of the first matrices of a layer's adapters, which backward needs for the second matrices."""
    if spec.lora is None:
        return
    tokens, shape = spec.micro_batch_tokens, spec.shape
    for linear in list_adapted_linears(shape, spec.lora):
        modules: tuple[str, ...] = ()
        rows = tokens
        if linear.component == "experts":
            modules, rows = ("moe",), _routed_tokens(spec)
        elif linear.component == "dense_mlp":
            modules = ("moe", "shared_experts") if shape.experts else ("mlp",)
        yield _stored_tensor(spec, rows * spec.lora.rank, modules)


def _tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the tensors that one layer stores for backward, the layer's input first.

    The layer of `spec` has one kind of blocks: attention with MLP or experts, Mamba, or multi-token prediction.
    """
    if spec.shape.blocks == MTP:
        yield from _mtp_joining_tensors(spec)
        return
    yield from _norm_and_dropout_tensors(spec)
    yield from _adapter_tensors(spec)
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


_SEPARATE_NORM = ("layernorm",)
"""The module that recomputes the output of a norm that is a layer of its own."""


def norm_modules(spec: RunSpec) -> tuple[tuple[str, ...], ...]:
    """Return one tuple per norm of a layer: the modules whose recomputation recomputes the norm's output.

    Transformer Engine's dense linear layers contain the preceding norm. For such a norm `layernorm`
    recomputes nothing (`gpt_layer_specs.py`: `IdentityOp`), and `mlp` recomputes the norm before the MLP.
    Norms before experts and latent attention are layers of their own.
    """
    shape = spec.shape
    before_attention: tuple[str, ...] = ()
    if shape.latent or not spec.fused_norms:
        before_attention = _SEPARATE_NORM
    before_mlp: tuple[str, ...] = ("mlp",)
    if shape.experts or not spec.fused_norms:
        before_mlp = _SEPARATE_NORM
    if not shape.blocks:
        return before_attention, before_mlp
    by_block = {ATTENTION: before_attention, MLP: before_mlp, EXPERTS: before_mlp}
    return (by_block.get(shape.blocks, ()),) * shape.norms_per_layer


def norm_steps(spec: RunSpec) -> int:
    """Return the number of products in a norm, each of which stores its input.

    On a CPU, PyTorch's RMSNorm scales the hidden state and then multiplies it with the weight
    (`aten/src/ATen/native/layer_norm.cpp`).
    """
    return 2 if spec.shape.rms_norm and spec.device is DeviceKind.CPU else 1


_ATTENTION_INPUTS = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers that read the output of the norm before attention, with and without latent attention."""


def _norm_and_dropout_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored inputs and outputs of norms, and the stored masks of dropouts.

    Sequence parallelism splits these tensors, and tensor parallelism alone does not. A norm's output is the
    input of a linear layer and may be stored in FP8. The input of a router is not quantised.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards
    steps = norm_steps(spec)
    modules_by_norm = norm_modules(spec)
    for index, modules in enumerate(modules_by_norm):
        is_before_attention = index == 0 and spec.shape.blocks in ("", ATTENTION)
        is_before_router = spec.shape.experts and index == len(modules_by_norm) - 1
        # The linear layer that follows the norm stores the norm's output. A fused norm is a part
        # of that layer, which then stores the norm's input too.
        output_savers = ("qkv_linear",) if is_before_attention else ()
        input_savers = output_savers
        if modules == _SEPARATE_NORM:
            input_savers = ("attn_norm",) if is_before_attention else ("mlp_norm",)
        yield _stored_tensor(spec, elements, (), *input_savers)
        if is_before_router:
            yield _stored_tensor(spec, elements, modules, *output_savers)
        else:
            linears = _ATTENTION_INPUTS if is_before_attention else ("linear_fc1",)
            yield _norm_output(spec, elements, linears, modules, *output_savers)
        if steps > 1:
            yield _stored_tensor(spec, elements, modules)
    if spec.dropout:
        yield _Tensor(spec.shape.residual_additions * elements, elements)


def _mtp_joining_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors that a layer of multi-token prediction adds to those of its transformer layer.

    The source is `multi_token_prediction.py` of Megatron 0.19.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden
    elements_per_rank = elements // spec.sequence_shards
    # Three norms store their inputs: the embeddings, the preceding hidden states and the layer's output. The output
    # layer gets the outputs of all MTP layers in one tensor, of which this layer's output is a part.
    num_hidden_states = 4
    yield _stored_tensor(spec, num_hidden_states * elements_per_rank)
    # The input of the projection is the embeddings beside the hidden states, so it is twice as wide.
    yield _linear_input(spec, 2 * elements_per_rank, ("eh_proj",))
    # The transformer layer's input, which that layer counts as one rank's part, is a view of the projection's output.
    # Sequence parallelism does not split that output, so the other ranks' parts are stored as well.
    yield _stored_tensor(spec, elements - elements_per_rank)


def _mamba_tensors(spec: RunSpec, mamba: Mamba) -> Iterator[_Tensor]:
    """Yield the stored tensors of a Mamba-2 mixer.

    The first entry counts the input projection's output together with the scan's output. The second entry is the
    input of the output projection. Backward recomputes convolution and states, which are therefore not stored
    (`mamba_ssm: mamba_split_conv1d_scan_combined`).
    """
    tokens, tensor = spec.micro_batch_tokens, spec.parallelism.tensor
    yield _stored_tensor(spec, tokens * (mamba.projected_columns + mamba.width) // tensor)
    yield _linear_input(spec, tokens * mamba.width // tensor, ("out_proj",))


def _attention_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of attention without latent projections: Q, K, V and the output.

    Further tensors are yielded if Q and K are stored twice, and for `a2a` context parallelism.
    """
    shape, tokens, tensor = spec.shape, spec.micro_batch_tokens, spec.parallelism.tensor
    # Attention without a fused kernel repeats K and V for every head (`repeat_interleave`) and
    # stores the repeated tensors.
    repeats = not spec.fused_attention and not spec.recompute.recomputes("core_attn")
    key_heads = shape.heads if repeats else shape.query_groups
    for heads in (shape.heads, key_heads, key_heads):
        yield _stored_tensor(spec, tokens * heads * shape.head_width // tensor, (), "core_attn")
    if _stores_full_projection(spec) and key_heads == shape.query_groups:
        width = (shape.heads + key_heads) * shape.head_width
        yield _stored_tensor(spec, tokens * width // tensor, (), "core_attn")
    output_elements = tokens * shape.heads * shape.head_width // tensor
    yield from _attention_output(spec, output_elements)
    if spec.parallelism.context > 1 and spec.cp_comm_type == "a2a":
        # All-to-all context parallelism also stores the output as it is split by heads, before the
        # second all-to-all splits it by tokens (`context_parallel.py`).
        yield _stored_tensor(spec, output_elements, (), "core_attn")


def _stores_full_projection(spec: RunSpec) -> bool:
    """Return True if Q and K are stored twice: unrotated in the projection's output, and rotated.

    PyTorch's attention stores V as a view, which keeps the full output of the projection in memory. Transformer
    Engine's attention copies V (`dot_product_attention/utils.py: get_qkv_layout`). The dry run copies V too,
    and context parallelism gathers V into a new tensor. In these cases the result is False.
    """
    is_torch_attention = spec.device is DeviceKind.CPU or spec.fused_attention
    is_rotary = not spec.shape.positions
    has_own_layers = not spec.fused_norms
    return is_torch_attention and is_rotary and has_own_layers and spec.parallelism.context == 1


def _attention_output(spec: RunSpec, elements: int) -> Iterator[_Tensor]:
    """Yield the stored output of attention, which is the input of the output projection.

    Without FP8 and with LoRA this is one tensor. With FP8 the output itself and its quantised copy are stored.
    """
    storing_modules = ("core_attn",) if spec.fused_attention else ()
    if spec.lora or not spec.fp8_recipe:
        yield _stored_tensor(spec, elements, (), *storing_modules, "attn_proj")
        return
    yield _stored_tensor(spec, elements, ("core_attn",), *storing_modules)
    yield _linear_input(spec, elements, ("linear_proj",), (), "attn_proj")


def _latent_attention_tensors(spec: RunSpec, latent: LatentAttention) -> Iterator[_Tensor]:
    """Yield the stored tensors of latent attention.

    Attention stores the low-rank queries, keys and values before and after a norm. It also stores the full queries,
    keys and values, in which each head has a copy of the rotary part (`multi_latent_attention.py`).
    """
    tokens, modules = spec.micro_batch_tokens // spec.sequence_shards, ("mla_up_proj",)
    normed_modules = modules if spec.fused_norms else ()
    for name, rank in (("q", latent.query_rank), ("kv", latent.key_value_rank)):
        linears = (f"linear_{name}_up_proj",)
        yield _stored_tensor(spec, tokens * rank, (), "qkv_linear")
        yield _norm_output(spec, tokens * rank, linears, normed_modules, "qkv_linear")
    yield _stored_tensor(spec, tokens * latent.rotary_width, (), "qkv_linear")
    head_rows = spec.micro_batch_tokens * spec.shape.heads // spec.parallelism.tensor
    key_width = latent.head_width + latent.rotary_width
    for width in (key_width, key_width, latent.value_width):
        yield _stored_tensor(spec, head_rows * width, modules, "core_attn")
    yield from _attention_output(spec, head_rows * latent.value_width)


def _scores(spec: RunSpec) -> _Tensor:
    """Return what attention stores of its scores, as one tensor.

    Fused attention stores only the softmax statistics. Unfused attention stores the softmax and, with dropout,
    also the dropout's mask and output.
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
    tokens, tensor = spec.micro_batch_tokens, spec.parallelism.tensor
    first_columns = ffn * (2 if spec.shape.gated else 1) // tensor
    yield _stored_tensor(spec, tokens * first_columns, modules)
    yield _linear_input(spec, tokens * ffn // tensor, ("linear_fc2",), modules)


def _routed_tokens(spec: RunSpec) -> int:
    """Return the tokens per micro batch that the experts of the busiest rank receive, once per chosen expert."""
    tokens, split = spec.micro_batch_tokens // spec.sequence_shards, spec.parallelism
    routed = tokens * split.effective_expert_tensor * spec.shape.experts_per_token
    return round(routed * spec.expert_receive_ratio)


def _expert_tensors(spec: RunSpec) -> Iterator[_Tensor]:
    """Yield the stored tensors of experts on the busiest rank.

    They are the routed tokens, the output of the first linear layer, the input of the second linear layer, and
    the router's scores. Dispatching and permuting store only the position of each token (Transformer Engine,
    `pytorch/permutation.py`: `row_id_map`; Megatron, `fused_a2a.py`: handles). Without a gated activation, no
    kernel fuses the multiplication with the probabilities. The activation is then stored for the gradients of
    the probabilities (`experts.py: bias_act_func`). A clamped activation is stored before and after clamping.
    Tensors of a shared expert follow last.
    """
    shape, split = spec.shape, spec.parallelism.effective_expert_tensor
    tokens, modules = spec.micro_batch_tokens // spec.sequence_shards, ("moe",)
    routed = _routed_tokens(spec)
    ffn = shape.expert_ffn_hidden // split
    first_columns = shape.expert_ffn_hidden * (2 if shape.gated else 1) // split
    # ETP does not split the hidden state, because column-parallel layers read all of it.
    hidden = shape.latent_experts or shape.hidden
    fused, activation_modules = "fused_group_mlp", ("moe", "moe_act")
    first_saver, activation_saver = "expert_fc1", "moe_act"
    if fused in spec.offload.modules:
        # One kernel computes the whole MLP and stores all of its tensors.
        first_saver = activation_saver = fused
    yield _linear_input(spec, routed * hidden, ("linear_fc1",), modules, first_saver)
    yield _stored_tensor(spec, routed * first_columns, modules, activation_saver)
    if shape.clamps_activations:
        yield _stored_tensor(spec, routed * first_columns, activation_modules)
    if not shape.gated:
        yield _stored_tensor(spec, routed * ffn, activation_modules)
    yield _linear_input(spec, routed * ffn, ("linear_fc2",), activation_modules, fused)
    if shape.latent_experts:
        yield _stored_tensor(spec, tokens * shape.latent_experts, modules)
    scores = spec.micro_batch_tokens * shape.experts // spec.sequence_shards
    yield _Tensor(2 * _FP32_BYTES * scores, scores, modules)
    if shape.shared_expert_ffn:
        yield from _mlp_tensors(spec, shape.shared_expert_ffn, ("moe", "shared_experts"))

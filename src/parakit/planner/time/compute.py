"""Seconds of computation and of memory traffic on one rank, for one micro batch.

A matrix product takes the longer of two times: its FLOPs at the achieved rate, and its operands' bytes at the
achieved memory bandwidth. Elementwise kernels take the time of their bytes. Kernels are Megatron's fused ones.
Figures that are called "measured" were measured on an H200 (../readings/README.md, "What an H200 showed").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

from parakit.config.model import MAMBA, MTP, Mamba
from parakit.config.peft import NF4_BITS, Lora
from parakit.config.replacing import replace
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.costs import (
    FP8_RECIPE_BYTES,
    LinearLayer,
    bytes_per_parameter,
    held_parameters,
    list_linears,
    logit_elements,
    offloaded_parameters,
    rank_tensors,
)
from parakit.planner.time.rates import DeviceRates
from parakit.planner.time.traffic import CHUNK, context_bytes, layer_bytes, scores_bytes

_ROW_REDUCTION_FACTOR = 1.4
"""Time of a pass that combines each row with a figure of the row, over the time of its bytes alone (measured: 2.5 TB/s,
where an exponential reads and writes 4.2)."""
_FORWARD_CROSS_ENTROPY_BYTES = 4 + 4 + 8 * _ROW_REDUCTION_FACTOR + 8 + 4 + 8 * _ROW_REDUCTION_FACTOR
"""Bytes per logit of the fp32 passes of `VocabParallelCrossEntropy`: copy, maximum, subtract, exponential, sum and
divide."""
_BACKWARD_CROSS_ENTROPY_BYTES = 8 * _ROW_REDUCTION_FACTOR + 4
_FUSED_CROSS_ENTROPY_PASSES = 5
"""Passes over the half-precision logits: they are read for the sum, then read and overwritten by their gradient, which
backward reads and scales (`te_parallel_cross_entropy`, flash-attn's `xentropy`)."""
_ADAM_BYTES = 28
"""Bytes per parameter of a fused Adam: it reads weight, both moments and gradient, and writes the first three."""
_TORCH_ADAM_BYTES = 80
"""Bytes per parameter of PyTorch's own AdamW, with a pass over all tensors for each operation (`torch/optim/adam.py:
_multi_tensor_adam`): decay 8, moments 12, 8 and 12, root and its two corrections 8 each, update 16."""
_NORM_AND_CLIP_BYTES = 4 + 8
_OFFLOADED_BYTES = 4
"""Bytes per offloaded parameter and direction: the gradient goes to the host and the weight comes back in fp32,
because copies that nothing waits for convert on the device (`aten/src/ATen/native/cuda/Copy.cu`)."""
_SECONDS_PER_RANDOM_NUMBER = 0.2e-9
"""Seconds of one processor per random number of dropout, in a kernel that torch.compile wrote (measured: bias, dropout
and addition of 42 million elements take 153 µs on 132 processors, where the bytes take 85). The TorchScript kernels of
devices before Hopper were not measured and count as 0."""
_INNER_SPLITS = (1, 2, 4)
"""Parts of the inner dimension that a product with few tiles can compute concurrently."""
_ACCUMULATED_BYTES = 8
"""Bytes per element of a gradient in fp32 that is read and written (`--gradient-accumulation-fusion`)."""
_PRODUCT_KERNEL_SECONDS = 3e-6
"""Start and end of a product's kernel (measured)."""
_WIDE_HEAD, _WIDEST_HEAD = 128, 256
"""Widths of heads that cuDNN trains on Blackwell: up to 128, keys of 192 with values of 128, and since 9.23 also 256.
Other heads go to FlashAttention 2 (Transformer Engine 2.3 to 2.18, `fused_attn.cpp: nvte_get_fused_attn_backend`;
cudnn-frontend issue 242)."""
_NARROW_HEAD_EXPONENT = 0.4
"""Exponent with which attention's rate falls on heads narrower than 128."""
_SHORT_SEQUENCE_KEYS = 720
"""Keys whose computation takes as long as start and end of a row of scores (measured, cuDNN and FlashAttention 2)."""
_ATTENTION_DROPOUT_FACTOR = 1.5
"""Time of attention with dropout over the time without it: the kernel draws a random number per score, and draws it
once more in backward (measured: 1,858 µs for 1,232 at a width of 80 and 1,024 keys)."""
_SECONDS_PER_DROPPED_SCORE = 2.3e-12
"""Seconds of forward and backward together to draw one random number per score on 132 processors, half of it in each
direction (measured: the 626 µs of `_ATTENTION_DROPOUT_FACTOR` for 512 heads)."""
_HOPPER_PROCESSORS = 132
_ATTENTION_BACKWARD_FACTOR = 2.5
"""Products in backward over those in forward, five to two: the scores are recomputed (arXiv:2205.14135)."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Computation time of one layer for one micro batch, in seconds by component.

    `*_recompute` is the part of forward that backward repeats.
    """

    forward_matmul: float
    matmul_recompute: float
    input_gradients: float
    weight_gradients: float
    forward_attention: float
    attention_recompute: float
    forward_memory: float
    memory_recompute: float
    backward_attention: float
    backward_memory: float

    @property
    def forward(self) -> float:
        """Seconds of forward, without recomputation."""
        return self.forward_matmul + self.forward_attention + self.forward_memory

    @property
    def backward(self) -> float:
        """Seconds of backward, with what is recomputed."""
        gradients = self.input_gradients + self.weight_gradients
        recompute = self.matmul_recompute + self.attention_recompute + self.memory_recompute
        return gradients + recompute + self.backward_attention + self.backward_memory


def layer_seconds(spec: RunSpec, rate: DeviceRates) -> LayerSeconds:
    """Return the computation times of one layer for one micro batch, without communication.

    All layers of `spec` must be of one kind. With LoRA, the layer's own weights have no gradients, and the products
    of the adapters are added.

    Args:
        spec: The run.
        rate: Rates that the device achieves.
    """
    layer = _layer_seconds_without_context(spec.without_cp_comm_type, rate)
    forward, backward = (moved / rate.bytes_per_second for moved in context_bytes(spec))
    if not backward:
        return layer
    recompute = forward if spec.recompute.recomputes("core_attn") else 0.0
    return replace(
        layer,
        forward_memory=layer.forward_memory + forward,
        memory_recompute=layer.memory_recompute + recompute,
        backward_memory=layer.backward_memory + backward,
    )


@lru_cache(maxsize=65536)
def _layer_seconds_without_context(spec: RunSpec, rate: DeviceRates) -> LayerSeconds:
    """Return a layer's times for one micro batch, without the memory traffic that context parallelism adds."""
    products = tuple(_list_products(spec))
    adapters = _AdapterTraffic()
    if spec.lora:
        adapters = _adapter_traffic(spec, spec.lora, products)
        products = _add_adapter_products(spec.lora, products)
    is_recomputed = [spec.recompute.recomputes(*product.modules) for product in products]
    has_recomputed_attention = spec.recompute.recomputes("core_attn")
    matmul = _product_times(spec, rate, products)
    attention, attention_backward = _attention_seconds(spec, rate)
    scores_forward, scores_backward = scores_bytes(spec)
    attention += scores_forward / rate.bytes_per_second
    moved = layer_bytes(spec, rate)
    cast_forward, cast_backward = _cast_bytes(products, rate)
    cast_recompute, _ = _cast_bytes(compress(products, is_recomputed), rate)
    drawing = _dropout_seconds(spec, rate)
    num_weights = sum(
        product.copies * product.inner * product.columns
        for product in products
        if product.is_trained
    )
    adding = num_weights * _seconds_per_added_gradient(spec, rate)
    return LayerSeconds(
        forward_matmul=sum(matmul.forward),
        matmul_recompute=sum(compress(matmul.forward, is_recomputed)),
        input_gradients=matmul.input_gradients,
        weight_gradients=matmul.weight_gradients,
        forward_attention=attention,
        attention_recompute=attention if has_recomputed_attention else 0.0,
        forward_memory=(moved.forward + cast_forward + adapters.forward) / rate.bytes_per_second
        + drawing,
        memory_recompute=(moved.recompute + cast_recompute + adapters.recompute)
        / rate.bytes_per_second
        + (drawing if spec.recompute.recomputes() else 0.0),
        backward_attention=attention_backward + scores_backward / rate.bytes_per_second,
        backward_memory=(moved.backward + cast_backward + adapters.backward) / rate.bytes_per_second
        + adding,
    )


class _ProductTimes(NamedTuple):
    """Seconds of a layer's matrix products."""

    forward: list[float]
    """Seconds per product, in the products' order."""
    input_gradients: float
    weight_gradients: float


def _product_times(spec: RunSpec, rate: DeviceRates, products: Sequence[_Product]) -> _ProductTimes:
    """Return the seconds of matrix products in forward and backward.

    Backward has two products per product of forward: one for the gradient of the input, and one for the gradient of the
    weight. Frozen weights have no gradients.
    """
    accumulates = not rate.execution.unfused_gradients

    def seconds(
        product: _Product, rows: int, inner: int, columns: int, accumulated: bool = False
    ) -> float:
        """Return the seconds of a matrix product with these sizes, in the kernel that `product` uses."""
        return product_seconds(
            rows,
            inner,
            columns,
            spec.element_bytes,
            rate,
            product.copies,
            product.quantized,
            accumulated,
        )

    return _ProductTimes(
        forward=[seconds(p, p.rows, p.inner, p.columns) for p in products],
        input_gradients=sum(seconds(p, p.rows, p.columns, p.inner) for p in products),
        weight_gradients=sum(
            seconds(p, p.inner, p.rows, p.columns, accumulates) for p in products if p.is_trained
        ),
    )


def _dropout_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Return the seconds to draw random numbers for a layer's hidden dropouts in forward.

    Backward draws no numbers, because it reads the stored masks. The time is 0 without dropout. It is also 0 on
    devices before Hopper, which have no compiled kernel for this.
    """
    if not (spec.dropout and rate.compiled):
        return 0.0
    numbers = (
        spec.micro_batch_tokens
        * spec.shape.hidden
        // spec.sequence_shards
        * spec.shape.residual_additions
    )
    return numbers * _SECONDS_PER_RANDOM_NUMBER / rate.processors


def _seconds_per_added_gradient(spec: RunSpec, rate: DeviceRates) -> float:
    """Return the seconds per element to add a weight's gradient to the sum of earlier micro batches.

    The time is 0 if the kernel of the matrix product adds the gradient itself. A time that was measured on this machine
    is added in any case.
    """
    measured = rate.measured.gradient_seconds / rate.core_fraction
    moved = spec.element_bytes + 2 * bytes_per_parameter(spec).gradients
    return measured + (moved / rate.bytes_per_second if rate.execution.unfused_gradients else 0.0)


def embedding_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Return the seconds of the embedding's memory traffic for one micro batch, forward and backward.

    Counted are the look-up, the positions, dropout and the scatter of gradients.
    """
    elements = spec.micro_batch_tokens * spec.shape.hidden
    seconds = 10 * spec.element_bytes * elements / rate.bytes_per_second
    measured = rate.measured.gradient_seconds
    return seconds + _vocabulary_table_elements(spec) * measured / rate.core_fraction


def head_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Return the seconds of output layer and loss for one micro batch: of matrix products, and of memory traffic.

    Both numbers cover forward and backward. Each MTP layer computes the output layer and the loss once more. It also
    reads its logits a second time, to count its correct predictions (`multi_token_prediction.py:
    _compute_mtp_acceptance_counts`).
    """
    predicted_tokens = spec.shape.predicted_tokens
    matmul = predicted_tokens * _output_layer_seconds(spec, rate)
    table_elements = 0 if spec.lora else predicted_tokens * _vocabulary_table_elements(spec)
    gradient_seconds = table_elements * _seconds_per_added_gradient(spec, rate)
    return matmul, _loss_seconds(spec, rate) + gradient_seconds


def _output_layer_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Return the seconds of the output layer's matrix products, forward and backward, for one predicted token.

    With LoRA the output layer is frozen, so its weight has no gradient.
    """
    tensor_parallel = spec.parallelism.tensor
    tokens, hidden = spec.micro_batch_tokens, spec.shape.hidden
    vocabulary = spec.shape.padded_vocabulary(tensor_parallel) // tensor_parallel
    if rate.measured.logit_seconds is not None:
        return (4 if spec.lora else 6) * tokens * hidden * vocabulary / rate.flops
    element_bytes = spec.element_bytes
    accumulates = not rate.execution.unfused_gradients
    forward = product_seconds(tokens, hidden, vocabulary, element_bytes, rate)
    input_gradient = product_seconds(tokens, vocabulary, hidden, element_bytes, rate)
    if spec.lora:
        return forward + input_gradient
    weight_gradient = product_seconds(
        hidden, tokens, vocabulary, element_bytes, rate, accumulated=accumulates
    )
    return forward + input_gradient + weight_gradient


def _loss_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Return the seconds per micro batch of the loss, and of counting MTP's correct predictions.

    With multi-token prediction (MTP) each token has several losses, and all are included.
    """
    logits = logit_elements(spec)
    loss_logits = spec.shape.predicted_tokens * logits
    seconds_per_logit = rate.measured.logit_seconds
    if seconds_per_logit is not None:
        return loss_logits * seconds_per_logit / rate.core_fraction
    loss_bytes = _loss_bytes_per_logit(spec) * loss_logits
    counting_bytes = spec.shape.total_mtp_layers * logits * spec.element_bytes
    return (loss_bytes + counting_bytes) / rate.bytes_per_second


def _loss_bytes_per_logit(spec: RunSpec) -> float:
    """Return the bytes per logit that the loss moves in forward and backward."""
    if spec.fused_loss or "cross_entropy" in spec.fused:
        return _FUSED_CROSS_ENTROPY_PASSES * spec.element_bytes
    moved: float = _FORWARD_CROSS_ENTROPY_BYTES + _BACKWARD_CROSS_ENTROPY_BYTES
    if spec.dtype != "fp32":
        moved += 2 * spec.element_bytes
    return moved


def _vocabulary_table_elements(spec: RunSpec) -> int:
    """Return the elements per rank of the embedding's weights, and of the output layer's.

    The gradient has as many elements. It is computed as a full tensor and added to those of earlier micro batches.
    """
    tensor = spec.parallelism.tensor
    return spec.shape.padded_vocabulary(tensor) * spec.shape.hidden // tensor


def optimizer_seconds(spec: RunSpec, rate: DeviceRates, pipeline_rank: int) -> float:
    """Return the seconds of the optimizer's update on a pipeline rank, without communication.

    The update is limited by memory traffic: of Adam, of clipping, of copies between precisions, and of setting
    gradients to zero.

    Raises:
        NoPeakError: A part of the optimizer is offloaded, and the rates of the host are unknown.
    """
    precision = bytes_per_parameter(spec)
    num_held, num_gradients = held_parameters(spec, pipeline_rank)
    measured = rate.measured
    if measured.parameter_seconds is not None:
        parameters = num_held * measured.parameter_seconds
        tensors = len(rank_tensors(spec, pipeline_rank)) * measured.tensor_seconds
        return (parameters + tensors) / rate.core_fraction
    gradient_copies = precision.gradient_copies and precision.gradients + 4 + 8
    weight_copies = precision.weights + 4 if precision.main_parameters else 0
    is_torch_adam = rate.execution.torch_kernels and "adamw" not in spec.fused
    # Moments in fewer than eight bytes per parameter are read and written in fewer bytes.
    adam = (_TORCH_ADAM_BYTES if is_torch_adam else _ADAM_BYTES) - 2 * (8 - precision.adam)
    moved_bytes = adam + _NORM_AND_CLIP_BYTES + gradient_copies + weight_copies
    num_offloaded = offloaded_parameters(spec, num_held)
    common = num_held * _NORM_AND_CLIP_BYTES + num_gradients * precision.gradients
    update_bytes = (num_held - num_offloaded) * (moved_bytes - _NORM_AND_CLIP_BYTES)
    update = update_bytes / rate.bytes_per_second
    if num_offloaded:
        update = _seconds_with_host_update(rate, update, num_offloaded)
    return common / rate.bytes_per_second + update


def _seconds_with_host_update(rate: DeviceRates, on_device: float, num_offloaded: int) -> float:
    """Return the seconds of an optimizer step in which the host CPU updates `num_offloaded` parameters.

    The device updates the other parameters at the same time, in `on_device` seconds. The host's update takes as long
    as its memory takes to move weights, gradients and Adam's state.

    Without `overlap_offload`, the gradients move to the host before the update, and the weights move back after it.
    With `overlap_offload`, transfers and updates of different tensors overlap, so the slowest of them determines the
    time (`hybrid_optimizer.py: HybridDeviceOptimizer.step`).
    """
    transfer_seconds = num_offloaded * _OFFLOADED_BYTES / rate.known_host.link_bytes_per_second
    host_seconds = num_offloaded * _ADAM_BYTES / rate.known_host.memory_bytes_per_second
    if rate.execution.overlap_offload:
        # The link moves gradients and weights at the same time, in opposite directions.
        return max(on_device, transfer_seconds, host_seconds)
    return max(on_device, host_seconds) + 2 * transfer_seconds


class _Product(NamedTuple):
    """One or several identical matrix products of a layer in forward.

    There are `copies` products of a rows×inner matrix with an inner×columns matrix.
    """

    rows: int
    inner: int
    columns: int
    copies: int = 1
    quantized: bool = True
    """True if a run with fp8 computes the product in fewer bits."""
    normed: bool = False
    """True if the norm before the product can write its input quantised (`LayerNormLinear`)."""
    between: tuple[bool, bool] = (False, False)
    """True for the input, and for the output's gradient, if they stay between an expert's two products."""
    modules: tuple[str, ...] = ()
    """Modules whose recomputation repeats the product; if empty, only that of the full layer does."""
    linear: LinearLayer | None = None
    """The linear layer of the product; None if LoRA cannot adapt the layer."""
    is_trained: bool = True
    """False if the weight is frozen, so that backward computes no gradient of it."""
    tensor: int = 1
    """Ranks over which tensor parallelism splits the linear layer."""


@lru_cache(maxsize=65536)
def product_seconds(
    rows: int,
    inner: int,
    columns: int,
    element_bytes: int,
    rate: DeviceRates,
    copies: int = 1,
    quantized: bool = False,
    accumulated: bool = False,
) -> float:
    """Return the seconds of a matrix product, or of several products of one shape in one kernel.

    The result is computed in tiles, in waves of one tile per processor. The last wave takes as long as the others, even
    if it is not full. Each tile starts and ends with work that takes as long as `rate.fill` elements of the inner
    dimension. A GPU loads operands concurrently with computation, and a CPU core does not.

    Args:
        rows: Rows of the first operand and of the result.
        inner: Columns of the first operand.
        columns: Columns of the result.
        element_bytes: Bytes per element of operands and result.
        rate: Rates that the device achieves.
        copies: Number of products of this shape in one kernel.
        quantized: True if the operands are quantised in a run with an fp8 recipe. Without a recipe it has no effect.
        accumulated: True if the result is added to gradients in fp32.
    """
    if not rows * inner * columns:
        return 0.0
    in_fewer_bits = quantized and bool(rate.fp8_recipe)
    flops = rate.quantised_flops if in_fewer_bits else rate.flops
    fill = rate.fill * (flops / rate.flops)
    flops_per_step = 2 * rate.processors
    # A product whose inner dimension is split adds up its parts in fp32.
    computing = min(
        _elements_per_processor(rows, columns, copies * parts, rate)
        * flops_per_step
        * (inner / parts + fill)
        / flops
        + (parts - 1) * 2 * 4 * copies * rows * columns / rate.bytes_per_second
        for parts in _INNER_SPLITS
    )
    operand_bytes = FP8_RECIPE_BYTES[rate.fp8_recipe] if in_fewer_bits else element_bytes
    is_cpu_core = rate.processors == 1
    result_bytes = _ACCUMULATED_BYTES if accumulated and not is_cpu_core else element_bytes
    moved = operand_bytes * (rows * inner + inner * columns) + result_bytes * rows * columns
    loading = copies * moved / rate.bytes_per_second
    if is_cpu_core:
        return computing + loading
    return max(computing, loading) + _PRODUCT_KERNEL_SECONDS


def _elements_per_processor(rows: int, columns: int, copies: int, rate: DeviceRates) -> float:
    """Return the number of elements of the result that one processor computes, rounded up to full tiles.

    Tiles that use the processor badly count as more elements. The kind of tile with the lowest count is taken. A CPU
    core has very small tiles, so the elements are not rounded up there.
    """
    if rate.processors == 1:
        return rows * columns * copies
    return min(
        [
            -(-copies * -(-rows // high) * -(-columns // wide) // rate.processors)
            * high
            * wide
            / utilisation
            for high, wide, utilisation in rate.tiles
        ]
    )


def _list_products(spec: RunSpec) -> Iterator[_Product]:
    """Yield the matrix products of one layer in forward: of attention's projections, and of the MLP or the experts.

    For a Mamba-2 mixer, only the products of the mixer are yielded. The block that begins a layer of multi-token
    prediction has one product more, which joins its two inputs.
    """
    shape, tensor = spec.shape, spec.parallelism.tensor
    tokens, hidden = spec.micro_batch_tokens, shape.hidden
    if shape.blocks == MAMBA and shape.mamba:
        yield from _list_mamba_products(spec, shape.mamba)
        return
    if shape.blocks == MTP:
        yield _Product(tokens, 2 * hidden, hidden // tensor)
    if shape.latent:
        yield from _list_latent_products(spec)
    else:
        for linear in _list_component_linears(spec, "attention"):
            is_normed = linear.name == "linear_qkv"
            yield _describe_product(linear, tokens, tensor)._replace(normed=is_normed)
    modules = ("moe", "shared_experts") if shape.experts else ("mlp",)
    for linear in _list_component_linears(spec, "dense_mlp"):
        is_normed = linear.name == "linear_fc1" and not shape.experts
        product = _describe_product(linear, tokens, tensor)
        yield product._replace(normed=is_normed, modules=modules)
    if shape.experts:
        yield from _list_expert_products(spec)


def _list_component_linears(spec: RunSpec, component: str) -> list[LinearLayer]:
    """Return the linear layers of one component of a layer: `attention`, `dense_mlp` or `experts`."""
    return [linear for linear in list_linears(spec.shape) if linear.component == component]


def _describe_product(linear: LinearLayer, rows: int, tensor: int) -> _Product:
    """Return the product of `rows` rows with a linear layer's weight, which tensor parallelism splits over ranks."""
    inner, columns = linear.shape_on_rank(tensor)
    return _Product(rows, inner, columns, linear=linear, tensor=tensor)


def _list_expert_products(spec: RunSpec) -> Iterator[_Product]:
    """Yield the matrix products of the router and of the experts on the busiest rank."""
    shape, tensor, modules = spec.shape, spec.parallelism.tensor, ("moe",)
    hidden, rank_tokens = shape.hidden, spec.micro_batch_tokens // spec.sequence_shards
    yield _Product(rank_tokens, hidden, shape.experts, quantized=False, modules=modules)
    experts_per_rank = shape.experts // spec.parallelism.expert
    expert_tensor = spec.parallelism.effective_expert_tensor
    tokens = (
        spec.micro_batch_tokens
        * expert_tensor
        // tensor
        * shape.experts_per_token
        // experts_per_rank
    )
    tokens = max(1, round(tokens * spec.expert_receive_ratio))
    if shape.latent_experts:
        yield _Product(rank_tokens, hidden, shape.latent_experts, modules=modules)
        yield _Product(rank_tokens, shape.latent_experts, hidden, modules=modules)
    for linear in _list_component_linears(spec, "experts"):
        is_first = linear.name == "linear_fc1"
        product = _describe_product(linear, tokens, expert_tensor)
        yield product._replace(
            copies=experts_per_rank, between=(not is_first, is_first), modules=modules
        )


def _list_mamba_products(spec: RunSpec, mamba: Mamba) -> Iterator[_Product]:
    """Yield the matrix products of a Mamba-2 mixer: of its projections, and of its scan (arXiv:2405.21060 section 6).

    The scan has four products per chunk of tokens: the scores of each group, the sum of each head weighted by the
    scores, what the chunk adds to each head's state, and what the state adds to each head's output.
    """
    tensor, tokens, hidden = spec.parallelism.tensor, spec.micro_batch_tokens, spec.shape.hidden
    yield _Product(tokens, hidden, mamba.projected_columns // tensor)
    yield _Product(tokens, mamba.width // tensor, hidden)
    chunks = -(-tokens // CHUNK)
    groups, heads = chunks * mamba.groups // tensor, chunks * mamba.heads // tensor
    state, width = mamba.state, mamba.head_width
    yield _Product(CHUNK, state, CHUNK, groups, quantized=False)
    yield _Product(CHUNK, CHUNK, width, heads, quantized=False)
    yield _Product(state, CHUNK, width, heads, quantized=False)
    yield _Product(CHUNK, state, width, heads, quantized=False)


def _list_latent_products(spec: RunSpec) -> Iterator[_Product]:
    """Yield the projections of multi-latent attention.

    Down-projections compute only the rank's shard of the sequence. Up-projections compute all tokens, for the rank's
    heads.
    """
    tokens, tensor = spec.micro_batch_tokens, spec.parallelism.tensor
    for linear in _list_component_linears(spec, "attention"):
        if not linear.is_split:
            yield _describe_product(linear, tokens // spec.sequence_shards, tensor=1)
            continue
        modules = () if linear.is_row_parallel else ("mla_up_proj",)
        yield _describe_product(linear, tokens, tensor)._replace(modules=modules)


def _add_adapter_products(lora: Lora, products: Iterable[_Product]) -> tuple[_Product, ...]:
    """Return the products of frozen linear layers, and after each the two products of its adapter.

    Adapters compute in the run's own type, without FP8. A norm before an adapter therefore writes its output in that
    type (`layernorm_linear.py: with_quantized_norm`). All experts of a rank share one adapter.
    """
    with_adapters: list[_Product] = []
    for product in products:
        linear = product.linear
        if linear is None or linear.name not in lora.targets:
            with_adapters.append(product._replace(is_trained=False))
            continue
        with_adapters.append(product._replace(is_trained=False, normed=False))
        rows, modules = product.rows * product.copies, product.modules
        for inner, columns in linear.adapter_shapes_on_rank(lora.rank, product.tensor):
            with_adapters.append(_Product(rows, inner, columns, quantized=False, modules=modules))
    return tuple(with_adapters)


class _AdapterTraffic(NamedTuple):
    """Memory traffic of LoRA in one layer and micro batch besides its products, in bytes."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0


_ADDITION_PASSES = 3
"""Passes over a tensor that is added to another one: both are read, and the sum is written."""


def _adapter_traffic(spec: RunSpec, lora: Lora, products: Iterable[_Product]) -> _AdapterTraffic:
    """Return the memory traffic that LoRA adds to a layer besides the products of adapters.

    Forward adds the output of an adapter to the output of its linear layer, and backward adds their input gradients.
    The output of a row-parallel layer is split over SP before it is added. Weights in NF4 are read and written in the
    run's type before each product.
    """
    forward = backward = recompute = 0.0
    for product in products:
        linear = product.linear
        if linear is None:
            continue
        if linear.name in lora.targets:
            rows = product.rows * product.copies
            is_scattered = linear.is_row_parallel and product.tensor > 1
            output_rows = rows // spec.sequence_shards if is_scattered else rows
            added = _ADDITION_PASSES * spec.element_bytes * output_rows * product.columns
            forward += added
            backward += _ADDITION_PASSES * spec.element_bytes * rows * product.inner
            recompute += added if spec.recompute.recomputes(*product.modules) else 0
        if lora.has_nf4_weights:
            weights = product.copies * product.inner * product.columns
            converted = (NF4_BITS / 8 + spec.element_bytes) * weights
            forward += converted
            backward += converted
            recompute += converted if spec.recompute.recomputes(*product.modules) else 0
    return _AdapterTraffic(forward, backward, recompute)


def _cast_bytes(products: Iterable[_Product], rate: DeviceRates) -> tuple[int, int]:
    """Return the bytes that are moved to quantise the operands of products, in forward and in backward.

    Without an fp8 recipe both numbers are 0. Each operand is read with two bytes per element. It is written twice: as
    it is, and transposed for the weight's gradient (Transformer Engine, `cast_transpose`). Operands of frozen weights
    are not written transposed (`linear.py: backward_needs_input`). Some recipes compute the scale from the maximum of
    the tensor (`Float8CurrentScaling`, and NVFP4: arXiv:2509.25149 §4.1). They read the
    operand a second time. Under `Float8CurrentScaling` a norm computes the maximum of its output, which saves this
    reading (TransformerEngine#2013). If the scale is known before (`DelayedScaling`), a norm writes its output
    quantised, so that it only has to be transposed. Fused experts quantise the tensors between their products inside
    their kernels, which adds no bytes.
    """
    fp8_recipe = rate.fp8_recipe
    if not fp8_recipe:
        return 0, 0
    read = 4 if fp8_recipe in (Fp8Recipe.TENSORWISE, Fp8Recipe.NVFP4) else 2
    written = FP8_RECIPE_BYTES[fp8_recipe]
    inputs = outputs = 0.0
    for product in products:
        transposed = written if rate.transposes and product.is_trained else 0.0
        bytes_per_element = read + written + transposed
        bytes_after_norm = {
            Fp8Recipe.DELAYED: 2 * transposed,
            Fp8Recipe.TENSORWISE: bytes_per_element - 2,
        }.get(fp8_recipe, bytes_per_element)
        is_input_fused, is_output_fused = (
            product.between if rate.execution.fused_experts else (False, False)
        )
        if product.quantized and not is_input_fused:
            input_bytes = bytes_after_norm if product.normed else bytes_per_element
            inputs += input_bytes * product.copies * product.rows * product.inner
        if product.quantized and not is_output_fused:
            outputs += bytes_per_element * product.copies * product.rows * product.columns
    return int(inputs), int(outputs)


def _attention_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Return the seconds of attention for one layer and micro batch, in forward and in backward.

    Attention is the product of Q and K, and the product of the scores with V. Fused attention skips masked scores.
    Unfused attention computes two full matrix products per head.
    """
    shape = spec.shape
    heads, length = shape.heads // spec.parallelism.tensor, shape.seq_length
    width = value_width = shape.head_width
    if shape.latent:
        width = shape.latent.head_width + shape.latent.rotary_width
        value_width = shape.latent.value_width
    if spec.fused_attention:
        # FlashAttention 3 has no dropout (Transformer Engine 2.7, `utils.py: get_attention_backend`).
        if rate.flash_attention_2_flops and spec.dropout:
            return _flash_attention_2_seconds(spec, rate, width, value_width)
        forward = _fused_attention_seconds(spec, rate, width, value_width)
        return forward, _ATTENTION_BACKWARD_FACTOR * forward
    copies, element = heads * spec.batch.micro_batch_size, spec.element_bytes
    queries = length // spec.parallelism.context
    scores = product_seconds(queries, width, length, element, rate, copies)
    weighted = product_seconds(queries, length, value_width, element, rate, copies)
    return scores + weighted, 2 * (scores + weighted)


def _fused_attention_seconds(
    spec: RunSpec, rate: DeviceRates, width: int, value_width: int
) -> float:
    """Return the seconds of fused attention in forward.

    The rate is lower for narrow heads, because the number of exponentials does not fall with the width. The rate is
    also lower on short sequences. If the device's fast kernels do not support the width, the rate is that of
    FlashAttention 2.

    Args:
        spec: The run. In layers with a window only the scores inside the window count.
        rate: Rates that the device achieves.
        width: Columns of a head's queries and keys.
        value_width: Columns of a head's values.
    """
    attended, flops = _count_attention(spec, rate, width + value_width)
    padding = -(-width // 32) * 32 / width
    narrow = 1.0
    if rate.narrow_heads:
        narrow = min(1.0, padding * width / _WIDE_HEAD) ** _NARROW_HEAD_EXPONENT
    short = attended / (attended + _SHORT_SEQUENCE_KEYS)
    drawing = _ATTENTION_DROPOUT_FACTOR if spec.dropout else 1.0
    is_widest = width == value_width == _WIDEST_HEAD
    has_own_kernel = rate.wide_heads or value_width <= _WIDE_HEAD or is_widest
    achieved = rate.attention_flops * (1.0 if has_own_kernel else rate.portable_share)
    return flops * padding * drawing / (achieved * narrow * short)


def _count_attention(spec: RunSpec, rate: DeviceRates, columns: int) -> tuple[float, float]:
    """Return the length over which a token attends, and the FLOPs of fused attention in forward.

    The length is twice the mean number of tokens that a token attends to, so that it is the full length of a document
    without windows.

    Args:
        spec: The run.
        rate: Rates of the device. Its execution states the length of a document.
        columns: Columns of a head's keys and values together.
    """
    heads, length = spec.shape.heads // spec.parallelism.tensor, spec.shape.seq_length
    document = min(rate.execution.document_length or length, length)
    attended = spec.shape.effective_attention_length(document)
    return attended, spec.micro_batch_tokens * attended * heads * columns


def _flash_attention_2_seconds(
    spec: RunSpec, rate: DeviceRates, width: int, value_width: int
) -> tuple[float, float]:
    """Return the seconds of FlashAttention 2 with dropout in forward and in backward.

    A head is padded to the next width with a known rate. So a head narrower than 64 takes as long as a head of 64. A
    head wider than 128 is not padded, and has the rate of a head of 128.

    Args:
        spec: The run.
        rate: Rates of the device. It has rates of FlashAttention 2.
        width: Columns of a head's queries and keys.
        value_width: Columns of a head's values.
    """
    attended, flops = _count_attention(spec, rate, width + value_width)
    rates_by_width = rate.flash_attention_2_flops
    padded_width = min((wide for wide in rates_by_width if wide >= width), default=width)
    achieved = rates_by_width.get(padded_width, rates_by_width[_WIDE_HEAD])
    short = attended / (attended + _SHORT_SEQUENCE_KEYS)
    forward = flops * padded_width / width / (achieved * short)
    scores = flops / (2 * (width + value_width))
    drawing = scores * _SECONDS_PER_DROPPED_SCORE / 2 * _HOPPER_PROCESSORS / rate.processors
    return forward + drawing, _ATTENTION_BACKWARD_FACTOR * forward + drawing

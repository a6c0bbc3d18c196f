"""A model as its `.args` file describes it: its shape for formulas, and its flags for Megatron."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from parakit.config.errors import suggest_names
from parakit.config.files import ROOT, read_args_file
from parakit.config.flag_table import FLAGS, flags_in_group, flags_with_role
from parakit.config.flags import Flags, drop_flags, merge_flags, pick_flags
from parakit.config.huggingface import read_config_flags
from parakit.config.strategy import Batch

FAMILIES = ("gpt3", "moe")
ALIASES = {"gpt3-354m": "gpt3-355m", "gpt3-512m": "gpt3-355m"}
PUBLISHED_SIZES = {"gpt3-345m": "345M", "gpt3-857m": "857M"}
"""Sizes under which models were published whose published dimensions have other numbers of parameters."""

HUB = ROOT / "hub"
"""Folder of imported models; each has a subfolder of its name with `NAME.args` and its weights."""

IMPORTED_WEIGHTS = "checkpoint"
"""Name of the folder of an imported model's weights, beside the `.args` file that loads them."""

WEIGHT_LOADING_FLAGS = flags_with_role("start") | {"--ckpt-format"}
"""Flags with which an imported model's `.args` file loads its weights."""

MODEL_FILES = (".args", ".json")
"""Suffixes of model files: Megatron's flags, or a Hugging Face `config.json`."""

GPT2_VOCABULARY = 50257

HALF_PRECISION_FLAGS = ("--fp16", "--bf16")
SHAPE_FLAGS = flags_with_role("shape", "precision")
"""Flags that decide a model's tensors, their precision and their initial values."""


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention's low-rank projections (arXiv:2405.04434 §2.1)."""

    query_rank: int
    """Rank of the query projection; 0 means that queries are projected from the hidden state
    directly.
    """
    key_value_rank: int
    head_width: int
    """Width of a query or key head without the rotary part."""
    rotary_width: int
    value_width: int
    splits_down_projections: bool = False
    """True if TP splits the down-projections too, as in Megatron's own layers; Transformer Engine's
    do not.
    """


@dataclass(frozen=True)
class Mamba:
    """Dimensions of the mixer of a Mamba-2 block (arXiv:2405.21060). Each head has one state."""

    heads: int
    head_width: int
    groups: int
    """Groups of heads that share the state's input and output projections (B and C)."""
    state: int
    """Columns of a head's state per channel."""

    @property
    def width(self) -> int:
        """Number of channels over all heads."""
        return self.heads * self.head_width

    @property
    def convolved_channels(self) -> int:
        """Number of channels that pass the short convolution: x, B and C."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected_columns(self) -> int:
        """Columns of the input projection: gate, x, B, C and one time step per head."""
        return self.width + self.convolved_channels + self.heads


@dataclass(frozen=True)
class LinearAttention:
    """Dimensions of a gated delta net (arXiv:2412.06464), a linear attention without scores.

    Each token updates one state per head.
    """

    key_heads: int
    """Number of key heads, and of query heads."""
    key_width: int
    value_heads: int
    value_width: int
    kernel: int
    """Tokens that the short convolution covers."""

    @property
    def value_channels(self) -> int:
        """Channels of all values, and of the output gate."""
        return self.value_heads * self.value_width

    @property
    def convolved_channels(self) -> int:
        """Number of channels that pass the short convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_channels

    @property
    def projected_columns(self) -> int:
        """Columns of the input projection: the convolved channels, the gate, and two numbers per
        value head.
        """
        return self.convolved_channels + self.value_channels + 2 * self.value_heads


GATED_DELTA_NET = "gated_delta_net"
"""The only value of `--experimental-attention-variant` that is counted."""
MAMBA, ATTENTION, MLP, EXPERTS, MTP, LINEAR = "M", "*", "-", "E", "/", "G"
"""Blocks of a hybrid model as in `--hybrid-layer-pattern`. `MTP` begins a layer of multi-token
prediction: the block joins hidden states with the embeddings of the following tokens, and the
output layer runs once more.
"""
BLOCKS = (MAMBA, ATTENTION, MLP, EXPERTS, MTP)
"""Blocks that are planned. For `LINEAR`, only parameters and FLOPs are counted."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model, which determine its parameters, FLOPs, memory and communication."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    """Key/value heads; equal to heads without grouped-query attention."""
    head_width: int
    ffn_hidden: int
    seq_length: int
    positions: int
    """Rows of the learned position table; 0 with rotary or no positions."""
    vocabulary: int = GPT2_VOCABULARY
    """Entries of the tokenizer, before padding."""
    vocabulary_multiple: int = 128
    """Megatron pads the vocabulary to a multiple of this times TP."""
    gated: bool = False
    """SwiGLU or GeGLU: the first MLP matrix has twice as many columns."""
    bias: bool = True
    """True if linear layers have biases."""
    qkv_bias: bool = False
    """True if the QKV projection has biases although the other layers have none."""
    rms_norm: bool = False
    """True for RMSNorm, which has a weight and no bias."""
    qk_norm: bool = False
    """True if queries and keys have one norm each, as wide as a head or as latent attention's
    ranks.
    """
    output_gate: bool = False
    """True if attention's output is gated; the QKV projection has further columns for the gate."""
    sink: bool = False
    """True if softmax has one learned offset per head."""
    window: int = 0
    """Tokens that a token attends to in layers with a window, itself included; 0 without windows.
    """
    windowed_fraction: float = 0.0
    """Fraction of the layers that have the window."""
    clamps_activations: bool = False
    """True if PyTorch kernels, and not a fused kernel, clamp the experts' activations."""
    tied_embeddings: bool = True
    experts: int = 0
    """Experts in each MLP; 0 is dense."""
    experts_per_token: int = 0
    expert_ffn_hidden: int = 0
    load_balancing: bool = True
    """True if the router's load-balancing loss is part of the loss."""
    router_z_loss: bool = False
    """True if the mean square of the router logits' log-sum-exp is part of the loss."""
    shared_expert_ffn: int = 0
    """Columns of the shared expert, which every token passes; 0 without a shared expert."""
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    """Indices from 0 of the layers with a dense MLP in a model with experts (`--moe-layer-freq`).
    """
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    """Linear attention; parameters and FLOPs of its layers are counted, but no time and no
    activations.
    """
    linear_layers: tuple[int, ...] = ()
    """Indices from 0 of the layers with linear attention (`--linear-attention-freq`)."""
    blocks: str = ""
    """Blocks of a hybrid's one layer, each with one norm; empty for attention and then an MLP or
    experts.
    """
    mamba: Mamba | None = None
    latent_experts: int = 0
    """Width that tokens are projected to before they are routed; 0 means the hidden state's width.
    """
    mtp_layers: int = 0
    """Layers of multi-token prediction after the last layer, each an `MTP` block and a layer. Those
    of a hybrid are among its blocks and not counted here.
    """
    mtp_is_repeated: bool = False
    """True if all layers of multi-token prediction share one set of weights."""

    def __hash__(self) -> int:
        """Return a cached hash over a few fields: a search looks shapes up far more often than it
        makes them.
        """
        return self._hash

    @cached_property
    def _hash(self) -> int:
        widths = (self.layers, self.hidden, self.heads, self.ffn_hidden, self.seq_length)
        return hash((*widths, self.blocks, self.experts, self.dense_layers, self.mtp_layers))

    @property
    def block_shapes(self) -> tuple[tuple[int, ModelShape], ...]:
        """One pair per kind of block: how often it occurs in a layer, and a shape with this block alone.

        A shape with at most one block gives a single pair of 1 and the shape itself.
        """
        if len(self.blocks) <= 1:
            return ((1, self),)
        return tuple(
            (times, self.with_only_block(block)) for block, times in Counter(self.blocks).items()
        )

    @lru_cache(maxsize=256)  # noqa: B019  (shapes are few)
    def with_only_block(self, block: str) -> ModelShape:
        """Return the shape of a model whose layers consist of one block of this kind. Other dimensions become 0."""
        shape = replace(self, blocks=block)
        if block != ATTENTION:
            shape = replace(shape, heads=0, query_groups=0, latent=None)
        if block != EXPERTS:
            shape = shape.without_experts
        return shape if block == MLP else replace(shape, ffn_hidden=0)

    @cached_property
    def without_experts(self) -> ModelShape:
        """The shape with a dense MLP in every layer."""
        return replace(self, experts=0, experts_per_token=0, shared_expert_ffn=0, dense_layers=())

    @cached_property
    def layer_kinds(self) -> tuple[tuple[ModelShape, Collection[int]], ...]:
        """One pair per kind of layer: its shape, and the indices, from 0, of the layers with this shape.

        Kinds with attention come before kinds with linear attention. Within both, layers with experts come before
        dense layers. A model with one kind of layers gives one pair.
        """
        dense, linear = frozenset(self.dense_layers), frozenset(self.linear_layers)
        if not dense and not linear:
            return ((self, range(self.layers)),)
        with_attention = frozenset(range(self.layers)) - linear
        plain = replace(self, linear_layers=()) if linear else self
        kinds: list[tuple[ModelShape, Collection[int]]] = [(plain, with_attention - dense)]
        if dense:
            kinds.append((plain.without_experts, with_attention & dense))
        if linear:
            kinds.append((plain.with_linear_attention, linear - dense))
        if dense and linear:
            kinds.append((plain.without_experts.with_linear_attention, linear & dense))
        return tuple(kinds)

    @property
    def with_linear_attention(self) -> ModelShape:
        """The shape with linear attention in every layer."""
        return replace(self, blocks=LINEAR + (EXPERTS if self.experts else MLP))

    def count_layers_by_kind(self, depths: int) -> tuple[tuple[int, ModelShape], ...]:
        """Return one pair per kind of layer: the number of such layers, and their shape.

        Args:
            depths: Number of layers of multi-token prediction that are added to the model's layers. These have
                attention. Their MLP is dense if the last layer of the model has a dense MLP.
        """
        counts: list[int] = []
        shapes: list[ModelShape] = []
        for shape, layers in self.layer_kinds:
            counts.append(len(layers))
            shapes.append(shape)
        # Kinds with attention come first. If there are two of them, the second one is dense.
        mtp_kind = 1 if self.mtp_is_dense else 0
        counts[mtp_kind] += depths
        return tuple(zip(counts, shapes, strict=True))

    @property
    def mtp_is_dense(self) -> bool:
        """True if the layers of multi-token prediction are dense: they have the form of the last
        layer.
        """
        return self.layers - 1 in self.dense_layers

    @property
    def stored_mtp_layers(self) -> int:
        """Number of layers of multi-token prediction that have their own weights."""
        return min(1, self.mtp_layers) if self.mtp_is_repeated else self.mtp_layers

    @property
    def norms_per_layer(self) -> int:
        """Number of normalisations in a layer of one kind."""
        return {"": 2, MTP: 3}.get(self.blocks, 1)

    @property
    def residual_additions(self) -> int:
        """Number of additions to the hidden states in a layer of one kind; each follows a dropout."""
        return {"": 2, MTP: 0}.get(self.blocks, 1)

    @property
    def total_mtp_layers(self) -> int:
        """Layers of multi-token prediction, those among a hybrid's blocks included."""
        return self.mtp_layers + self.blocks.count(MTP)

    @property
    def predicted_tokens(self) -> int:
        """Tokens predicted per position; each needs one pass through the output layer."""
        return 1 + self.total_mtp_layers

    def effective_attention_length(self, length: int) -> float:
        """Return the length of a sequence without a window in which attention has equally many FLOPs.

        The result is twice the mean number of tokens that a token attends to, over all positions and layers. If
        the model has no window below `length`, the result is `length`. Megatron-Bridge counts in the same way
        (`flop_utils.py: calculate_swa_context`).
        """
        window = self.window
        if not 0 < window < length:
            return length
        # The first tokens have fewer than `window` tokens to attend to.
        windowed_length = window * (2 - (window - 1) / length)
        return length - self.windowed_fraction * (length - windowed_length)

    def padded_vocabulary(self, tensor: int = 1) -> int:
        """Return the rows of the embedding over all `tensor` TP ranks (Megatron's
        `_vocab_size_with_padding`).
        """
        multiple = self.vocabulary_multiple * tensor
        return round_up(self.vocabulary, multiple)


@dataclass(frozen=True)
class Model:
    """A model of an `.args` file or a Hugging Face `config.json`."""

    name: str
    family: str
    """Name of the folder under `examples/` that holds the model's file."""
    flags: tuple[str, ...]
    shape: ModelShape
    batch: Batch
    """Batch in the file; `batch.choose_batch` fits it to a strategy."""
    dtype: str
    """`fp16`, `bf16` or `fp32`, on a GPU."""
    dropout: float
    source: str = field(default="", compare=False)
    """Path that the model was read from (`MODEL=`); empty for a file of the kit."""


_NO_FILE = "There is no file {}; give an .args file, a config.json or a model of 'make list'."


class UnknownModelError(ValueError):
    """A model name that is unknown; the message lists similar names."""


def model_names() -> tuple[str, ...]:
    """Return the names of all models of all families, then of the imported models."""
    names: list[str] = []
    for family in FAMILIES:
        files = _list_folder(_family_folder(family))
        names += [file.removesuffix(".args") for file in files if file.endswith(".args")]
    names += [name for name in _list_folder(HUB) if (HUB / name / f"{name}.args").is_file()]
    return tuple(names)


def load_model(name: str, file: str | None = None) -> Model:
    """Return the model with this name.

    The model is read from `file` (the value of `MODEL=`) if the name of that file is `name`. Otherwise it is
    read from `examples/` or `hub/`.

    Raises:
        UnknownModelError: No `.args` file has that name.
        ValueError: The file lacks a flag that defines the shape.
    """
    if file and is_model_file(file) and model_name_of_file(file) == name:
        return find_model(file)
    current_name = ALIASES.get(name, name)
    if current_name not in model_names():
        raise UnknownModelError(_explain_unknown_model(name))
    for family in FAMILIES:
        path = _family_folder(family) / f"{current_name}.args"
        if path.is_file():
            return model_from_flags(current_name, family, read_args_file(path))
    imported = HUB / current_name / f"{current_name}.args"
    return replace(find_model(str(imported)), source="")


def _explain_unknown_model(name: str) -> str:
    """Return the error text for a name that no model has.

    For T5 and BERT, the text explains that the kit trains GPT models only. For other names, it suggests up to
    three similar names, or `make list` if none is similar.
    """
    other_architecture = re.match(r"(?:.*-)?(t5|bert)\b", name, re.IGNORECASE)
    if other_architecture:
        script = f"pretrain_{other_architecture[1].lower()}.py"
        return (
            f"'{name}' is no GPT, and the kit trains GPT models only. It does not start Megatron's "
            f"{script}, which has other data, losses and splits. Train a decoder of that size, for example "
            f"gpt3-345m, or start {script} yourself and read its log with 'make report LOGS='."
        )
    hint = suggest_names(name, model_names(), "'make list' shows all models")
    return f"There is no model '{name}'; {hint} {explain_own_model(name)}"


def explain_own_model(name: str) -> str:
    """Return a sentence that states how to use a model of the user's own with a name that no model has."""
    return (
        f"To use a model of your own, write Megatron's flags to examples/gpt3/models/{name}.args, or give "
        "MODEL= the path of any .args file or config.json."
    )


def is_model_file(text: str) -> bool:
    """Return True if the value of `MODEL=` is the path of a file, which need not exist."""
    return Path(text).suffix in MODEL_FILES or "/" in text


def model_name_of_file(text: str) -> str:
    """Return the name of the model that a file describes.

    The name of a `config.json` is the name of its folder. For other files it is the file's name without suffix.

    Raises:
        UnknownModelError: There is no such file.
    """
    path = Path(text).expanduser()
    if not path.is_file():
        raise UnknownModelError(_NO_FILE.format(text))
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def find_model(text: str) -> Model:
    """Return the model with this name, or in this `.args` file or Hugging Face `config.json`.

    Raises:
        UnknownModelError: There is no such model or file.
        ValueError: The file does not define a shape, or is of an unknown architecture.
    """
    if not is_model_file(text):
        return load_model(text)
    name, path = model_name_of_file(text), Path(text).expanduser()
    arguments = read_config_flags(path) if path.suffix == ".json" else read_args_file(path)
    family = "moe" if Flags(arguments).has("--num-experts") else "gpt3"
    return replace(model_from_flags(name, family, arguments), source=text)


def model_from_flags(name: str, family: str, arguments: Sequence[str]) -> Model:
    """Return the model that Megatron's flags describe, for example the flags of a file or of a run.

    Raises:
        ValueError: A flag that defines the shape is missing. The message names the flag.
    """
    flags = Flags(arguments)
    return Model(
        name=name,
        family=family,
        flags=tuple(arguments),
        shape=shape_from_flags(name, flags),
        batch=parse_batch(flags),
        dtype=parse_dtype(flags),
        # The training flags of a family may switch dropout off for all its models.
        dropout=Flags((*training_flags(family), *arguments)).number("--hidden-dropout"),
    )


def parse_batch(flags: Flags, replicas: int = 1) -> Batch:
    """Return the batch in the flags. Defaults are 1 sample per rank and 1 micro batch per replica."""
    micro = flags.integer("--micro-batch-size", 1)
    return Batch(micro, flags.integer("--global-batch-size", micro * replicas))


def parse_dtype(flags: Flags) -> str:
    """Return the dtype in the flags: `fp16`, `bf16` or `fp32`."""
    for flag in HALF_PRECISION_FLAGS:
        if flags.has(flag):
            return flag.removeprefix("--")
    return "fp32"


def replace_vocabulary(model: Model, entries: int) -> Model:
    """Return the model with a vocabulary of `entries` tokens."""
    if model.shape.vocabulary == entries:
        return model
    flags = merge_flags(model.flags, ("--vocab-size", str(entries)))
    return replace(model, flags=flags, shape=replace(model.shape, vocabulary=entries))


def imported_weights_folder(model: Model) -> Path | None:
    """Return the folder of an imported model's initial weights; None for a model without weights."""
    named = Flags(model.flags).text("--load")
    return ROOT / named if named else None


def training_flags(family: str) -> tuple[str, ...]:
    """Return the flags that a family's models are trained with unless their own files differ."""
    return read_args_file(ROOT / "examples" / family / "training.args")


def merge_training_flags(model: Model, in_half: bool = True) -> tuple[str, ...]:
    """Return the family's training flags and the model's own flags, without the flags that load
    weights.

    If `in_half` is False, the flags for fp16 and bf16 are left out too.
    """
    own_flags = drop_flags(model.flags, WEIGHT_LOADING_FLAGS)
    flags = (*training_flags(model.family), *own_flags)
    if in_half:
        return flags
    return drop_flags(flags, HALF_PRECISION_FLAGS)


def apply_flags_to_model(
    model: Model, arguments: Sequence[str], names: Container[str] = SHAPE_FLAGS
) -> Model:
    """Return the model with some of `arguments` applied to its flags. The name stays the same.

    Only flags that `names` contains are applied. By default these are the flags of shape and precision. If none
    of them is in `arguments`, the model is returned unchanged.

    Raises:
        ValueError: The flags do not define a shape.
    """
    changes = pick_flags(arguments, names)
    if not changes:
        return model
    model_flags = model.flags
    if any(flag in changes for flag in HALF_PRECISION_FLAGS):
        # Megatron refuses --fp16 together with --bf16.
        model_flags = drop_flags(model_flags, HALF_PRECISION_FLAGS)
    return model_from_flags(model.name, model.family, merge_flags(model_flags, changes))


def shape_from_flags(name: str, flags: Flags) -> ModelShape:
    """Return the shape that the flags define, as Megatron's `validate_args` derives it.

    Raises:
        ValueError: A flag that defines the shape is missing, or a dimension is too small.
    """
    for required in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        if not flags.has(required):
            raise ValueError(f"Model '{name}' lacks {required}; add it to the model's .args file.")
    # Fields that the table of flags maps to one flag each. The other fields follow below.
    stated = flags.fields("shape")
    _refuse_negative_dimensions(flags)
    layers = stated["layers"]
    has_experts = bool(stated.get("experts", 0))
    has_learned_positions = flags.text("--position-embedding-type") == "learned_absolute"
    balancing_coefficient = flags.text("--moe-aux-loss-coeff", "0").strip("[]")
    shape = ModelShape(
        **(_derive_default_dimensions(stated, flags) | stated),
        positions=flags.integer("--max-position-embeddings") if has_learned_positions else 0,
        gated=flags.has("--swiglu") or flags.has("--quick-geglu"),
        rms_norm=flags.text("--normalization") == "RMSNorm",
        sink=flags.text("--softmax-type") == "learnable",
        clamps_activations=_clamps_activations(flags),
        latent=_parse_latent_attention(flags),
        load_balancing=balancing_coefficient not in ("0", "0.0"),
        router_z_loss=flags.has("--moe-z-loss-coeff"),
        dense_layers=_parse_dense_layers(flags, layers) if has_experts else (),
        linear=_parse_linear_attention(flags),
        linear_layers=_parse_linear_layers(flags, layers),
        window=_parse_window(flags),
        windowed_fraction=_parse_windowed_fraction(flags, layers),
    )
    _refuse_empty_dimensions(name, shape)
    if flags.has("--hybrid-layer-pattern"):
        return _hybrid_shape(shape, flags)
    return shape


def _refuse_negative_dimensions(flags: Flags) -> None:
    """Raise a ValueError that names the first flag of the shape with a negative number.

    Dimensions that must be at least 1, and the numbers of experts, are not checked here.
    `_refuse_empty_dimensions` checks them.
    """
    for flag in flags_in_group("shape", "latent", "mamba", "linear"):
        if flag.kind != "whole" or flag.field in (*_FROM_ONE, *_OF_EXPERTS):
            continue
        value = flags.integer(flag.name)
        if value < 0:
            raise ValueError(f"{flag.name} is {value}; use 0 or more.")


def _derive_default_dimensions(stated: Mapping[str, Any], flags: Flags) -> dict[str, int]:
    """Return Megatron's defaults of the dimensions that it derives from other dimensions, by field.

    These are the query groups, the head width, and the widths of MLPs and experts.
    """
    hidden, heads = stated["hidden"], stated["heads"]
    ffn_hidden = stated.get("ffn_hidden", default_ffn_hidden(hidden, flags.has("--swiglu")))
    return {
        "query_groups": heads,
        "head_width": hidden // max(1, heads),
        "ffn_hidden": ffn_hidden,
        "expert_ffn_hidden": ffn_hidden,
    }


def _clamps_activations(flags: Flags) -> bool:
    """Return True if kernels of their own clamp the experts' activations.

    Transformer Engine's fused experts clamp inside their matrix products instead.
    """
    has_limit = flags.has("--quick-geglu") and flags.has("--activation-func-clamp-value")
    return has_limit and not flags.has("--use-transformer-engine-op-fuser")


def _parse_latent_attention(flags: Flags) -> LatentAttention | None:
    """Return the widths of latent attention; None if the flags choose plain attention."""
    if not flags.has("--multi-latent-attention"):
        return None
    return LatentAttention(**({"query_rank": 0} | flags.fields("latent")))


def _parse_dense_layers(flags: Flags, layers: int) -> tuple[int, ...]:
    """Return the indices, from 0, of the layers without experts in a model with experts."""
    with_experts = _parse_layer_pattern(flags, "--moe-layer-freq", layers, _is_multiple)
    return tuple(layer for layer in range(layers) if layer not in with_experts)


def _has_linear_attention(flags: Flags) -> bool:
    """Return True if some layers have linear attention."""
    return flags.text("--experimental-attention-variant") == GATED_DELTA_NET


def _parse_linear_attention(flags: Flags) -> LinearAttention | None:
    """Return the dimensions of linear attention; None if no layer has linear attention."""
    return LinearAttention(**flags.fields("linear")) if _has_linear_attention(flags) else None


def _parse_linear_layers(flags: Flags, layers: int) -> tuple[int, ...]:
    """Return the indices, from 0, of the layers with linear attention."""
    if not _has_linear_attention(flags):
        return ()
    return _parse_layer_pattern(flags, "--linear-attention-freq", layers, _is_no_last_of_group)


_FROM_ONE = (
    *("layers", "hidden", "heads", "query_groups", "head_width", "ffn_hidden"),
    *("seq_length", "vocabulary", "vocabulary_multiple"),
)
_OF_EXPERTS = ("experts", "experts_per_token", "expert_ffn_hidden")


_WINDOWED_LAYERS = "--window-attn-skip-freq"


def _parse_windowed_fraction(flags: Flags, layers: int) -> float:
    """Return the fraction of the layers that attend to a window only. It is 0 for a model without a window."""
    if not _parse_window(flags):
        return 0.0
    if not flags.has(_WINDOWED_LAYERS):
        return 1.0
    windowed = _parse_layer_pattern(flags, _WINDOWED_LAYERS, layers, _is_no_last_of_group)
    return len(windowed) / layers


def _parse_window(flags: Flags) -> int:
    """Return the number of tokens to which a token attends, itself included, by `--window-size`.

    The second number of the flag is ignored, because a causal mask leaves later tokens out. The result is 0
    without a window.

    Raises:
        ValueError: The value is not a pair of numbers.
    """
    text = flags.text("--window-size")
    if not text:
        return 0
    pair = re.fullmatch(r"\(?(-?\d+),(-?\d+)\)?", text.replace(" ", ""))
    if pair is None:
        raise ValueError(f"--window-size {text} is no pair of numbers; write a pair such as 127,0.")
    earlier_tokens = int(pair[1])  # -1 means all of them, without a window.
    return max(0, earlier_tokens + 1)


def default_ffn_hidden(hidden: int, swiglu: bool) -> int:
    """Return Megatron's default MLP width: 4 times hidden, or for SwiGLU two thirds of that.

    SwiGLU's width is rounded down to a multiple of 64. Its three matrices then have about as many
    parameters as the two of a plain MLP.
    """
    return int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden


def _refuse_empty_dimensions(name: str, shape: ModelShape) -> None:
    """Raise a ValueError if a dimension is below 1, if experts are negative, or if query groups do not divide heads.

    The error names the first such dimension.
    """
    for flag in flags_in_group("shape"):
        value = getattr(shape, flag.field)
        if flag.field in _FROM_ONE and value < 1:
            raise ValueError(f"Model '{name}' has {flag.name} {value}; use 1 or more.")
    if min(getattr(shape, field) for field in _OF_EXPERTS) < 0:
        raise ValueError(f"Model '{name}' has a negative number of experts, or of their columns.")
    if shape.heads % shape.query_groups:
        raise ValueError(
            f"Model '{name}' has {shape.heads} attention heads, which {shape.query_groups} query "
            "groups do not divide; use another --num-query-groups."
        )


def _is_multiple(layer: int, every: int) -> bool:
    """Return True for layers 0, `every`, 2 × `every`, …"""
    return layer % every == 0


def _is_no_last_of_group(layer: int, every: int) -> bool:
    """Return True for all layers but each `every`-th one."""
    return (layer + 1) % every > 0


def _parse_layer_pattern(
    flags: Flags, name: str, layers: int, is_selected: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Return the indices, from 0, of the layers that a flag selects.

    The flag's value is a Python list with 1 for selected layers, or a number. For a number,
    `is_selected` tells from a layer's index and the number whether the layer is selected.

    Raises:
        ValueError: The value is neither a number above 0 nor a list, or the list's length is not `layers`.
    """
    text = " ".join(flags.texts(name)) or str(FLAGS[name].default or "")
    try:
        pattern = _evaluate_pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        pattern = None
    if isinstance(pattern, int) and pattern > 0:
        return tuple(layer for layer in range(layers) if is_selected(layer, pattern))
    if isinstance(pattern, list) and len(pattern) == layers:
        return tuple(layer for layer, mark in enumerate(pattern) if mark)
    raise ValueError(
        f"{name} {text[:60]} is neither a number above 0 nor a list for {layers} layers; write a "
        "number, or a list such as [0]*1+[1]*3."
    )


def _evaluate_pattern(node: ast.expr) -> Any:
    """Evaluate the syntax tree of a layer pattern, such as `([0]*3+[1]*29)`.

    The result is a number or a list of numbers.

    Raises:
        TypeError: The tree has anything but whole numbers, lists, sums and products.
    """
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List():
            return [_evaluate_pattern(element) for element in node.elts]
        case ast.BinOp(op=ast.Add()):
            return _evaluate_pattern(node.left) + _evaluate_pattern(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _evaluate_pattern(node.left) * min(_evaluate_pattern(node.right), _MOST_LAYERS)
    raise TypeError


_MOST_LAYERS = 10_000


def _hybrid_shape(shape: ModelShape, flags: Flags) -> ModelShape:
    """Return the shape with the blocks of `--hybrid-layer-pattern`.

    Raises:
        ValueError: The pattern has a block that the formulas do not know.
    """
    blocks = flags.text("--hybrid-layer-pattern")
    known = (*BLOCKS, LINEAR)
    unknown = sorted(set(blocks).difference(known))
    if unknown:
        raise ValueError(
            f"--hybrid-layer-pattern {blocks} has the unknown block '{unknown[0]}'; "
            f"use blocks of {' '.join(known)}."
        )
    stated = flags.fields("mamba")
    mamba = Mamba(**({"heads": 2 * shape.hidden // stated["head_width"]} | stated))
    linear = LinearAttention(**flags.fields("linear"))
    single_layer = replace(shape, mtp_layers=0, dense_layers=(), linear_layers=())
    return replace(single_layer, layers=1, blocks=blocks, mamba=mamba, linear=linear)


def _family_folder(family: str) -> Path:
    """Return the folder with the model files of a family."""
    return ROOT / "examples" / family / "models"


def _list_folder(folder: Path) -> list[str]:
    """Return the names of a folder's entries in order; empty if the folder is missing or cannot be read.

    Each job lists all models to parse its target, and a `Path` per file would take four times as long.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []

"""A model as its `.args` file describes it: the shape for formulas, the flags for Megatron."""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from parakit.config.files import ROOT, read_args_file
from parakit.config.flag_table import FLAGS, flags_in_group, flags_with_role
from parakit.config.flags import Flags, drop_flags, merge_flags, pick_flags
from parakit.config.huggingface import read_config_flags
from parakit.config.strategy import Batch

FAMILIES = ("gpt3", "moe")
ALIASES = {"gpt3-354m": "gpt3-355m", "gpt3-512m": "gpt3-355m"}

HUB = ROOT / "hub"
"""Imported models, each in a folder of its name with `NAME.args` and its weights."""

IMPORTED_WEIGHTS = "checkpoint"
"""Folder of an imported model's weights, beside its `.args` file, which loads them."""

WEIGHT_LOADING_FLAGS = flags_with_role("start") | {"--ckpt-format"}
"""Flags by which an imported model's `.args` file loads its weights."""

MODEL_FILES = (".args", ".json")
"""Megatron's flags, or a Hugging Face `config.json`."""

GPT2_VOCABULARY = 50257

HALF_PRECISION_FLAGS = ("--fp16", "--bf16")
SHAPE_FLAGS = flags_with_role("shape", "precision")
"""Flags that decide which tensors a model has, their precision, and their values at the start."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434 §2.1): widths of its low-rank projections."""

    query_rank: int
    """0: queries are projected straight from the hidden state."""
    key_value_rank: int
    head_width: int
    """Of a query and a key without the rotary part."""
    rotary_width: int
    value_width: int
    splits_down_projections: bool = False
    """TP splits what projects to the ranks too: so Megatron's own layers, not Transformer Engine's."""


@dataclass(frozen=True)
class Mamba:
    """The mixer of a Mamba-2 block (arXiv:2405.21060): heads with a state each."""

    heads: int
    head_width: int
    groups: int
    """Of heads that share input and output projections of the state (B and C)."""
    state: int
    """Columns of a head's state for each of its channels."""

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_width

    @property
    def convolved_channels(self) -> int:
        """Channels that pass the short convolution: x, B and C."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected_columns(self) -> int:
        """Columns of the input projection: gate, x, B, C and a time step a head."""
        return self.width + self.convolved_channels + self.heads


@dataclass(frozen=True)
class LinearAttention:
    """A gated delta net (arXiv:2412.06464): heads with a state that each token updates, no scores."""

    key_heads: int
    """Of queries too."""
    key_width: int
    value_heads: int
    value_width: int
    kernel: int
    """Tokens that the short convolution looks at."""

    @property
    def value_channels(self) -> int:
        """Channels of all values, and of the gate on what is read of them."""
        return self.value_heads * self.value_width

    @property
    def convolved_channels(self) -> int:
        """Channels that pass the short convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_channels

    @property
    def projected_columns(self) -> int:
        """Columns of the input projection: those, the gate, and two numbers a head."""
        return self.convolved_channels + self.value_channels + 2 * self.value_heads


GATED_DELTA_NET = "gated_delta_net"
"""Of `--experimental-attention-variant` the one that is counted."""
MAMBA, ATTENTION, MLP, EXPERTS, MTP, LINEAR = "M", "*", "-", "E", "/", "G"
"""Blocks of a hybrid, as in `--hybrid-layer-pattern`. `MTP` begins a depth of multi-token prediction:
it joins hidden states with the embeddings of the tokens ahead, and the output layer runs once more."""
BLOCKS = (MAMBA, ATTENTION, MLP, EXPERTS, MTP)
"""Those that are planned; of `LINEAR` only parameters and FLOPs are counted."""


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class ModelShape:
    """What parameter counts, FLOPs, memory and traffic follow from."""

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
    """SwiGLU or GeGLU: the first MLP matrix is twice as wide."""
    bias: bool = True
    """Biases in the linear layers."""
    qkv_bias: bool = False
    """Biases in the QKV projection although the others have none."""
    rms_norm: bool = False
    """RMSNorm has a weight and no bias."""
    qk_norm: bool = False
    """Queries and keys have a norm each: of a head's width, or of latent attention's ranks."""
    output_gate: bool = False
    """Attention's output is gated by columns that the QKV projection has more."""
    sink: bool = False
    """Softmax has a learned offset for each head."""
    window: int = 0
    """Tokens, its own among them, that one attends to in layers with a window; 0 without."""
    windowed_fraction: float = 0.0
    """Share of the layers that have it."""
    clamps_activations: bool = False
    """Experts' activations are clamped by kernels of PyTorch's."""
    tied_embeddings: bool = True
    experts: int = 0
    """Experts in each MLP; 0 is dense."""
    experts_per_token: int = 0
    expert_ffn_hidden: int = 0
    load_balancing: bool = True
    """The router's load-balancing loss is part of the loss."""
    router_z_loss: bool = False
    """So is the mean square of its logits' log-sum-exp."""
    shared_expert_ffn: int = 0
    """Columns of the expert that every token passes beside its routed ones."""
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    """Layers, from 0, whose MLP is dense among those of experts (`--moe-layer-freq`)."""
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    """Of its blocks or layers parameters and FLOPs are counted, and no time or memory of activations."""
    linear_layers: tuple[int, ...] = ()
    """Layers, from 0, that have it in place of attention (`--linear-attention-freq`)."""
    blocks: str = ""
    """Of a hybrid's layer, each with a norm of its own; empty is attention, then an MLP or experts."""
    mamba: Mamba | None = None
    latent_experts: int = 0
    """Width that tokens are projected to before they are routed; 0 is the hidden state's."""
    mtp_layers: int = 0
    """Depths of multi-token prediction behind the layers, each an `MTP` block and a layer; those of a
    hybrid are among its blocks."""
    mtp_is_repeated: bool = False
    """All depths are one block and one layer, with one set of weights."""

    def __hash__(self) -> int:
        """Of a few fields: a search looks shapes up more often than it makes them."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        widths = (self.layers, self.hidden, self.heads, self.ffn_hidden, self.seq_length)
        return hash((*widths, self.blocks, self.experts, self.dense_layers, self.mtp_layers))

    @property
    def block_shapes(self) -> tuple[tuple[int, ModelShape], ...]:
        """How many of a layer's blocks are of each kind, with a shape of such a block alone."""
        if len(self.blocks) <= 1:
            return ((1, self),)
        return tuple(
            (times, self.with_only_block(block)) for block, times in Counter(self.blocks).items()
        )

    @lru_cache(maxsize=256)  # noqa: B019  (shapes are few)
    def with_only_block(self, block: str) -> ModelShape:
        """A layer that is one block."""
        kept = replace(self, blocks=block)
        if block != ATTENTION:
            kept = replace(kept, heads=0, query_groups=0, latent=None)
        if block != EXPERTS:
            kept = kept.without_experts
        return kept if block == MLP else replace(kept, ffn_hidden=0)

    @cached_property
    def without_experts(self) -> ModelShape:
        """Its layers with a dense MLP."""
        return replace(self, experts=0, experts_per_token=0, shared_expert_ffn=0, dense_layers=())

    @cached_property
    def layer_kinds(self) -> tuple[tuple[ModelShape, Collection[int]], ...]:
        """Shapes of layers that are alike, each with those layers, from 0: attention's before linear
        attention's, of either those with experts before the dense."""
        dense, linear = frozenset(self.dense_layers), frozenset(self.linear_layers)
        if not (dense or linear):
            return ((self, range(self.layers)),)
        rest = frozenset(range(self.layers)) - linear
        plain = replace(self, linear_layers=()) if linear else self
        kinds = (
            (True, plain, rest - dense),
            (dense, plain.without_experts, rest & dense),
            (linear, plain.with_linear_attention, linear - dense),
            (dense and linear, plain.without_experts.with_linear_attention, linear & dense),
        )
        return tuple((kind, layers) for is_there, kind, layers in kinds if is_there)

    @property
    def with_linear_attention(self) -> ModelShape:
        """Its layers with linear attention."""
        return replace(self, blocks=LINEAR + (EXPERTS if self.experts else MLP))

    def count_layers_by_kind(self, depths: int) -> tuple[tuple[int, ModelShape], ...]:
        """How many layers are of each kind, so many depths ahead among them: those have attention, and
        a dense MLP where the last layer has one."""
        counts = [len(layers) for _, layers in self.layer_kinds]
        counts[self.mtp_is_dense] += depths
        return tuple(zip(counts, (kind for kind, _ in self.layer_kinds), strict=True))

    @property
    def mtp_is_dense(self) -> bool:
        """Whether the layers of depths ahead are dense: they are as the last one is."""
        return self.layers - 1 in self.dense_layers

    @property
    def stored_mtp_layers(self) -> int:
        """Depths of multi-token prediction that have weights of their own."""
        return min(1, self.mtp_layers) if self.mtp_is_repeated else self.mtp_layers

    @property
    def norms_per_layer(self) -> int:
        """Normalisations of a layer of one kind."""
        return {"": 2, MTP: 3}.get(self.blocks, 1)

    @property
    def residual_additions(self) -> int:
        """Additions to the hidden states of a layer of one kind, each behind a dropout."""
        return {"": 2, MTP: 0}.get(self.blocks, 1)

    @property
    def total_mtp_layers(self) -> int:
        """Depths of multi-token prediction: each embeds the tokens ahead and passes the output layer."""
        return self.mtp_layers + self.blocks.count(MTP)

    @property
    def predicted_tokens(self) -> int:
        """Tokens that are predicted at each position, each with a pass through the output layer."""
        return 1 + self.total_mtp_layers

    def effective_attention_length(self, length: int) -> float:
        """Twice the tokens that one of a sequence of `length` attends to, in the mean over positions and
        layers: the length itself without a window (Megatron-Bridge counts so,
        `flop_utils.py: calculate_swa_context`)."""
        window = self.window
        if not 0 < window < length:
            return length
        return length - self.windowed_fraction * (length - window * (2 - (window - 1) / length))

    def padded_vocabulary(self, tensor: int = 1) -> int:
        """Rows of the embedding over all TP ranks (Megatron's `_vocab_size_with_padding`)."""
        multiple = self.vocabulary_multiple * tensor
        return round_up(self.vocabulary, multiple)


@dataclass(frozen=True)
class Model:
    """One `.args` file."""

    name: str
    family: str
    """The folder under `examples/` it stands in."""
    flags: tuple[str, ...]
    shape: ModelShape
    batch: Batch
    """Of the one-device baseline; other strategies scale it (`strategy.batch_for`)."""
    dtype: str
    """`fp16`, `bf16` or `fp32`, on a GPU."""
    dropout: float
    source: str = field(default="", compare=False)
    """The path that it was read from (`MODEL=`), where that is no file of the kit's own."""


_NO_FILE = "There is no file {}; give an .args file, a config.json or a model of 'make list'."


class UnknownModelError(ValueError):
    """No model of that name; the message lists the near ones."""


def model_names() -> tuple[str, ...]:
    """Every model of every family, then the imported ones."""
    return tuple(path.stem for _, path in _known_files())


def load_model(name: str, file: str | None = None) -> Model:
    """Read a model by name: a target's `MODEL=`, the path of a file, if it has that name, else a file
    of `examples/` or `hub/`.

    Raises:
        UnknownModelError: There is no such `.args` file.
        ValueError: The file lacks a flag that defines the shape.
    """
    wanted = ALIASES.get(name, name)
    if file and is_model_file(file) and model_name_of_file(file) == name:
        return find_model(file)
    for family, path in _known_files():
        if path.stem == wanted and family:
            return model_from_flags(wanted, family, read_args_file(path))
        if path.stem == wanted:
            return replace(find_model(str(path)), source="")
    if other := re.match(r"(?:.*-)?(t5|bert)\b", name, re.IGNORECASE):
        raise UnknownModelError(
            f"'{name}' is no GPT: the kit has no entry for pretrain_{other[1].lower()}.py, whose data, "
            "losses and splits are others; train a decoder of that size, for example gpt3-345m, or "
            "start the entry from the checkout itself and read its log with 'make report LOGS='."
        )
    near = difflib.get_close_matches(name, model_names(), n=3, cutoff=0.4)
    hint = " or ".join(near) if near else "one of " + ", ".join(model_names())
    raise UnknownModelError(
        f"There is no model '{name}'; did you mean {hint}? A model of your own is a file of Megatron's "
        f"flags, examples/gpt3/models/{name}.args, and MODEL= takes the path of any .args file or "
        "config.json: its name is the model's."
    )


def is_model_file(text: str) -> bool:
    """Whether `MODEL=` is the path of a file, which need not be there."""
    return Path(text).suffix in MODEL_FILES or "/" in text


def model_name_of_file(text: str) -> str:
    """The name of the model in a file.

    Raises:
        UnknownModelError: There is no such file.
    """
    path = Path(text).expanduser()
    if not path.is_file():
        raise UnknownModelError(_NO_FILE.format(text))
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def find_model(text: str) -> Model:
    """A model by name, or by the path of any `.args` file or of a Hugging Face `config.json`.

    Raises:
        UnknownModelError: There is no such model or file.
        ValueError: The file does not define a shape, or is of an architecture that is not known.
    """
    if not is_model_file(text):
        return load_model(text)
    path, name = Path(text).expanduser(), model_name_of_file(text)
    words = read_config_flags(path) if path.suffix == ".json" else read_args_file(path)
    family = "moe" if Flags(words).has("--num-experts") else "gpt3"
    return replace(model_from_flags(name, family, words), source=text)


def model_from_flags(name: str, family: str, words: Sequence[str]) -> Model:
    """Build a model from Megatron flags, wherever they come from (a file, a run's argv).

    Raises:
        ValueError: A flag that defines the shape is missing; the message names it.
    """
    flags = Flags(words)
    return Model(
        name=name,
        family=family,
        flags=tuple(words),
        shape=shape_from_flags(name, flags),
        batch=parse_batch(flags),
        dtype=parse_dtype(flags),
        # A family may train all its models without.
        dropout=Flags((*training_flags(family), *words)).number("--hidden-dropout"),
    )


def parse_batch(flags: Flags, replicas: int = 1) -> Batch:
    """What the flags say; a sample a rank, and a micro batch a replica, where they do not."""
    micro = flags.integer("--micro-batch-size", 1)
    return Batch(micro, flags.integer("--global-batch-size", micro * replicas))


def parse_dtype(flags: Flags) -> str:
    """`fp16`, `bf16` or `fp32`."""
    return next(
        (half.removeprefix("--") for half in HALF_PRECISION_FLAGS if flags.has(half)), "fp32"
    )


def replace_vocabulary(model: Model, entries: int) -> Model:
    """The same model over another tokenizer's tokens."""
    if model.shape.vocabulary == entries:
        return model
    flags = merge_flags(model.flags, ("--vocab-size", str(entries)))
    return replace(model, flags=flags, shape=replace(model.shape, vocabulary=entries))


def imported_weights_folder(model: Model) -> Path | None:
    """The checkpoint that an imported model begins with; None for a model without weights."""
    named = Flags(model.flags).text("--load")
    return ROOT / named if named else None


def training_flags(family: str) -> tuple[str, ...]:
    """How a family's models are trained unless their own files say otherwise."""
    return read_args_file(ROOT / "examples" / family / "training.args")


def merge_training_flags(model: Model, in_half: bool = True) -> tuple[str, ...]:
    """The family's training flags, then the model's own without its weights."""
    flags = (*training_flags(model.family), *drop_flags(model.flags, WEIGHT_LOADING_FLAGS))
    return flags if in_half else drop_flags(flags, HALF_PRECISION_FLAGS)


def apply_flags_to_model(
    model: Model, words: Sequence[str], names: Container[str] = SHAPE_FLAGS
) -> Model:
    """The model that `words` make of it: another shape or precision, under its name.

    Flags that `names` lacks are left out. Raises as `model_from_flags` does.
    """
    changes = pick_flags(words, names)
    if not changes:
        return model
    other_half = any(half in changes for half in HALF_PRECISION_FLAGS)
    kept = drop_flags(model.flags, HALF_PRECISION_FLAGS) if other_half else model.flags
    return model_from_flags(model.name, model.family, merge_flags(kept, changes))


def shape_from_flags(name: str, flags: Flags) -> ModelShape:
    """Derive the shape as Megatron's `validate_args` does; raises as `model_from_flags`, also where a
    dimension is below its least."""
    for needed in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        if not flags.has(needed):
            raise ValueError(f"Model '{name}' lacks {needed}; add it to its .args file.")
    said = flags.fields("shape")
    for flag in flags_in_group("shape", "latent", "mamba", "linear"):
        counted = flag.kind == "whole" and flag.field not in (*_FROM_ONE, *_OF_EXPERTS)
        if counted and (value := flags.integer(flag.name)) < 0:
            raise ValueError(f"{flag.name} is {value}; use 0 or more.")
    hidden, heads, layers = said["hidden"], said["heads"], said["layers"]
    learned = flags.text("--position-embedding-type") == "learned_absolute"
    latent = flags.has("--multi-latent-attention")
    columns = said.get("ffn_hidden", default_ffn_hidden(hidden, flags.has("--swiglu")))
    derived = {
        "query_groups": heads,
        "head_width": hidden // max(1, heads),
        "ffn_hidden": columns,
        "expert_ffn_hidden": columns,
    }
    experts = said.get("experts", 0)
    with_experts = _marked(flags, "--moe-layer-freq", layers, _each) if experts else range(layers)
    linear = flags.text("--experimental-attention-variant") == GATED_DELTA_NET
    window, windowed_fraction = _window(flags), 1.0
    if window and flags.has(_SKIPPED):
        windowed_fraction = len(_marked(flags, _SKIPPED, layers, _others)) / layers
    shape = ModelShape(
        **(derived | said),
        positions=flags.integer("--max-position-embeddings") if learned else 0,
        gated=flags.has("--swiglu") or flags.has("--quick-geglu"),
        rms_norm=flags.text("--normalization") == "RMSNorm",
        sink=flags.text("--softmax-type") == "learnable",
        # Fused experts clamp in their products, which other activations do in their own kernel.
        clamps_activations=flags.has("--quick-geglu")
        and flags.has("--activation-func-clamp-value")
        and not flags.has("--use-transformer-engine-op-fuser"),
        latent=LatentAttention(**({"query_rank": 0} | flags.fields("latent"))) if latent else None,
        load_balancing=flags.text("--moe-aux-loss-coeff", "0").strip("[]") not in ("0", "0.0"),
        router_z_loss=flags.has("--moe-z-loss-coeff"),
        dense_layers=tuple(layer for layer in range(layers) if layer not in with_experts),
        linear=LinearAttention(**flags.fields("linear")) if linear else None,
        linear_layers=_marked(flags, "--linear-attention-freq", layers, _others) if linear else (),
        window=window,
        windowed_fraction=windowed_fraction if window else 0.0,
    )
    _refuse_empty(name, shape)
    return _hybrid_shape(shape, flags) if flags.has("--hybrid-layer-pattern") else shape


_FROM_ONE = (
    *("layers", "hidden", "heads", "query_groups", "head_width", "ffn_hidden"),
    *("seq_length", "vocabulary", "vocabulary_multiple"),
)
_OF_EXPERTS = ("experts", "experts_per_token", "expert_ffn_hidden")


_SKIPPED = "--window-attn-skip-freq"


def _window(flags: Flags) -> int:
    """Tokens of `--window-size`, whose second number a causal mask leaves at 0; 0 without a window.

    Raises:
        ValueError: It is no pair of numbers.
    """
    said = flags.text("--window-size")
    pair = re.fullmatch(r"\(?(-?\d+),(-?\d+)\)?", said.replace(" ", ""))
    if said and not pair:
        raise ValueError(f"--window-size {said} is no pair of numbers, such as 127,0; correct it.")
    return max(0, int(pair[1]) + 1) if pair else 0


def default_ffn_hidden(hidden: int, swiglu: bool) -> int:
    """Megatron's 4h; SwiGLU's is two thirds of it, rounded to 64, so that an MLP's size stays that."""
    return int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden


def _refuse_empty(name: str, shape: ModelShape) -> None:
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


def _each(layer: int, every: int) -> bool:
    return layer % every == 0


def _others(layer: int, every: int) -> bool:
    return (layer + 1) % every > 0


def _marked(
    flags: Flags, name: str, layers: int, by_number: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Layers, from 0, that a flag marks by a 1 in a list of Python's, or a number as `by_number` says.

    Raises:
        ValueError: It is neither, or its list is of another number of layers.
    """
    text = " ".join(flags.texts(name)) or str(FLAGS[name].default or "")
    try:
        pattern = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        pattern = None
    if isinstance(pattern, int) and pattern > 0:
        return tuple(layer for layer in range(layers) if by_number(layer, pattern))
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ValueError(
            f"{name} {text[:60]} is no number above 0 and no list of {layers} layers, "
            "such as [0]*1+[1]*3; correct it."
        )
    return tuple(layer for layer, mark in enumerate(pattern) if mark)


def _evaluated(node: ast.expr) -> Any:
    """A number, a list of numbers, or sums and multiples of those; TypeError for anything else."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List():
            return [_evaluated(element) for element in node.elts]
        case ast.BinOp(op=ast.Add()):
            return _evaluated(node.left) + _evaluated(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _evaluated(node.left) * min(_evaluated(node.right), _MOST_LAYERS)
    raise TypeError


_MOST_LAYERS = 10_000


def _hybrid_shape(shape: ModelShape, flags: Flags) -> ModelShape:
    """The shape with the blocks of `--hybrid-layer-pattern`.

    Raises:
        ValueError: It has a block that the formulas do not know.
    """
    blocks = flags.text("--hybrid-layer-pattern")
    if strange := sorted(set(blocks) - {*BLOCKS, LINEAR}):
        raise ValueError(
            f"--hybrid-layer-pattern {blocks} has the block '{strange[0]}', which is not known; "
            f"use blocks of {' '.join((*BLOCKS, LINEAR))}."
        )
    said = flags.fields("mamba")
    mamba = Mamba(**({"heads": 2 * shape.hidden // said["head_width"]} | said))
    linear = LinearAttention(**flags.fields("linear"))
    whole = replace(shape, mtp_layers=0, dense_layers=(), linear_layers=())
    return replace(whole, layers=1, blocks=blocks, mamba=mamba, linear=linear)


def _known_files() -> Iterator[tuple[str, Path]]:
    """Every family's files, with its name, then those of imported models, without one."""
    for family in FAMILIES:
        for path in sorted((ROOT / "examples" / family / "models").glob("*.args")):
            yield family, path
    for path in sorted(HUB.glob("*/*.args")):
        if path.stem == path.parent.name:
            yield "", path

"""A run's flags as fields of a `ConfigContainer`, and such fields as flags.

Most follow from `table.py`; here is what several flags or fields say together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.convert.recipe.table import BRIDGE, BRIDGE_VERSION, ON, ROWS, Row, Symbol, Value
from tools.spec.flags import Flags, drop_flags, merge_flags, pick_flags
from tools.spec.model import SHAPE_FLAGS
from tools.spec.run import Backend, DeviceKind, RunSpec

OUTPUT = "nemo_experiments"
"""Where a recipe writes; Bridge's own do too."""

type Fields = Mapping[str, Value]
"""By `section.field`."""


class RecipeError(ValueError):
    """A run that no recipe can express, or a recipe that expresses no run; one sentence."""


@dataclass(frozen=True)
class Recipe:
    """A run as a recipe has it."""

    fields: dict[str, Value]
    """Those that differ from Bridge's defaults."""
    left_out: tuple[str, ...]
    """What has no counterpart, a sentence each."""


@dataclass(frozen=True)
class Reading:
    """A recipe as Megatron's flags."""

    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    """What no flag says, a sentence each."""


_ACTIVATIONS: dict[tuple[bool, str], str] = {
    (False, "torch.nn.functional.gelu"): "",
    (True, "torch.nn.functional.silu"): "--swiglu",
    (False, "megatron.core.activations.squared_relu"): "--squared-relu",
    (True, "megatron.core.fusions.fused_bias_geglu.quick_gelu"): "--quick-geglu",
}
"""The flag for an MLP that is gated or not, with this function."""

_LOCAL = Symbol("megatron.bridge.models.gpt_provider.local_layer_spec")
_HALVES = {"--fp16": Symbol("torch.float16"), "--bf16": Symbol("torch.bfloat16")}
_PRESETS: dict[str, dict[str, Value]] = {
    "bf16_mixed": {"bf16": True, "grad_reduce_in_fp32": True},
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
}
"""Of Bridge's names for a precision those that have no FP8."""

_IN_FP32, _IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
_GROUPED, _POSITIONS = "--group-query-attention", "--max-position-embeddings"
_NULL = "NullTokenizer"
_TOKENIZER = {
    "--tokenizer-type": "tokenizer.tokenizer_type",
    "--tokenizer-model": "tokenizer.tokenizer_model",
    "--vocab-file": "tokenizer.vocab_file",
    "--merge-file": "tokenizer.merge_file",
}
_OF_DEVICE = ("--transformer-impl", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion")
"""Chosen for the devices at hand, beside the rows that are."""

_JOINT = frozenset(
    (
        *filter(None, _ACTIVATIONS.values()),
        *("--ffn-hidden-size", "--vocab-size", _GROUPED, _POSITIONS, "--data-path", "--mock-data"),
        *(_IN_FP32, _IN_BF16, "--save", "--tensorboard-dir", *_OF_DEVICE, *_TOKENIZER),
    )
)
"""Flags without a row: several make one field, or one makes several."""

_SYNONYMS = {
    "--muon-use-nesterov": "--muon-nesterov",
    "--layernorm-epsilon": "--norm-epsilon",
    "--disable-align-grad-reduce": "--no-align-grad-reduce",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--persistent-save-interval": "--save-interval",
}
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_OTHER_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--virtual-pipeline-model-parallel-size",
)


def recipe_of_flags(given: Iterable[str], spec: RunSpec, tokens_added: int = 0) -> Recipe:
    """A run as a recipe.

    Args:
        given: The flags it was started with.
        spec: What they mean.
        tokens_added: Entries that the run's Megatron adds to `--vocab-size`: 1 up to 0.17.

    Raises:
        RecipeError: A recipe cannot say what the run trains.
    """
    _refuse_other_trainers(spec)
    words = _canonical(tuple(given), spec)
    kept = words
    if spec.device is DeviceKind.CPU:
        kept = drop_flags(words, {*_OF_DEVICE, *(row.flag for row in ROWS if row.of_device)})
    flags = Flags(kept)
    fields: dict[str, Value] = {}
    for row in ROWS:
        if row.applies(flags):
            fields |= row.values(_given(row, kept))
    fields |= _model(flags, spec) | _precision(flags) | _data(kept) | _outputs(flags)
    fields |= _tokenizer(flags, spec.shape.vocabulary + tokens_added)
    missing = object()
    changed = {place: each for place, each in fields.items() if each != BRIDGE.get(place, missing)}
    return Recipe(changed, (*_beyond_flags(spec, words, kept), *_without_counterpart(kept)))


def reading_of_fields(fields: Fields) -> Reading:
    """A recipe as flags; fields that are missing have Bridge's default.

    Raises:
        RecipeError: A field is of another kind, two contradict one another, or it is no GPT model that
            Megatron has flags for.
    """
    _refuse_other_models(fields)
    fields = _with_precision({**BRIDGE, **fields}, "mixed_precision", _sections(fields))
    notes: list[str] = []
    groups = fields.get("model.num_query_groups")
    words = [] if groups in (None, fields.get("model.num_attention_heads")) else [_GROUPED]
    for row in ROWS:
        if row.applies(Flags(words)):
            words += _words_of(row, fields, notes)
    words += _model_words(fields, Flags(words), notes)
    words += _vocabulary_words(fields, notes)
    words += _data_words(fields, notes)
    return Reading(merge_flags(words), (*notes, *_unread(fields)))


# From flags to fields.


def _refuse_other_trainers(spec: RunSpec) -> None:
    if spec.backend != Backend.MEGATRON:
        raise RecipeError(
            f"The run trained with BACKEND={spec.backend}; Megatron-Bridge trains with Megatron Core, so "
            "choose a run of Megatron's."
        )
    if spec.parallelism.schedule:
        raise RecipeError(
            f"The run's pipeline schedule {spec.parallelism.schedule} is the native backend's; choose a "
            "run of Megatron's."
        )
    positions, tokens = spec.shape.positions, spec.shape.seq_length
    if positions not in (0, tokens):
        raise RecipeError(
            f"The run's model has {positions} learned positions for sequences of {tokens} tokens; "
            f"Megatron-Bridge's has as many as tokens, so train with {_POSITIONS} {tokens}."
        )


def _canonical(words: tuple[str, ...], spec: RunSpec) -> tuple[str, ...]:
    """The same flags, each once and under the name that the table has."""
    merged = merge_flags(tuple(_SYNONYMS.get(word, word) for word in words))
    if "--recompute-activations" in merged:
        selective = ("--recompute-granularity", "selective")
        merged = merge_flags(drop_flags(merged, ("--recompute-activations",)), selective)
    if "--use-rotary-position-embeddings" in merged:
        merged = drop_flags(merged, ("--use-rotary-position-embeddings",))
        merged = merge_flags(merged, ("--position-embedding-type", "rope"))
    stages = spec.parallelism.virtual_stages
    merged = drop_flags(merged, (*_OTHER_STAGES, _STAGES))
    if not spec.parallelism.sequence_parallel:
        merged = drop_flags(merged, ("--sequence-parallel",))
    return (*merged, _STAGES, str(stages)) if stages > 1 else merged


def _given(row: Row, words: tuple[str, ...]) -> Value:
    found = pick_flags(words, (row.flag,))
    if not found:
        return row.megatron
    try:
        return row.kind.read(found[1:])
    except (ValueError, IndexError):
        raise RecipeError(
            f"The run's {' '.join(found)} is not {row.kind.wanted}, so no field of a recipe says it."
        ) from None


def _model(flags: Flags, spec: RunSpec) -> dict[str, Value]:
    (gated, function), flag = next(
        (each for each in _ACTIVATIONS.items() if each[1] and flags.has(each[1])),
        next(iter(_ACTIVATIONS.items())),
    )
    unfused = "--no-bias-swiglu-fusion" if flag == "--swiglu" else "--no-bias-gelu-fusion"
    biased = flag == "--swiglu" or spec.shape.bias
    fields: dict[str, Value] = {
        "model.ffn_hidden_size": spec.shape.ffn_hidden,
        "model.gated_linear_unit": gated,
        "model.activation_func": Symbol(function),
        "model.bias_activation_fusion": biased and not flags.has(unfused),
    }
    if flags.text("--transformer-impl") == "local":
        fields["model.transformer_layer_spec"] = _LOCAL
    return fields


def _precision(flags: Flags) -> dict[str, Value]:
    half = next((name for name in _HALVES if flags.has(name)), None)
    if half is None:
        return {"ddp.grad_reduce_in_fp32": flags.has(_IN_FP32)}
    # Megatron adds up gradients of bf16 in fp32 unless it is asked not to.
    in_fp32 = flags.has(_IN_FP32) or (half == "--bf16" and not flags.has(_IN_BF16))
    return {
        "mixed_precision.params_dtype": _HALVES[half],
        "mixed_precision.pipeline_dtype": _HALVES[half],
        "mixed_precision.grad_reduce_in_fp32": in_fp32,
    }


def _data(words: Sequence[str]) -> dict[str, Value]:
    paths = list(pick_flags(words, ("--data-path",))[1:])
    if not paths:
        return {"dataset.blend": None}
    if len(paths) == 1:
        return {"dataset.blend": [[*paths], None]}
    return {"dataset.blend": [[*paths[1::2]], [float(weight) for weight in paths[::2]]]}


def _outputs(flags: Flags) -> dict[str, Value]:
    return {
        "checkpoint.save": f"{OUTPUT}/checkpoints" if flags.has("--save") else None,
        "logger.tensorboard_dir": f"{OUTPUT}/tensorboard",
    }


def _tokenizer(flags: Flags, entries: int) -> dict[str, Value]:
    if flags.text("--tokenizer-type", _NULL) == _NULL:
        # Megatron Core 0.16's adds an entry for the end of a document to the size it is given.
        return {"tokenizer.tokenizer_type": _NULL, "tokenizer.vocab_size": entries - 1}
    return {place: flags.text(flag) or None for flag, place in _TOKENIZER.items()}


def _beyond_flags(spec: RunSpec, words: Sequence[str], kept: Sequence[str]) -> Iterable[str]:
    dropped = " ".join(drop_flags(words, {word for word in kept if word.startswith("--")}))
    if dropped:
        yield f"{dropped}: for CPU ranks; Megatron-Bridge trains on GPUs, with their own."
    if spec.fused:
        yield f"FUSED={','.join(spec.fused)}: the kit's kernels; Transformer Engine has its own."
    if spec.link_bits_per_second:
        yield f"NET={spec.link_bits_per_second}bps: the link between the ranks was shaped."
    if spec.shares_gpu:
        yield "SHARE_GPU=1: all ranks were on one GPU."
    if spec.plant:
        yield f"PLANT={spec.plant.path}: each rank ran this file; the recipe is of the unchanged Megatron."


def _without_counterpart(words: Sequence[str]) -> Iterable[str]:
    known = {row.flag for row in ROWS} | _JOINT
    unknown = drop_flags(words, known)
    for flag in (word for word in unknown if word.startswith("--")):
        said = " ".join(pick_flags(unknown, (flag,)))
        if flag in SHAPE_FLAGS:
            raise RecipeError(
                f"The run's {said} makes a model that no field of Megatron-Bridge {BRIDGE_VERSION} is known "
                "for; train without it."
            )
        yield f"{said}: no field of Megatron-Bridge {BRIDGE_VERSION} is known to mean it."


# From fields to flags.


def _refuse_other_models(fields: Fields) -> None:
    for field in ("num_layers", "hidden_size", "num_attention_heads"):
        value = fields.get(f"model.{field}")
        if not isinstance(value, int) or value < 1:
            raise RecipeError(
                f"model.{field} is {shown(value)}, not a whole number above 0, so it defines no model."
            )
    target = str(fields.get("model._target_", ""))
    for field in ("multi_latent_attention", "is_hybrid_model", "encoder_num_layers"):
        if fields.get(f"model.{field}"):
            raise RecipeError(
                f"model.{field} of {target or 'the recipe'} is another architecture than the GPT that the "
                "kit reads; choose a recipe of a GPTModelProvider without it."
            )


def _sections(fields: Fields) -> set[str]:
    return {place.partition(".")[0] for place, each in fields.items() if "." in place or each}


def _with_precision(fields: dict[str, Value], name: str, given: set[str]) -> dict[str, Value]:
    """The fields with `mixed_precision` as it will be, and no sections that it would overwrite."""
    preset = fields.get(name)
    if isinstance(preset, str):
        if preset.replace("-", "_") not in _PRESETS:
            raise RecipeError(
                f"mixed_precision is {shown(preset)}, a name that is not known here; write its fields out, "
                f"or use one of {', '.join(_PRESETS)}."
            )
        mixed = {f"{name}.{key}": each for key, each in _PRESETS[preset.replace("-", "_")].items()}
        fields = fields | mixed
    elif name not in given:
        for place in [each for each in fields if each.startswith(f"{name}.")]:
            key = place.removeprefix(f"{name}.")
            for section in ("model", "optimizer", "ddp"):
                fields[place] = fields.get(f"{section}.{key}", fields[place])
        return fields
    return fields | {"ddp.grad_reduce_in_fp32": fields[f"{name}.grad_reduce_in_fp32"]}


def _words_of(row: Row, fields: Fields, notes: list[str]) -> list[str]:
    value = _one_value(row, fields, notes)
    if value is None:
        return []
    try:
        words = row.kind.words(value)
    except TypeError:
        raise RecipeError(
            f"{row.places[0]} is {shown(value)}, not {row.kind.wanted}"
            + ("; YAML reads 1e-4 as a text, write 1.0e-4." if isinstance(value, str) else ".")
        ) from None
    return [] if words is None or value == row.megatron else [row.flag, *words]


def _one_value(row: Row, fields: Fields, notes: list[str]) -> Value:
    """The value that the row's places hold together."""
    held: dict[str, Value] = {}
    for place in row.places:
        value = fields.get(place.removeprefix("!"))
        if value is not None:
            held[place] = not value if place.startswith("!") else value
    values = list(held.values())
    if not values or all(value == values[0] for value in values):
        return values[0] if values else None
    if row.flag == "--seq-length":
        raise RecipeError(
            f"{' and '.join(f'{place} {shown(each)}' for place, each in held.items())} contradict one "
            "another; give both the same number of tokens."
        )
    if row.flag == "--weight-decay":  # What Bridge's scheduler sets at each step, whatever was given.
        value = held.get("scheduler.end_weight_decay", values[0])
    elif row.kind is ON:  # A switch of several parts: Bridge switches all on.
        value = True
    else:
        value = values[0]
    said = ", ".join(f"{place.removeprefix('!')} {shown(each)}" for place, each in held.items())
    notes.append(f"{said}: {row.flag} is one value; {shown(value)} is what counts.")
    return value


def _model_words(fields: Fields, flags: Flags, notes: list[str]) -> list[str]:
    gated, function = fields.get("model.gated_linear_unit"), fields.get("model.activation_func")
    path = function.path if isinstance(function, Symbol) else shown(function)
    flag = _ACTIVATIONS.get((gated is True, path))
    if flag is None:
        kind = "gated " if gated else ""
        raise RecipeError(
            f"model.activation_func is {kind}{path}, for which Megatron-LM has no flag; it has "
            + ", ".join(f"{'gated ' if each[0] else ''}{each[1]}" for each in _ACTIVATIONS)
            + "."
        )
    hidden = flags.integer("--hidden-size", 0)
    ffn = fields.get("model.ffn_hidden_size") or 4 * hidden
    if not isinstance(ffn, int):
        raise RecipeError(f"model.ffn_hidden_size is {shown(ffn)}, not a whole number.")
    words = [flag] if flag else []
    words += [] if ffn == 4 * hidden and not flag else ["--ffn-hidden-size", str(ffn)]
    if not fields.get("model.bias_activation_fusion"):
        biased = fields.get("model.add_bias_linear")
        words += ["--no-bias-swiglu-fusion"] if flag == "--swiglu" else []
        words += ["--no-bias-gelu-fusion"] if flag != "--swiglu" and biased else []
    words += [_POSITIONS, flags.text("--seq-length")]
    layers = fields.get("model.transformer_layer_spec")
    if layers == _LOCAL:
        words += ["--transformer-impl", "local"]
    elif layers != BRIDGE["model.transformer_layer_spec"]:
        path = layers.path if isinstance(layers, Symbol) else shown(layers)
        notes.append(f"model.transformer_layer_spec {path}: Megatron-LM chooses its layers by flags.")
    in_fp32 = fields.get("ddp.grad_reduce_in_fp32")
    if flags.has("--bf16"):
        return words + ([] if in_fp32 else [_IN_BF16])
    return words + ([_IN_FP32] if in_fp32 else [])


def _vocabulary_words(fields: Fields, notes: list[str]) -> list[str]:
    rows, entries = fields.get("model.vocab_size"), fields.get("tokenizer.vocab_size")
    kind = fields.get("tokenizer.tokenizer_type")
    if isinstance(rows, int):  # Bridge pads only what a tokenizer says.
        return ["--vocab-size", str(rows), "--make-vocab-size-divisible-by", "1"]
    if kind == _NULL and isinstance(entries, int):
        return ["--vocab-size", str(entries + 1)]
    notes.append(
        f"tokenizer.tokenizer_type {shown(kind)}: how many entries it has is not in the recipe; the kit takes "
        "GPT-2's unless --vocab-size says another number."
    )
    return []


def _data_words(fields: Fields, notes: list[str]) -> list[str]:
    target = str(fields.get("dataset._target_", "GPTDatasetConfig"))
    if not target.endswith("GPTDatasetConfig"):
        notes.append(f"dataset {target}: the kit reads .bin/.idx; name one in DATA=.")
        return []
    blend = fields.get("dataset.blend")
    if blend is None:
        return []
    if not isinstance(blend, list) or len(blend) != 2 or not isinstance(blend[0], list):
        raise RecipeError(f"dataset.blend is {shown(blend)}, not a list of prefixes and their weights.")
    paths, weights = [str(path) for path in blend[0]], blend[1]
    if weights is None and len(paths) == 1:
        return ["--data-path", *paths]
    if not isinstance(weights, list) or len(weights) != len(paths):
        raise RecipeError(
            f"dataset.blend has {len(paths)} prefixes and weights {shown(weights)}; give each its weight."
        )
    pairs = zip(weights, paths, strict=True)
    return ["--data-path", *(str(each) for pair in pairs for each in pair)]


_DERIVED = frozenset(
    (
        *("dist.local_rank", "model.transformer_impl", "model.should_pad_vocab", "model.vocab_size"),
        *("model.params_dtype", "model.pipeline_dtype", "optimizer.params_dtype"),
        *("mixed_precision.params_dtype", "mixed_precision.pipeline_dtype"),
        *("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32", "mixed_precision"),
        *("model.ffn_hidden_size", "model.gated_linear_unit", "model.activation_func"),
        *("model.bias_activation_fusion", "model.transformer_layer_spec", "dataset.blend"),
        *("dataset.tokenizer", "dataset.split_matrix", "tokenizer.vocab_size", *_TOKENIZER.values()),
        *("checkpoint.save", "logger.tensorboard_dir", "scheduler.lr_warmup_steps"),
        *("scheduler.lr_decay_steps", "scheduler.wd_incr_steps", "scheduler.wsd_decay_steps"),
    )
)
"""Fields that another decides, or that are read beside the table."""


def _unread(fields: Fields) -> Iterable[str]:
    """Fields that differ from Bridge's default and that no flag says."""
    read = {place.removeprefix("!") for row in ROWS for place in row.places} | _DERIVED
    halves = {place.partition(".")[2] for place in fields if place.startswith("mixed_precision.")}
    for place, value in fields.items():
        section, _, field = place.partition(".")
        precision = section in ("model", "optimizer", "ddp") and field in halves
        if place in read or field == "_target_" or precision or value == BRIDGE.get(place):
            continue
        yield f"{place} = {shown(value)}: no flag of Megatron-LM is known to mean it."


def shown(value: Value) -> str:
    """A value as Python writes it."""
    if isinstance(value, Symbol):
        return value.path
    if isinstance(value, list):
        return f"[{', '.join(shown(each) for each in value)}]"
    return repr(value)

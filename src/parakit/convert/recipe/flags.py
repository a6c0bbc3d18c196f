"""The fields of a `ConfigContainer` as Megatron's flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parakit.config.flag_table import KnownFlag
from parakit.config.flags import Flags, drop_flags, merge_flags
from parakit.convert.recipe.table import (
    ACCUMULATE_IN_FP32,
    ACTIVATIONS,
    BRIDGE_DEFAULTS,
    LOCAL_LAYER_SPEC,
    NULL_TOKENIZER,
    POSITIONS_FLAG,
    REDUCE_IN_BF16,
    ROWS,
    TOKENIZER_FIELDS,
    VALUE_KINDS,
    Fields,
    RecipeError,
    Symbol,
    Value,
    format_value,
    implied_switches,
    megatron_default,
    negate_if_marked,
)


@dataclass(frozen=True)
class RecipeFlags:
    """A recipe as Megatron's flags."""

    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    """What no flag says, a sentence each."""


_PRESETS: dict[str, dict[str, Value]] = {
    "bf16_mixed": {"bf16": True, "grad_reduce_in_fp32": True},
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
}
"""Of Bridge's names for a precision those that have no FP8."""

_PARTS = "--data-parallel-sharding-strategy"

_DERIVED = frozenset(
    (
        *("dist.local_rank", "checkpoint.save", "logger.tensorboard_dir", "mixed_precision"),
        *("model.transformer_impl", "model.should_pad_vocab", "model.vocab_size"),
        *("model.ffn_hidden_size", "model.gated_linear_unit", "model.activation_func"),
        *("model.bias_activation_fusion", "model.transformer_layer_spec"),
        *("model.params_dtype", "mixed_precision.params_dtype", "optimizer.params_dtype"),
        *("model.pipeline_dtype", "mixed_precision.pipeline_dtype"),
        *("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"),
        *("dataset.blend", "dataset.tokenizer", "dataset.split_matrix"),
        *("tokenizer.vocab_size", *TOKENIZER_FIELDS.values()),
        *("scheduler.lr_warmup_steps", "scheduler.lr_decay_steps"),
        *("scheduler.wd_incr_steps", "scheduler.wsd_decay_steps"),
    )
)
"""Fields that another decides, or that are read beside the table."""


def flags_from_fields(fields: Fields) -> RecipeFlags:
    """A recipe as flags; fields that are missing have Bridge's default.

    Raises:
        RecipeError: A field is of another kind, two contradict one another, or it is no GPT model that
            Megatron has flags for.
    """
    _refuse_other_models(fields)
    given = {place.partition(".")[0] for place, each in fields.items() if "." in place or each}
    fields = _with_precision({**BRIDGE_DEFAULTS, **fields}, "mixed_precision", given)
    notes: list[str] = []
    groups = fields.get("model.num_query_groups")
    grouped = groups not in (None, fields.get("model.num_attention_heads"))
    words = ["--group-query-attention"] * grouped
    for row in ROWS:
        if Flags(words).applies(row):
            words += _words_of(row, fields, notes)
    words += _model_words(fields, Flags(words), notes)
    words += _vocabulary_words(fields, notes)
    words += _data_words(fields, notes)
    unsaid = implied_switches(Flags(words))
    if "--use-megatron-fsdp" in words and _PARTS not in words:
        words += [_PARTS, "optim_grads_params"]  # Megatron's default, which not every release has.
    return RecipeFlags(drop_flags(merge_flags(words), unsaid), (*notes, *_unread(fields)))


def _refuse_other_models(fields: Fields) -> None:
    for field in ("num_layers", "hidden_size", "num_attention_heads"):
        value = fields.get(f"model.{field}")
        if not isinstance(value, int) or value < 1:
            raise RecipeError(
                f"model.{field} is {format_value(value)}, not a whole number above 0, so it defines no model."
            )
    target = str(fields.get("model._target_", ""))
    for field in ("multi_latent_attention", "is_hybrid_model", "encoder_num_layers"):
        if fields.get(f"model.{field}"):
            raise RecipeError(
                f"model.{field} of {target or 'the recipe'} is another architecture than the kit's GPT; "
                "choose a recipe of a GPTModelProvider without it."
            )


def _with_precision(fields: dict[str, Value], name: str, given: set[str]) -> dict[str, Value]:
    """The fields with `mixed_precision` as it will be, and no sections that it would overwrite."""
    preset = fields.get(name)
    if isinstance(preset, str):
        meant = _PRESETS.get(preset.replace("-", "_"))
        if meant is None:
            raise RecipeError(
                f"mixed_precision is {format_value(preset)}, a name not known here; write its fields out, or "
                f"use one of {', '.join(_PRESETS)}."
            )
        fields = fields | {f"{name}.{key}": each for key, each in meant.items()}
    elif name not in given:
        for place in [each for each in fields if each.startswith(f"{name}.")]:
            key = place.removeprefix(f"{name}.")
            for section in ("ddp", "optimizer", "model"):  # The model's counts.
                fields[place] = fields.get(f"{section}.{key}", fields[place])
        return fields
    return fields | {"ddp.grad_reduce_in_fp32": fields[f"{name}.grad_reduce_in_fp32"]}


def _words_of(row: KnownFlag, fields: Fields, notes: list[str]) -> list[str]:
    value = _one_value(row, fields, notes)
    if value is None:
        return []
    try:
        words = VALUE_KINDS[row.kind].words(value)
    except TypeError:
        raise RecipeError(
            f"{row.recipe[0]} is {format_value(value)}, not {VALUE_KINDS[row.kind].wanted}"
            + ("; YAML reads 1e-4 as a text, write 1.0e-4." if isinstance(value, str) else ".")
        ) from None
    return [] if words is None or value == megatron_default(row) else [row.name, *words]


def _one_value(row: KnownFlag, fields: Fields, notes: list[str]) -> Value:
    """The value that the row's places hold together."""
    found = ((place, fields.get(place.lstrip("!"))) for place in row.recipe)
    held = {place: negate_if_marked(place, value) for place, value in found if value is not None}
    values = list(held.values())
    if not values or all(value == values[0] for value in values):
        return values[0] if values else None
    if row.name == "--seq-length":
        raise RecipeError(
            f"{' and '.join(f'{place} {format_value(each)}' for place, each in held.items())} contradict one "
            "another; give both the same number of tokens."
        )
    # Of a switch with several parts Bridge switches all on.
    value = True if row.kind == "on" else values[0]
    if row.name == "--weight-decay":  # Bridge's scheduler sets it at each step, whatever was given.
        value = held.get("scheduler.end_weight_decay", value)
    said = ", ".join(f"{place.lstrip('!')} {format_value(each)}" for place, each in held.items())
    notes.append(f"{said}: {row.name} is one value; {format_value(value)} is what counts.")
    return value


def _model_words(fields: Fields, flags: Flags, notes: list[str]) -> list[str]:
    gated, function = fields.get("model.gated_linear_unit"), fields.get("model.activation_func")
    path = function.path if isinstance(function, Symbol) else format_value(function)
    flag = ACTIVATIONS.get((gated is True, path))
    if flag is None:
        kind = "gated " if gated else ""
        raise RecipeError(
            f"model.activation_func is {kind}{path}, for which Megatron-LM has no flag; it has "
            + ", ".join(f"{'gated ' if each[0] else ''}{each[1]}" for each in ACTIVATIONS)
            + "."
        )
    hidden = flags.integer("--hidden-size")
    ffn = fields.get("model.ffn_hidden_size") or 4 * hidden
    if not isinstance(ffn, int):
        raise RecipeError(f"model.ffn_hidden_size is {format_value(ffn)}, not a whole number.")
    words = [flag] if flag else []
    words += [] if ffn == 4 * hidden and not flag else ["--ffn-hidden-size", str(ffn)]
    if not fields.get("model.bias_activation_fusion"):
        biased = fields.get("model.add_bias_linear")
        words += ["--no-bias-swiglu-fusion"] if flag == "--swiglu" else []
        words += ["--no-bias-gelu-fusion"] if flag != "--swiglu" and biased else []
    words += [POSITIONS_FLAG, flags.text("--seq-length")]
    layers = fields.get("model.transformer_layer_spec")
    if layers == LOCAL_LAYER_SPEC:
        words += ["--transformer-impl", "local"]
    elif layers != BRIDGE_DEFAULTS["model.transformer_layer_spec"]:
        path = layers.path if isinstance(layers, Symbol) else format_value(layers)
        notes.append(
            f"model.transformer_layer_spec {path}: Megatron-LM chooses its layers by flags."
        )
    in_fp32 = fields.get("ddp.grad_reduce_in_fp32")
    if flags.has("--bf16"):
        return words + ([] if in_fp32 else [REDUCE_IN_BF16])
    return words + ([ACCUMULATE_IN_FP32] if in_fp32 else [])


def _vocabulary_words(fields: Fields, notes: list[str]) -> list[str]:
    rows, entries = fields.get("model.vocab_size"), fields.get("tokenizer.vocab_size")
    kind = fields.get("tokenizer.tokenizer_type")
    if isinstance(rows, int):  # Bridge pads only what a tokenizer says.
        return ["--vocab-size", str(rows), "--make-vocab-size-divisible-by", "1"]
    if kind == NULL_TOKENIZER and isinstance(entries, int):
        return ["--vocab-size", str(entries + 1)]
    notes.append(
        f"tokenizer.tokenizer_type {format_value(kind)}: how many entries it has is not in the recipe; the "
        "kit takes GPT-2's unless --vocab-size says another number."
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
        raise RecipeError(
            f"dataset.blend is {format_value(blend)}, not a list of prefixes and their weights."
        )
    paths, weights = [str(path) for path in blend[0]], blend[1]
    if weights is None and len(paths) == 1:
        return ["--data-path", *paths]
    if not isinstance(weights, list) or len(weights) != len(paths):
        raise RecipeError(
            f"dataset.blend has {len(paths)} prefixes and weights {format_value(weights)}; give each one."
        )
    pairs = zip(weights, paths, strict=True)
    return ["--data-path", *(str(each) for pair in pairs for each in pair)]


def _unread(fields: Fields) -> Iterable[str]:
    """Fields that differ from Bridge's default and that no flag says."""
    read = {place.lstrip("!") for row in ROWS for place in row.recipe} | _DERIVED
    halves = {place.partition(".")[2] for place in fields if place.startswith("mixed_precision.")}
    for place, value in fields.items():
        section, _, field = place.partition(".")
        precision = section in ("model", "optimizer", "ddp") and field in halves
        if place in read or field == "_target_" or precision or value == BRIDGE_DEFAULTS.get(place):
            continue
        yield f"{place} = {format_value(value)}: no flag of Megatron-LM is known to mean it."

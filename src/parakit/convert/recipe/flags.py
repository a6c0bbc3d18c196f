"""Turn the fields of a `ConfigContainer`, the recipe of Megatron-Bridge, into Megatron's flags.

A field is named `section.field` (`model.num_layers`). Fields that no flag expresses are either refused,
if the recipe would then make another model, or listed in `RecipeFlags.left_out`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parakit.config.flag_table import KnownFlag
from parakit.config.flags import Flags, drop_flags, merge_flags
from parakit.convert.recipe.table import (
    ACCUMULATE_IN_FP32,
    ACTIVATIONS,
    BRIDGE_DEFAULTS,
    FLAGS_WITH_FIELDS,
    LOCAL_LAYER_SPEC,
    NULL_TOKENIZER,
    POSITIONS_FLAG,
    REDUCE_IN_BF16,
    TOKENIZER_FIELDS,
    VALUE_KINDS,
    Fields,
    RecipeError,
    Value,
    format_value,
    implied_switches,
    megatron_default,
    negate_if_marked,
)


@dataclass(frozen=True)
class RecipeFlags:
    """A recipe in the form of Megatron's flags."""

    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    """One sentence per field that no flag expresses."""


_PRECISIONS: dict[str, dict[str, Value]] = {
    "bf16_mixed": {"bf16": True, "grad_reduce_in_fp32": True},
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
}
"""Fields of `mixed_precision` by Bridge's name for them; Bridge's names with FP8 are missing."""

_SHARDING_STRATEGY = "--data-parallel-sharding-strategy"

_HANDLED_FIELDS = frozenset(
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
"""Fields that the flag table lacks, but that other fields decide or that code here reads."""


def flags_from_fields(fields: Fields) -> RecipeFlags:
    """Convert the fields of a recipe to the flags with which Megatron trains the same.

    A field that is missing has Bridge's default. Flags whose value is Megatron's default are left out. Fields
    that no flag can express are described in `left_out`.

    Raises:
        RecipeError: A field has a value of a wrong kind, two fields contradict each other, or Megatron has no
            flags for the model.
    """
    _refuse_other_models(fields)
    sections = {name.partition(".")[0] for name, value in fields.items() if "." in name or value}
    fields = _resolve_precision({**BRIDGE_DEFAULTS, **fields}, "mixed_precision", sections)
    notes: list[str] = []
    flags: list[str] = []
    query_groups = fields.get("model.num_query_groups")
    if query_groups not in (None, fields.get("model.num_attention_heads")):
        flags.append("--group-query-attention")
    for row in FLAGS_WITH_FIELDS:
        if Flags(flags).applies(row):
            flags += _convert_row(row, fields, notes)
    flags += _convert_model_fields(fields, Flags(flags), notes)
    flags += _convert_vocabulary(fields, notes)
    flags += _convert_data_set(fields, notes)
    implied = implied_switches(Flags(flags))
    if "--use-megatron-fsdp" in flags and _SHARDING_STRATEGY not in flags:
        # The default of Megatron 0.19, which other releases do not have.
        flags += [_SHARDING_STRATEGY, "optim_grads_params"]
    return RecipeFlags(
        flags=drop_flags(merge_flags(flags), implied),
        left_out=(*notes, *_describe_unknown_fields(fields)),
    )


def _refuse_other_models(fields: Fields) -> None:
    """Raise a RecipeError for a recipe without a model's size, or with an architecture other than GPT."""
    for field in ("num_layers", "hidden_size", "num_attention_heads"):
        value = fields.get(f"model.{field}")
        if not isinstance(value, int) or value < 1:
            raise RecipeError(
                f"model.{field} is {format_value(value)}, not a whole number above 0, so it defines no "
                "model."
            )
    target = str(fields.get("model._target_", ""))
    for field in ("multi_latent_attention", "is_hybrid_model", "encoder_num_layers"):
        if fields.get(f"model.{field}"):
            raise RecipeError(
                f"model.{field} of {target or 'the recipe'} is another architecture than the kit's GPT; "
                "choose a recipe of a GPTModelProvider without it."
            )


def _resolve_precision(fields: dict[str, Value], name: str, sections: set[str]) -> dict[str, Value]:
    """Return the fields of a recipe with the precision section `name` (`mixed_precision`) resolved as in Bridge.

    There are three cases. If the section is the name of a preset ('bf16_mixed'), the fields of the preset are
    added. If the recipe's `sections` have the section, its fields stay. In both cases `grad_reduce_in_fp32` of
    the section overwrites the field of `ddp`, and the result is a copy of `fields`. If `sections` lacks the
    section, `fields` is changed in place and returned: each field of the section takes the value that `model`
    has, else `optimizer`, else `ddp`.

    Raises:
        RecipeError: The name of the preset is unknown.
    """
    preset = fields.get(name)
    if isinstance(preset, str):
        preset_fields = _PRECISIONS.get(preset.replace("-", "_"))
        if preset_fields is None:
            raise RecipeError(
                f"mixed_precision is {format_value(preset)}, a name not known here; write its fields "
                f"out, or use one of {', '.join(_PRECISIONS)}."
            )
        fields = fields | {f"{name}.{key}": value for key, value in preset_fields.items()}
    elif name not in sections:
        precision_fields = [field for field in fields if field.startswith(f"{name}.")]
        for field in precision_fields:
            key = field.removeprefix(f"{name}.")
            # `model` comes last, because it decides where the sections differ.
            for section in ("ddp", "optimizer", "model"):
                fields[field] = fields.get(f"{section}.{key}", fields[field])
        return fields
    return fields | {"ddp.grad_reduce_in_fp32": fields[f"{name}.grad_reduce_in_fp32"]}


def _convert_row(row: KnownFlag, fields: Fields, notes: list[str]) -> list[str]:
    """Return the flag of a row of the table with its arguments, as the recipe's fields give them.

    The result is empty if no field is set, or if the value is Megatron's default. If several fields of the row
    differ, a sentence is added to `notes`.

    Raises: RecipeError: The value is of a wrong kind, or fields contradict each other.
    """
    value = _merge_field_values(row, fields, notes)
    if value is None:
        return []
    kind = VALUE_KINDS[row.kind]
    try:
        arguments = kind.arguments(value)
    except TypeError:
        hint = "; YAML reads 1e-4 as a text, write 1.0e-4." if isinstance(value, str) else "."
        raise RecipeError(
            f"{row.recipe[0]} is {format_value(value)}, not {kind.wanted}{hint}"
        ) from None
    if arguments is None or value == megatron_default(row):
        return []
    return [row.name, *arguments]


def _merge_field_values(row: KnownFlag, fields: Fields, notes: list[str]) -> Value:
    """Merge the values of all fields that a flag stands for into one value; None if no field is set.

    If the fields differ, the result is the value that Bridge trains with, and a sentence is added to `notes`.

    Raises:
        RecipeError: The fields are sequence lengths and differ. Bridge refuses such a recipe.
    """
    value_by_field = {}
    for field in row.recipe:
        field_value = fields.get(field.lstrip("!"))
        if field_value is not None:
            value_by_field[field] = negate_if_marked(field, field_value)
    values = list(value_by_field.values())
    if not values:
        return None
    if all(value == values[0] for value in values):
        return values[0]
    if row.name == "--seq-length":
        named_values = " and ".join(
            f"{field} {format_value(value)}" for field, value in value_by_field.items()
        )
        raise RecipeError(
            f"{named_values} contradict one another; give both the same number of tokens."
        )
    # Bridge switches on every part of a switch if one part is on.
    value = True if row.kind == "on" else values[0]
    if row.name == "--weight-decay":
        # Bridge's scheduler sets the weight decay at every step, whatever the optimizer was given.
        value = value_by_field.get("scheduler.end_weight_decay", value)
    named_values = ", ".join(
        f"{field.lstrip('!')} {format_value(value)}" for field, value in value_by_field.items()
    )
    notes.append(f"{named_values}: {row.name} is one value; {format_value(value)} is what counts.")
    return value


def _convert_model_fields(fields: Fields, flags: Flags, notes: list[str]) -> list[str]:
    """Return the flags of the MLP, the positions, the layers' implementation and the gradients' type.

    `flags` are the flags that the table has already given. If no flag corresponds to the layer specification, a
    sentence is added to `notes`.

    Raises:
        RecipeError: Megatron has no flag for the activation function.
    """
    activation_flag = _find_activation_flag(fields)
    default_ffn_size = 4 * flags.integer("--hidden-size")
    ffn_size = fields.get("model.ffn_hidden_size") or default_ffn_size
    if not isinstance(ffn_size, int):
        raise RecipeError(f"model.ffn_hidden_size is {format_value(ffn_size)}, not a whole number.")
    arguments = [activation_flag] if activation_flag else []
    # With an activation flag Megatron's own default of the size may be another.
    if ffn_size != default_ffn_size or activation_flag:
        arguments += ["--ffn-hidden-size", str(ffn_size)]
    if not fields.get("model.bias_activation_fusion"):
        if activation_flag == "--swiglu":
            arguments.append("--no-bias-swiglu-fusion")
        elif fields.get("model.add_bias_linear"):
            arguments.append("--no-bias-gelu-fusion")
    arguments += [POSITIONS_FLAG, flags.text("--seq-length")]
    layer_spec = fields.get("model.transformer_layer_spec")
    if layer_spec == LOCAL_LAYER_SPEC:
        arguments += ["--transformer-impl", "local"]
    elif layer_spec != BRIDGE_DEFAULTS["model.transformer_layer_spec"]:
        notes.append(
            f"model.transformer_layer_spec {format_value(layer_spec)}: Megatron-LM chooses its layers by "
            "flags."
        )
    has_fp32_gradients = bool(fields.get("ddp.grad_reduce_in_fp32"))
    if flags.has("--bf16") and not has_fp32_gradients:
        arguments.append(REDUCE_IN_BF16)
    if not flags.has("--bf16") and has_fp32_gradients:
        arguments.append(ACCUMULATE_IN_FP32)
    return arguments


def _find_activation_flag(fields: Fields) -> str:
    """Return the flag of the MLP's activation function; empty for GELU, which needs no flag.

    Raises:
        RecipeError: Megatron has no flag for the function.
    """
    is_gated = bool(fields.get("model.gated_linear_unit"))
    function = format_value(fields.get("model.activation_func"))
    flag = ACTIVATIONS.get((fields.get("model.gated_linear_unit") is True, function))
    if flag is None:
        known_functions = ", ".join(
            f"{'gated ' if gated else ''}{known_function}" for gated, known_function in ACTIVATIONS
        )
        raise RecipeError(
            f"model.activation_func is {'gated ' if is_gated else ''}{function}, for which Megatron-LM "
            f"has no flag; it has {known_functions}."
        )
    return flag


def _convert_vocabulary(fields: Fields, notes: list[str]) -> list[str]:
    """Return the flags of the vocabulary's size.

    If the recipe does not say the size, the result is empty and a sentence is added to `notes`.
    """
    model_size = fields.get("model.vocab_size")
    tokenizer_size = fields.get("tokenizer.vocab_size")
    tokenizer = fields.get("tokenizer.tokenizer_type")
    if isinstance(model_size, int):
        # Bridge pads only a size that comes from a tokenizer.
        return ["--vocab-size", str(model_size), "--make-vocab-size-divisible-by", "1"]
    if tokenizer == NULL_TOKENIZER and isinstance(tokenizer_size, int):
        return ["--vocab-size", str(tokenizer_size + 1)]
    notes.append(
        f"tokenizer.tokenizer_type {format_value(tokenizer)}: how many entries it has is not in the "
        "recipe; the kit takes GPT-2's unless --vocab-size says another number."
    )
    return []


def _convert_data_set(fields: Fields, notes: list[str]) -> list[str]:
    """Return `--data-path` with one prefix, or with weights and prefixes in turn ('0.3 first 0.7 second').

    The result is empty for a recipe without data. It is also empty for a data set in another format than
    `.bin/.idx`, and a sentence is then added to `notes`.

    Raises:
        RecipeError: `dataset.blend` is not a pair of a list of prefixes and a list of as many weights.
    """
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
    prefixes, weights = [str(prefix) for prefix in blend[0]], blend[1]
    if weights is None and len(prefixes) == 1:
        return ["--data-path", *prefixes]
    if not isinstance(weights, list) or len(weights) != len(prefixes):
        raise RecipeError(
            f"dataset.blend has {len(prefixes)} prefixes and weights {format_value(weights)}; give each "
            "one."
        )
    arguments = ["--data-path"]
    for weight, prefix in zip(weights, prefixes, strict=True):
        arguments += [str(weight), prefix]
    return arguments


def _describe_unknown_fields(fields: Fields) -> Iterable[str]:
    """Yield a sentence for each field that differs from Bridge's default and that no flag can express."""
    known_fields = set(_HANDLED_FIELDS)
    for row in FLAGS_WITH_FIELDS:
        known_fields.update(field.lstrip("!") for field in row.recipe)
    precision_prefix = "mixed_precision."
    precision_keys = {
        name.removeprefix(precision_prefix) for name in fields if name.startswith(precision_prefix)
    }
    for name, value in fields.items():
        section, _, key = name.partition(".")
        if name in known_fields or key == "_target_" or value == BRIDGE_DEFAULTS.get(name):
            continue
        # Fields of `mixed_precision` overwrite those of these sections.
        if section in ("model", "optimizer", "ddp") and key in precision_keys:
            continue
        yield f"{name} = {format_value(value)}: no flag of Megatron-LM is known to mean it."

"""Turn the flags of a run into the fields of a `ConfigContainer`, the recipe of Megatron-Bridge.

A field is named `section.field` (`model.num_layers`). What no field can express is either refused, if it
changes what is trained, or listed in `Recipe.left_out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parakit.config.flag_table import FLAGS, KnownFlag
from parakit.config.flags import Flags, drop_flags, merge_flags, pick_flags, values_by_flag
from parakit.config.model import SHAPE_FLAGS
from parakit.config.run import Backend, DeviceKind, RunSpec
from parakit.convert.recipe.table import (
    ACCUMULATE_IN_FP32,
    ACTIVATIONS,
    BRIDGE_DEFAULTS,
    BRIDGE_VERSION,
    FLAGS_WITH_FIELDS,
    LOCAL_LAYER_SPEC,
    NULL_TOKENIZER,
    POSITIONS_FLAG,
    REDUCE_IN_BF16,
    TOKENIZER_FIELDS,
    VALUE_KINDS,
    RecipeError,
    Symbol,
    Value,
    implied_switches,
    megatron_default,
    negate_if_marked,
)

_OUTPUT = "nemo_experiments"
"""Folder that a recipe writes its checkpoints and logs to, as Bridge's own recipes do."""


@dataclass(frozen=True)
class Recipe:
    """A run in the form of a Megatron-Bridge recipe."""

    fields: dict[str, Value]
    """Fields that differ from Bridge's defaults, and those of `_ALWAYS_WRITTEN`."""
    flags: tuple[str, ...]
    """Flags of the run that the fields express, without those that only CPU ranks need."""
    left_out: tuple[str, ...]
    """One sentence per flag or setting of the run that has no field."""


_ALWAYS_WRITTEN = frozenset(
    (
        "model.seq_length",
        "model.hidden_dropout",
        "model.attention_dropout",
        "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size",
        "model.context_parallel_size",
        "rng.seed",
    )
)
"""Fields that are written even with Bridge's default, because readers look for them."""

_SYNONYMS = {
    flag.name: flag.recipe[0]
    for flag in FLAGS.values()
    if flag.recipe and flag.recipe[0].startswith("--")
}
"""The flag of the table by each of its other names."""
_ABBREVIATIONS = {
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}
"""The flags that a switch stands for."""
_VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
_OTHER_VIRTUAL_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--virtual-pipeline-model-parallel-size",
)
"""Other ways to say the number of virtual stages."""
_HALF_PRECISION_TYPES = {"--fp16": Symbol("torch.float16"), "--bf16": Symbol("torch.bfloat16")}


def recipe_from_flags(arguments: Iterable[str], spec: RunSpec) -> Recipe:
    """Convert the flags of a run to the recipe with which Megatron-Bridge trains the same.

    Args: arguments: The flags that the run was started with. spec: The meaning of these flags.

    Raises:
        RecipeError: A recipe cannot express what the run trains.
    """
    _refuse_other_trainers(spec)
    all_flags = _normalize_flags(tuple(arguments), spec)
    kept_flags = all_flags
    if spec.device is DeviceKind.CPU:
        device_flags = {flag.name for flag in FLAGS.values() if flag.of_device}
        kept_flags = drop_flags(all_flags, device_flags)
    fields = _collect_fields(kept_flags, spec)
    no_default = object()
    written_fields = {
        name: value
        for name, value in fields.items()
        if name in _ALWAYS_WRITTEN or value != BRIDGE_DEFAULTS.get(name, no_default)
    }
    vocabulary = ("--vocab-size", str(spec.shape.vocabulary))
    return Recipe(
        fields=written_fields,
        flags=merge_flags(kept_flags, vocabulary),
        left_out=(
            *_describe_lost_settings(spec, all_flags, kept_flags),
            *_describe_unknown_flags(kept_flags),
        ),
    )


def _refuse_other_trainers(spec: RunSpec) -> None:
    """Raise a RecipeError if Megatron-Bridge cannot train the run.

    It cannot train a run of another backend, a pipeline schedule of the native backend, or a model
    whose number of learned positions differs from the tokens per sequence.
    """
    if spec.backend != Backend.MEGATRON:
        raise RecipeError(
            f"The run trained with BACKEND={spec.backend}, Megatron-Bridge with Megatron Core; "
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
            f"Megatron-Bridge's has as many as tokens, so train with {POSITIONS_FLAG} {tokens}."
        )


def _normalize_flags(flags: tuple[str, ...], spec: RunSpec) -> tuple[str, ...]:
    """Convert flags to the canonical form that the table of flags and fields knows, with the same meaning.

    Synonyms and abbreviations are replaced, repeated flags are merged, and switches that Megatron sets because
    of other flags are added. Of the flags that state virtual stages, only
    `--num-virtual-stages-per-pipeline-rank` remains, with the number of the spec.
    """
    merged = merge_flags(tuple(_SYNONYMS.get(argument, argument) for argument in flags))
    for abbreviation, meaning in _ABBREVIATIONS.items():
        if abbreviation in merged:
            merged = merge_flags(drop_flags(merged, (abbreviation,)), meaning)
    merged = merge_flags(merged, implied_switches(Flags(merged)))
    virtual_stages = spec.parallelism.virtual_stages
    merged = drop_flags(merged, (*_OTHER_VIRTUAL_STAGES, _VIRTUAL_STAGES))
    # Without tensor parallelism, Megatron switches the flag off (`validate_args`), so the spec does not
    # have it. Megatron Core's configuration, which Bridge fills itself, would refuse it.
    if not spec.parallelism.sequence_parallel:
        merged = drop_flags(merged, ("--sequence-parallel",))
    if virtual_stages > 1:
        return (*merged, _VIRTUAL_STAGES, str(virtual_stages))
    return merged


def _collect_fields(arguments: tuple[str, ...], spec: RunSpec) -> dict[str, Value]:
    """Return the value of each field of Megatron-Bridge that the flags determine, by the field's name.

    A flag that is missing gives its field Megatron's default.
    """
    flags = Flags(arguments)
    fields: dict[str, Value] = {}
    for flag in FLAGS_WITH_FIELDS:
        if flags.applies(flag):
            value = _read_value(flag, arguments)
            for name in flag.recipe:
                fields[name.lstrip("!")] = negate_if_marked(name, value)
    fields |= _collect_model_fields(flags, spec) | _collect_precision_fields(flags)
    fields["dataset.blend"] = _read_blend(arguments)
    fields["checkpoint.save"] = f"{_OUTPUT}/checkpoints" if flags.has("--save") else None
    fields["logger.tensorboard_dir"] = f"{_OUTPUT}/tensorboard"
    if flags.text("--tokenizer-type", NULL_TOKENIZER) == NULL_TOKENIZER:
        # Megatron Core 0.16, which Bridge uses, adds an entry for the end of a document to this size.
        fields["tokenizer.tokenizer_type"] = NULL_TOKENIZER
        fields["tokenizer.vocab_size"] = spec.shape.vocabulary - 1
    else:
        fields |= {name: flags.text(flag) or None for flag, name in TOKENIZER_FIELDS.items()}
    return fields


def _read_value(flag: KnownFlag, arguments: tuple[str, ...]) -> Value:
    """Return the flag's value in `arguments`, or Megatron's default if the flag is missing.

    Raises:
        RecipeError: The value is not of the kind that the flag takes, such as a whole number.
    """
    flag_and_values = pick_flags(arguments, (flag.name,))
    if not flag_and_values:
        return megatron_default(flag)
    kind = VALUE_KINDS[flag.kind]
    try:
        return kind.read(flag_and_values[1:])
    except ValueError:
        raise RecipeError(
            f"The run's {' '.join(flag_and_values)} is not {kind.wanted}, so no field of a recipe says "
            "it."
        ) from None


def _collect_model_fields(flags: Flags, spec: RunSpec) -> dict[str, Value]:
    """Return the fields of the MLP and of the layers' implementation. Each follows from several flags together."""
    # Without a flag for another function the MLP has GELU, the first in the table.
    (is_gated, function), activation_flag = next(iter(ACTIVATIONS.items()))
    for activation, flag in ACTIVATIONS.items():
        if flag and flags.has(flag):
            (is_gated, function), activation_flag = activation, flag
            break
    is_swiglu = activation_flag == "--swiglu"
    unfused = "--no-bias-swiglu-fusion" if is_swiglu else "--no-bias-gelu-fusion"
    can_fuse = is_swiglu or spec.shape.bias
    fields: dict[str, Value] = {
        "model.ffn_hidden_size": spec.shape.ffn_hidden,
        "model.gated_linear_unit": is_gated,
        "model.activation_func": Symbol(function),
        "model.bias_activation_fusion": can_fuse and not flags.has(unfused),
    }
    if flags.text("--transformer-impl") == "local":
        fields["model.transformer_layer_spec"] = LOCAL_LAYER_SPEC
    return fields


def _collect_precision_fields(flags: Flags) -> dict[str, Value]:
    """Return the fields of precision: dtypes of parameters and pipeline communication, and if gradients are fp32.

    Without `--bf16` and `--fp16` the result has only the field of the gradients.
    """
    precision = next((flag for flag in _HALF_PRECISION_TYPES if flags.has(flag)), None)
    if precision is None:
        return {"ddp.grad_reduce_in_fp32": flags.has(ACCUMULATE_IN_FP32)}
    # Megatron accumulates gradients of bf16 in fp32 unless a flag asks for bf16.
    is_default_fp32 = precision == "--bf16" and not flags.has(REDUCE_IN_BF16)
    return {
        "mixed_precision.params_dtype": _HALF_PRECISION_TYPES[precision],
        "mixed_precision.pipeline_dtype": _HALF_PRECISION_TYPES[precision],
        "mixed_precision.grad_reduce_in_fp32": flags.has(ACCUMULATE_IN_FP32) or is_default_fp32,
    }


def _read_blend(arguments: Sequence[str]) -> Value:
    """Return the value of `dataset.blend` that means the same as `--data-path`: a list [prefixes, weights].

    A single data set has None in place of the weights. Without `--data-path`, the result is None.
    """
    paths = pick_flags(arguments, ("--data-path",))[1:]
    if not paths:
        return None
    if len(paths) == 1:
        return [[*paths], None]
    return [[*paths[1::2]], [float(weight) for weight in paths[::2]]]


def _describe_lost_settings(
    spec: RunSpec, all_flags: Sequence[str], kept_flags: Sequence[str]
) -> Iterable[str]:
    """Yield a sentence for each setting of the run that a recipe cannot express.

    The flags that only CPU ranks need are named in one sentence.
    """
    kept_names = {argument for argument in kept_flags if argument.startswith("--")}
    dropped = " ".join(drop_flags(all_flags, kept_names))
    if dropped:
        yield f"{dropped}: for CPU ranks; Megatron-Bridge trains on GPUs, with their own."
    if spec.fused:
        yield f"FUSED={','.join(spec.fused)}: the kit's kernels; Transformer Engine has its own."
    if spec.link_bits_per_second:
        yield f"NET={spec.link_bits_per_second}bps: the link between the ranks was shaped."
    if spec.shares_gpu:
        yield "SHARE_GPU=1: all ranks were on one GPU."
    if spec.patch_file:
        patch = f"PATCH_FILE={spec.patch_file.path}: each rank ran this file"
        yield f"{patch}; the recipe leaves Megatron unchanged."


def _describe_unknown_flags(arguments: Sequence[str]) -> Iterable[str]:
    """Yield a sentence for each flag to which no field of Megatron-Bridge corresponds.

    Raises:
        RecipeError: The flag changes the model's shape.
    """
    unknown = drop_flags(arguments, {flag.name for flag in FLAGS.values() if flag.recipe})
    for flag, values in values_by_flag(unknown).items():
        flag_and_values = " ".join((flag, *values))
        if flag in SHAPE_FLAGS:
            raise RecipeError(
                f"The run's {flag_and_values} makes a model for which no field of Megatron-Bridge is "
                "known; train without it."
            )
        yield f"{flag_and_values}: no field of Megatron-Bridge {BRIDGE_VERSION} is known to mean it."

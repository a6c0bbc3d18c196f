"""A run's flags as the fields of a `ConfigContainer`."""

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
    LOCAL_LAYER_SPEC,
    NULL_TOKENIZER,
    POSITIONS_FLAG,
    REDUCE_IN_BF16,
    ROWS,
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
"""Where a recipe writes; Bridge's own do too."""


@dataclass(frozen=True)
class Recipe:
    """A run as a recipe has it."""

    fields: dict[str, Value]
    """Those that differ from Bridge's defaults, and those that a reader looks for."""
    flags: tuple[str, ...]
    """The run's flags that these say; of CPU ranks those that a GPU gets too."""
    left_out: tuple[str, ...]
    """What has no counterpart, a sentence each."""


_SHOWN = frozenset(
    (
        "model.seq_length",
        "model.hidden_dropout",
        "model.attention_dropout",
        "rng.seed",
        *(f"model.{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context")),
    )
)
"""Fields that a reader looks for: written although they have Bridge's default."""

_SYNONYMS = {
    flag.name: flag.recipe[0]
    for flag in FLAGS.values()
    if flag.recipe and flag.recipe[0].startswith("--")
}
_ABBREVIATIONS = {
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_OTHER_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--virtual-pipeline-model-parallel-size",
)
_HALVES = {"--fp16": Symbol("torch.float16"), "--bf16": Symbol("torch.bfloat16")}


def recipe_from_flags(given: Iterable[str], spec: RunSpec) -> Recipe:
    """A run as a recipe: the flags that it was started with, and what they mean.

    Raises:
        RecipeError: A recipe cannot say what the run trains.
    """
    _refuse_other_trainers(spec)
    words = _canonical(tuple(given), spec)
    kept = words
    if spec.device is DeviceKind.CPU:
        kept = drop_flags(words, {flag.name for flag in FLAGS.values() if flag.of_device})
    flags = Flags(kept)
    fields: dict[str, Value] = {}
    for row in ROWS:
        if flags.applies(row):
            value = _given(row, kept)
            fields |= {place.lstrip("!"): negate_if_marked(place, value) for place in row.recipe}
    fields |= _model(flags, spec) | _precision(flags)
    fields["dataset.blend"] = _blend(kept)
    fields["checkpoint.save"] = f"{_OUTPUT}/checkpoints" if flags.has("--save") else None
    fields["logger.tensorboard_dir"] = f"{_OUTPUT}/tensorboard"
    entries = spec.shape.vocabulary
    if flags.text("--tokenizer-type", NULL_TOKENIZER) == NULL_TOKENIZER:
        # Megatron Core 0.16's adds an entry for the end of a document to the size it is given.
        fields |= {"tokenizer.tokenizer_type": NULL_TOKENIZER, "tokenizer.vocab_size": entries - 1}
    else:
        fields |= {place: flags.text(flag) or None for flag, place in TOKENIZER_FIELDS.items()}
    missing = object()
    changed = {
        place: each
        for place, each in fields.items()
        if place in _SHOWN or each != BRIDGE_DEFAULTS.get(place, missing)
    }
    left_out = (*_beyond_flags(spec, words, kept), *_without_counterpart(kept))
    return Recipe(changed, merge_flags(kept, ("--vocab-size", str(entries))), left_out)


def _refuse_other_trainers(spec: RunSpec) -> None:
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


def _canonical(words: tuple[str, ...], spec: RunSpec) -> tuple[str, ...]:
    """The same flags, each once and under the name that the table has."""
    merged = merge_flags(tuple(_SYNONYMS.get(word, word) for word in words))
    for short, meant in _ABBREVIATIONS.items():
        if short in merged:
            merged = merge_flags(drop_flags(merged, (short,)), meant)
    merged = merge_flags(merged, implied_switches(Flags(merged)))
    stages = spec.parallelism.virtual_stages
    merged = drop_flags(merged, (*_OTHER_STAGES, _STAGES))
    if not spec.parallelism.sequence_parallel:
        merged = drop_flags(merged, ("--sequence-parallel",))
    return (*merged, _STAGES, str(stages)) if stages > 1 else merged


def _given(row: KnownFlag, words: tuple[str, ...]) -> Value:
    found = pick_flags(words, (row.name,))
    if not found:
        return megatron_default(row)
    kind = VALUE_KINDS[row.kind]
    try:
        return kind.read(found[1:])
    except ValueError:
        raise RecipeError(
            f"The run's {' '.join(found)} is not {kind.wanted}, so no field of a recipe says it."
        ) from None


def _model(flags: Flags, spec: RunSpec) -> dict[str, Value]:
    (gated, function), flag = next(
        (each for each in ACTIVATIONS.items() if each[1] and flags.has(each[1])),
        next(iter(ACTIVATIONS.items())),
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
        fields["model.transformer_layer_spec"] = LOCAL_LAYER_SPEC
    return fields


def _precision(flags: Flags) -> dict[str, Value]:
    half = next((name for name in _HALVES if flags.has(name)), None)
    if half is None:
        return {"ddp.grad_reduce_in_fp32": flags.has(ACCUMULATE_IN_FP32)}
    # Megatron adds up gradients of bf16 in fp32 unless it is asked not to.
    in_fp32 = flags.has(ACCUMULATE_IN_FP32) or (half == "--bf16" and not flags.has(REDUCE_IN_BF16))
    return {
        "mixed_precision.params_dtype": _HALVES[half],
        "mixed_precision.pipeline_dtype": _HALVES[half],
        "mixed_precision.grad_reduce_in_fp32": in_fp32,
    }


def _blend(words: Sequence[str]) -> Value:
    """Prefixes of data sets and their weights."""
    paths = pick_flags(words, ("--data-path",))[1:]
    if len(paths) < 2:
        return [[*paths], None] if paths else None
    return [[*paths[1::2]], [float(weight) for weight in paths[::2]]]


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
    if spec.patch_file:
        ran = f"PATCH_FILE={spec.patch_file.path}: each rank ran this file"
        yield f"{ran}; the recipe leaves Megatron unchanged."


def _without_counterpart(words: Sequence[str]) -> Iterable[str]:
    unknown = drop_flags(words, {flag.name for flag in FLAGS.values() if flag.recipe})
    for flag, values in values_by_flag(unknown).items():
        said = " ".join((flag, *values))
        if flag in SHAPE_FLAGS:
            raise RecipeError(
                f"The run's {said} makes a model for which no field of Megatron-Bridge is known; train "
                "without it."
            )
        yield f"{said}: no field of Megatron-Bridge {BRIDGE_VERSION} is known to mean it."

"""Models of published measurements as models to plan with: names of `models.yaml` that no `.args` file has."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import cache
from pathlib import Path

from parakit.config.flags import format_fields_as_flags, format_flags
from parakit.config.hub_cache import find_cached_config, is_hub_id
from parakit.config.huggingface import list_unplanned_parts
from parakit.config.model import (
    Model,
    ModelShape,
    UnknownModelError,
    explain_own_model,
    find_model,
    is_model_file,
    model_from_flags,
    model_names,
)
from parakit.planner.readings.facts import hub_names, model_entries, model_facts, source_facts
from parakit.planner.readings.reading_to_spec import (
    RefusedError,
    build_shape,
    complete_measurement,
)
from parakit.planner.readings.table import PublishedMeasurement

_LOSS_COEFFICIENT = 0.001
"""Weight of the loss that balances experts. Any weight above 0 computes as much."""

SEQUENCE_LENGTH = 4096
"""Tokens per sample of these models unless SEQ= is set: most of their published runs have so many."""


def find_planned_model(text: str) -> Model:
    """Return the model with this name, in this file, or with this id on the Hugging Face hub.

    If a model of the kit and a model of `models.yaml` have the same name, the model of the kit is returned. An id is
    looked up in the hub's local cache, then in `models.yaml`.

    Raises:
        UnknownModelError: There is no such model, or the planner has no formulas for its layers.
        ValueError: The file does not define a shape.
    """
    if is_hub_id(text):
        return _find_hub_model(text)
    try:
        return find_model(text)
    except UnknownModelError:
        if is_model_file(text):
            raise
        if text in published_model_names():
            return build_published_model(text)
        _suggest_published_name(text)
        raise


def _find_hub_model(hub_id: str) -> Model:
    """Return the model with this id on the hub. It has the last part of the id as its name if its config is cached.

    Raises:
        UnknownModelError: The id is neither in the cache nor in `models.yaml`.
        ConfigError: The cached `config.json` describes no model that can be planned.
    """
    config = find_cached_config(hub_id)
    if config is not None:
        name = hub_id.partition("/")[2].lower()
        return replace(find_model(str(config)), name=name)
    names_by_id = {known.lower(): name for known, name in hub_names().items()}
    if hub_id.lower() in names_by_id:
        return find_planned_model(names_by_id[hub_id.lower()])
    raise UnknownModelError(
        f"{hub_id} is neither a file nor in the cache of the Hugging Face hub, and the kit does not know it; download "
        f"its config.json ('hf download {hub_id} config.json') and repeat, or set MODEL= to the file."
    )


def published_model_names() -> tuple[str, ...]:
    """Return the names of the entries of `models.yaml` that define a model, or state why it cannot be planned.

    A name is left out if `model_facts` finds the entry of another name for it.
    """
    sizes = ({"layers", "hidden", "heads"}, {"blocks"}, {"refused"})
    return tuple(
        name
        for name, facts in model_entries().items()
        if any(size <= facts.keys() for size in sizes) and model_facts(name) == facts
    )


def has_no_file(model: Model) -> bool:
    """Return True for a model that only published measurements describe, so that nothing can train it by its name."""
    is_published = not model.source and model.name in published_model_names()
    return is_published and model.name not in model_names()


def unplanned_parts(model: Model) -> tuple[str, ...]:
    """Return the parts of a model that its plan leaves out, such as "the vision tower"; empty if there are none."""
    if model.source.endswith(".json"):
        return list_unplanned_parts(Path(model.source).expanduser())
    return tuple(model_entries().get(model.name, {}).get("unplanned", ()))


@cache
def build_published_model(name: str) -> Model:
    """Return the model with this name in `models.yaml`, with the flags of Megatron that define its shape.

    Raises:
        UnknownModelError: The file states why the model is not planned.
    """
    stated = PublishedMeasurement(0, "", "", 0.0, model=name, seq=SEQUENCE_LENGTH)
    source = source_facts(stated)
    try:
        shape = build_shape(complete_measurement(stated, source), source)
    except RefusedError as error:
        raise UnknownModelError(
            f"{error}, for which the planner has no formulas; plan another model."
        ) from None
    family = "moe" if shape.experts else "gpt3"
    return model_from_flags(name, family, _shape_flags(shape, model_entries()[name]))


def _shape_flags(shape: ModelShape, facts: dict[str, object]) -> tuple[str, ...]:
    """Return the flags of Megatron that define the shape of a model in `models.yaml`.

    Args:
        facts: The model's entry in `models.yaml`. It states the router's groups and an unusual activation, which the
            shape does not have.
    """
    groups, activation = facts.get("groups"), facts.get("activation")
    special_flags: dict[str, object] = {
        "--max-position-embeddings": shape.seq_length,
        "--position-embedding-type": _position_embedding(shape),
        "--group-query-attention": shape.query_groups != shape.heads,
        "--swiglu": shape.gated and activation is None,
        "--normalization": "RMSNorm" if shape.rms_norm else "LayerNorm",
        "--multi-latent-attention": shape.latent is not None,
        "--softmax-type": "learnable" if shape.sink else None,
        "--bf16": True,
    }
    if activation is not None:
        special_flags[f"--{activation}"] = True
    if shape.experts and shape.load_balancing:
        special_flags["--moe-aux-loss-coeff"] = _LOSS_COEFFICIENT
    if shape.window:
        # Megatron does not count the token itself, and each n-th layer has no window.
        full_layers = round(shape.layers * (1 - shape.windowed_fraction))
        special_flags["--window-size"] = f"{shape.window - 1},0"
        if full_layers:
            special_flags["--window-attn-skip-freq"] = shape.layers // full_layers
    flags = [*format_fields_as_flags(shape, "shape"), *format_flags(special_flags)]
    if shape.latent:
        flags += format_fields_as_flags(shape.latent, "latent")
    if shape.dense_layers:
        pattern = [int(layer not in shape.dense_layers) for layer in range(shape.layers)]
        flags += ["--moe-layer-freq", str(pattern)]
    if shape.blocks:
        flags += ["--hybrid-layer-pattern", shape.blocks * shape.layers]
    if shape.mamba:
        flags += format_fields_as_flags(shape.mamba, "mamba")
    if isinstance(groups, list):
        number, chosen = map(str, groups)
        flags += ["--moe-router-num-groups", number, "--moe-router-group-topk", chosen]
    return tuple(flags)


def _position_embedding(shape: ModelShape) -> str:
    """Return Megatron's name of the kind of position embeddings. Models with Mamba layers have none."""
    if shape.mamba:
        return "none"
    return "learned_absolute" if shape.positions else "rope"


def _suggest_published_name(text: str) -> None:
    """Raise an UnknownModelError that suggests a published model, if the name most similar to `text` is one.

    Nothing happens if the most similar name is a model of the kit.

    Args:
        text: Name that neither the kit nor `models.yaml` has.
    """
    planned = [name for name in published_model_names() if "refused" not in model_facts(name)]
    near = difflib.get_close_matches(text, (*model_names(), *planned), n=1)
    if near and near[0] not in model_names():
        raise UnknownModelError(
            f"There is no model '{text}'; did you mean {near[0]}? {explain_own_model(text)}"
        )

"""Recipes as Bridge's `to_yaml` writes them, made without Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parakit.convert.recipe.fields import Recipe, recipe_from_flags
from parakit.convert.recipe.table import Symbol, Value
from parakit.launch.options import options_from_texts
from parakit.launch.recipe import RecipeRun, compose_recipe_run

CONTAINER = "megatron.bridge.training.config.ConfigContainer"
ATTENTION = "megatron.core.transformer.enums.AttnBackend"
MEMBERS = {"flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5}


def source(target: str) -> RecipeRun:
    """What a target would train, whatever is set around the tests."""
    return compose_recipe_run(target, options_from_texts({}))


def recipe_of(run: RecipeRun) -> Recipe:
    return recipe_from_flags(run.megatron_arguments, run.spec)


def document(fields: Mapping[str, Value]) -> dict[str, Any]:
    """The content of the YAML file for fields by `section.field`."""
    sections: dict[str, Any] = {"_target_": CONTAINER}
    for dotted_name, value in fields.items():
        section, _, field = dotted_name.partition(".")
        if field:
            sections.setdefault(section, {})[field] = plain(value)
        else:
            sections[section] = plain(value)
    return sections


def write(path: Path, fields: Mapping[str, Value]) -> Path:
    """The YAML file."""
    path.write_text(yaml.safe_dump(document(fields)))
    return path


def plain(value: Value) -> Any:
    if isinstance(value, list):
        return [plain(element) for element in value]
    if not isinstance(value, Symbol):
        return value
    if value.path.startswith(ATTENTION):
        number = MEMBERS[value.path.rpartition(".")[2]]
        return {"_target_": ATTENTION, "_args_": [number], "_call_": True}
    return {"_target_": value.path, "_call_": False}

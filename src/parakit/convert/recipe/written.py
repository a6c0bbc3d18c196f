"""Render a recipe as Python files: the recipe that Megatron-Bridge trains, and nemo-run's entry.

The entry is a script that starts the recipe beside it with nemo-run. Both files are Jinja templates in
this folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import TextWrapper

from parakit.config.run import RunSpec
from parakit.convert.recipe.fields import Recipe
from parakit.convert.recipe.table import (
    BRIDGE_DEFAULTS,
    BRIDGE_VERSION,
    FLAGS_WITH_FIELDS,
    Symbol,
    Value,
    format_value,
)
from parakit.formatting.html import environment

RECIPE_FILE, ENTRY_FILE = "bridge_recipe.py", "nemo_entry.py"
NEMO_VERSION = "0.11.1"
GPUS_PER_MACHINE = 8

_SECTIONS = (
    *("model", "train", "optimizer", "scheduler", "dataset", "tokenizer", "mixed_precision"),
    *("ddp", "dist", "checkpoint", "logger", "rng", "rerun_state_machine"),
)
"""Sections in the order in which they are written."""
_OPTIONAL_SECTIONS = ("mixed_precision", "ddp", "dist", "rng", "rerun_state_machine")
"""Sections that a container makes itself, so that they are written only if they have fields."""
_LINE_WIDTH = 100


def render_recipe(recipe: Recipe, spec: RunSpec, origin: str, path: str) -> str:
    """Return the text of `bridge_recipe.py`.

    Args:
        recipe: The fields of the recipe, and descriptions of the settings for which there is no field.
        spec: The run, for the title and the number of ranks.
        origin: The command that makes the file, for its header.
        path: The file's path from the repository's root, for the command that trains it.
    """
    # Each section has a name, a class, and its fields with value and unit.
    sections: list[tuple[str, str, list[tuple[str, str, str]]]] = []
    classes: list[str] = []
    symbols: list[str] = []
    for section, fields in _group_by_section(recipe.fields).items():
        class_path = str(BRIDGE_DEFAULTS[f"{section}._target_"])
        classes.append(class_path)
        symbols += [value.path for value in fields.values() if isinstance(value, Symbol)]
        _, class_name = _split_import(class_path)
        sections.append((section, class_name, list(_format_fields(section, fields))))
    return _render_template(
        RECIPE_FILE,
        spec,
        bridge=BRIDGE_VERSION,
        origin=origin,
        machines=_torchrun_options(spec.parallelism.world_size),
        path=path,
        left_out=[_format_list_item(sentence) for sentence in recipe.left_out],
        torch=any(symbol.startswith("torch.") for symbol in symbols),
        imports=_collect_imports((*classes, *symbols)),
        width=_LINE_WIDTH,
        sections=sections,
    )


def _group_by_section(fields: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Return the fields of a recipe by section and name, in the order in which sections are written.

    A section without fields is left out if the container makes it itself.

    Args:
        fields: Values by `section.field`.
    """
    fields_by_section: dict[str, dict[str, Value]] = {}
    for section in _SECTIONS:
        prefix = f"{section}."
        section_fields = {
            name.removeprefix(prefix): value
            for name, value in fields.items()
            if name.startswith(prefix)
        }
        if section_fields or section not in _OPTIONAL_SECTIONS:
            fields_by_section[section] = section_fields
    return fields_by_section


def render_entry(
    spec: RunSpec, name: str, variables: Mapping[str, str], origin: str, path: str
) -> str:
    """Return the text of `nemo_entry.py`, a program that trains the recipe in its folder on this machine.

    Args:
        spec: The run, for the title and the number of ranks.
        name: The name of nemo-run's experiment.
        variables: Environment variables that the ranks need.
        origin: The command that makes the file, for its header.
        path: The file's path from the repository's root, for the command that starts it.
    """
    return _render_template(
        ENTRY_FILE,
        spec,
        nemo=NEMO_VERSION,
        origin=origin,
        path=path,
        recipe=RECIPE_FILE,
        environment=sorted(variables.items()),
        name=name,
    )


def _render_template(file: str, spec: RunSpec, **context: object) -> str:
    """Return the text of the template `file`.j2 with the run's title, its ranks and `context`."""
    ranks = spec.parallelism.world_size
    title = f"{spec.model or 'A GPT'}, {spec.name}, on {ranks} GPU{'s' if ranks > 1 else ''}"
    template = environment(Path(__file__).parent, escaped=False).get_template(f"{file}.j2")
    return template.render(title=title, ranks=ranks, **context)


def _format_list_item(sentence: str) -> str:
    """Return a sentence as an item of a list in a docstring, wrapped and without what would end it."""
    wrapper = TextWrapper(_LINE_WIDTH, initial_indent="- ", subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(sentence.replace("\\", "/").replace('"', "'"))


def _torchrun_options(ranks: int) -> str:
    """Return torchrun's options for so many ranks on one machine, or on several with 8 GPUs each."""
    if ranks <= GPUS_PER_MACHINE:
        return f"--standalone --nproc-per-node {ranks}"
    nodes = -(-ranks // GPUS_PER_MACHINE)
    rendezvous = "--node-rank … --master-addr …"
    return f"--nnodes {nodes} --nproc-per-node {ranks // nodes} {rendezvous}"


def _collect_imports(paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return pairs of a module and the names to import from it, for dotted paths; all are sorted.

    `ConfigContainer` is always included. Paths of torch are left out, because recipes write them in full.
    """
    names_by_module: dict[str, set[str]] = {"megatron.bridge.training.config": {"ConfigContainer"}}
    for path in paths:
        module, name = _split_import(path)
        if module:
            names_by_module.setdefault(module, set()).add(name)
    return [(module, sorted(names_by_module[module])) for module in sorted(names_by_module)]


def _split_import(path: str) -> tuple[str, str]:
    """Return the module and the name to import for a dotted path.

    The name is the first part that begins with an upper-case letter, or the last part. A path of torch
    has no module, because it is written in full.
    """
    if path.startswith("torch."):
        return "", path
    parts = path.split(".")
    name_index = len(parts) - 1
    for index, part in enumerate(parts):
        if part[:1].isupper():
            name_index = index
            break
    return ".".join(parts[:name_index]), parts[name_index]


def _format_fields(section: str, fields: Mapping[str, Value]) -> Iterable[tuple[str, str, str]]:
    """Yield each field's name, its value in Python, and its unit; empty if the name says the unit."""
    for field, value in fields.items():
        unit = _UNITS.get(f"{section}.{field}", "")
        # The name `train_iters` begins like the unit 'iterations', so a comment would repeat it.
        needs_no_unit = value is None or unit[:4] in field
        yield field, _format_python(value), "" if needs_no_unit else unit


def _format_python(value: Value) -> str:
    """Return a value as Python code for the recipe: symbols by their imported name, texts in double quotes."""
    if isinstance(value, Symbol):
        module, _ = _split_import(value.path)
        return value.path.removeprefix(f"{module}.") if module else value.path
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return f"[{', '.join(_format_python(item) for item in value)}]"
    return format_value(value)


_UNITS = {
    field.removeprefix("!"): row.unit
    for row in FLAGS_WITH_FIELDS
    for field in row.recipe
    if row.unit
}
"""Units of the fields by `section.field`."""

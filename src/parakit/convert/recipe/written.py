"""A recipe as the Python file that Megatron-Bridge trains with, and nemo-run's entry for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import TextWrapper

from parakit.config.run import RunSpec
from parakit.convert.recipe.fields import Recipe
from parakit.convert.recipe.table import (
    BRIDGE_DEFAULTS,
    BRIDGE_VERSION,
    ROWS,
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
"""In the order in which they are written."""
_BY_ITSELF = ("mixed_precision", "ddp", "dist", "rng", "rerun_state_machine")
"""Sections that a container makes without being told."""
_WIDTH = 100


def render_recipe(recipe: Recipe, spec: RunSpec, origin: str, path: str) -> str:
    """The Python file that the command `origin` makes, at a path from the repository's root."""
    used: dict[str, dict[str, Value]] = {}
    for name in _SECTIONS:
        begin = f"{name}."
        fields = recipe.fields.items()
        held = {place.removeprefix(begin): it for place, it in fields if place.startswith(begin)}
        if held or name not in _BY_ITSELF:
            used[name] = held
    classes = {name: str(BRIDGE_DEFAULTS[f"{name}._target_"]) for name in used}
    symbols = [
        value.path for held in used.values() for value in held.values() if isinstance(value, Symbol)
    ]
    return _rendered(
        RECIPE_FILE,
        spec,
        bridge=BRIDGE_VERSION,
        origin=origin,
        machines=_machines(spec.parallelism.world_size),
        path=path,
        left_out=map(_in_docstring, recipe.left_out) if recipe.left_out else (),
        torch=any(symbol.startswith("torch.") for symbol in symbols),
        imports=_imports((*classes.values(), *symbols)),
        width=_WIDTH,
        sections=[
            (name, _module_and_name(classes[name])[1], list(_fields(name, held)))
            for name, held in used.items()
        ],
    )


def render_entry(
    spec: RunSpec, name: str, variables: Mapping[str, str], origin: str, path: str
) -> str:
    """nemo-run's entry, an experiment of that name, which trains the recipe beside it on this machine
    with the variables of the environment that its ranks need; `origin` and path as above."""
    return _rendered(
        ENTRY_FILE,
        spec,
        nemo=NEMO_VERSION,
        origin=origin,
        path=path,
        recipe=RECIPE_FILE,
        environment=sorted(variables.items()),
        name=name,
    )


def _rendered(file: str, spec: RunSpec, **parts: object) -> str:
    ranks = spec.parallelism.world_size
    title = f"{spec.model or 'A GPT'}, {spec.name}, on {ranks} GPU{'s' if ranks > 1 else ''}"
    template = environment(Path(__file__).parent, escaped=False).get_template(f"{file}.j2")
    return template.render(title=title, ranks=ranks, **parts)


def _in_docstring(sentence: str) -> str:
    words = TextWrapper(_WIDTH, initial_indent="- ", subsequent_indent="  ")
    words.break_long_words = words.break_on_hyphens = False
    return words.fill(sentence.replace("\\", "/").replace('"', "'"))


def _machines(ranks: int) -> str:
    """torchrun's options for one machine, or several."""
    if ranks <= GPUS_PER_MACHINE:
        return f"--standalone --nproc-per-node {ranks}"
    nodes = -(-ranks // GPUS_PER_MACHINE)
    rendezvous = "--node-rank … --master-addr …"
    return f"--nnodes {nodes} --nproc-per-node {ranks // nodes} {rendezvous}"


def _imports(paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Modules with the names that are taken from them, in the order in which they are written."""
    names: dict[str, set[str]] = {"megatron.bridge.training.config": {"ConfigContainer"}}
    for module, name in map(_module_and_name, paths):
        if module:
            names.setdefault(module, set()).add(name)
    return [(module, sorted(names[module])) for module in sorted(names)]


def _module_and_name(path: str) -> tuple[str, str]:
    """Where a name is imported from; nothing for torch's, which are written in full."""
    if path.startswith("torch."):
        return "", path
    parts = path.split(".")
    cut = next((at for at, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:cut]), parts[cut]


def _fields(section: str, fields: Mapping[str, Value]) -> Iterable[tuple[str, str, str]]:
    """Each field, its value in Python, and its unit where its name does not say it."""
    for field, value in fields.items():
        unit = _UNITS.get(f"{section}.{field}", "")
        said = value is None or unit[:4] in field  # `train_iters` says iterations.
        yield field, _python(value), "" if said else unit


def _python(value: Value) -> str:
    if isinstance(value, Symbol):
        module, _ = _module_and_name(value.path)
        return value.path.removeprefix(f"{module}.") if module else value.path
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return f"[{', '.join(_python(each) for each in value)}]"
    return format_value(value)


_UNITS = {place.removeprefix("!"): row.unit for row in ROWS for place in row.recipe if row.unit}

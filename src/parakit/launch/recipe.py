"""`make export-recipe` and `make import-recipe`: runs as recipes of Megatron-Bridge and nemo-run, and back."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.io import write_atomically
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, format_args_file, relative_to_root
from parakit.config.run import RunSpec
from parakit.config.strategy import parse_strategy, strategy_flags
from parakit.convert import (
    BRIDGE_VERSION,
    ENTRY_FILE,
    GPUS_PER_MACHINE,
    RECIPE_FILE,
    Recipe,
    RecipeError,
    build_imported_recipe,
    build_recipe,
    check_recipe_entry,
    flags_from_fields,
    is_bridge_installed,
    model_name,
    read_recipe,
    recipe_differences,
    recipe_from_flags,
    render_entry,
    render_recipe,
)
from parakit.costs import find_violations
from parakit.formatting.terminal import say
from parakit.formatting.units import plural
from parakit.launch.job import format_make_command, parse_target
from parakit.launch.options import Options
from parakit.launch.run_folder import read_named_run
from parakit.launch.runtime import ON_HOST
from parakit.launch.train import compose_job

RECIPES = ROOT / "recipes"
NEMO = "nemo"
_NEEDED_BY_RANKS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True)
class RecipeRun:
    """A run, trained or not, as a recipe is made from it."""

    name: str
    megatron_arguments: tuple[str, ...]
    spec: RunSpec
    environment: Mapping[str, str]


def export_recipe(run: str, to: str, options: Options, console: Console) -> int:
    """Write a run as a recipe and print the files' paths; return 0.

    The recipe is checked with Megatron-Bridge if that is installed.

    Args:
        run: A run folder, or a training target that need not have been trained.
        to: `bridge`, or `nemo` for nemo-run's entry script as well.
        options: The make variables of the target.
        console: The terminal.

    Raises:
        LaunchError, RecipeError: There is no such run, or no recipe can express it; nothing was written.
    """
    if run.startswith("train-"):
        source = compose_recipe_run(run, options)
        for reason in find_violations(source.spec):
            raise LaunchError(f"{run} makes a run that Megatron refuses: {reason}")
    else:
        source = read_recipe_run(run)
    origin = f"make export-recipe RUN={run} TO={to}"
    folder = RECIPES / source.name
    ranks = source.spec.parallelism.world_size
    if to == NEMO and ranks > GPUS_PER_MACHINE:
        raise LaunchError(
            f"{run} needs {ranks} GPUs, and nemo-run's entry is for one machine of "
            f"{GPUS_PER_MACHINE}; use TO=bridge with an executor of your own."
        )
    recipe = recipe_from_flags(source.megatron_arguments, source.spec)
    recipe_path, entry_path = folder / RECIPE_FILE, folder / ENTRY_FILE
    text = render_recipe(recipe, source.spec, origin, relative_to_root(recipe_path))
    contents = {recipe_path: text}
    check_results = {recipe_path: _check_recipe(recipe, text, source.spec)}
    if to == NEMO:
        entry = _render_entry_script(source, origin, relative_to_root(entry_path))
        contents[entry_path] = entry
        check_results[entry_path] = _check_entry_script(entry, text, source.spec)
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
        say(console, f"{relative_to_root(path)}: {check_results[path]}")
    for sentence in recipe.left_out:
        say(console, f"Without a counterpart: {sentence}", "yellow")
    return 0


def import_recipe(input: str, name: str | None, gpus: int | None, console: Console) -> int:
    """Write a recipe's model as an `.args` file, print the make command that trains it, and return 0.

    Settings of the recipe that no flag can express are printed as well.

    Args:
        input: Megatron-Bridge's YAML, or a Python file that builds a container.
        name: The model's name; None takes the file's.
        gpus: Number of GPUs to train on; None takes the fewest that the strategy allows.
        console: The terminal.

    Raises:
        LaunchError, RecipeError: The file is no recipe, the name is unusable or belongs to another model, no target
            names the recipe's parallelism, or Megatron would refuse the run. Nothing was written.
    """
    # A Python recipe may be named with its function, as in `recipe.py:function`.
    path = Path(input.partition(":")[0])
    name = _choose_model_name(path, name, input)
    translation = flags_from_fields(read_recipe(input))
    imported = build_imported_recipe(translation, name, gpus)
    for reason in find_violations(imported.spec):
        raise LaunchError(f"{input} makes a run that Megatron refuses: {reason}")
    _refuse_another_strategy(imported.spec)
    model_file = ROOT / "examples" / imported.family / "models" / f"{name}.args"
    title = f"From {path.name}, a recipe of Megatron-Bridge, by 'make import-recipe'."
    text = format_args_file([title], imported.model_flags)
    if model_file.exists() and model_file.read_text() != text:
        raise LaunchError(
            f"Another model is in {relative_to_root(model_file)} already; set NAME=another-name."
        )
    write_atomically(model_file, text)
    say(console, f"{relative_to_root(model_file)}; train it with")
    say(console, format_make_command(imported.target, imported.variables))
    for sentence in translation.left_out:
        say(console, f"In no flag: {sentence}", "yellow")
    return 0


def _choose_model_name(path: Path, name: str | None, recipe: str) -> str:
    """Return the name of an imported model: `name` if it is set, else one from the recipe's path.

    A recipe under its default file name is named by its folder.

    Raises:
        LaunchError: The path yields no name, or NAME= is not in the form of a model's name.
    """
    if not name:
        has_default_name = path.stem == Path(RECIPE_FILE).stem
        name = model_name(path.resolve().parent.name if has_default_name else path.stem)
    if not name:
        raise LaunchError(
            f"{recipe} has no letters or digits in its name to name the model by; set NAME=my-model."
        )
    if name != model_name(name):
        raise LaunchError(f"NAME={name} is no model's name; use {model_name(name)}.")
    return name


def read_recipe_run(run: str) -> RecipeRun:
    """Return the run in a run folder.

    Raises:
        LaunchError: The folder holds no run.
    """
    folder = Path(run)
    record = read_named_run(folder, ", and a target (RUN=train-tp2-gpt2-large-2gpu) needs none")
    return RecipeRun(folder.resolve().name, record.argv, record.spec, record.environment)


def compose_recipe_run(name: str, options: Options) -> RecipeRun:
    """Return the run that a target would train on GPUs with Transformer Engine.

    Raises:
        LaunchError: The name is no target, or its parts do not fit together.
    """
    job = parse_target(name, options)
    # Megatron-Bridge runs in a container with both libraries, even if this machine has neither.
    runtime = replace(ON_HOST, transformer_engine=True, apex=True)
    launch = compose_job(job, runtime)
    return RecipeRun(job.target, launch.arguments(), launch.spec, launch.environment)


def _check_recipe(recipe: Recipe, text: str, spec: RunSpec) -> str:
    """Return a sentence on how the recipe was checked; raise if Megatron-Bridge reads it as another run."""
    if not is_bridge_installed():
        return "not checked; 'make setup-bridge' installs Megatron-Bridge, which can check it."
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RECIPE_FILE
        file.write_text(text)
        fields = build_recipe(str(file), spec.parallelism.world_size)
    for difference in recipe_differences(recipe, fields, spec):
        raise RecipeError(f"The recipe is not the run: {difference}")
    return (
        f"Megatron-Bridge {BRIDGE_VERSION} reads it as the run, with the run's {len(recipe.fields)} fields "
        f"and defaults in {len(fields) - len(recipe.fields)} others."
    )


def _render_entry_script(source: RecipeRun, origin: str, path: str) -> str:
    """Return nemo-run's entry script of the run, with the environment variables that ranks need."""
    environment = source.environment
    needed = {name: environment[name] for name in _NEEDED_BY_RANKS if name in environment}
    return render_entry(source.spec, source.name, needed, origin, path)


def _check_entry_script(entry: str, recipe: str, spec: RunSpec) -> str:
    """Return a description of the entry script, after nemo-run has checked the script without starting it.

    If Megatron-Bridge is not installed, the script is not checked. The description of a checked script also says how
    many ranks nemo-run would start. If nemo-run refuses the script, the error of `check_recipe_entry` is raised.

    Args:
        entry: Text of the entry script.
        recipe: Text of the recipe, which the script imports.
        spec: The run that the recipe trains.
    """
    if not is_bridge_installed():
        return "the entry script that trains the recipe with nemo-run."
    ranks = spec.parallelism.world_size
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ENTRY_FILE
        file.write_text(entry)
        file.with_name(RECIPE_FILE).write_text(recipe)
        check_recipe_entry(file, ranks)
    return (
        "the entry script that trains the recipe with nemo-run, which starts "
        f"{plural(ranks, 'rank')} with torchrun."
    )


def _refuse_another_strategy(spec: RunSpec) -> None:
    """Raise a LaunchError if no target names the recipe's parallelism."""
    name = spec.name
    named = parse_strategy(name, spec.parallelism.world_size)
    if named.with_expert_tensor(spec.parallelism.expert_tensor) != spec.parallelism:
        recipe_flags = shlex.join(strategy_flags(spec.parallelism))
        target_flags = shlex.join(strategy_flags(named))
        raise LaunchError(
            f"No target names the recipe's strategy ({recipe_flags}); the nearest, {name}, is {target_flags}."
        )

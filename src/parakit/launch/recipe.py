"""`make export-recipe RUN= TO=` and `make import-recipe INPUT=`: Megatron-Bridge's and nemo-run's."""

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
    """What a recipe is made of."""

    name: str
    megatron_arguments: tuple[str, ...]
    spec: RunSpec
    environment: Mapping[str, str]


def export_recipe(run: str, to: str, options: Options, console: Console) -> int:
    """Write a run as a recipe, checked with Megatron-Bridge where that is installed; 0.

    Args:
        run: A run folder, or a training target, which need not have been trained.
        to: `bridge`, or `nemo` for nemo-run's entry too.
        options: As training takes them, for a target.
        console: Where it says what it wrote.

    Raises:
        LaunchError, RecipeError: There is no such run, or no recipe says what it trains; nothing was
            written.
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
    text = render_recipe(recipe, source.spec, origin, relative_to_root(folder / RECIPE_FILE))
    files = {RECIPE_FILE: (text, _checked(recipe, text, source.spec))}
    if to == NEMO:
        entry = _entry(source, origin, relative_to_root(folder / ENTRY_FILE))
        files[ENTRY_FILE] = (entry, _started(entry, text, source.spec))
    folder.mkdir(parents=True, exist_ok=True)
    for name, (content, said) in files.items():
        write_atomically(folder / name, content)
        say(console, f"{relative_to_root(folder / name)}: {said}")
    for sentence in recipe.left_out:
        say(console, f"Without a counterpart: {sentence}", "yellow")
    return 0


def import_recipe(input: str, name: str | None, gpus: int | None, console: Console) -> int:
    """Write a recipe's model as an `.args` file and print the target that trains it; 0.

    Args:
        input: Bridge's YAML, or a Python file that makes a container.
        name: The model's; None is the file's.
        gpus: To train on; None is the fewest that the strategy allows.
        console: Where it prints.

    Raises:
        LaunchError, RecipeError: It is no recipe, or Megatron would refuse the run; nothing was written.
    """
    file = input
    path = Path(file.partition(":")[0])
    name = name or model_name(
        path.resolve().parent.name if path.stem == Path(RECIPE_FILE).stem else path.stem
    )
    if not name:
        raise LaunchError(
            f"{file} gives no name of letters or digits to the model; give NAME=my-model."
        )
    if name != model_name(name):
        raise LaunchError(f"NAME={name} is no model's name; use {model_name(name)}.")
    reading = flags_from_fields(read_recipe(file))
    read = build_imported_recipe(reading, name, gpus)
    for reason in find_violations(read.spec):
        raise LaunchError(f"{file} makes a run that Megatron refuses: {reason}")
    _refuse_another_strategy(read.spec)
    written = ROOT / "examples" / read.family / "models" / f"{name}.args"
    title = f"From {path.name}, a recipe of Megatron-Bridge, by 'make import-recipe'."
    text = format_args_file([title], read.model_flags)
    if written.exists() and written.read_text() != text:
        raise LaunchError(
            f"There is a model {relative_to_root(written)} already, another one; give NAME=another-name."
        )
    write_atomically(written, text)
    say(console, f"{relative_to_root(written)}; train it with")
    say(console, format_make_command(read.target, read.variables))
    for sentence in reading.left_out:
        say(console, f"In no flag: {sentence}", "yellow")
    return 0


def read_recipe_run(run: str) -> RecipeRun:
    """A run that was trained.

    Raises:
        LaunchError: The folder holds none.
    """
    folder = Path(run)
    record = read_named_run(folder, ", and a target (RUN=train-tp2-gpt2-large-2gpu) needs none")
    return RecipeRun(folder.resolve().name, record.argv, record.spec, record.environment)


def compose_recipe_run(name: str, options: Options) -> RecipeRun:
    """What a target would train on GPUs with Transformer Engine.

    Raises:
        LaunchError: It is no target, or does not fit together.
    """
    job = parse_target(name, options)
    # The container that Megatron-Bridge runs in has both, whatever is here.
    runtime = replace(ON_HOST, transformer_engine=True, apex=True)
    launch = compose_job(job, runtime)
    return RecipeRun(job.target, launch.arguments(), launch.spec, launch.environment)


def _checked(recipe: Recipe, text: str, spec: RunSpec) -> str:
    """What the recipe was checked with."""
    if not is_bridge_installed():
        return "not checked here; 'make setup-bridge' installs what checks it."
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RECIPE_FILE
        file.write_text(text)
        fields = build_recipe(str(file), spec.parallelism.world_size)
    for difference in recipe_differences(recipe, fields, spec):
        raise RecipeError(f"The recipe is not the run: {difference}")
    return (
        f"Megatron-Bridge {BRIDGE_VERSION} takes it; the container has the run's {len(recipe.fields)} "
        f"fields and defaults in {len(fields) - len(recipe.fields)} others, and reads as the run."
    )


def _entry(source: RecipeRun, origin: str, path: str) -> str:
    given = source.environment
    needed = {name: given[name] for name in _NEEDED_BY_RANKS if name in given}
    return render_entry(source.spec, source.name, needed, origin, path)


def _started(entry: str, recipe: str, spec: RunSpec) -> str:
    """What nemo-run says that it would start."""
    if not is_bridge_installed():
        return "trains it with nemo-run."
    ranks = spec.parallelism.world_size
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ENTRY_FILE
        file.write_text(entry)
        file.with_name(RECIPE_FILE).write_text(recipe)
        check_recipe_entry(file, ranks)
    return f"trains it with nemo-run; nemo-run starts {ranks} rank{'s' * (ranks > 1)} of it by torchrun."


def _refuse_another_strategy(spec: RunSpec) -> None:
    """Refuse a strategy that no target names."""
    name = spec.name
    named = parse_strategy(name, spec.parallelism.world_size)
    if named.with_expert_tensor(spec.parallelism.expert_tensor) != spec.parallelism:
        asked, here = (shlex.join(strategy_flags(each)) for each in (spec.parallelism, named))
        raise LaunchError(f"The recipe's strategy ({asked}) has no target; {name} is {here}.")

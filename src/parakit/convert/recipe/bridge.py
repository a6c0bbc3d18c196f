"""Megatron-Bridge in an environment of its own: what a recipe builds, and whether that is the run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from parakit.config.files import ROOT, read_yaml
from parakit.config.run import DeviceKind, RunSpec, spec_of_flags
from parakit.convert.recipe.fields import Recipe
from parakit.convert.recipe.flags import flags_from_fields
from parakit.convert.recipe.table import (
    BRIDGE_DEFAULTS,
    CONTAINER,
    Fields,
    RecipeError,
    format_value,
    parse_container,
)
from parakit.convert.recipe.written import RECIPE_FILE

ENVIRONMENT = ROOT / ".venv-bridge"
"""Made by `make setup-bridge`."""

_EVALUATE = Path(__file__).with_name("evaluate.py")
_SECONDS = 300
_NO_ENVIRONMENT = (
    "{} is Python, which Megatron-Bridge has to read, and that is not installed here; run 'make "
    "setup-bridge', or give the YAML that the container's to_yaml() writes."
)


def is_bridge_installed() -> bool:
    """Whether recipes can be built here."""
    return (ENVIRONMENT / "bin/python").exists()


def read_recipe(text: str) -> Fields:
    """The fields of a recipe: Bridge's YAML, or a Python file, `path.py` or `path.py:function`.

    Raises:
        RecipeError: There is no such file, or it is no recipe.
    """
    path = Path(text.partition(":")[0]).expanduser()
    if not path.is_file():
        raise RecipeError(f"FILE={text}: there is no file {path}.")
    if path.suffix == ".py":
        if not is_bridge_installed():
            raise RecipeError(_NO_ENVIRONMENT.format(path))
        return build_recipe(text)
    return _fields_of_file(path)


def build_recipe(recipe: str, ranks: int | None = None) -> Fields:
    """The fields of the container that a Python file (`path.py`, `path.py:function`) makes in a process
    of Bridge's environment, which validates it as at the start of training on so many ranks, if any.

    Raises:
        RecipeError: It makes none, or Bridge refuses it.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "container.yaml"
        _evaluate(recipe, out, *(["--ranks", str(ranks)] if ranks else []))
        return _fields_of_file(out)


def check_recipe_entry(entry: Path, ranks: int) -> None:
    """Let nemo-run say that an entry would start the recipe beside it on so many ranks.

    Raises:
        RecipeError: nemo-run refuses it, or would start something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dryrun.txt"
        _evaluate(str(entry), out, "--dryrun")
        said = re.findall(r"'([^']*)'", out.read_text())
    wanted = ("torchrun", "--nproc-per-node", str(ranks), str(entry.with_name(RECIPE_FILE)))
    if missing := [word for word in wanted if word not in said]:
        raise RecipeError(f"{entry.name} would not start {' '.join(missing)}.")


def _evaluate(file: str, out: Path, *options: str) -> None:
    try:
        ended = subprocess.run(
            [ENVIRONMENT / "bin/python", _EVALUATE, *options, file, out],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RecipeError(f"{file} took more than {_SECONDS} seconds to build.") from None
    if ended.returncode or not out.is_file():
        said = ended.stderr.strip().splitlines() or ["it wrote nothing"]
        raise RecipeError(f"{Path(file).name} makes no container: {said[-1]}")


def recipe_differences(recipe: Recipe, fields: Fields, spec: RunSpec) -> Iterable[str]:
    """Where the fields of a container that was built from the run's recipe are not the run, a sentence
    each; empty if every field says the same."""
    for place, value in recipe.fields.items():
        if fields.get(place) != value:
            built_as = format_value(fields.get(place))
            yield f"{place} is {built_as} in the container and {format_value(value)} in the run."
    for place, value in fields.items():
        if place.endswith("_target_") or place in recipe.fields or place not in BRIDGE_DEFAULTS:
            continue
        if value != BRIDGE_DEFAULTS[place] and place != "dist.local_rank":
            yield f"{place} is {format_value(value)} in the container, which the run does not ask for."
    ranks, name = spec.parallelism.world_size, spec.model
    asked = spec_of_flags(recipe.flags, ranks, DeviceKind.GPU, name)
    read = spec_of_flags(flags_from_fields(fields).flags, ranks, DeviceKind.GPU, name)
    if read != asked:
        yield f"The container reads as another run: {read}, not {asked}."


def _fields_of_file(path: Path) -> Fields:
    try:
        return parse_container(read_yaml(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = str(error).splitlines()[0]
        raise RecipeError(f"{path} is no YAML ({said}); give what to_yaml() writes.") from None
    except ValueError as error:
        raise RecipeError(
            f"{path} is no recipe of Megatron-Bridge: {error}; give what {CONTAINER}.to_yaml() writes."
        ) from None

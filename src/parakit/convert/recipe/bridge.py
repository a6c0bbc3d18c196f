"""Build and check recipes with Megatron-Bridge, which is installed in a virtual environment of its own.

`make setup-bridge` installs that environment. Without it, recipes can be read from YAML only, and
exported recipes are not checked.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from parakit.config.files import ROOT, read_yaml
from parakit.config.run import DeviceKind, RunSpec, spec_from_flags
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
"""Virtual environment that `make setup-bridge` makes."""

_EVALUATE = Path(__file__).with_name("evaluate.py")
_TIMEOUT_SECONDS = 300
_NO_ENVIRONMENT = (
    "{} is Python, which Megatron-Bridge has to read, and that is not installed here; run 'make "
    "setup-bridge', or give the YAML that the container's to_yaml() writes."
)


def is_bridge_installed() -> bool:
    """Return True if Megatron-Bridge's environment is here, so that recipes can be built."""
    return (ENVIRONMENT / "bin/python").exists()


def read_recipe(text: str) -> Fields:
    """Read the fields of the Megatron-Bridge recipe that `text` names, with the value of each.

    `text` is the path of the YAML that Bridge writes, or of a Python file, with or without the name of
    a function in it (`path.py:function`).

    Raises:
        RecipeError: The file does not exist or is no recipe. Or it is a Python file and Bridge is not
            installed.
    """
    path = Path(text.partition(":")[0]).expanduser()
    if not path.is_file():
        raise RecipeError(f"INPUT={text}: there is no file {path}.")
    if path.suffix == ".py":
        if not is_bridge_installed():
            raise RecipeError(_NO_ENVIRONMENT.format(path))
        return build_recipe(text)
    return _read_container(path)


def build_recipe(recipe: str, ranks: int | None = None) -> Fields:
    """Execute a Python recipe with Megatron-Bridge, and return the fields of the `ConfigContainer` that it makes.

    Args:
        recipe: `path.py` or `path.py:function`. It runs in a process of Bridge's environment.
        ranks: Number of ranks on which Bridge also validates the container, as at the start of training; None
            skips the validation. The validation changes some fields, but the result has the values before it.

    Raises:
        RecipeError: The file makes no container, Bridge refuses it, or building takes over 300 s.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "container.yaml"
        _evaluate(recipe, output, *(["--ranks", str(ranks)] if ranks else []))
        return _read_container(output)


def check_recipe_entry(entry: Path, ranks: int) -> None:
    """Check with nemo-run's dry run that an entry file starts the recipe in its folder on `ranks` ranks.

    Raises:
        RecipeError: nemo-run refuses the entry, or would start something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "dryrun.txt"
        _evaluate(str(entry), output, "--dryrun")
        started_arguments = re.findall(r"'([^']*)'", output.read_text())
    expected_arguments = (
        *("torchrun", "--nproc-per-node", str(ranks)),
        str(entry.with_name(RECIPE_FILE)),
    )
    missing = [argument for argument in expected_arguments if argument not in started_arguments]
    if missing:
        raise RecipeError(f"{entry.name} would not start {' '.join(missing)}.")


def _evaluate(file: str, output: Path, *options: str) -> None:
    """Run `evaluate.py` on `file` in Bridge's environment, which writes its result to `output`.

    Raises: RecipeError: The program fails, writes nothing, or takes over 300 s. The message has its last error
    line.
    """
    try:
        process = subprocess.run(
            [ENVIRONMENT / "bin/python", _EVALUATE, *options, file, output],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RecipeError(f"{file} took more than {_TIMEOUT_SECONDS} seconds to build.") from None
    if process.returncode or not output.is_file():
        error_lines = process.stderr.strip().splitlines() or ["it wrote nothing"]
        raise RecipeError(f"{Path(file).name} makes no container: {error_lines[-1]}")


def recipe_differences(recipe: Recipe, fields: Fields, spec: RunSpec) -> Iterable[str]:
    """Yield a sentence per difference between a built container and the run; nothing if both train the same.

    Args:
        recipe: The recipe of the run.
        fields: The fields of the container that Bridge built from it.
        spec: The run.
    """
    for name, value in recipe.fields.items():
        if fields.get(name) != value:
            built_value = format_value(fields.get(name))
            yield f"{name} is {built_value} in the container and {format_value(value)} in the run."
    for name, value in fields.items():
        if name.endswith("_target_") or name in recipe.fields or name not in BRIDGE_DEFAULTS:
            continue
        if value != BRIDGE_DEFAULTS[name] and name != "dist.local_rank":
            built_value = format_value(value)
            yield f"{name} is {built_value} in the container, which the run does not ask for."
    ranks, model = spec.parallelism.world_size, spec.model
    expected_spec = spec_from_flags(recipe.flags, ranks, DeviceKind.GPU, model)
    built_spec = spec_from_flags(flags_from_fields(fields).flags, ranks, DeviceKind.GPU, model)
    if built_spec != expected_spec:
        yield f"The container reads as another run: {built_spec}, not {expected_spec}."


def _read_container(path: Path) -> Fields:
    """Return the fields in a YAML file of Bridge's.

    Raises:
        RecipeError: The file is no YAML, or no `ConfigContainer`.
    """
    try:
        return parse_container(read_yaml(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(f"{path} is no YAML ({reason}); give what to_yaml() writes.") from None
    except ValueError as error:
        raise RecipeError(
            f"{path} is no recipe of Megatron-Bridge: {error}; give what {CONTAINER}.to_yaml() writes."
        ) from None

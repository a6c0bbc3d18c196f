"""Execute a Python recipe with Megatron-Bridge, or dry-run an entry of nemo-run, and write the result.

Python of `.venv-bridge` runs this file in a process of its own. The kit is not installed there, so nothing of it is
imported.

    python evaluate.py recipe.py[:function] OUT    the container that the recipe returns, as Bridge's YAML
    python evaluate.py --dryrun nemo_entry.py OUT  what nemo-run would start, as it prints it

With `--ranks N`, Bridge also validates the container as at the start of training on N ranks;
`--validated FILE` writes the validated container. Some packages that Megatron, Bridge and nemo-run
import need a GPU or another cloud. Where they are missing, empty packages stand in for them
(`REPLACEABLE_PACKAGES`); nothing in them is called.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.machinery
import importlib.util
import inspect
import io
import os
import runpy
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

REPLACEABLE_PACKAGES = ("transformer_engine", "nvidia_resiliency_ext", "leptonai")
"""Packages that Megatron Core, Bridge's training loop and nemo-run import, in this order."""

_TRANSFORMER_ENGINE = "2.12.0"
"""Version of Transformer Engine that Megatron Core sees: one that Bridge 0.3.1 requires."""


class _AnyAttribute(type):
    """A class that has every attribute; each is such a class. It serves annotations and subclasses."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {})


class _EmptyModule(types.ModuleType):
    """A module in which every name can be looked up. Each name is a class that has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__version__ = [], _TRANSFORMER_ENGINE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (), {"__module__": self.__name__})


class _MissingModules(MetaPathFinder, Loader):
    """An importer that makes an `_EmptyModule` for every module of the packages that are not installed."""

    def __init__(self, missing: Sequence[str]) -> None:
        self._missing = missing

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(argv: Sequence[str]) -> None:
    """Build the recipe's container and write it as YAML; exit with one sentence if the recipe is wrong.

    With `--dryrun`, write the text that nemo-run's dry run prints instead.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dryrun", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--validated", type=Path)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    replace_missing_packages()
    if arguments.dryrun:
        arguments.out.write_text(dry_run(arguments.recipe))
        return
    container = build_container(arguments.recipe)
    if arguments.ranks:
        validated = validate_container(container, arguments.ranks)
        if arguments.validated:
            validated.to_yaml(str(arguments.validated))
    container.to_yaml(str(arguments.out))


def replace_missing_packages() -> None:
    """Let imports of `REPLACEABLE_PACKAGES` succeed in this process, also of those not installed."""
    missing = [name for name in REPLACEABLE_PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _MissingModules(missing))


def build_container(recipe: str) -> Any:
    """Execute a recipe (`path.py` or `path.py:function`) and return its `ConfigContainer`.

    If the recipe gives the precision as a name ('bf16_mixed'), the fields of this precision replace the name.
    The process exits with a sentence if the file is no Python or its function returns no container.
    """
    from megatron.bridge.training.config import ConfigContainer

    path, _, name = recipe.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name) if name else _find_only_recipe(module, path)
    container = function()
    if not isinstance(container, ConfigContainer):
        sys.exit(f"{recipe} returns a {type(container).__name__}, not a ConfigContainer.")
    if isinstance(container.mixed_precision, str):
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        container.mixed_precision = get_mixed_precision_config(container.mixed_precision)
    return container


def _find_only_recipe(module: types.ModuleType, path: str) -> Any:
    """Return the module's public function that is annotated to return a ConfigContainer.

    The process exits with a sentence if the module defines no such function, or several.
    """
    recipes = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and "ConfigContainer" in str(inspect.signature(function).return_annotation)
        and not name.startswith("_")
    }
    if len(recipes) != 1:
        names = ", ".join(sorted(recipes)) or "none"
        sys.exit(
            f"{path} has {len(recipes)} functions that return a ConfigContainer ({names}); name one: "
            f"INPUT={path}:function."
        )
    return next(iter(recipes.values()))


def validate_container(container: Any, ranks: int) -> Any:
    """Return a copy of the container with the changes that Bridge makes before it trains on `ranks` ranks.

    Sets the environment variable WORLD_SIZE of this process.

    The process exits with a sentence if Bridge refuses the container.
    """
    from megatron.bridge.training.config import runtime_config_update

    os.environ["WORLD_SIZE"] = str(ranks)
    validated = copy.deepcopy(container)
    try:
        runtime_config_update(validated)
    except (AssertionError, ValueError, TypeError) as error:
        sys.exit(f"Megatron-Bridge refuses the recipe for --ranks {ranks}: {error}".strip())
    return validated


def dry_run(entry: str) -> str:
    """Run an entry file of nemo-run with `--dryrun`, and return the text that it prints.

    The files that nemo-run writes are deleted. The environment and `sys.argv` of this process are changed.
    """
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(printed):
        os.environ |= {"NEMORUN_HOME": home, "COLUMNS": "500", "NO_COLOR": "1"}
        sys.argv = [entry, "--dryrun"]
        runpy.run_path(entry, run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])

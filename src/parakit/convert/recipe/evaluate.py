"""What the recipe in a Python file builds: run by `.venv-bridge`'s Python, apart from the kit.

    python evaluate.py recipe.py[:function] OUT    the container it returns, as Bridge's YAML
    python evaluate.py --dryrun nemo_entry.py OUT  what nemo-run would start, as it prints it

With `--ranks N` Bridge's own validation runs as well, as at the start of training on that many;
`--validated FILE` keeps its result. Packages that need a GPU or another cloud, and that these files only
import, are stood in for where they are missing: `STOOD_IN`. Nothing of them is called.
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

from parakit.formatting.units import plural

REPLACEABLE_PACKAGES = ("transformer_engine", "nvidia_resiliency_ext", "leptonai")
"""Megatron Core imports the first, Bridge's training loop the second, nemo-run the third."""

_TRANSFORMER_ENGINE = "2.12.0"
"""The version that Megatron Core sees: one that Bridge 0.3.1 asks for."""


class _Anything(type):
    """A class that has every attribute, classes like itself: enough for annotations and subclasses."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Empty(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__version__ = [], _TRANSFORMER_ENGINE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__module__": self.__name__})


class _MissingModules(MetaPathFinder, Loader):
    def __init__(self, missing: Sequence[str]) -> None:
        self._missing = missing

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(words: Sequence[str]) -> None:
    """Write the YAML, or end with one sentence on what is wrong with the recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dryrun", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--validated", type=Path)
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    replace_missing_packages()
    if given.dryrun:
        given.out.write_text(dry_run(given.recipe))
        return
    container = build_container(given.recipe)
    if given.ranks:
        checked = validate_container(container, given.ranks)
        if given.validated:
            checked.to_yaml(str(given.validated))
    container.to_yaml(str(given.out))


def replace_missing_packages() -> None:
    """From here on, imports of what is missing of `STOOD_IN` succeed."""
    missing = [name for name in REPLACEABLE_PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _MissingModules(missing))


def build_container(recipe: str) -> Any:
    """The container that the recipe's function returns."""
    from megatron.bridge.training.config import ConfigContainer

    path, _, name = recipe.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    container = getattr(module, name)() if name else _only_recipe(module, path)()
    if not isinstance(container, ConfigContainer):
        sys.exit(f"{recipe} returns a {type(container).__name__}, not a ConfigContainer.")
    if isinstance(container.mixed_precision, str):
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        container.mixed_precision = get_mixed_precision_config(container.mixed_precision)
    return container


def _only_recipe(module: types.ModuleType, path: str) -> Any:
    found = {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and "ConfigContainer" in str(inspect.signature(each).return_annotation)
        and not name.startswith("_")
    }
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        sys.exit(
            f"{path} has {len(found)} functions that return a ConfigContainer ({names}); name one: "
            f"FILE={path}:function."
        )
    return next(iter(found.values()))


def validate_container(container: Any, ranks: int) -> Any:
    """What Bridge makes of it on that many ranks before it trains."""
    from megatron.bridge.training.config import runtime_config_update

    os.environ["WORLD_SIZE"] = str(ranks)
    checked = copy.deepcopy(container)
    try:
        runtime_config_update(checked)
    except (AssertionError, ValueError, TypeError) as error:
        sys.exit(f"Megatron-Bridge refuses the recipe on {plural(ranks, 'rank')}: {error}".strip())
    return checked


def dry_run(entry: str) -> str:
    """What an entry of nemo-run prints instead of starting it; nemo-run keeps nothing of it."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(printed):
        os.environ |= {"NEMORUN_HOME": home, "COLUMNS": "500", "NO_COLOR": "1"}
        sys.argv = [entry, "--dryrun"]
        runpy.run_path(entry, run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])

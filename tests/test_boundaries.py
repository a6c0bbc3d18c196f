"""Boundaries between the packages of parakit: who loads torch, what is public, and which way imports point."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from parakit.config.files import ROOT

SOURCE = ROOT / "src"
PACKAGES = tuple(sorted(path.parent.name for path in SOURCE.glob("parakit/*/__init__.py")))

TRAINING = ("accounting", "capturing", "dryrun", "native")
"""Packages of the training processes, which may load torch."""

TORCH_MODULES = (
    "parakit.artifacts.torch_dist_writer",
    "parakit.checkpoint.compare",
    "parakit.checkpoint.reshard",
    "parakit.convert.hf.checkpoint",
    "parakit.convert.hf.families",
    "parakit.convert.hf.from_megatron",
    "parakit.convert.hf.into_megatron",
    "parakit.convert.hf.random_model",
    "parakit.convert.hf.reference",
    "parakit.convert.hf.serve",
    "parakit.convert.hf.tensor_files",
    "parakit.launch.microbenchmark_rank",
)
"""Modules of other packages that load torch, because they compute with tensors in separate processes."""


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(parakit[\w.]*)[ \t]+)?import\b[ \t(]*([\w., \t]*)", re.MULTILINE
)
"""Imports at any depth of a module: the package, which is empty for `import`, and names in its first line."""


def _imports_of_kit(path: Path) -> Iterator[str]:
    """Yield the name of every module of the kit that a file imports, functions included.

    The file is searched and not parsed, because parsing all files takes seconds.
    """
    for source, text in IMPORT.findall(path.read_text(encoding="utf-8")):
        names = [part.split()[0] for part in text.split(",") if part.strip()]
        if source:
            # `from parakit import planner` imports a package too.
            yield source
            yield from (f"{source}.{name}" for name in names)
        else:
            yield from (name for name in names if name.split(".")[0] == "parakit")


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules_of(package: str) -> dict[str, Path]:
    """Return the files of a package by their modules' names, without programs (`__main__`)."""
    files = sorted((SOURCE / "parakit" / package).rglob("*.py"))
    return {_module(file): file for file in files if file.stem != "__main__"}


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the name of every module that is imported below a node, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            # `from parakit import planner` imports a package too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _typing_block(tree: ast.Module) -> ast.If | None:
    """Return the first `if TYPE_CHECKING:` of a module."""
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            return statement
    return None


def _public_names(package: str) -> tuple[str, ...]:
    """Return `__all__` of a package as its `__init__` has it."""
    for statement in _tree(SOURCE / "parakit" / package / "__init__.py").body:
        target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(statement, ast.Assign | ast.AnnAssign)
            assert statement.value is not None
            return tuple(ast.literal_eval(statement.value))
    return ()


@cache
def _defined_names(path: Path) -> set[str]:
    """Return the names that a module binds at its top level."""
    names = set()
    for statement in _tree(path).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        else:
            stores = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names |= {node.id for node in stores if isinstance(node.ctx, ast.Store)}
    return names


def test_commands_load_no_torch() -> None:
    packages = [package for package in PACKAGES if package not in TRAINING]
    modules = [module for package in packages for module in _modules_of(package)]
    modules = [module for module in modules if module not in TORCH_MODULES]
    assert len(modules) > 300
    program = (
        "import importlib, sys\n"
        "for name in sys.stdin.read().split():\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'megatron'} & set(sys.modules)\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} loads {heavy}')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(modules),
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", TORCH_MODULES)
def test_listed_exceptions_do_load_torch(module: str) -> None:
    tree = _tree((SOURCE / Path(*module.split("."))).with_suffix(".py"))
    statements = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {name.split(".")[0] for node in statements for name in _imported_modules(node)}
    assert imported & {"torch", "megatron"}


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_those_that_the_package_imports(package: str) -> None:
    names = _public_names(package)
    block = _typing_block(_tree(SOURCE / "parakit" / package / "__init__.py"))
    modules = _modules_of(package)
    if block is None:
        # Its modules are public themselves, or there is nothing public.
        assert all(f"parakit.{package}.{name}" in modules for name in names)
        return
    imported = []
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module is not None
        defined = _defined_names(modules[statement.module])
        for alias in statement.names:
            assert alias.name in defined, f"{statement.module} defines no {alias.name}"
            assert alias.asname is None
            imported.append(alias.name)
    assert len(imported) == len(set(imported))
    assert set(names) == set(imported)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_differ_from_names_of_submodules(package: str) -> None:
    """Importing the submodule would replace the name in the package."""
    if _typing_block(_tree(SOURCE / "parakit" / package / "__init__.py")) is not None:
        modules = {module.split(".")[2] for module in _modules_of(package) if "." in module[8:]}
        assert not modules & set(_public_names(package))


@cache
def _layers() -> dict[str, int]:
    """Return the layer of each package of parakit, 0 the highest, as pyproject.toml tells import-linter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    levels = {name: level for level, line in enumerate(layers) for name in line.split(" | ")}
    prefix = "parakit."
    return {name[len(prefix) :]: level for name, level in levels.items() if name.startswith(prefix)}


def test_every_package_has_its_layer() -> None:
    layers = {name for name in _layers() if (SOURCE / "parakit" / name).is_dir()}
    assert sorted(layers) == list(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_in_lower_layers(package: str) -> None:
    layers = _layers()
    for module, path in _modules_of(package).items():
        for name in _imports_of_kit(path):
            parts = name.split(".")
            if len(parts) > 1 and parts[1] in layers:
                allowed = parts[1] == package or layers[parts[1]] > layers[package]
                assert allowed, f"{module} imports {name}"


def _names_imported(package: str, source: str) -> set[str]:
    """Return the names that a package imports from another package of parakit."""
    names = set()
    mark = f"from parakit.{source} import"
    for path in _modules_of(package).values():
        if mark not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == f"parakit.{source}":
                names |= {alias.name for alias in node.names}
    return names


def test_report_imports_only_predictions_and_measurements_from_the_planner() -> None:
    assert _names_imported("reporting", "planner") == {
        "MeasurementsError",
        "RecordedRun",
        "RefusedError",
        "RequestError",
        "MeasurementRow",
        "Uncertainty",
        "add_rows",
        "predict_recorded_run",
        "build_measurement_row",
    }


def test_import_contracts_have_no_exceptions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "ignore_imports" not in text


STARTED_MODULE = re.compile(r'(?:"-m", |call_module\()"((?:parakit|megatron_patches|tools)[\w.]*)"')


def test_every_module_that_is_started_by_name_is_a_program() -> None:
    started = {}
    for folder in ("src", "examples", "tools", "megatron_patches"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in STARTED_MODULE.findall(path.read_text(encoding="utf-8")):
                started[name] = path
    assert len(started) > 6
    for name, path in started.items():
        root = SOURCE if name.startswith("parakit") else ROOT
        module = root / Path(*name.split("."))
        if (module / "__init__.py").is_file():
            assert (module / "__main__.py").is_file(), f"{path} starts {name}"
        else:
            program = module.with_suffix(".py").read_text(encoding="utf-8")
            assert '__name__ == "__main__"' in program, f"{path} starts {name}"

"""Programs that tests start as text (`python -c`) import existing names, which tools for renaming do not see."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from parakit.config.files import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
_IMPORT = re.compile(r"from ((?:parakit|megatron_patches|tools|tests)[\w.]*) import ([\w, ]+)")
_AFTER_IMPORTS = re.compile(r"^(?:def |class |async |@|if |for |\w+[^\n=]*=)", re.MULTILINE)


def _imports_in_strings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of the kit's modules in the strings of a file."""
    text = file.read_text()
    code = _AFTER_IMPORTS.search(text)
    if code is None or not _IMPORT.search(text, code.start()):
        return  # Parsing all files would take seconds, and most import only at their top.
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in _IMPORT.findall(node.value):
                for name in names.split(","):
                    yield module, name.split(" as ")[0].strip()


def _file_of(module: str) -> Path | None:
    """Return the file of a module of the kit, or None if there is none."""
    path = module.replace(".", "/")
    for folder in (ROOT / "src", ROOT):
        for file in (folder / f"{path}.py", folder / path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def _bound_names(file: Path) -> set[str]:
    """Return the names that a module binds anywhere, so that a condition does not hide one."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _can_be_imported(module: str, name: str) -> bool:
    file = _file_of(module)
    return file is not None and (
        name in _bound_names(file) or _file_of(f"{module}.{name}") is not None
    )


@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        ("parakit.config.files", "ROOT", True),
        ("parakit.config", "files", True),
        ("parakit.costs", "estimate_rank_memory", True),
        ("parakit.config.files", "NOTHING", False),
        ("parakit.nothing", "ROOT", False),
    ],
)
def test_names_are_looked_up_in_the_source(module: str, name: str, there: bool) -> None:
    assert _can_be_imported(module, name) is there


def test_an_import_in_a_string_is_found_and_one_of_the_file_is_not(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    program = 'CODE = """\nfrom parakit.config import files\n"""\n'
    file.write_text(f"from parakit.config.files import ROOT\n\n{program}")
    assert list(_imports_in_strings(file)) == [("parakit.config", "files")]
    file.write_text("from parakit.config.files import ROOT\n\nFILES = ROOT\n")
    assert list(_imports_in_strings(file)) == []


def test_programs_in_strings_import_existing_names() -> None:
    imports = [(file, *names) for file in FILES for names in _imports_in_strings(file)]
    assert imports
    missing = [
        f"{file.relative_to(ROOT)}: from {module} import {name}"
        for file, module, name in imports
        if not _can_be_imported(module, name)
    ]
    assert missing == []

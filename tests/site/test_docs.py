"""What pages say of the repository is so: their links, and the commands in their code blocks."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from os.path import normpath
from pathlib import Path

import pytest

from parakit.cli.commands import COMMANDS, INTERNAL
from parakit.cli.options import find_command, refuse_unused_variables
from parakit.cli.program import FAMILIES
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.settings import SETTINGS
from parakit.experiments.matrix.definition import load_matrix
from parakit.experiments.matrix.page import write_cells_page, write_differences_page
from parakit.site.hooks import MADE_LATER, indent_nested_lists, list_pages, render_settings_page
from tests.given import command_named

PAGES = [name for name in list_pages() if name.endswith(".md")]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_IMPORT_PATH = re.compile(r"PYTHONPATH=([^\s`]+)")
_TWO_WORDS = re.compile(r"-m parakit ([a-z-]+)(?: ([a-z-]+))?")
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
PYTHON = ".venv/bin/python"
NEED_NOTHING = ("plan", "advise", "schedules", "validate", "dryrun")
"""Commands of `parakit` that need no devices, data or runs."""


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [
        target
        for target in _LINK.findall(text)
        if ":" not in target
        and not (ROOT / page).parent.joinpath(target).exists()
        and normpath(Path(page).parent / target) not in MADE_LATER
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_make_commands_name_variables_that_their_targets_use(page: str) -> None:
    for arguments in _commands(page, "make"):
        names = [word.partition("=")[0] for word in arguments if re.match(r"[A-Z_]+=", word)]
        target = next(
            (word for word in arguments[arguments.index("make") + 1 :] if "=" not in word), ""
        )
        if not any(sign in target for sign in "<…["):
            bench = next((word for word in arguments if target == "bench" and "NAME=" in word), "")
            command = command_named(f"{target} {bench}") if bench else find_command(target)
            assert command is not None or target in ("help", "help-all"), target
            names = [
                name for name in names if (target, name) != ("test", "TIER")
            ]  # The Makefile's own.
            if command:
                refuse_unused_variables(names, target, command)


def test_the_page_of_differences_has_every_pair_of_the_matrix_and_both_lead_to_cells(
    tmp_path: Path,
) -> None:
    stored, matrix = ROOT / "docs", load_matrix()
    cells = write_cells_page(stored=stored, folder=tmp_path, matrix=matrix).read_text()
    page = write_differences_page(stored=stored, folder=tmp_path, matrix=matrix).read_text()
    linked = re.findall(r'href="parity-cells\.html#([^"]+)"', page)
    in_matrix = re.findall(
        r"\(parity-cells\.html#([^)]+)\)", (ROOT / "docs/parity-matrix.md").read_text()
    )
    assert linked
    assert set(linked) == set(in_matrix)
    assert set(linked) <= set(re.findall(r'id="([^"]+)"', cells))


def test_pages_that_make_docs_generates_are_not_committed() -> None:
    command = ("git", "-C", str(ROOT), "ls-files", "--", *MADE_LATER)
    committed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert committed == ""


def test_the_reference_has_every_variable() -> None:
    page = render_settings_page()
    assert [s.name for s in SETTINGS if f"`{s.name}`" not in page] == []


def test_nested_list_items_are_indented_outside_of_code() -> None:
    text = "1. one\n   - inside\n     goes on\n- two\n  - inside\n\n```yaml\n  - code\n```\n  - after\n"
    inside, after = (
        text.replace("   - i", "    - i").replace("\n  - i", "\n    - i").split("  - after")
    )
    assert indent_nested_lists(text) == f"{inside}    - after{after}"


def _planning_commands() -> list[list[str]]:
    """Return the arguments of `parakit` in every command of the pages that plans without a redirection."""
    commands = [command for page in PAGES for command in _commands(page, PYTHON)]
    return [
        command[3:]
        for command in commands
        if command[1:3] == ["-m", "parakit"] and command[3] in NEED_NOTHING and ">" not in command
    ]


def test_modules_that_the_pages_run_are_there() -> None:
    modules = {
        command[2]
        for page in PAGES
        for command in _commands(page, PYTHON)
        if command[1:2] == ["-m"]
    }
    assert "parakit" in modules
    assert [name for name in sorted(modules) if not _can_be_run(name)] == []


def _can_be_run(module: str) -> bool:
    """Return True if `python -m MODULE` finds a module, or a package with a `__main__`."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec is not None


def test_import_paths_that_the_pages_set_name_src() -> None:
    paths = [path for page in PAGES for path in _IMPORT_PATH.findall((ROOT / page).read_text())]
    assert paths
    assert set(paths) <= {"src:.", "…/src:…"}


def test_no_page_writes_a_command_behind_one_that_does_not_take_it() -> None:
    names = {command.name for command in (*COMMANDS, *INTERNAL)}
    pairs = {pair for page in PAGES for pair in _TWO_WORDS.findall((ROOT / page).read_text())}
    assert {name for name, _ in pairs} >= {"plan", "trace", "validate"}
    wrong = [
        (first, second)
        for first, second in sorted(pairs)
        if second in names and second not in FAMILIES.get(first, ())
    ]
    assert wrong == []


def test_the_pages_show_planning_commands() -> None:
    assert {arguments[0] for arguments in _planning_commands()} >= {"plan", "validate", "dryrun"}


@pytest.mark.slow
def test_planning_commands_run() -> None:
    for arguments in _planning_commands():
        ended = subprocess.run(
            (sys.executable, "-m", "parakit", *arguments),
            cwd=ROOT,  # The commands name files of the clone.
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{shlex.join(arguments)}: {ended.stderr}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    subprocess.run(("make", "docs"), cwd=ROOT, check=True)
    assert (ROOT / "site/index.html").is_file()
    assert (ROOT / "site/planner/pyodide.asm.wasm").is_file()
    assert 'id="search"' in (ROOT / "site/docs/parity-differences.html").read_text()
    assert "dense.tp2" in (ROOT / "site/docs/parity-cells.html").read_text()
    assert "Megatron" in (ROOT / "site/docs/residuals.html").read_text()


def _commands(page: str, program: str) -> list[list[str]]:
    commands = []
    for block in _FENCE.findall((ROOT / page).read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                arguments = shlex.split(line, comments=True)
            except ValueError:
                continue
            # Variables may stand before the program, as in DRY_RUN=1 make train-….
            first = next((word for word in arguments if "=" not in word), "")
            if first == program:
                commands.append(arguments)
    return commands

"""The planner and the drawings as pages: Pyodide runs `parakit.planner` in the browser, no server computes.

`python -m parakit.site.planner_page FOLDER` writes static files. Pyodide comes from the npm registry and
msgspec's WebAssembly wheel from the Python package index, at the versions below; nothing of either is in
the repository. The kit itself is its wheel. PyYAML's and rich's Python files are those of the running
environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from parakit.config.files import ROOT
from parakit.site.drawing.figure import render_drawings_page

PYODIDE = "pyodide@314.0.7"
MSGSPEC = "msgspec==0.22.0"
PLATFORM = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14")
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
PYTHON_ONLY_PACKAGES = ("yaml", "rich")
"""Packages of the environment of which the Python files alone suffice."""

TEMPLATES = Path(__file__).with_name("templates")
COPIED_TEMPLATES = ("planner.html", "planner.js", "drawings.js", "python.js", "worker.js")


class PageError(Exception):
    """The page could not be made; the message says what is missing."""


def write_planner_pages(folder: Path) -> None:
    """Write both pages and everything that they load.

    Raises:
        PageError: A package could not be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drawings.html").write_text(render_drawings_page(), encoding="utf-8")
    with TemporaryDirectory() as work:
        _fetch(("npm", "pack", "--silent", PYODIDE), Path(work))
        wheel = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM)
        _fetch((*wheel, "--only-binary", ":all:", "--abi", "cp314", MSGSPEC), Path(work))
        (archive,) = Path(work).glob("pyodide-*.tgz")
        with tarfile.open(archive) as packed:
            for name in RUNTIME:
                member = packed.extractfile(f"package/{name}")
                assert member is not None
                (folder / name).write_bytes(member.read())
        (compiled,) = Path(work).glob("msgspec-*.whl")
        shutil.copyfile(compiled, folder / "msgspec.zip")
    build_wheel(folder / "parakit.zip")
    pack_python_files(folder / "pure.zip")
    for name in COPIED_TEMPLATES:
        shutil.copyfile(TEMPLATES / name, folder / name)
    shutil.copyfile(ROOT / "src/parakit/formatting/house.css", folder / "house.css")


def _fetch(command: tuple[str, ...], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True)
    except FileNotFoundError:
        raise PageError(f"There is no {command[0]}; install Node.js, which brings it.") from None
    except subprocess.CalledProcessError:
        raise PageError(
            f"{command[-1]} could not be fetched (see above); the planner's page needs a package "
            "registry once, when it is made."
        ) from None


def build_wheel(path: Path) -> None:
    """Write the kit's wheel, as `pip install .` builds it, to a file.

    Raises:
        PageError: hatchling, which builds it, is not installed.
    """
    if find_spec("hatchling") is None:
        raise PageError(
            "hatchling is not installed, which builds the kit's wheel; run 'make setup'."
        )
    with TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        shutil.copyfile(wheel, path)


def pack_python_files(path: Path) -> None:
    """Write a zip of the Python files of the packages in PURE."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in PYTHON_ONLY_PACKAGES:
            package = Path(str(files(name)))
            for file in sorted(package.rglob("*.py")):
                packed.write(file, file.relative_to(package.parent))


if __name__ == "__main__":
    try:
        write_planner_pages(Path(sys.argv[1]))
    except PageError as error:
        sys.exit(str(error))

"""Write the pages of the planner and the drawings, which run `parakit.planner` in the browser.

`python -m parakit.site.planner_page FOLDER` writes static files, and no server computes. Pyodide, which runs Python
in the browser, comes from the npm registry. The WebAssembly wheel of msgspec comes from the Python package index.
Both have the versions below, and nothing of either is in the repository. The kit itself is its wheel. The Python
files of PyYAML and rich are copied from the running environment.
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
"""Packages that run in the browser without compiled files."""

TEMPLATES = Path(__file__).with_name("templates")
COPIED_TEMPLATES = ("planner.html", "planner.js", "drawings.js", "python.js", "worker.js")


class PageError(Exception):
    """A page that could not be written; the message names what is missing."""


def write_planner_pages(folder: Path) -> None:
    """Write both pages and all files that they load; make the folder if it does not exist.

    Raises:
        PageError: A package could not be fetched, or the kit's wheel could not be built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drawings.html").write_text(render_drawings_page(), encoding="utf-8")
    with TemporaryDirectory() as work:
        _copy_pyodide(Path(work), folder)
        _copy_msgspec(Path(work), folder)
    build_wheel(folder / "parakit.zip")
    pack_python_files(folder / "pure.zip")
    for name in COPIED_TEMPLATES:
        shutil.copyfile(TEMPLATES / name, folder / name)
    shutil.copyfile(ROOT / "src/parakit/formatting/house.css", folder / "house.css")


def _copy_pyodide(work: Path, folder: Path) -> None:
    """Download Pyodide's package into the folder `work`, and copy the files of RUNTIME from there to `folder`."""
    _fetch(("npm", "pack", "--silent", PYODIDE), work)
    (archive,) = work.glob("pyodide-*.tgz")
    with tarfile.open(archive) as package:
        for name in RUNTIME:
            member = package.extractfile(f"package/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())


def _copy_msgspec(work: Path, folder: Path) -> None:
    """Fetch msgspec's WebAssembly wheel into the folder `work`, and copy it as `msgspec.zip`."""
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM)
    _fetch((*download, "--only-binary", ":all:", "--abi", "cp314", MSGSPEC), work)
    (wheel,) = work.glob("msgspec-*.whl")
    shutil.copyfile(wheel, folder / "msgspec.zip")


def _fetch(command: tuple[str, ...], folder: Path) -> None:
    """Run a command that downloads a package to a folder. The package is the command's last argument.

    Raises:
        PageError: The program is missing or fails.
    """
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
    """Write the kit's wheel to the file `path`. It is the wheel that `pip install .` builds.

    Raises:
        PageError: hatchling, which builds the wheel, is not installed.
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
    """Write a zip with the Python files of the packages in PURE."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PYTHON_ONLY_PACKAGES:
            package = Path(str(files(name)))
            for file in sorted(package.rglob("*.py")):
                archive.write(file, file.relative_to(package.parent))


if __name__ == "__main__":
    try:
        write_planner_pages(Path(sys.argv[1]))
    except PageError as error:
        sys.exit(str(error))

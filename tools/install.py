"""Install the packages of requirement files into this Python's environment, with uv or else with pip.

Usage: python tools/install.py FILE... The files name every package with its hash, so nothing is resolved.
`--beside CONSTRAINTS ASKED LOCK` is for a Python that has packages already: the packages of ASKED that are missing
are installed, in the LOCK's versions as far as the constraints allow. `--settings` prints pip's settings as JSON.

uv is the program on PATH, or the pinned version, which pip installs into the environment. uv does not read pip's
files, so it gets pip's settings as variables. INSTALLER=pip does not use uv. Without a GPU, torch's build for CPUs is
installed if an index has it. This file needs the standard library only.
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

# uv's variable for each of pip's settings, and the separator of several values; empty takes the first value.
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
    """Install the packages that the requirement files name, and return the exit code of uv or pip.

    Without uv, pip installs. With `--settings`, pip's settings are printed instead. With `--beside`, `install_beside`
    is called with the other arguments.
    """
    if files[0] == "--settings":
        print(json.dumps(pip_settings()))
        return 0
    if files[0] == "--beside":
        return install_beside(*files[1:])
    packages: list[str] = []
    for file in files:
        packages += packages_of(Path(file).read_text())
    uv, reason = find_uv()
    if uv is None:
        consequence = "pip installs, in about five times the time"
        print(f"uv is not used ({reason}): {consequence}.", file=sys.stderr)
    installer = Installer(uv)
    torch = next((package for package in packages if package.startswith("torch==")), None)
    if torch and torch_for_cpus_fits():
        is_installed = installer.torch_for_cpus(torch.split()[0])
        if is_installed:
            packages = without_cuda(packages)
    print(f"  {len(packages)} packages of {' and '.join(files)}", file=sys.stderr)
    return installer.install(packages)


def install_beside(constraints: str, asked: str, lock: str) -> int:
    """Install the packages of a requirement file that are missing, and return the exit code of uv.

    Nothing is installed if all requirements are met already. Without uv, a message is printed on stderr and 1 is
    returned.

    Args:
        constraints: File of versions that must not change.
        asked: Requirement file of the packages.
        lock: Requirement file with the preferred versions. Packages that get another version are printed.
    """
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
    preferred = [_match_installed_version(package) for package in locked]
    resolved = installer.resolved(asked, constraints, preferred)
    # A package is `NAME==VERSION`, followed by its hashes.
    locked_versions = {package.split()[0] for package in locked}
    resolved_versions = [package.split()[0] for package in resolved]
    different = [version for version in resolved_versions if version not in locked_versions]
    if different:
        print(f"  Not as in {lock}: {', '.join(different)}", file=sys.stderr)
    return installer.install(resolved)


def _match_installed_version(package: str) -> str:
    """Return a locked package with the installed version, or unchanged if the package is not installed."""
    name = package.split("==", maxsplit=1)[0]
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def packages_of(text: str) -> list[str]:
    """Return the packages of a requirement file's text, each with the lines of its hashes."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]
    return re.split(r"\n(?=\S)", "\n".join(lines))


def without_cuda(packages: Iterable[str]) -> list[str]:
    """Return the packages without torch and without those that only torch's build for CUDA needs."""
    of_cuda = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-(?!ml-py)[a-z0-9-]+)==")
    return [package for package in packages if not of_cuda.match(package)]


def torch_for_cpus_fits() -> bool:
    """Return True if torch's build for CPUs can be installed: on Linux on x86-64, without a GPU and without Slurm.

    Slurm means that this machine is the login node of a cluster. Its environment also serves nodes that may have
    GPUs.
    """
    return (
        (platform.system(), platform.machine()) == ("Linux", "x86_64")
        and not Path("/proc/driver/nvidia/version").exists()
        and not shutil.which("nvidia-smi")
        and not shutil.which("sbatch")
    )


def find_uv() -> tuple[Path | None, str]:
    """Return the path of uv and an empty text, or None and the reason why uv cannot be used.

    If no uv is found, the pinned version is installed with pip.
    """
    if os.environ.get("INSTALLER") == "pip":
        return None, "INSTALLER=pip"
    installed = Path(sysconfig.get_path("scripts"), "uv")
    for path in (shutil.which("uv"), installed, ROOT / ".venv/bin/uv"):
        if path and runs(Path(path)):
            return Path(path), ""
    lock = packages_of((ROOT / "requirements.txt").read_text())
    pinned = next(package for package in lock if package.startswith("uv=="))
    command = (*PIP, "install", *PIP_OPTIONS, "--quiet", "--no-deps", "--require-hashes", "-r")
    with requirement_file([pinned]) as file:
        answer = subprocess.run((*command, file), capture_output=True, text=True, check=False)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        return None, f"pip cannot install {pinned.split()[0]}: {lines[-1]}"
    if not runs(installed):
        return None, f"{installed} does not run here"
    return installed, ""


@contextmanager
def requirement_file(packages: Sequence[str]) -> Iterator[str]:
    """Write a requirement file of these packages, give its path, and remove it at the end."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        yield file.name


def runs(uv: Path) -> bool:
    """Return True if this uv exists, starts, and is at least version 0.7, which knows `UV_VARIABLES`."""
    try:
        answer = subprocess.run((uv, "--version"), capture_output=True, text=True, check=False)
    except OSError:
        return False
    version = re.match(r"uv (\d+)\.(\d+)", answer.stdout)
    return version is not None and (int(version[1]), int(version[2])) >= (0, 7)


class Installer:
    """Installer that uses uv with pip's settings, or pip.

    Args:
        uv: Path of uv, or None for pip.
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
        """Install torch's build for CPUs, which has 0.2 GB instead of 3; return True if that worked."""
        command = (*self.command, "--quiet", "--no-deps", f"{torch}+cpu")
        answer = subprocess.run(command, env=self.environment, capture_output=True, check=False)
        return not answer.returncode

    def has(self, asked: str, constraints: str) -> bool:
        """Return True if all packages are installed in versions that the constraints allow; no index is read."""
        environment = {**self.environment, "UV_FIND_LINKS": ""}
        command = (*self.command, "--no-index", "--requirement", asked, "--constraint", constraints)
        answer = subprocess.run(command, env=environment, capture_output=True, check=False)
        return not answer.returncode

    def resolved(self, asked: str, constraints: str, preferred: Sequence[str]) -> list[str]:
        """Return the pinned requirements for the packages and all their dependencies.

        Preferred versions are taken where possible. If uv fails, the process exits with the exit code of uv.

        Args:
            asked: Requirement file of the packages.
            constraints: File of versions that must not change.
            preferred: Requirements with the preferred versions.
        """
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
        """Install the packages without their dependencies, check their hashes, and return the exit code.

        The installer's output goes to the terminal. The exit code after Ctrl-C is 130.
        """
        # Without a terminal uv prints every package at each step: these lines are left out.
        filtered = self.uv is not None and not sys.stderr.isatty()
        with requirement_file(packages) as file:
            command = (*self.command, "--no-deps", "--require-hashes", "--requirement", file)
            with subprocess.Popen(
                command,
                env=self.environment,
                # The installer inherits the set-up's lock, and holds it even if this process is killed.
                close_fds=False,
                stderr=subprocess.PIPE if filtered else None,
                text=True,
            ) as process:
                try:
                    for line in process.stderr or ():
                        if not re.match(r" [-+~] | +(Downloaded|Building|Built) ", line):
                            print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
                    return process.wait()
                except KeyboardInterrupt:  # The terminal sends the signal to the installer, too.
                    process.wait()
                    return 130


def pip_settings() -> dict[str, str]:
    """Return pip's settings by name.

    If a setting is stated several times, environment variables win over the section `install`, and this section wins
    over `global`.
    """
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
    """Return the environment variables for uv: those of `environment`, and pip's settings as variables of uv.

    Variables in `environment` win over pip's settings. By default uv takes a package from the first index that has its
    name, and pip takes it from any index. The variables make uv do as pip does. This is safe, because hashes are
    checked.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, (variable, separator) in UV_VARIABLES.items():
        values = settings.get(name, "").split()
        if values:
            variables[variable] = separator.join(values) if separator else values[0]
    return {**variables, **environment}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

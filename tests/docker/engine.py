"""A Docker engine of the tests' own: root and `dockerd` are enough, no registry, no network.

Its containers see this machine's programs and packages, read-only: the OCI runtime beside it adds
these mounts to every container, and an image of a few links stands in for NVIDIA's. So a build installs
nothing that is there already, and ranks in a container import this Python's torch.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.patience import PATIENCE, until

BASE = "nvcr.io/nvidia/pytorch:0-stand-in"
LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = ("etc/pip", "proc", "sys", "dev", "opt", "sbin", "tmp", "usr")
RUNTIME = """#!{python}
import json, os, sys
words = sys.argv[1:]
if "create" in words or "run" in words:
    bundle = "."
    for at, word in enumerate(words):
        if word in ("--bundle", "-b"):
            bundle = words[at + 1]
        elif word.startswith("--bundle="):
            bundle = word.partition("=")[2]
    path = os.path.join(bundle, "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["process"].pop("rlimits", None)  # Unlimited memory is locked only with CAP_SYS_RESOURCE.
    spec["mounts"][1:1] = [
        {{"destination": place, "type": "bind", "source": each, "options": ["rbind", "ro"]}}
        for place, each in {mounts!r}.items()
    ]
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv({program!r}, [{name!r}, *words])
"""


@dataclass(frozen=True)
class Engine:
    """One that runs."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """As `DOCKER_HOST` names it."""
        return f"unix://{self.folder}/sock"

    def docker(self, *docker_arguments: str, check: bool = True) -> str:
        """What the client prints."""
        environment = {**os.environ, "DOCKER_HOST": self.address, "DOCKER_BUILDKIT": "0"}
        answer = subprocess.run(
            ("docker", *docker_arguments),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or answer.returncode == 0, answer.stderr + answer.stdout
        return answer.stdout.strip()


def missing() -> str:
    """What this machine lacks for an engine; empty if nothing."""
    if os.geteuid() != 0:
        return "an engine of the tests' own needs root"
    absent = [name for name in ("docker", "dockerd", "runc") if shutil.which(name) is None]
    if absent:
        return f"an engine of the tests' own needs {', '.join(absent)}, which the package docker.io has"
    return ""


@contextmanager
def running(folder: Path, *shown: Path) -> Iterator[Engine]:
    """An engine whose containers see `shown` too, with the image `BASE`; all of it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = start(folder, *shown)
    try:
        _import_base(engine)
        yield engine
    finally:
        stop(engine)
        unmount(folder)  # An engine that was killed has left some.
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, *shown: Path) -> Engine:
    """Start it in a folder."""
    hook = folder / "hook" / "nvidia-container-runtime-hook"  # Asked for by `--gpus`.
    _program(hook, "#!/bin/sh\nexit 0\n")
    named = {"path": str(write_runtime(folder, find_mounts(*shown)))}
    configuration = {
        "data-root": str(folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "pid"),
        "hosts": [f"unix://{folder}/sock"],
        "bridge": "none",
        "iptables": False,
        "default-runtime": "nvidia",
        "runtimes": {"nvidia": named},
        # A machine's own engine may share containerd.
        "containerd-namespace": "kit-tests",
        "containerd-plugins-namespace": "kit-tests-plugins",
    }
    (folder / "daemon.json").write_text(json.dumps(configuration))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            ("dockerd", "--config-file", str(folder / "daemon.json")),
            env={**os.environ, "PATH": f"{hook.parent}:{os.environ['PATH']}"},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    engine = Engine(folder, process)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        return bool(engine.docker("info", "--format", "{{.ID}}", check=False))

    until(answers, "the engine does not answer", PATIENCE)
    return engine


def find_mounts(*shown: Path) -> dict[str, str]:
    """Return this machine's folders that containers see, by their path in a container: programs, packages, `shown`."""
    packages = Path(sysconfig.get_path("purelib")).resolve()
    programs = Path(sys.executable).parent.resolve()  # uv is one of them.
    seen = dict.fromkeys(map(str, (Path("/usr"), Path(sys.base_prefix), programs, *shown)))
    mounts = {path: path for path in seen if not path.startswith("/usr/")}
    return {**mounts, _own_packages(): str(packages)}


def write_runtime(folder: Path, mounts: Mapping[str, str], name: str = "runc") -> Path:
    """Write the OCI runtime that adds read-only mounts to every container of runc or crun; return its path."""
    # Another user cannot reach this environment's Python in root's home.
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    program = shutil.which(name)
    runtime = RUNTIME.format(python=python, mounts=dict(mounts), program=program, name=name)
    _program(folder / "oci-runtime", runtime)
    return folder / "oci-runtime"


def stop(engine: Engine) -> None:
    """End it with its containers."""
    containers = engine.docker("ps", "--quiet", check=False).split()
    if containers:
        engine.docker("rm", "--force", *containers, check=False)
    engine.process.terminate()
    engine.process.wait(PATIENCE)
    for process in psutil.process_iter(
        ["cmdline"]
    ):  # An engine that was killed has left its helpers.
        if str(engine.folder) in " ".join(process.info["cmdline"] or ()):
            process.kill()


def _own_packages() -> str:
    """Where this environment's Python has packages outside of it."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output((python, "-c", asked), text=True).strip()


def _import_base(engine: Engine) -> None:
    """Import the image `BASE` into an engine."""
    archive = engine.folder / "base.tar"
    engine.docker("import", *write_base(archive), str(archive), BASE)
    archive.unlink()


def write_base(archive: Path) -> list[str]:
    """Write the archive of the image `BASE`; return the options of its import."""
    python = Path(sys.base_prefix) / "bin"
    with tarfile.open(archive, "w") as tar:
        for name in FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, target in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        tar.addfile(tarfile.TarInfo("etc/pip/constraint.txt"))
    programs = Path(sys.executable).parent.resolve()
    changes = (
        f"ENV PATH={python}:/usr/local/bin:/usr/bin:/bin:{programs}",
        "ENV PIP_CONSTRAINT=/etc/pip/constraint.txt",
    )
    return [word for change in changes for word in ("--change", change)]


def unmount(folder: Path) -> None:
    places = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    for place in sorted(filter(lambda one: one.startswith(f"{folder}/"), places), reverse=True):
        subprocess.run(("umount", "--lazy", place), check=False)


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

"""Podman with a storage of the tests' own: root and `podman` are enough, no registry, no network."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docker.engine import BASE, unmount, write_base, write_runtime

CONFIGURATION = """[containers]
netns = "host"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "kit"
tmp_dir = "{folder}/temporary"
[engine.runtimes]
kit = ["{runtime}"]
"""
STORAGE = """[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""


@dataclass(frozen=True)
class Podman:
    """Podman with the configuration in a folder."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Podman finds its configuration and its storage."""
        return {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Return what Podman prints. The name is that of `Engine`, whose tests these containers share."""
        answer = subprocess.run(
            ("podman", *arguments),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or answer.returncode == 0, answer.stderr + answer.stdout
        return answer.stdout.strip()


def missing() -> str:
    """Return what this machine lacks for containers of Podman; empty if nothing."""
    if os.geteuid() != 0:
        return "Podman of the tests' own needs root"
    absent = [name for name in ("podman", "conmon", "catatonit", "runc") if not shutil.which(name)]
    return f"Podman of the tests' own needs {', '.join(absent)}" if absent else ""


@contextmanager
def running(folder: Path, *shown: Path) -> Iterator[Podman]:
    """Give Podman the image `BASE`, whose containers see `shown` too; all of it is removed at the end."""
    folder.mkdir(parents=True)
    runtime = write_runtime(folder, *shown)
    configuration = CONFIGURATION.format(folder=folder, runtime=runtime)
    (folder / "containers.conf").write_text(configuration)
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    podman = Podman(folder)
    try:
        archive = folder / "base.tar"
        podman.docker("import", *write_base(archive), str(archive), BASE)
        yield podman
    finally:
        podman.docker("rm", "--all", "--force", check=False)
        unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)

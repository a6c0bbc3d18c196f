"""Podman with a storage of the tests' own, as root or rootless: no registry, no network."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docker.engine import BASE, find_mounts, unmount, write_base, write_runtime

CONFIGURATION = """[containers]
netns = "host"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "{name}"
tmp_dir = "{folder}/temporary"
[engine.runtimes]
{name} = ["{runtime}"]
"""
STORAGE = """[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""

WITHOUT_HYBRID_CGROUPS = (
    *("unshare", "--mount", "sh", "-c"),
    'umount --lazy /sys/fs/cgroup/unified 2>/dev/null; exec "$@"',
    "sh",
)
"""The start of a command that sees no second hierarchy of control groups, with which crun refuses to start."""


@dataclass(frozen=True)
class Podman:
    """Podman with the configuration in a folder."""

    folder: Path
    user: pwd.struct_passwd | None = None
    """The user of a rootless Podman; None for root's."""
    runtime: str = "runc"
    """The OCI runtime of its containers, runc or crun."""
    group: int | None = None
    """A supplementary group of the user; None for none."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Podman finds its configuration and its storage."""
        variables = {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }
        if self.user is not None:
            variables |= {"HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder / "runtime")}
        return variables

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that starts a program as the user of this Podman."""
        if self.user is None:
            return ()
        groups = "--clear-groups" if self.group is None else f"--groups={self.group}"
        return (
            *(WITHOUT_HYBRID_CGROUPS if self.runtime == "crun" else ()),
            # Of root the user keeps that they may read everything: this Python may lie in root's home.
            *("setpriv", f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}"),
            *(groups, "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
        )

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Return what Podman prints. The name is that of `Engine`, whose tests these containers share."""
        answer = subprocess.run(
            (*self.prefix, "podman", *arguments),
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


def find_user() -> pwd.struct_passwd | None:
    """Return a user with subordinate ids, whom a rootless Podman needs; None if this machine has none."""
    for file in ("/etc/subuid", "/etc/subgid"):
        if not Path(file).exists():
            return None
    names = [line.partition(":")[0] for line in Path("/etc/subuid").read_text().splitlines()]
    users = [user for user in pwd.getpwall() if user.pw_uid and user.pw_name in names]
    return users[0] if users else None


def missing_for_rootless() -> str:
    """Return what this machine lacks for containers of a rootless Podman; empty if nothing."""
    if lack := missing():
        return lack
    if shutil.which("newuidmap") is None:
        return "a rootless Podman needs newuidmap (package uidmap)"
    if find_user() is None:
        return "a rootless Podman needs a user with subordinate ids in /etc/subuid"
    if not Path("/dev/mqueue").is_dir():
        return "a rootless Podman with --ipc=host needs /dev/mqueue mounted"
    return ""


@contextmanager
def running(
    folder: Path,
    *shown: Path,
    user: pwd.struct_passwd | None = None,
    runtime: str = "runc",
    group: int | None = None,
) -> Iterator[Podman]:
    """Give Podman the image `BASE`, whose containers see `shown` too; all of it is removed at the end.

    A rootless Podman is `user`'s, who owns `folder` then. `runtime` and `group` are those of `Podman`.
    """
    folder.mkdir(parents=True)
    mounts = stage_mounts(folder, shown) if user else find_mounts(*shown)
    program = write_runtime(folder, mounts, runtime)
    configuration = CONFIGURATION.format(folder=folder, name=runtime, runtime=program)
    (folder / "containers.conf").write_text(configuration)
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    podman = Podman(folder, user, runtime, group)
    try:
        archive = folder / "base.tar"
        changes = write_base(archive)
        if user is not None:
            (folder / "runtime").mkdir(mode=0o700)
            for path in (folder, *folder.iterdir()):
                os.chown(path, user.pw_uid, user.pw_gid)
        podman.docker("import", *changes, str(archive), BASE)
        yield podman
    finally:
        podman.docker("rm", "--all", "--force", check=False)
        if user is not None:  # Its process that holds the user namespace is left otherwise.
            podman.docker("system", "migrate", check=False)
        unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def stage_mounts(folder: Path, shown: tuple[Path, ...]) -> dict[str, str]:
    """Mount what containers see where every user may reach it; return the mounts by their path in a container."""
    staged = {}
    for number, (path, source) in enumerate(find_mounts(*shown).items()):
        mount_point = folder / f"mount-{number}"
        mount_point.mkdir()
        subprocess.run(("mount", "--bind", source, str(mount_point)), check=True)
        staged[path] = str(mount_point)
    return staged

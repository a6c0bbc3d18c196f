"""Check the Python, packages, programs, shared memory, limits, network names and disk of this machine."""

import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

from parakit.cluster.checks.result import (
    FAIL,
    GIB,
    PASS,
    ROOT,
    SETUP_STAMP,
    CheckResult,
    image_tag,
    kit_python,
    pass_or_warn,
    run_program,
)

PROBE_BYTES = 128 << 20
SLOW_BYTES_PER_SECOND = 100e6
SETUP_BYTES = 10 * 10**9
"""Disk space that setup needs. `.venv` takes 6.6 GB (`du -s`); the rest is for pip's downloads and for runs."""

SETUP_FILES = 60_000
"""Inodes that setup needs. `.venv` has about 50,000 files and folders (`find .venv | wc -l`)."""

RUN_FILES = 64
"""Files that a run on a few ranks writes if it saves no checkpoint."""

OPEN_FILES = 4096
"""Open files below which the limit is a warning."""

LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one machine find each other."""
LOOPBACK_SECONDS = 5.0

PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s#;]+)(?=[ \t]*(?:\\|#|$))", re.MULTILINE)
"""A pinned package in requirements.txt.

A pin that only some machines need has a condition after ';' and does not match.
"""
LIST_PACKAGES = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version"
    " for d in m.distributions() if d.metadata['Name']}))"
)


def check_python() -> CheckResult:
    """Check whether `tools/setup.sh` finds a Python that setup can use. In the kit's image the check always passes."""
    if image_tag():
        return pass_or_warn("Python", f"of the image {image_tag()}")
    output = run_program(["tools/setup.sh", "--python"])
    if not output.succeeded:
        fix = "install one, for example 'uv python install 3.12' or 'pyenv install 3.12'"
        return CheckResult(FAIL, "Python", "no CPython 3.12 or 3.13 with venv", fix)
    version = run_program(
        [output.out, "-c", "import platform; print(platform.python_version())"]
    ).out
    return pass_or_warn("Python", f"{version} at {output.out}")


def check_packages() -> CheckResult:
    """Check whether `.venv` has the packages that requirements.txt pins."""
    if image_tag():
        return pass_or_warn("Packages", "those of the image")
    requirements = Path(ROOT, "requirements.txt").read_bytes()
    python = kit_python()
    if python is None:
        fix = "'make setup', or any other target, installs them"
        return pass_or_warn("Packages", "not installed yet", fix)
    installed = Path(ROOT, ".venv", SETUP_STAMP).read_text()
    if hashlib.sha256(requirements).hexdigest() not in installed:
        finding = "requirements.txt has changed since"
        return pass_or_warn("Packages", finding, "run 'make setup'")
    differing = differing_packages(python, requirements.decode())
    fix = "rm -r .venv && make setup"
    if differing is None:
        return CheckResult(FAIL, "Packages", ".venv's Python does not run", fix)
    if differing:
        return CheckResult(FAIL, "Packages", "not as pinned: " + ", ".join(differing), fix)
    return pass_or_warn("Packages", "as pinned in requirements.txt")


def differing_packages(python: str, requirements: str) -> "list[str] | None":
    """Return a clause for each package that is not installed at its pinned version, sorted by name.

    None means that the given Python does not run.
    """
    output = run_program([python, "-c", LIST_PACKAGES])
    if not output.succeeded:
        return None
    installed = json.loads(output.out)
    pins = {name.lower().replace("_", "-"): version for name, version in PIN.findall(requirements)}
    return [
        "{} {} instead of {}".format(name, installed.get(name, "missing"), version)
        for name, version in sorted(pins.items())
        if installed.get(name) != version
    ]


def check_programs() -> CheckResult:
    """Check for git, which records the commit, and make and g++, which build a Megatron checkout's helpers."""
    missing = [name for name in ("git", "make", "g++") if shutil.which(name) is None]
    if missing:
        fix = "install them; git records the commit, make and g++ build a Megatron-LM checkout's helpers"
        return pass_or_warn("Programs", "missing: " + ", ".join(missing), fix)
    return pass_or_warn("Programs", "git, make, g++")


def check_shared_memory() -> CheckResult:
    """Check the size of /dev/shm, through which NCCL and data loaders pass buffers."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return pass_or_warn("Shared memory", "no /dev/shm", "mount a tmpfs there")
    fix = "sudo mount -o remount,size=8G /dev/shm; of a container: --ipc=host"
    finding = f"{size / GIB:.1f} GiB in /dev/shm"
    return pass_or_warn("Shared memory", finding, fix if size < GIB else "")


def check_limits() -> CheckResult:
    """Check the limits of locked memory, which InfiniBand needs, and of open files, which many ranks need."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    finding = "locked memory {}, open files {}".format(
        _format_limit(locked, 2**20, " MiB"), _format_limit(files, 1, "")
    )
    fix = ""
    if locked != resource.RLIM_INFINITY and Path("/dev/infiniband").is_dir():
        fix = "NCCL pins what InfiniBand reads: 'memlock unlimited' in /etc/security/limits.conf"
    elif files != resource.RLIM_INFINITY and files < OPEN_FILES:
        fix = f"'nofile {OPEN_FILES}' in /etc/security/limits.conf"
    return pass_or_warn("Limits", finding, fix)


def check_loopback() -> CheckResult:
    """Check that programs of this machine can connect to each other at LOOPBACK."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind((LOOPBACK, 0))
            server.listen(1)
            client.settimeout(LOOPBACK_SECONDS)
            client.connect(server.getsockname())
    except OSError as error:
        problem = f"nothing can be connected to at {LOOPBACK} ({error.strerror or error})"
        fix = "switch the loopback interface on, over which ranks talk: 'ip link set lo up' as root"
        return CheckResult(FAIL, "Loopback", problem, fix)
    return pass_or_warn("Loopback", f"{LOOPBACK} can be connected to")


def check_host_name() -> CheckResult:
    """Check that this machine's name resolves to an address of this machine.

    The name is in the fix and not in the finding, because nodes of a cluster are compared by their findings.
    """
    name = platform.node()
    fix = (
        f"runs on this machine do without; for runs over several, give {name} one in DNS or "
        "/etc/hosts, or name addresses in MASTER_ADDR="
    )
    problem = explain_unresolvable(name)
    if problem:
        return pass_or_warn("Host name", f"it has no address ({problem})", fix)
    addresses = {
        str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    }
    if not any(map(is_own_address, addresses)):
        finding = "its address is not one of this machine's"
        fix = f"{fix}; now it has {', '.join(sorted(addresses))}"
        return pass_or_warn("Host name", finding, fix)
    return pass_or_warn("Host name", "resolves to an address of this machine")


def explain_unresolvable(name: str) -> str:
    """Return the reason why a host's name has no address; empty if it has an address."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def is_own_address(address: str) -> bool:
    """Return True if a program can listen at the address on this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as server:
            server.bind((address, 0))
    except OSError:
        return False
    return True


def check_disk(folder: str = ROOT) -> CheckResult:
    """Check the disk space for setup or a run, and measure how fast the disk writes a file."""
    before_setup = kit_python() is None
    elsewhere = "clone the kit where there is more"
    if before_setup:
        result = check_room(folder, SETUP_BYTES, "setup", elsewhere, SETUP_FILES)
    else:
        result = check_room(folder, GIB, "a run", elsewhere, RUN_FILES)
    if result.status != PASS:
        return result
    free = shutil.disk_usage(folder).free
    try:
        rate = write_rate(folder, min(PROBE_BYTES, free // 4))
    except OSError as error:
        finding = f"{folder} cannot be written: {error.strerror}"
        return CheckResult(FAIL, "Disk", finding, "clone the kit where you may write")
    finding = f"{free / GIB:.0f} GiB free, writes {rate / 1e6:.0f} MB/s"
    fix = "slow for checkpoints and data sets; put runs elsewhere with RUNS= and data with DATA="
    return pass_or_warn("Disk", finding, fix if rate < SLOW_BYTES_PER_SECOND else "", rate)


def check_room(
    folder: str, needed_bytes: int, needed_by: str, elsewhere: str, needed_files: int = RUN_FILES
) -> CheckResult:
    """Check whether a folder can be written, and whether its disk has enough space and inodes.

    Args:
        folder: The folder.
        needed_bytes: The space that is needed.
        needed_by: What needs the space, as a noun for the finding.
        elsewhere: A clause for the fix on how to use another folder.
        needed_files: The number of files that are needed.
    """
    if not os.access(folder, os.W_OK):
        return CheckResult(FAIL, "Disk", f"{folder} is not writable", elsewhere)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        finding = f"{folder} has {_format_size(free)} free and {needed_by} needs about {_format_size(needed_bytes)}"
        return pass_or_warn("Disk", finding, "free some room, or " + elsewhere)
    files = free_files(folder)
    if files is not None and files < needed_files:
        finding = (
            f"{folder} can take {files} more files (free inodes) and {needed_by} needs about "
            f"{needed_files}"
        )
        return pass_or_warn("Disk", finding, "remove files that are not needed, or " + elsewhere)
    return pass_or_warn("Disk", _format_size(free) + " free")


def free_files(folder: str) -> "int | None":
    """Return the number of free inodes of a folder's file system; None if it has no such limit."""
    statistics = os.statvfs(folder)
    return statistics.f_favail if statistics.f_files else None


def write_rate(folder: str, size: int) -> float:
    """Write a file of `size` bytes, flush it, remove it, and return the bytes per second."""
    block = os.urandom(1 << 20)
    start = time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return max(size, 1) / max(time.monotonic() - start, 1e-6)


def _format_limit(value: int, unit: int, suffix: str) -> str:
    """Return a limit of the system in a unit, or `unlimited`."""
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{suffix}"


def _format_size(size_bytes: int) -> str:
    """Return a size in GB, or in MiB if it is below 1 GB."""
    # `parakit.formatting.units` needs a newer Python than 3.6, on which the doctor must run.
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 2**20:.0f} MiB"

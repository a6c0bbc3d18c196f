"""Python, packages, programs, shared memory, limits and disk of this machine."""

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
"""`.venv` takes 6.6 GB (`du -s`); the rest is for the packages as pip downloads them, and for runs."""

SETUP_FILES = 60_000
"""`.venv` has about 50,000 files and folders (`find .venv | wc -l`)."""

RUN_FILES = 64
"""Of a run on a few ranks that saves nothing."""

OPEN_FILES = 4096

LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one machine find each other."""
LOOPBACK_SECONDS = 5.0

# A pin that only some machines need is followed by ';' and the condition, and is not looked for.
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s#;]+)(?=[ \t]*(?:\\|#|$))", re.MULTILINE)
LIST_PACKAGES = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version"
    " for d in m.distributions() if d.metadata['Name']}))"
)


def check_python() -> CheckResult:
    """Whether there is a Python that setup can use, by setup's own search."""
    if image_tag():
        return pass_or_warn("Python", f"of the image {image_tag()}")
    answer = run_program(["tools/setup.sh", "--python"])
    if not answer.succeeded:
        fix = "install one, for example 'uv python install 3.12' or 'pyenv install 3.12'"
        return CheckResult(FAIL, "Python", "no CPython 3.12 or 3.13 with venv", fix)
    version = run_program(
        [answer.out, "-c", "import platform; print(platform.python_version())"]
    ).out
    return pass_or_warn("Python", f"{version} at {answer.out}")


def check_packages() -> CheckResult:
    """Whether `.venv` holds what requirements.txt pins."""
    if image_tag():
        return pass_or_warn("Packages", "those of the image")
    requirements = Path(ROOT, "requirements.txt").read_bytes()
    python = kit_python()
    if python is None:
        fix = "'make setup', or any other target, installs them"
        return pass_or_warn("Packages", "not installed yet", fix)
    installed = Path(ROOT, ".venv", SETUP_STAMP).read_text()
    if hashlib.sha256(requirements).hexdigest() not in installed:
        found = "requirements.txt has changed since"
        return pass_or_warn("Packages", found, "run 'make setup'")
    wrong = differing_packages(python, requirements.decode())
    if wrong is None or wrong:
        found = "not as pinned: " + ", ".join(wrong) if wrong else ".venv's Python does not run"
        return CheckResult(FAIL, "Packages", found, "rm -r .venv && make setup")
    return pass_or_warn("Packages", "as pinned in requirements.txt")


def differing_packages(python: str, requirements: str) -> "list[str] | None":
    """Packages of a Python that are not at their pinned version; None if it does not run."""
    answer = run_program([python, "-c", LIST_PACKAGES])
    if not answer.succeeded:
        return None
    installed = json.loads(answer.out)
    pins = {name.lower().replace("_", "-"): version for name, version in PIN.findall(requirements)}
    return [
        "{} {} instead of {}".format(name, installed.get(name, "missing"), version)
        for name, version in sorted(pins.items())
        if installed.get(name) != version
    ]


def check_programs() -> CheckResult:
    """git for the kit's commit, make and a C++ compiler for a checkout's data helpers."""
    missing = [name for name in ("git", "make", "g++") if shutil.which(name) is None]
    if missing:
        fix = "install them; git records the commit, make and g++ build a Megatron-LM checkout's helpers"
        return pass_or_warn("Programs", "missing: " + ", ".join(missing), fix)
    return pass_or_warn("Programs", "git, make, g++")


def check_shared_memory() -> CheckResult:
    """NCCL and data loaders pass buffers through /dev/shm."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return pass_or_warn("Shared memory", "no /dev/shm", "mount a tmpfs there")
    fix = "sudo mount -o remount,size=8G /dev/shm; of a container: --ipc=host"
    found = f"{size / GIB:.1f} GiB in /dev/shm"
    return pass_or_warn("Shared memory", found, fix if size < GIB else "")


def check_limits() -> CheckResult:
    """Locked memory for InfiniBand, open files for many ranks; containers have their own."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "locked memory {}, open files {}".format(
        _limit(locked, 2**20, " MiB"), _limit(files, 1, "")
    )
    fix = ""
    if locked != resource.RLIM_INFINITY and Path("/dev/infiniband").is_dir():
        fix = "NCCL pins what InfiniBand reads: 'memlock unlimited' in /etc/security/limits.conf"
    elif files != resource.RLIM_INFINITY and files < OPEN_FILES:
        fix = f"'nofile {OPEN_FILES}' in /etc/security/limits.conf"
    return pass_or_warn("Limits", found, fix)


def check_loopback() -> CheckResult:
    """Check that programs of this machine can connect to each other."""
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
    """Check that this machine's name stands for an address, and for one that it has itself.

    Nodes of a cluster are compared by what is found, so the name itself stands in the fix.
    """
    name = platform.node()
    here = f"runs on this machine do without; for runs over several, give {name} one"
    where = f"{here} in DNS or /etc/hosts, or name addresses in MASTER_ADDR="
    problem = explain_unresolvable(name)
    if problem:
        return pass_or_warn("Host name", f"it has no address ({problem})", where)
    addresses = {
        str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    }
    if not any(map(is_own_address, addresses)):
        problem = "its address is not one of this machine's"
        return pass_or_warn(
            "Host name", problem, f"{where}; now it has {', '.join(sorted(addresses))}"
        )
    return pass_or_warn("Host name", "resolves to an address of this machine")


def explain_unresolvable(name: str) -> str:
    """Return why a host's name has no address; empty if it has one."""
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
    """Room for setup or a run, and the disk's write rate, flushed."""
    before_setup = kit_python() is None
    needed, by = (SETUP_BYTES, "setup") if before_setup else (GIB, "a run")
    files = SETUP_FILES if before_setup else RUN_FILES
    row = check_room(folder, needed, by, "clone the kit where there is more", files)
    if row.status != PASS:
        return row
    free = shutil.disk_usage(folder).free
    try:
        rate = write_rate(folder, min(PROBE_BYTES, free // 4))
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return CheckResult(FAIL, "Disk", found, "clone the kit where you may write")
    found = f"{free / GIB:.0f} GiB free, writes {rate / 1e6:.0f} MB/s"
    fix = "slow for checkpoints and data sets; put runs elsewhere with RUNS= and data with DATA="
    return pass_or_warn("Disk", found, fix if rate < SLOW_BYTES_PER_SECOND else "", rate)


def check_room(
    folder: str, needed_bytes: int, needed_by: str, elsewhere: str, needed_files: int = RUN_FILES
) -> CheckResult:
    """Whether a folder can be written and has room for what `needed_by` (a noun) writes."""
    if not os.access(folder, os.W_OK):
        return CheckResult(FAIL, "Disk", f"{folder} is not writable", elsewhere)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        found = f"{folder} has {_size(free)} free and {needed_by} needs about {_size(needed_bytes)}"
        return pass_or_warn("Disk", found, "free some room, or " + elsewhere)
    files = free_files(folder)
    if files is not None and files < needed_files:
        found = (
            f"{folder} can take {files} more files (free inodes) and {needed_by} needs about "
            f"{needed_files}"
        )
        return pass_or_warn("Disk", found, "remove files that are not needed, or " + elsewhere)
    return pass_or_warn("Disk", _size(free) + " free")


def free_files(folder: str) -> "int | None":
    """How many more files a folder's file system takes (inodes); None where it has no such limit."""
    found = os.statvfs(folder)
    return found.f_favail if found.f_files else None


def write_rate(folder: str, size: int) -> float:
    """Bytes a second of one file, until the disk has it; the file is removed."""
    block = os.urandom(1 << 20)
    start = time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return max(size, 1) / max(time.monotonic() - start, 1e-6)


def _limit(value: int, unit: int, suffix: str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{suffix}"


def _size(size_bytes: int) -> str:
    # `parakit.formatting.units` needs a younger Python than these checks, which are there to say so.
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 2**20:.0f} MiB"

"""Shared memory, limits and disk."""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from tools.launch.doctor.finding import FAIL, PASS, ROOT, WARN, Finding

GIB = 2**30
PROBE_BYTES = 128 << 20
SLOW_BYTES_PER_SECOND = 100e6
SETUP_BYTES = 10 * 10**9
"""`.venv` takes 6.6 GB (`du -s`); the rest is for the packages as pip downloads them, and for runs."""

OPEN_FILES = 4096


def check_shared_memory() -> Finding:
    """NCCL and data loaders pass buffers through /dev/shm."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding(WARN, "Shared memory", "no /dev/shm", "mount a tmpfs there")
    found = f"{size / GIB:.1f} GiB in /dev/shm"
    if size < GIB:
        fix = "sudo mount -o remount,size=8G /dev/shm; of a container: --ipc=host"
        return Finding(WARN, "Shared memory", found, fix)
    return Finding(PASS, "Shared memory", found)


def check_limits() -> Finding:
    """Locked memory for InfiniBand, open files for many ranks; containers are given their own."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "locked memory {}, open files {}".format(
        _limit(locked, 2**20, " MiB"), _limit(files, 1, "")
    )
    if locked != resource.RLIM_INFINITY and Path("/dev/infiniband").is_dir():
        fix = "NCCL pins what InfiniBand reads: 'memlock unlimited' in /etc/security/limits.conf"
        return Finding(WARN, "Limits", found, fix)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        return Finding(WARN, "Limits", found, f"'nofile {OPEN_FILES}' in /etc/security/limits.conf")
    return Finding(PASS, "Limits", found)


def check_disk(folder: str = ROOT) -> Finding:
    """Room, and the rate at which the kit's disk takes a file that is really written."""
    free = shutil.disk_usage(folder).free
    try:
        rate = write_rate(folder, min(PROBE_BYTES, free // 4))
    except OSError as error:
        fix = "give yourself the folder, or clone the kit where you may write"
        return Finding(FAIL, "Disk", f"{folder} cannot be written: {error.strerror}", fix)
    found = f"{free / GIB:.0f} GiB free, writes {rate / 1e6:.0f} MB/s"
    if free < SETUP_BYTES:
        fix = f"setup needs {SETUP_BYTES / 1e9:.0f} GB; free some"
        return Finding(WARN, "Disk", found, fix, rate)
    if rate < SLOW_BYTES_PER_SECOND:
        fix = (
            "slow for checkpoints and data sets; put runs elsewhere with RUNS= and data with DATA="
        )
        return Finding(WARN, "Disk", found, fix, rate)
    return Finding(PASS, "Disk", found, "", rate)


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

"""Driver, GPUs, their connection, the all-reduce rate between them and their clocks under load.

The kit's Python describes them (`parakit.launch.devices`, NVML) and measures (`parakit.launch.link_rates`).
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from parakit.cluster.checks.result import (
    FAIL,
    GIB,
    CheckResult,
    kit_python,
    pass_or_warn,
    run_program,
)

BUSY_BYTES = 2 * GIB
"""More than a desktop or an idle driver holds; published measurements began at 3 MiB."""

GOOD_RATE_FRACTION = 0.5
"""Of the link's rate; NCCL reaches more of NVLink, and gloo about that of one TCP connection."""

GOOD_CLOCK_FRACTION = 0.9
"""Of the highest clock, reached under load; power caps take some of it from every large GPU."""

ALL_REDUCE_TIMEOUT_SECONDS = 150.0
_DRIVER_FIX = "see 'nvidia-smi' and 'dmesg'; after an update of the driver the machine must restart"
ON_CPU = "'make demo' and the -<N>cpu targets work without"


class GpuUse(NamedTuple):
    """A GPU and who uses it."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    processes: "tuple[int, ...]" = ()
    """Processes that compute on it, as far as NVML sees them."""


def check_devices() -> "list[CheckResult]":
    """Rows for driver, GPUs and topology."""
    python = kit_python()
    if python is None:
        return [_before_setup()]
    described, problem = _printed(python, "parakit.launch.devices")
    if problem:
        fix = "see '.venv/bin/python -m parakit.launch.devices'"
        return [CheckResult(FAIL, "Driver", "cannot be asked: " + problem, fix)]
    return check_description(described)


def check_description(described: "dict[str, Any]") -> "list[CheckResult]":
    """Rows for what `parakit.launch.devices` printed."""
    if described["problem"]:
        return [CheckResult(FAIL, "Driver", "NVML fails: " + described["problem"], _DRIVER_FIX)]
    if not described["gpus"]:
        return [_without_gpus()]
    gpus = [GpuUse(**gpu) for gpu in described["gpus"]]
    shown = "; ".join(f"{gpu.number}: {gpu.name}, {gpu.memory_bytes >> 20} MiB" for gpu in gpus)
    one = len(gpus) == 1
    fix = "five of the six published runs need two; -2cpu targets show them" if one else ""
    rows = [pass_or_warn("Driver", described["driver"]), pass_or_warn("GPUs", shown, fix)]
    return [*rows, *check_busy(gpus, gpus), *([] if one else [_topology(described)])]


def check_busy(gpus: "list[GpuUse]", machine: "list[GpuUse]") -> "list[CheckResult]":
    """A result for each of `gpus` that something else uses; the fix names the machine's free ones."""
    free = ",".join(str(gpu.number) for gpu in machine if gpu.used_bytes <= BUSY_BYTES)
    fix = "wait for it or end it"
    fix += f", or choose others with CUDA_VISIBLE_DEVICES={free}" if free else ""
    results = []
    for gpu in gpus:
        if gpu.used_bytes > BUSY_BYTES:
            by = " by process " + ", ".join(map(str, gpu.processes)) if gpu.processes else ""
            used = f"{gpu.used_bytes / GIB:.1f} GiB are in use{by}"
            found = f"GPU {gpu.number} ({gpu.name}) is busy: {used}"
            results.append(pass_or_warn(f"GPU {gpu.number}", found, fix))
    return results


def check_all_reduce() -> "list[CheckResult]":
    """Rows for the all-reduce between this machine's devices, and for the GPUs' clocks."""
    python = kit_python()
    if python is None:
        return [pass_or_warn("All-reduce", "not measured before setup", "run 'make setup'")]
    measured, problem = _printed(python, "parakit.launch.link_rates", ALL_REDUCE_TIMEOUT_SECONDS)
    problem = problem or measured.get("problem", "")
    if problem:
        fix = "see '.venv/bin/python -m parakit.launch.link_rates'"
        return [CheckResult(FAIL, "All-reduce", "fails: " + problem, fix)]
    return check_rates(measured)


def check_rates(measured: "dict[str, Any]") -> "list[CheckResult]":
    """Rows for what `parakit.launch.link_rates` printed."""
    return [_rate(measured)] + [_clock(clock) for clock in measured["clocks"]]


def _printed(python: str, module: str, seconds: float = 20.0) -> "tuple[dict[str, Any], str]":
    """What a module prints as JSON in its last line; or nothing, and why."""
    answer = run_program([python, "-m", module], seconds)
    try:
        return json.loads(answer.out.splitlines()[-1]), ""
    except (ValueError, IndexError):
        return {}, answer.problem or "it printed nothing"


def _before_setup() -> CheckResult:
    if shutil.which("nvidia-smi") is None:
        return _without_gpus()
    answer = run_program(["nvidia-smi", "-L"])
    if not answer.succeeded:
        return CheckResult(FAIL, "Driver", "nvidia-smi fails: " + answer.problem, _DRIVER_FIX)
    found = f"{len(answer.out.splitlines())} GPU(s), not examined before setup"
    return pass_or_warn("Driver", found, "run 'make setup'")


def _without_gpus() -> CheckResult:
    if Path("/dev/nvidiactl").exists():
        fix = "give the container NVIDIA's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return pass_or_warn("Driver", "loaded, but NVML is missing", fix)
    return pass_or_warn("Driver", "no NVIDIA driver", "install it for GPU targets; " + ON_CPU)


def _topology(described: "dict[str, Any]") -> CheckResult:
    links = described["links"]
    if all(link["nvlinks"] is link["topology"] is None for link in links):
        return pass_or_warn("Topology", "NVML does not report it", "see 'nvidia-smi topo -m'")
    fix = "the published numbers were made over NVLink; here TP, SP and CP will take longer"
    linked = all(link["nvlinks"] for link in links)
    return pass_or_warn(
        "Topology", described["connection"] + ", between GPUs", "" if linked else fix
    )


def _rate(measured: "dict[str, Any]") -> CheckResult:
    rate, full = measured["bytes_per_second"], measured["link_bytes_per_second"]
    who = "GPUs" if measured["backend"] == "NCCL" else "CPU ranks"
    between = "{} between {} {}".format(measured["backend"], measured["ranks"], who)
    if measured["ranks"] < 2:
        return pass_or_warn("All-reduce", between + ": nothing to send")
    found = f"{between}: {rate / 1e9:.2f} GB/s"
    if full is None:
        return pass_or_warn("All-reduce", "{} over {}".format(found, measured["link"]), "", rate)
    found += ", {:.0%} of {} ({:.2f} GB/s)".format(rate / full, measured["link"], full / 1e9)
    fix = "see that nothing else uses the devices; NCCL_DEBUG=INFO names the path NCCL takes"
    return pass_or_warn("All-reduce", found, fix if rate < GOOD_RATE_FRACTION * full else "", rate)


def _clock(clock: "dict[str, Any]") -> CheckResult:
    what = "Clock of GPU {}".format(clock["gpu"])
    highest, limit, why = clock["highest_mhz"], clock["limit_mhz"], clock["throttling"]
    if highest is None:
        return pass_or_warn(what, "NVML does not report it", "see 'nvidia-smi -q -d CLOCK'")
    of = f" of {limit}" if limit else ""
    found = f"{highest} MHz under load{of}, throttling: {why}"
    fix = ""
    if why != "none":
        fix = "see 'nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER'; cool it, or raise its power limit"
    elif limit and highest < GOOD_CLOCK_FRACTION * limit:
        fix = "a lower clock may be set: 'nvidia-smi -q -d CLOCK', 'sudo nvidia-smi --reset-gpu-clocks'"
    return pass_or_warn(what, found, fix, highest)

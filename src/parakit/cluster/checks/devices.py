"""Check the driver, the GPUs, their links, the all-reduce rate between them, and their clocks under load.

The kit's Python runs `parakit.launch.devices`, which describes the GPUs through NVML, and
`parakit.launch.link_rates`, which measures rates and clocks.
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
"""Memory in use above which a GPU counts as busy. A desktop or an idle driver uses less."""

GOOD_RATE_FRACTION = 0.5
"""The fraction of the link's rate below which an all-reduce is a warning.

NCCL reaches more of NVLink, and gloo about this fraction of a TCP connection.
"""

GOOD_CLOCK_FRACTION = 0.9
"""The fraction of the highest clock below which the clock under load is a warning.

Power caps lower the clock of every large GPU a little.
"""

ALL_REDUCE_TIMEOUT_SECONDS = 150.0
_DRIVER_FIX = "see 'nvidia-smi' and 'dmesg'; after an update of the driver the machine must restart"
ON_CPU = "'make demo' and the -<N>cpu targets work without"


class GpuUse(NamedTuple):
    """A GPU, its memory, and the processes that use it."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    processes: "tuple[int, ...]" = ()
    """Ids of the processes that compute on the GPU, as far as NVML sees them."""


def check_devices() -> "list[CheckResult]":
    """Check the driver, the GPUs and their topology. Before setup only the driver is checked."""
    python = kit_python()
    if python is None:
        return [_check_driver_before_setup()]
    described, problem = _run_module(python, "parakit.launch.devices")
    if problem:
        fix = "see '.venv/bin/python -m parakit.launch.devices'"
        return [CheckResult(FAIL, "Driver", "cannot be asked: " + problem, fix)]
    return check_description(described)


def check_description(described: "dict[str, Any]") -> "list[CheckResult]":
    """Return the results of the checks on the devices that `parakit.launch.devices` described."""
    if described["problem"]:
        return [CheckResult(FAIL, "Driver", "NVML fails: " + described["problem"], _DRIVER_FIX)]
    if not described["gpus"]:
        return [_report_no_gpu()]
    gpus = [GpuUse(**gpu) for gpu in described["gpus"]]
    shown = "; ".join(f"{gpu.number}: {gpu.name}, {gpu.memory_bytes >> 20} MiB" for gpu in gpus)
    fix = ""
    if len(gpus) == 1:
        fix = "five of the six published runs need two; -2cpu targets show them"
    results = [pass_or_warn("Driver", described["driver"]), pass_or_warn("GPUs", shown, fix)]
    results += check_busy(gpus, gpus)
    if len(gpus) > 1:
        results.append(_check_topology(described))
    return results


def check_busy(gpus: "list[GpuUse]", machine: "list[GpuUse]") -> "list[CheckResult]":
    """Return a warning for each busy GPU. The suggested fix names the free GPUs of the machine.

    Args:
        gpus: The GPUs to check.
        machine: All GPUs of the machine.
    """
    free = ",".join(str(gpu.number) for gpu in machine if gpu.used_bytes <= BUSY_BYTES)
    fix = "wait for it or end it"
    if free:
        fix += f", or choose others with CUDA_VISIBLE_DEVICES={free}"
    results = []
    for gpu in gpus:
        if gpu.used_bytes > BUSY_BYTES:
            finding = (
                f"GPU {gpu.number} ({gpu.name}) is busy: {gpu.used_bytes / GIB:.1f} GiB are in use"
            )
            if gpu.processes:
                finding += " by process " + ", ".join(map(str, gpu.processes))
            results.append(pass_or_warn(f"GPU {gpu.number}", finding, fix))
    return results


def check_all_reduce() -> "list[CheckResult]":
    """Measure the all-reduce between this machine's devices, and the GPUs' clocks under load."""
    python = kit_python()
    if python is None:
        return [pass_or_warn("All-reduce", "not measured before setup", "run 'make setup'")]
    measured, problem = _run_module(python, "parakit.launch.link_rates", ALL_REDUCE_TIMEOUT_SECONDS)
    problem = problem or measured.get("problem", "")
    if problem:
        fix = "see '.venv/bin/python -m parakit.launch.link_rates'"
        return [CheckResult(FAIL, "All-reduce", "fails: " + problem, fix)]
    return check_rates(measured)


def check_rates(measured: "dict[str, Any]") -> "list[CheckResult]":
    """Return the results for what `parakit.launch.link_rates` printed."""
    return [_check_rate(measured)] + [_check_clock(clock) for clock in measured["clocks"]]


def _run_module(python: str, module: str, seconds: float = 20.0) -> "tuple[dict[str, Any], str]":
    """Run a module that prints JSON in its last line; return the JSON and no problem, or nothing and why."""
    output = run_program([python, "-m", module], seconds)
    try:
        return json.loads(output.out.splitlines()[-1]), ""
    except (ValueError, IndexError):
        return {}, output.problem or "it printed nothing"


def _check_driver_before_setup() -> CheckResult:
    """Check whether the driver answers, by running nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return _report_no_gpu()
    output = run_program(["nvidia-smi", "-L"])
    if not output.succeeded:
        return CheckResult(FAIL, "Driver", "nvidia-smi fails: " + output.problem, _DRIVER_FIX)
    finding = f"{len(output.out.splitlines())} GPU(s), not examined before setup"
    return pass_or_warn("Driver", finding, "run 'make setup'")


def _report_no_gpu() -> CheckResult:
    """Return the warning that there is no driver, or that a container lacks NVIDIA's utilities."""
    if Path("/dev/nvidiactl").exists():
        fix = "give the container NVIDIA's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return pass_or_warn("Driver", "loaded, but NVML is missing", fix)
    return pass_or_warn("Driver", "no NVIDIA driver", "install it for GPU targets; " + ON_CPU)


def _check_topology(described: "dict[str, Any]") -> CheckResult:
    """Return a warning if not all GPUs are connected by NVLink, or if NVML does not report the links."""
    links = described["links"]
    is_unreported = all(link["nvlinks"] is None and link["topology"] is None for link in links)
    if is_unreported:
        return pass_or_warn("Topology", "NVML does not report it", "see 'nvidia-smi topo -m'")
    fix = ""
    has_nvlink = all(link["nvlinks"] for link in links)
    if not has_nvlink:
        fix = "the published numbers were made over NVLink; here TP, SP and CP will take longer"
    return pass_or_warn("Topology", described["connection"] + ", between GPUs", fix)


def _check_rate(measured: "dict[str, Any]") -> CheckResult:
    """Return the all-reduce rate, with a warning if it is below GOOD_RATE_FRACTION of the link's rate."""
    rate, link_rate = measured["bytes_per_second"], measured["link_bytes_per_second"]
    backend, num_ranks, link = measured["backend"], measured["ranks"], measured["link"]
    devices = "GPUs" if backend == "NCCL" else "CPU ranks"
    between = f"{backend} between {num_ranks} {devices}"
    if num_ranks < 2:
        return pass_or_warn("All-reduce", between + ": nothing to send")
    finding = f"{between}: {rate / 1e9:.2f} GB/s"
    if link_rate is None:
        return pass_or_warn("All-reduce", f"{finding} over {link}", "", rate)
    fraction = rate / link_rate
    finding += f", {fraction:.0%} of {link} ({link_rate / 1e9:.2f} GB/s)"
    fix = ""
    if rate < GOOD_RATE_FRACTION * link_rate:
        fix = "see that nothing else uses the devices; NCCL_DEBUG=INFO names the path NCCL takes"
    return pass_or_warn("All-reduce", finding, fix, rate)


def _check_clock(clock: "dict[str, Any]") -> CheckResult:
    """Return a GPU's clock under load, with a warning if it is throttled or clearly below its limit."""
    subject = "Clock of GPU {}".format(clock["gpu"])
    highest, limit, throttling = clock["highest_mhz"], clock["limit_mhz"], clock["throttling"]
    if highest is None:
        return pass_or_warn(subject, "NVML does not report it", "see 'nvidia-smi -q -d CLOCK'")
    of_limit = f" of {limit}" if limit else ""
    finding = f"{highest} MHz under load{of_limit}, throttling: {throttling}"
    fix = ""
    if throttling != "none":
        fix = "see 'nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER'; cool it, or raise its power limit"
    elif limit and highest < GOOD_CLOCK_FRACTION * limit:
        fix = "a lower clock may be set: 'nvidia-smi -q -d CLOCK', 'sudo nvidia-smi --reset-gpu-clocks'"
    return pass_or_warn(subject, finding, fix, highest)

"""What devices send each other and how fast they clock meanwhile; `.venv`'s torch and NVML measure."""

import json
from typing import Any

from tools.launch.doctor.finding import FAIL, PASS, WARN, Finding, ask
from tools.launch.doctor.software import VENV_PYTHON

SECONDS = 150.0
GOOD_SHARE = 0.5
"""Of the link's rate; NCCL reaches more of NVLink, and gloo about that of one TCP connection."""

GOOD_CLOCK = 0.9
"""Of the highest clock, reached under load; power caps take some of it from every large GPU."""


def check_exchange() -> "list[Finding]":
    """Rows for the all-reduce between this machine's devices, and for the GPUs' clocks."""
    if not VENV_PYTHON.exists():
        return [Finding(WARN, "All-reduce", "not measured before setup", "run 'make setup'")]
    answer = ask([str(VENV_PYTHON), "-m", "tools.launch.exchange"], seconds=SECONDS)
    try:
        told = json.loads(answer.out.splitlines()[-1])
    except (ValueError, IndexError):
        told = {"problem": answer.problem or "it printed nothing"}
    if "problem" in told:
        fix = "see '.venv/bin/python -m tools.launch.exchange'"
        return [Finding(FAIL, "All-reduce", "fails: " + told["problem"], fix)]
    return check_rates(told)


def check_rates(told: "dict[str, Any]") -> "list[Finding]":
    """Rows for what `tools.launch.exchange` printed."""
    return [_rate(told)] + [_clock(clock) for clock in told["clocks"]]


def _rate(told: "dict[str, Any]") -> Finding:
    rate, full = told["bytes_per_second"], told["link_bytes_per_second"]
    between = "{} between {} {}".format(
        told["backend"], told["ranks"], "GPUs" if told["backend"] == "NCCL" else "CPU ranks"
    )
    if told["ranks"] < 2:
        return Finding(PASS, "All-reduce", between + ": nothing to send", "", None)
    found = f"{between}: {rate / 1e9:.2f} GB/s"
    if full is None:
        return Finding(PASS, "All-reduce", "{} over {}".format(found, told["link"]), "", rate)
    found += ", {:.0%} of {} ({:.2f} GB/s)".format(rate / full, told["link"], full / 1e9)
    if rate < GOOD_SHARE * full:
        fix = "see that nothing else uses the devices; NCCL_DEBUG=INFO names the path NCCL takes"
        return Finding(WARN, "All-reduce", found, fix, rate)
    return Finding(PASS, "All-reduce", found, "", rate)


def _clock(clock: "dict[str, Any]") -> Finding:
    what = "Clock of GPU {}".format(clock["gpu"])
    highest, limit, why = clock["highest_mhz"], clock["limit_mhz"], clock["throttling"]
    if highest is None:
        return Finding(WARN, what, "NVML does not tell", "see 'nvidia-smi -q -d CLOCK'")
    found = "{} MHz under load{}, throttling: {}".format(
        highest, f" of {limit}" if limit else "", why
    )
    if why != "none":
        fix = "see 'nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER'; cool it, or raise its power limit"
        return Finding(WARN, what, found, fix, highest)
    if limit and highest < GOOD_CLOCK * limit:
        fix = "a lower clock may be set: 'nvidia-smi -q -d CLOCK', 'sudo nvidia-smi --reset-gpu-clocks'"
        return Finding(WARN, what, found, fix, highest)
    return Finding(PASS, what, found, "", highest)

"""What the doctor measures: on stand-in GPUs, and really between CPU ranks."""

import json
import subprocess
import sys

import pytest

from parakit.cluster.checks.devices import check_rates
from parakit.cluster.checks.result import PASS, WARN
from parakit.config.files import ROOT
from parakit.launch.devices import visible_gpus
from parakit.launch.link_rates import (
    ClockWatch,
    identify_local_link,
    measure_loopback_bytes_per_second,
)
from tests.launch.fake_nvml import FakeNvml

CLOCK, CAP = ("gpu", "highest_mhz", "limit_mhz", "throttling"), "software power cap"
RATE = {"backend": "NCCL", "ranks": 2, "link": "NVLink 4", "clocks": []}


def test_the_highest_clock_and_every_throttle_reason_are_kept(two_h200: FakeNvml) -> None:
    two_h200.gpus[1].clock_mhz = 1200
    two_h200.gpus[1].throttle = 0x4 | 0x40
    with ClockWatch(visible_gpus()) as watch:
        pass
    assert watch.summarize() == [
        dict(zip(CLOCK, (0, 1980, 1980, "none"), strict=True)),
        dict(zip(CLOCK, (1, 1200, 1980, f"{CAP} + hardware thermal slowdown"), strict=True)),
    ]


def test_a_gpu_that_reports_nothing_is_no_error(two_h200: FakeNvml) -> None:
    gpus = visible_gpus()
    two_h200.lost.add(0)
    with ClockWatch(gpus) as watch:
        pass
    assert watch.summarize()[0] == dict(zip(CLOCK, (0, None, None, "none"), strict=True))


def test_gpus_over_nvlink_are_compared_with_its_rate_and_others_with_nothing(
    two_h200: FakeNvml,
) -> None:
    name, rate = identify_local_link(visible_gpus())
    assert "NVLink" in name
    assert rate == 450e9  # 18 links of 25 GB/s each way
    two_h200.nvlink = False
    assert identify_local_link(visible_gpus()) == ("PCIe", None)
    assert identify_local_link(visible_gpus()[:1]) == ("nothing: one GPU", None)


@pytest.mark.parametrize(
    ("rate", "full", "status", "found"),
    [
        (360e9, 450e9, PASS, "NCCL between 2 GPUs: 360.00 GB/s, 80% of NVLink 4 (450.00 GB/s)"),
        (20e9, 450e9, WARN, "NCCL between 2 GPUs: 20.00 GB/s, 4% of NVLink 4 (450.00 GB/s)"),
        (20e9, None, PASS, "NCCL between 2 GPUs: 20.00 GB/s over NVLink 4"),
    ],
)
def test_a_rate_far_below_the_links_is_warned_about(
    rate: float, full: float | None, status: str, found: str
) -> None:
    (row,) = check_rates(RATE | {"bytes_per_second": rate, "link_bytes_per_second": full})
    assert (row.status, row.finding) == (status, found)


@pytest.mark.parametrize(
    ("clock", "status", "fix"),
    [
        ({"highest_mhz": 1980, "limit_mhz": 1980, "throttling": "none"}, PASS, ""),
        (
            {"highest_mhz": 1200, "limit_mhz": 1980, "throttling": "none"},
            WARN,
            "--reset-gpu-clocks",
        ),
        (
            {"highest_mhz": 1900, "limit_mhz": 1980, "throttling": "software power cap"},
            WARN,
            "raise its power limit",
        ),
        ({"highest_mhz": None, "limit_mhz": None, "throttling": "none"}, WARN, "nvidia-smi"),
    ],
)
def test_clocks_and_throttling_are_named_with_the_fix(
    clock: dict[str, object], status: str, fix: str
) -> None:
    told = RATE | {"bytes_per_second": 1e9, "link_bytes_per_second": None}
    row = check_rates(told | {"clocks": [{"gpu": 3, **clock}]})[1]
    assert (row.status, row.subject) == (status, "Clock of GPU 3")
    assert fix in row.fix


def test_loopback_moves_something() -> None:
    assert measure_loopback_bytes_per_second() > 0


@pytest.mark.slow
def test_two_cpu_ranks_exchange_through_gloo() -> None:
    command = (sys.executable, "-m", "parakit.launch.link_rates")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(answer.stdout)
    assert (told["backend"], told["ranks"], told["link"]) == ("gloo", 2, "TCP over loopback")
    assert told["bytes_per_second"] > 0
    assert told["link_bytes_per_second"] > 0

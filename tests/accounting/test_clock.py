"""Clocks of host and device. Device events are scripted with the milliseconds at which the device reaches them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from parakit.accounting import timeline as timeline_module
from parakit.accounting.timeline import DeviceClock, HostClock, clock_for_model


@dataclass
class ScriptedDevice:
    reached_ms: Iterator[float]
    synchronised: int = 0
    made: list["Event"] = field(default_factory=list)

    def Event(self, enable_timing: bool) -> "Event":  # noqa: N802 - torch's name
        assert enable_timing
        return Event(self)

    def synchronize(self) -> None:
        self.synchronised += 1


@dataclass
class Event:
    device: ScriptedDevice
    at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = next(self.device.reached_ms)

    def synchronize(self) -> None:
        assert self.at_ms is not None

    def elapsed_time(self, other: "Event") -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


@pytest.fixture
def host_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    times: list[int] = []
    monkeypatch.setattr(timeline_module.time, "perf_counter_ns", lambda: times.pop(0))
    return times


def test_device_events_are_converted_to_the_hosts_clock(host_ns: list[int]) -> None:
    host_ns.extend([5_000_000])
    clock = DeviceClock(ScriptedDevice(iter([100.0, 102.5])))
    assert clock.to_nanoseconds(clock.now()) == 7_500_000


def test_events_before_the_last_synchronization_get_earlier_times(host_ns: list[int]) -> None:
    host_ns.extend([0, 50_000_000])
    device = ScriptedDevice(iter([10.0, 12.0, 20.0]))
    clock = DeviceClock(device)
    mark = clock.now()
    clock.synchronize()
    assert clock.to_nanoseconds(mark) == 42_000_000
    assert device.synchronised == 2


def test_host_clock_returns_recorded_nanoseconds(host_ns: list[int]) -> None:
    host_ns.extend([7])
    clock = HostClock()
    clock.synchronize()
    assert clock.to_nanoseconds(clock.now()) == 7


def test_a_model_on_the_host_is_timed_by_the_host() -> None:
    assert isinstance(clock_for_model(torch.nn.Linear(1, 1)), HostClock)
    assert isinstance(clock_for_model(torch.nn.Module()), HostClock)

"""pynvml without a driver: its functions answer for GPUs that a test describes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest

from parakit.launch import devices

GIB = 2**30
DRIVER = "580.82.07"


@dataclass
class FakeGpu:
    """What one GPU answers; a name in `refuses` is answered with `not supported`."""

    name: str = "NVIDIA H200"
    memory_bytes: int = 143_771 << 20
    used_bytes: int = 3 << 20
    reserved_bytes: int = 600 << 20
    processes: tuple[int, ...] = ()
    throttle: int = 0
    links: int = 18
    clock_mhz: int = 1980
    refuses: set[str] = field(default_factory=set)


class FakeNvml:
    """A machine's GPUs; handles are their numbers."""

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.gpus = gpus
        self.lost: set[int] = set()
        self.peers = True
        self.nvlink = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace pynvml's functions."""
        for name, answer in self._answers().items():
            monkeypatch.setattr(pynvml, name, self._guarded(name, answer))

    def _guarded(self, name: str, answer: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            gpu = arguments[0] if arguments and isinstance(arguments[0], int) else None
            if gpu in self.lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            if gpu is not None and name in self.gpus[gpu].refuses:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(*arguments, **named)

        return call

    def _answers(self) -> dict[str, Callable[..., object]]:
        gpus = self.gpus
        rates = SimpleNamespace(gpu=98, memory=40)
        return {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda gpu: gpus[gpu].name,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}a{gpu}b-0000",
            "nvmlSystemGetDriverVersion": lambda: DRIVER,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid) for pid in gpus[gpu].processes
            ],
            "nvmlDeviceGetUtilizationRates": lambda gpu: rates,
            "nvmlDeviceGetPowerUsage": lambda gpu: 654_321,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 60 + gpu,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: gpus[gpu].clock_mhz,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpus[gpu].throttle,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpus[gpu].throttle,
            "nvmlDeviceGetTopologyCommonAncestor": lambda gpu, peer: pynvml.NVML_TOPOLOGY_NODE,
            "nvmlDeviceGetP2PStatus": self._peer_status,
            "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < gpus[gpu].links),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: (
                pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            ),
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"bus-{gpu}"),
        }

    def _memory(self, gpu: int, version: int | None = None) -> SimpleNamespace:
        told = self.gpus[gpu]
        # The first version counts what the driver reserves as used; the second, as nvidia-smi, not.
        reserved = 0 if version else told.reserved_bytes
        return SimpleNamespace(total=told.memory_bytes, used=told.used_bytes + reserved)

    def _peer_status(self, *asked: int) -> int:
        ability = asked[2]
        assert isinstance(ability, int)  # as the C function wants it
        able = self.nvlink if ability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK else self.peers
        return pynvml.NVML_P2P_STATUS_OK if able else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


def machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> Iterator[FakeNvml]:
    """For fixtures: a machine with these GPUs until the test ends."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(list(gpus))
    nvml.install(monkeypatch)
    devices.all_gpus.cache_clear()
    yield nvml
    devices.all_gpus.cache_clear()

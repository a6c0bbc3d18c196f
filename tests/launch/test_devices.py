import pynvml
import pytest

from parakit.artifacts.run import SAMPLE_COLUMNS, DeviceLink
from parakit.launch import devices
from parakit.launch.devices import (
    describe_links,
    driver_version,
    find_links,
    memory_used_bytes,
    name_throttle_reasons,
    process_ids,
    sample_gpus,
    visible_gpus,
)
from tests.launch.fake_nvml import DRIVER, FakeGpu, FakeNvml


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    devices.all_gpus.cache_clear()
    assert visible_gpus({}) == ()
    assert driver_version() is None
    devices.all_gpus.cache_clear()


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-1a1b", [1]),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    two_h200: FakeNvml, chosen: str | None, indices: list[int]
) -> None:
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [gpu.index for gpu in visible_gpus(environment)] == indices


def test_memory_in_use_is_nvidia_smis_without_what_the_driver_reserves(two_h200: FakeNvml) -> None:
    gpu = visible_gpus({})[0]
    assert memory_used_bytes(gpu) == 3 << 20
    assert driver_version() == DRIVER
    two_h200.gpus[0].processes = (11, 12)
    assert process_ids(gpu) == (11, 12)


def test_a_reading_has_every_column_and_the_rank_of_its_gpu(two_h200: FakeNvml) -> None:
    two_h200.gpus[1].throttle = 0x4 | 0x40 | 0x1
    readings = dict(sample_gpus(visible_gpus({"CUDA_VISIBLE_DEVICES": "1,0"})))
    assert list(readings) == [0, 1]
    assert {"seconds", "rank", *readings[0]} == set(SAMPLE_COLUMNS)
    assert readings[0] == {
        "device": "NVIDIA H200",
        "utilisation_percent": 98,
        "memory_bytes": 3 << 20,
        "power_watts": 654.321,
        "temperature_celsius": 61,
        "sm_clock_mhz": 1980,
        "throttle_reasons": "software power cap + hardware thermal slowdown",
    }
    assert readings[1]["throttle_reasons"] == "none"


def test_on_a_later_node_readings_carry_the_ranks_of_that_node(two_h200: FakeNvml) -> None:
    assert [rank for rank, _ in sample_gpus(visible_gpus({}), 2)] == [2, 3]


def test_what_a_gpu_does_not_report_is_left_out_and_a_lost_gpu_gives_nothing(
    two_h200: FakeNvml,
) -> None:
    two_h200.gpus[0].refuses = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"}
    two_h200.gpus[0].refuses |= {"nvmlDeviceGetCurrentClocksEventReasons"}
    gpus = visible_gpus({})
    two_h200.lost = {1}
    readings = dict(sample_gpus(gpus))
    assert list(readings) == [0]
    assert "power_watts" not in readings[0]
    assert readings[0]["temperature_celsius"] == 60
    assert readings[0]["throttle_reasons"] == "none"  # asked by the older name


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0, "none"),
        (1, "none"),
        (0x8 | 0x80, "hardware slowdown + hardware power brake"),
        (0x4 | 0x8000, "software power cap + 0x8000"),
    ],
)
def test_throttle_bits_become_words_and_unknown_ones_stay_visible(bits: int, text: str) -> None:
    assert name_throttle_reasons(bits) == text


def test_two_gpus_on_a_switch_are_joined_by_all_their_links(two_h200: FakeNvml) -> None:
    links = find_links(visible_gpus({}))
    assert links == (DeviceLink(0, 1, "one NUMA node", 18, True),)
    assert describe_links(links) == "NVLink (18 links), peer access"


def test_without_nvlink_the_path_over_pcie_is_named(two_h200: FakeNvml) -> None:
    two_h200.nvlink = two_h200.peers = False
    links = find_links(visible_gpus({}))
    assert links == (DeviceLink(0, 1, "one NUMA node", 0, False),)
    assert describe_links(links) == "PCIe, one NUMA node, no peer access"


def test_a_driver_that_reports_nothing_leaves_the_connection_unknown(two_h200: FakeNvml) -> None:
    two_h200.gpus[0].refuses = {"nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"}
    assert find_links(visible_gpus({})) == (DeviceLink(0, 1),)
    assert find_links(visible_gpus({})[:1]) == ()
    assert describe_links(()) is None


def test_four_gpus_have_six_connections_described_once(
    monkeypatch: pytest.MonkeyPatch, two_h200: FakeNvml
) -> None:
    two_h200.gpus += [FakeGpu(), FakeGpu()]
    devices.all_gpus.cache_clear()
    links = find_links(visible_gpus({}))
    assert [(link.first, link.second) for link in links][-1] == (2, 3)
    assert (len(links), describe_links(links)) == (6, "NVLink (18 links), peer access")

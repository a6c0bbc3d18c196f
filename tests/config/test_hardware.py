import pytest

from parakit.config.hardware import (
    UnknownHardwareError,
    device_by_key,
    find_device,
    link_by_key,
    load_hardware,
)


def test_device_is_recognised_by_the_name_of_its_driver() -> None:
    device = find_device("NVIDIA H200")
    assert device is not None
    assert device.peak_flops("bf16") == 989.5e12
    assert device.memory_bytes == 143_771 * 2**20


def test_older_drivers_leave_out_the_vendor() -> None:
    assert find_device("A100-SXM4-40GB") is device_by_key("a100-40gb")


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "Tesla T4", ""])
def test_unknown_device_is_none_instead_of_a_similar_device(name: str) -> None:
    assert find_device(name) is None


def test_a_dtype_without_a_rate_has_no_peak() -> None:
    assert device_by_key("a100").peak_flops("fp8") is None


def test_every_device_names_a_known_link_and_a_source() -> None:
    hardware = load_hardware()
    for device in hardware.devices.values():
        assert device.link in hardware.links
        assert device.source
    assert all(link.source for link in hardware.links.values())


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("a100-80gb", "a100"),
        ("A100-80GB-SXM", "a100"),
        ("a100_sxm4_40gb", "a100-40gb"),
        ("h100-sxm", "h100"),
        ("H200 SXM", "h200"),
        ("4090", "rtx4090"),
    ],
)
def test_common_name_of_a_device_is_its_alias(alias: str, key: str) -> None:
    assert device_by_key(alias).key == key


def test_device_names_are_unique_and_match_only_their_device() -> None:
    devices = load_hardware().devices.values()
    names = [name for device in devices for name in (device.key, *device.aliases)]
    assert [device_by_key(name).key for name in names] == [
        device.key for device in devices for _ in (device.key, *device.aliases)
    ]
    with pytest.raises(UnknownHardwareError, match=r"no GPU 'h100-pcie'; did you mean .*h100"):
        device_by_key("h100-pcie")


def test_unknown_key_suggests_similar_keys() -> None:
    with pytest.raises(UnknownHardwareError, match="no GPU 'h201'; did you mean h20"):
        device_by_key("h201")
    with pytest.raises(UnknownHardwareError, match="no link 'nvlink9'; did you mean nvlink"):
        link_by_key("nvlink9")


@pytest.mark.parametrize(
    ("key", "teraflops", "memory_gib"),
    [("mi300x", 1307, 192), ("mi325x", 1307, 256), ("mi350x", 2300, 288), ("mi355x", 2516, 288)],
)
def test_gpus_of_amd_have_the_rate_and_memory_of_their_own_datasheets(
    key: str, teraflops: int, memory_gib: int
) -> None:
    device = device_by_key(key)
    assert device.peak_flops("bf16") == teraflops * 1e12
    assert device.memory_bytes == memory_gib * 2**30

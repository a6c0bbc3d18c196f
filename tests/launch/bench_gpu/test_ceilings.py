import pytest

from tools.launch.bench_gpu import ceilings


def test_ceilings_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SECONDS_EACH", 0.01)
    assert ceilings.matmul_flops(64, "cpu") > 1e6
    assert ceilings.copy_bytes_per_second(1 << 16, "cpu") > 1e6

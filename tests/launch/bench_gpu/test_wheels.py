from pathlib import Path

import pytest

from tools.launch.bench_gpu import ceilings, wheels
from tools.recipe.model import ROOT


def test_every_needed_package_is_pinned_where_setup_pins_it() -> None:
    found = wheels.pinned((ROOT / "requirements.txt").read_text())
    assert set(found) == set(wheels.NEEDED)
    assert found["megatron-core"].startswith("megatron-core==")


def test_nothing_is_missing_here() -> None:
    assert wheels.missing() == ()
    assert wheels.torch_problem() is None


def test_a_folder_that_is_not_there_is_refused_with_what_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "missing", lambda: ("msgspec",))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"is no folder\. .*pip download .* msgspec=="):
        wheels.install(tmp_path / "none")


@pytest.mark.parametrize(("version", "fits"), [("2.8.1", False), ("2.9.0+cu130", True)])
def test_an_old_torch_is_refused(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: version)
    assert (wheels.torch_problem() is None) == fits


def test_ceilings_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SECONDS_EACH", 0.01)
    assert ceilings.matmul_flops(64, "cpu") > 1e6
    assert ceilings.copy_bytes_per_second(1 << 16, "cpu") > 1e6

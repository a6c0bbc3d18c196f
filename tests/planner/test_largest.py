import json
from pathlib import Path

import pytest

from parakit.config.hardware import device_by_key
from parakit.planner.largest import find_largest_models
from tests.program import run_plan as main


def sizes(devices: int, recompute: str = "none") -> dict[str, int]:
    found = find_largest_models(device_by_key("h100"), devices)
    return {each.strategy: each.parameters for each in found if each.recompute == recompute}


def test_each_sharding_holds_a_larger_model_and_a_split_one_a_larger_still() -> None:
    found = sizes(8)
    assert found["dp8"] < found["dp8-zero1"] < found["dp8-zero2"] < found["dp8-zero3"]
    assert found["cp8"] < found["dp8-zero1"] < found["pp8"]
    assert found["dp8"] == pytest.approx(80e9 / 18, rel=0.2)  # 18 bytes a parameter in bf16.


def test_recomputation_never_makes_the_model_smaller() -> None:
    kept, again = sizes(8), sizes(8, "full")
    assert all(again[strategy] >= kept[strategy] for strategy in kept)
    assert again["dp8-zero3"] > kept["dp8-zero3"]


def test_tensor_parallelism_stays_inside_a_node() -> None:
    assert "tp64" not in sizes(64)
    assert "sp8pp8" in sizes(64)


def test_it_is_printed_drawn_and_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "largest.svg"
    assert main(["--largest", "--gpus", "2", "--gpu", "h100", "--svg", str(picture)]) == 0
    assert "The largest model on 2 H100" in capsys.readouterr().out
    assert "billion parameters" in picture.read_text()
    assert main(["--largest", "--gpus", "2", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["strategy"] == "dp2"


def test_it_makes_its_own_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--largest", "--model", "gpt2-large"]) == 2
    assert "leave MODEL= and STRATEGY= out" in capsys.readouterr().err

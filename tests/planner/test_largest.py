import json
from functools import cache
from pathlib import Path

import pytest

from parakit.config.hardware import device_by_key
from parakit.planner.largest import LargestModel, find_largest_models
from tests.program import run_plan as main


@cache
def find_models(devices: int) -> list[LargestModel]:
    return find_largest_models(device_by_key("h100"), devices)


def sizes(devices: int, recompute: str = "none") -> dict[str, int]:
    largest_models = find_models(devices)
    return {
        largest.strategy: largest.parameters
        for largest in largest_models
        if largest.recompute == recompute
    }


def test_largest_model_grows_with_each_zero_stage_and_further_with_pipeline_parallelism() -> None:
    largest = sizes(8)
    assert largest["dp8"] < largest["dp8-zero1"] < largest["dp8-zero2"] < largest["dp8-zero3"]
    assert largest["cp8"] < largest["dp8-zero1"] < largest["pp8"]
    assert largest["dp8"] == pytest.approx(80e9 / 18, rel=0.2)  # 18 bytes a parameter in bf16.


def test_recomputation_never_makes_the_model_smaller() -> None:
    kept, again = sizes(8), sizes(8, "full")
    assert all(again[strategy] >= kept[strategy] for strategy in kept)
    assert again["dp8-zero3"] > kept["dp8-zero3"]


def test_tensor_parallelism_stays_inside_a_node() -> None:
    assert "tp16" not in sizes(16)
    assert "sp8pp2" in sizes(16)


def test_largest_models_are_printed_drawn_and_written_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "largest.svg"
    assert main(["--largest", "--gpus", "2", "--gpu", "h100", "--svg", str(picture)]) == 0
    assert "The largest model on 2 H100" in capsys.readouterr().out
    assert "billion parameters" in picture.read_text()
    assert main(["--largest", "--gpus", "2", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["strategy"] == "dp2"


def test_largest_models_refuse_a_model_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--largest", "--model", "gpt2-large"]) == 2
    assert "leave --model and --strategy out" in capsys.readouterr().err

"""The plants: each is stated, and each acts as stated (slow)."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.verify.plants.check import FOLDER, Checker, Plant, plants
from tests.verify.plants.trace import STAGES, first_difference
from tools.launch.job import parse_target
from tools.launch.options import read_plant
from tools.spec.files import ROOT, read_yaml

MODULES = {"check.py", "trace.py", "__init__.py"}


def test_every_plant_is_python_and_every_file_is_a_plant_of_the_table() -> None:
    stated = {plant.file for plant in plants()}
    assert stated == {path.name for path in FOLDER.glob("*.py")} - MODULES
    assert all(
        read_plant(str(FOLDER / file)).path == f"tests/verify/plants/{file}" for file in stated
    )


def test_every_stage_of_an_iteration_has_plants_and_each_names_a_layout_that_exists() -> None:
    assert {plant.stage for plant in plants()} == set(STAGES)
    ids = [plant.id for plant in plants()]
    assert len(set(ids)) == len(ids) >= 36
    for plant in plants():
        target = f"train-{plant.strategy}-{plant.model}-{plant.devices}cpu"
        assert parse_target(target).flags is not None


def test_every_plant_of_a_resumed_run_names_a_file_a_layout_and_a_stage_that_exist() -> None:
    entries = read_yaml(FOLDER / "resumed.yaml")
    files = {f"resumed/{path.name}" for path in (FOLDER / "resumed").glob("*.py")}
    assert {entry["file"] for entry in entries} == files
    for entry in entries:
        target = f"train-{entry['strategy']}-{entry['model']}-{entry.get('devices', 2)}cpu"
        assert parse_target(target).flags is not None
        assert entry["stage"] in STAGES
        read_plant(str(FOLDER / entry["file"]))


def run_of(*events: tuple[str, str, str, str]) -> list[dict[str, object]]:
    return [{"events": [list(event) for event in events]}]


def test_the_first_difference_is_of_the_first_stage_and_the_first_layer() -> None:
    before = run_of(
        ("outputs", "decoder.layers.2.mlp", "0#0", "a"),
        ("outputs", "decoder.layers.1.mlp", "0#0", "a"),
        ("norm", "grad_norm", "", "1.0"),
    )
    after = run_of(
        ("outputs", "decoder.layers.2.mlp", "0#0", "b"),
        ("outputs", "decoder.layers.1.mlp", "0#0", "b"),
        ("norm", "grad_norm", "", "2.0"),
    )
    assert first_difference(before, after) == ("outputs", "decoder.layers.1.mlp")
    assert first_difference(before, before) == ("", "")


def test_of_gradients_the_module_that_makes_a_wrong_one_of_a_right_one_is_named() -> None:
    stage, layer = "activation gradients", "decoder.layers.1"
    right = [(stage, layer, "out.0#0", "a"), (stage, f"{layer}.fc1", "out.0#0", "a")]
    names = ((f"{layer}.fc1", "in.0#0"), (f"{layer}.norm", "out.0#0"), (layer, "in.0#0"))
    before = run_of(*right, *((stage, name, slot, "a") for name, slot in names))
    after = run_of(*right, *((stage, name, slot, "b") for name, slot in names))
    assert first_difference(before, after) == (stage, f"{layer}.fc1")


class Stub(Checker):
    """A check of runs that are given: layouts' traces, by whether they are planted."""

    def __init__(self, of_layout: Sequence[Sequence[dict[str, object]]]) -> None:
        self.of_layout = of_layout
        self.ran: list[Plant] = []

    def _run(self, plant: Plant, planted: bool) -> list[dict[str, Any]]:
        self.ran.append(plant)
        return list(self.of_layout[planted if plant.devices > 1 else 0])


def stated(stage: str, module: str, trace: Sequence[str] = ()) -> Plant:
    given = {"id": "a", "file": "a.py", "catalogue": "", "strategy": "tp2", "model": "gpt2-tiny"}
    return Plant(
        **given, stage=stage, module=module, kind="", extra="--a", extra_b="--b", trace=trace
    )


def test_of_a_norm_without_a_part_the_trace_sees_the_norm_alone() -> None:
    runs = [run_of(("norm", "grad_norm", "", norm)) for norm in ("1.0", "2.0")]
    assert Stub(runs).check(stated("norm", "embedding.weight")) == ("", "norm", "grad_norm")
    problem, *_ = Stub(runs).check(stated("weights", "embedding.weight"))
    assert problem == "expected weights, embedding.weight"


def test_a_plant_may_part_inside_of_its_module_but_only_there_where_the_trace_is_stated() -> None:
    runs = [run_of(("outputs", "decoder.layers.1.mlp.fc1", "0#0", value)) for value in "ab"]
    found = ("outputs", "decoder.layers.1.mlp.fc1")
    assert Stub(runs).check(stated("outputs", "decoder.layers.1.mlp")) == ("", *found)
    assert Stub(runs).check(stated("loss", "loss", found)) == ("", *found)
    outer = ("outputs", "decoder.layers.1.mlp")
    problem, *_ = Stub(runs).check(stated("outputs", "decoder.layers.1.mlp", outer))
    assert problem == "expected outputs, decoder.layers.1.mlp"


def test_one_rank_has_no_flags_of_the_layout_alone() -> None:
    runs = [run_of(("loss", "loss", "0#0", value)) for value in "ab"]
    checker = Stub(runs)
    checker.check(stated("loss", "loss"))
    flags = [(plant.devices, (*plant.flags, *plant.own_flags)) for plant in checker.ran]
    assert flags == [(1, ("--a",)), (1, ("--a",)), (2, ("--a", "--b")), (2, ("--a", "--b"))]


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_plant_leaves_one_rank_alone_and_acts_where_it_is_stated(
    tmp_path: Path, sample_prefix: Path
) -> None:
    command = (sys.executable, "-m", "tests.verify.plants.check")
    given = ("--data", str(sample_prefix), "--folder", str(tmp_path))
    done = subprocess.run((*command, *given), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

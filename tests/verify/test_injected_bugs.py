"""The injected bugs: each is stated, and each acts as stated (slow)."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.patch_file import SEPARATOR
from parakit.artifacts.capture import CaptureStage
from parakit.config.files import ROOT, read_yaml
from parakit.launch.job import parse_target
from parakit.launch.options import read_patch_file
from tests.verify.injected_bugs.check import FOLDER, Checker, InjectedBug, injected_bugs
from tests.verify.injected_bugs.trace import STAGES, first_difference

MODULES = {"check.py", "trace.py", "__init__.py"}


def test_every_injected_bug_is_python_and_every_file_is_an_injected_bug_of_the_table() -> None:
    named = {file for bug in injected_bugs() for file in bug.file.split(SEPARATOR)}
    stated = {file for file in named if not file.startswith("../")}  # Cures of docs/upstream.
    assert all((FOLDER / file).is_file() for file in named)
    assert stated == {path.name for path in FOLDER.glob("*.py")} - MODULES
    assert all(
        read_patch_file(str(FOLDER / file)).path == f"tests/verify/injected_bugs/{file}"
        for file in stated
    )


def test_every_stage_of_an_iteration_has_injected_bugs_and_each_names_a_layout_that_exists() -> (
    None
):
    assert {bug.stage for bug in injected_bugs()} == set(STAGES)
    ids = [bug.id for bug in injected_bugs()]
    assert len(set(ids)) == len(ids) >= 36
    for bug in injected_bugs():
        target = f"train-{bug.strategy}-{bug.model}-{bug.devices}cpu"
        assert parse_target(target).flags is not None


def test_every_injected_bug_of_what_is_printed_names_a_file_and_a_layout_that_exist() -> None:
    bugs = injected_bugs("logged.yaml")
    assert {bug.file for bug in bugs} == {
        f"logged/{path.name}" for path in (FOLDER / "logged").glob("*.py")
    }
    for bug in bugs:
        assert parse_target(f"train-{bug.strategy}-{bug.model}-{bug.devices}cpu").flags is not None
        assert bug.stage == CaptureStage.LOG
        read_patch_file(str(bug.path))


def test_every_injected_bug_of_a_resumed_run_names_a_file_a_layout_and_a_stage_that_exist() -> None:
    entries = read_yaml(FOLDER / "resumed.yaml")
    files = {f"resumed/{path.name}" for path in (FOLDER / "resumed").glob("*.py")}
    assert {entry["file"] for entry in entries} == files
    for entry in entries:
        target = f"train-{entry['strategy']}-{entry['model']}-{entry.get('devices', 2)}cpu"
        assert parse_target(target).flags is not None
        assert entry["stage"] in STAGES
        read_patch_file(str(FOLDER / entry["file"]))


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


def test_module_that_turns_a_right_gradient_into_a_wrong_one_is_named() -> None:
    stage, layer = "activation gradients", "decoder.layers.1"
    right = [(stage, layer, "out.0#0", "a"), (stage, f"{layer}.fc1", "out.0#0", "a")]
    names = ((f"{layer}.fc1", "in.0#0"), (f"{layer}.norm", "out.0#0"), (layer, "in.0#0"))
    before = run_of(*right, *((stage, name, slot, "a") for name, slot in names))
    after = run_of(*right, *((stage, name, slot, "b") for name, slot in names))
    assert first_difference(before, after) == (stage, f"{layer}.fc1")


class Stub(Checker):
    """A check of runs that are given: strategies' traces, by whether they have the bug."""

    def __init__(self, of_layout: Sequence[Sequence[dict[str, object]]]) -> None:
        self.of_layout = of_layout
        self.ran: list[InjectedBug] = []

    def _run(self, bug: InjectedBug, injected: bool) -> list[dict[str, Any]]:
        self.ran.append(bug)
        return list(self.of_layout[injected if bug.devices > 1 else 0])


def stated(stage: str, module: str, trace: Sequence[str] = ()) -> InjectedBug:
    fields_of_bug = {
        "id": "a",
        "file": "a.py",
        "catalogue": "",
        "strategy": "tp2",
        "model": "gpt2-tiny",
    }
    return InjectedBug(
        **fields_of_bug,
        stage=stage,
        module=module,
        kind="",
        extra="--a",
        extra_b="--b",
        trace=trace,
    )


def test_trace_sees_only_the_value_of_a_norm_without_a_part() -> None:
    runs = [run_of(("norm", "grad_norm", "", norm)) for norm in ("1.0", "2.0")]
    assert Stub(runs).check(stated("norm", "embedding.weight")) == ("", "norm", "grad_norm")
    problem, *_ = Stub(runs).check(stated("weights", "embedding.weight"))
    assert problem == "expected weights, embedding.weight"


def test_injected_bug_may_differ_inside_its_module_only_where_the_trace_is_stated() -> None:
    runs = [run_of(("outputs", "decoder.layers.1.mlp.fc1", "0#0", value)) for value in "ab"]
    blamed = ("outputs", "decoder.layers.1.mlp.fc1")
    assert Stub(runs).check(stated("outputs", "decoder.layers.1.mlp")) == ("", *blamed)
    assert Stub(runs).check(stated("loss", "loss", blamed)) == ("", *blamed)
    outer = ("outputs", "decoder.layers.1.mlp")
    problem, *_ = Stub(runs).check(stated("outputs", "decoder.layers.1.mlp", outer))
    assert problem == "expected outputs, decoder.layers.1.mlp"


def test_run_of_one_rank_has_no_flags_of_the_layout() -> None:
    runs = [run_of(("loss", "loss", "0#0", value)) for value in "ab"]
    checker = Stub(runs)
    checker.check(stated("loss", "loss"))
    flags = [(bug.devices, (*bug.flags, *bug.own_flags)) for bug in checker.ran]
    assert flags == [(1, ("--a",)), (1, ("--a",)), (2, ("--a", "--b")), (2, ("--a", "--b"))]


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_injected_bug_leaves_one_rank_unchanged_and_acts_where_stated(
    tmp_path: Path, sample_prefix: Path
) -> None:
    command = (sys.executable, "-m", "tests.verify.injected_bugs.check")
    fields_of_bug = ("--data", str(sample_prefix), "--folder", str(tmp_path))
    done = subprocess.run(
        (*command, *fields_of_bug), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout

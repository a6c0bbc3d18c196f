"""A step of a plain PyTorch program: captured in ten lines, compared without launching anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import parakit
from parakit.artifacts.capture import Stage
from parakit.artifacts.verdict import Outcome, Verdict
from parakit.capturing.state import perturb
from parakit.config.files import ROOT
from parakit.experiments.captures import judge_captures
from tests.given import run

SLOW = pytest.mark.slow
"""Nine processes that import torch's distributed tensors."""


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of the program on one rank, under FSDP2 and TP, and with a fault in either."""
    folder = tmp_path_factory.mktemp("captures")
    command = (sys.executable, "-m", "tests.capturing.plain_program", str(folder))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def verdict(captures: Path, name: str) -> Verdict:
    return judge_captures(captures / "one", captures / name).verdict


@SLOW
@pytest.mark.parametrize("split", ["fsdp", "tp"])
def test_a_split_of_somebody_elses_program_holds(captures: Path, split: str) -> None:
    found = verdict(captures, split)
    assert (found.verdict, found.not_aligned) == (Outcome.HELD, ())
    assert found.compared == found.seen > 200


@SLOW
def test_gradients_that_are_averaged_twice_are_named(captures: Path) -> None:
    found = verdict(captures, "fsdp divided twice")
    assert (found.verdict, found.stage) == (Outcome.DIFFERS, Stage.REDUCED_GRADIENTS)
    assert (found.ranks, found.factor) == ((0, 1), pytest.approx(0.5))


@SLOW
def test_a_sum_over_tensor_parallel_ranks_that_is_missing_is_named_with_its_module(
    captures: Path,
) -> None:
    found = verdict(captures, "tp not reduced")
    assert (found.verdict, found.stage) == (Outcome.DIFFERS, Stage.OUTPUTS)
    assert found.module == "layers.1.feed_forward.w2"
    assert "sum" in str(found.kind)


@SLOW
def test_the_command_says_which_and_its_code_is_the_verdicts(
    captures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = {"COMPARE": str(captures / "one")}
    assert run("inspect", {"CKPT": str(captures / "tp"), **reference}) == 0
    assert capsys.readouterr().out.startswith("held: ")
    wrong = {"CKPT": str(captures / "tp not reduced"), **reference}
    assert run("inspect", wrong) == 1
    assert "layers.1.feed_forward.w2" in capsys.readouterr().out.splitlines()[0]
    assert run("inspect", {**wrong, "JSON": "1"}) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "differs"
    with pytest.raises(ValueError, match="name its reference, such as COMPARE="):
        run("inspect", {"CKPT": str(captures / "tp")})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_weight_is_off_by_its_own_types_rounding_error(dtype: torch.dtype) -> None:
    weight = torch.ones(64, dtype=dtype)
    perturb([("a name", weight)])
    found = set((weight.double() - 1).tolist())
    assert found == {sign * torch.finfo(dtype).eps for sign in (-1, 1)}


def test_groups_that_are_not_all_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    model = torch.nn.Linear(2, 2)
    steps = parakit.capture(model, torch.optim.SGD(model.parameters()), "nowhere")
    with pytest.raises(ValueError, match="2 ranks are not 1 data-parallel ones times 1 tensor-"):
        next(steps)

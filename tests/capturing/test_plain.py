"""Captures of a plain PyTorch program: ten lines capture a step, and the comparison launches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from parakit import capture
from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.capturing.state import perturb
from parakit.config.files import ROOT
from parakit.experiments.captures import judge_captures
from tests.given import run

SLOW = pytest.mark.slow
"""Mark of tests that need nine processes with torch's distributed tensors."""


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return captures of the program on a single rank, with FSDP2 and TP, and with a fault in either."""
    folder = tmp_path_factory.mktemp("captures")
    command = (sys.executable, "-m", "tests.capturing.plain_program", str(folder))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def verdict(captures: Path, name: str) -> VerifyVerdict:
    return judge_captures(captures / "one", captures / name).verdict


@SLOW
@pytest.mark.parametrize("split", ["fsdp", "tp"])
def test_captures_under_fsdp_and_tp_agree_with_one_rank(captures: Path, split: str) -> None:
    result = verdict(captures, split)
    assert (result.verdict, result.not_aligned) == (VerifyOutcome.HELD, ())
    assert result.compared == result.seen > 200


@SLOW
def test_comparison_finds_gradients_that_are_averaged_twice(captures: Path) -> None:
    result = verdict(captures, "fsdp divided twice")
    assert (result.verdict, result.stage) == (VerifyOutcome.DIFFERS, CaptureStage.REDUCED_GRADIENTS)
    assert (result.ranks, result.factor) == ((0, 1), pytest.approx(0.5))


@SLOW
def test_comparison_names_the_module_that_lacks_an_all_reduce(
    captures: Path,
) -> None:
    result = verdict(captures, "tp not reduced")
    assert (result.verdict, result.stage) == (VerifyOutcome.DIFFERS, CaptureStage.OUTPUTS)
    assert result.module == "layers.1.feed_forward.w2"
    assert "sum" in str(result.kind)


@SLOW
def test_inspect_compares_two_captures_and_exits_with_the_verdict(
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
def test_perturb_changes_each_element_by_the_epsilon_of_its_dtype(dtype: torch.dtype) -> None:
    weight = torch.ones(64, dtype=dtype)
    perturb([("a name", weight)])
    changes = set((weight.double() - 1).tolist())
    assert changes == {sign * torch.finfo(dtype).eps for sign in (-1, 1)}


def test_capture_refuses_groups_that_do_not_cover_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    model = torch.nn.Linear(2, 2)
    steps = capture(model, torch.optim.SGD(model.parameters()), "nowhere")
    with pytest.raises(ValueError, match="2 ranks are not 1 data-parallel ones times 1 tensor-"):
        next(steps)


def test_capture_of_a_model_without_tensor_arguments_says_what_it_needs(tmp_path: Path) -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, length: int) -> torch.Tensor:
            return self.weight.expand(length)

    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"called without a tensor; pass its inputs as arguments"
    steps = capture(model, optimizer, tmp_path)
    next(steps)
    with pytest.raises(ValueError, match=message):
        model(3)

"""Blind measurements have the kinds of the README's table, and `validate` shows their errors beside held-out ones."""

import json
from dataclasses import replace

import pytest

from parakit.planner.readings import command
from parakit.planner.readings.blind import group_blind_by_kind, predict_blind_measurements
from parakit.planner.readings.residual import Residuals
from parakit.planner.readings.summary import encode_kinds
from tests.program import run_plan as main


def test_blind_measurements_have_the_kinds_of_the_table() -> None:
    groups = group_blind_by_kind(predict_blind_measurements())
    assert {name: len(group.errors) for name, group in groups.items()} == {
        "B200, GB200 dense": 2,
        "GeForce RTX 4090": 1,
        "MI350X": 1,
        "H100 BF16 recipes": 3,
        "MLPerf, dense": 9,
        "MoE, H100": 11,
        "peak memory": 3,
    }


def test_blind_errors_stand_beside_those_held_out_by_source(
    published_residuals: Residuals,
) -> None:
    blind = group_blind_by_kind(predict_blind_measurements())
    kinds = encode_kinds(published_residuals, blind)
    assert kinds["MoE, H100"]["held_out_by_source"]["predicted"] == 23
    assert kinds["MoE, H100"]["blind"]["predicted"] == 11
    assert kinds["FSDP, dense"]["blind"] is None
    assert kinds["peak memory"]["held_out_by_source"] is None


def test_validate_of_the_kits_file_has_the_errors_of_blind_measurements(
    published_residuals: Residuals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    residuals = replace(published_residuals, predicted=published_residuals.predicted[::200])
    monkeypatch.setattr(command, "compute_residuals", lambda *_: residuals)
    main(["validate", "--json"])
    blind = group_blind_by_kind(predict_blind_measurements())
    assert json.loads(capsys.readouterr().out)["kinds"] == encode_kinds(residuals, blind)

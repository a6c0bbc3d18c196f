"""The score of an injected case: which answers count as right."""

from typing import Any

import pytest

from tests.hang.injected import module_is_right, table

MLP = {"kind": "skip", "module": "0:decoder.layers.1.mlp.linear_fc2", "frames": []}
UNKNOWN = {"kind": "skip", "module": "", "frames": ["/site/megatron/training/utils.py:9 print"]}


def scored_case(module: str | None, *fired: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "skip", "outcome": "exact", "fired": fired, "said": {"module": module}}


@pytest.mark.parametrize("named", [None, "", "mlp"])
def test_case_whose_fault_met_no_known_module_is_not_counted(named: str | None) -> None:
    case = scored_case(named, UNKNOWN)
    assert module_is_right(case) is None
    assert "| 0 of 0 |" in table([case | {"module": module_is_right(case)}], "kind")


@pytest.mark.parametrize(
    ("named", "is_right"), [("mlp", True), (None, False), ("", False), ("optimizer", False)]
)
def test_an_answer_without_a_module_is_wrong_where_the_fault_met_one(
    named: str | None, is_right: bool
) -> None:
    assert module_is_right(scored_case(named, MLP)) is is_right


def test_an_answer_for_two_places_is_counted_only_if_it_can_be_scored() -> None:
    """The module of a call in the other order may be unknown, and the answer may be that call's place."""
    assert module_is_right(scored_case("mlp", UNKNOWN, MLP)) is True
    assert module_is_right(scored_case("optimizer", UNKNOWN, MLP)) is False
    assert module_is_right(scored_case(None, UNKNOWN, MLP)) is None


def test_a_module_that_holds_the_one_of_the_fault_is_right() -> None:
    router = MLP | {"module": "0:decoder.layers.1.mlp.router"}
    assert module_is_right(scored_case("mlp", router)) is True
    assert module_is_right(scored_case("mlp.experts", router)) is False

"""Claims of the tutorial that its own rows contradict, with the arithmetic that shows each.

The claims are data (`examples/experiments/tutorial/claims.yaml`). An expression is arithmetic over figures of the rows,
such as `ms[446] / ms[443] - 1`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import msgspec

from parakit.config.files import read_yaml
from parakit.costs import total_parameters
from parakit.experiments.tutorial.rows import FOLDER, TutorialRow, find_row

_OPERATORS: Mapping[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _printed(value: float | None) -> float:
    """Return a printed figure.

    Raises:
        ValueError: The run went out of memory, so that nothing was printed.
    """
    if value is None:
        raise ValueError("The tutorial prints no figure of a run that went out of memory.")
    return value


FIGURES: Mapping[str, Callable[[TutorialRow], float]] = {
    "ms": lambda row: _printed(row.step_ms),
    "gb": lambda row: _printed(row.memory_gb),
    "layers": lambda row: row.loaded_model.shape.layers,
    "hidden": lambda row: row.loaded_model.shape.hidden,
    "billions": lambda row: total_parameters(row.loaded_model.shape) / 1e9,
    "batch": lambda row: row.global_batch,
    "gpus": lambda row: row.gpus,
    "tp": lambda row: row.parallelism.tensor,
    "pp": lambda row: row.parallelism.pipeline,
    "slots": lambda row: row.micro_batches + row.parallelism.pipeline - 1,
}
"""Figures of a row by their names in expressions. Slots are micro batches and the bubble, p - 1, of 1F1B."""

_FIGURE = re.compile(rf"\b({'|'.join(FIGURES)})\[(\d+)\]")


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim of the tutorial, what holds instead, and the arithmetic."""

    key: str
    chapter: str
    rows: list[int]
    """Ids of the runs that the claim is about."""
    says: str
    """The claim of the tutorial."""
    holds: str
    """The correction: a statement that is true in place of the claim."""
    checks: list[tuple[str, float, str]]
    """Expression, its value, and the unit. Empty if a source alone decides."""
    source: str = ""
    """File of Megatron at core_v0.14.0 that shows the mechanism; empty if arithmetic suffices."""


@dataclass(frozen=True)
class Check:
    """One piece of arithmetic of a claim."""

    expression: str
    value: float
    unit: str

    def compute(self) -> float:
        """Return the value of the expression over the rows of the tutorial."""
        return evaluate_expression(self.expression)

    def __str__(self) -> str:
        """The arithmetic with the figures of the rows, such as `665 / 680 - 1 = -0.02`."""

        def fill_in(match: re.Match[str]) -> str:
            return f"{FIGURES[match[1]](find_row(match[2])):,.6g}"

        text = _FIGURE.sub(fill_in, self.expression)
        separator = "" if self.unit.startswith("%") else " "
        return f"{text} = {self.value:,.6g}{separator}{self.unit}".replace(" * ", " × ")


@cache
def read_claims() -> tuple[Claim, ...]:
    """Return all claims, chapter by chapter."""
    return tuple(msgspec.convert(read_yaml(FOLDER / "claims.yaml"), list[Claim]))


def checks_of(claim: Claim) -> list[Check]:
    """Return the arithmetic of a claim."""
    return [Check(*check) for check in claim.checks]


def evaluate_expression(expression: str) -> float:
    """Return the value of arithmetic over figures of the rows.

    Raises:
        ValueError: The expression has something else than numbers, figures of rows, and + - * /.
    """
    return _evaluate(ast.parse(expression, mode="eval").body)


def _evaluate(node: ast.expr) -> float:
    """Return the value of one part of an expression.

    Raises:
        ValueError: The part is neither a number, nor a figure of a row, nor one of the four operations.
    """
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_evaluate(left), _evaluate(right))
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=row_id)) if (
            name in FIGURES
        ):
            return float(FIGURES[name](find_row(str(row_id))))
    raise ValueError(f"'{ast.unparse(node)}' is no number, figure of a row, or one of + - * /.")

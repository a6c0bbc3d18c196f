"""Compare what a strategy's log prints of each iteration with what its reference's log prints.

A captured loss is what the loss function gives to backward. What the loss function reports, and Megatron
prints, is another value: it may be wrong although every captured tensor agrees. Losses, norms and
counters of each line are therefore compared as they are printed. Two values may differ by one unit of
the last printed digit and, relative to the larger one, by the iteration's number times the rounding of
one iteration, as losses may in the report's parity (`src/parakit/reporting/analyse/parity.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.capture import SCORES, CapturedRank, CaptureStage
from parakit.artifacts.verdict import VerifyOutcome
from parakit.formatting.units import plural
from parakit.logs import Iteration, scrape_log
from parakit.reporting import (
    BACKEND_ROUNDING_PER_ITERATION,
    MAX_HALF_PRECISION_ITERATIONS,
    ROUNDING_PER_ITERATION,
    allowed_difference,
    last_digit_unit,
)
from parakit.verify import NORM, CaptureComparison, Judgement, name_factor

LOG_FILE = "log.txt"
"""Name of a run's log beside the tensors that the run has captured."""
_LOSS, _NORM = "lm loss", "grad norm"
_NORM_UNIT = 1e-3
"""One unit of the last digit of a norm, which Megatron prints with three decimals (`{:.3f}`)."""
_SAME_FACTOR = 1e-3
"""How far the ratios of several iterations may differ and still be one factor."""
_EXACT = {
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "consumed samples": "consumed_samples",
    "loss scale": "loss_scale",
    "number of skipped iterations": "skipped_iterations",
    "number of nan iterations": "nan_iterations",
}
"""Values that no rounding changes, by the field that holds them.

The number of zeros is none of them: a gradient that is all rounding is exactly zero in one layout and
not in another (tp2 of gpt2-tiny printed 0 zeros where baseline printed 1).
"""


@dataclass(frozen=True)
class Rounding:
    """The rounding of one iteration that the reference measured, relative to a value."""

    loss: float
    balancing_loss: float
    """Of auxiliary, z and MTP losses, which follow from routers' scores too."""
    norm: float | None
    """None where the optimizer computes no norm, which is then not compared."""
    last_iteration: int | None = None
    """The last iteration that is compared; None compares all."""


@dataclass(frozen=True)
class LoggedValue:
    """A value of one iteration that both logs print."""

    name: str
    """As Megatron prints the name."""
    iteration: int
    ours: float
    reference: float
    allowed: float
    """How far the two may differ."""
    show: Callable[[float], str]
    """Writes a value as Megatron prints it."""

    @property
    def difference(self) -> float:
        """Absolute difference of the two values."""
        return abs(self.ours - self.reference)

    @property
    def differs(self) -> bool:
        """Return True if the difference is more than rounding; a NaN differs."""
        return not self.difference <= self.allowed

    @property
    def sentence(self) -> str:
        """Both values and what follows from them."""
        reporter = "the loss function" if self.name.endswith("loss") else "Megatron"
        return (
            f"the log prints {self.name} {self.show(self.ours)} at iteration {self.iteration}, the "
            f"reference's log {self.show(self.reference)}; every captured tensor agrees, so {reporter} "
            "reports a wrong value"
        )


def compare_logs(
    judgement: Judgement, ours: Path, reference: Path, rank: CapturedRank, *, same_backend: bool
) -> Judgement:
    """Return a judgement with the logs' values compared. It becomes `differs` if a value differs.

    Args:
        judgement: Any judgement; one whose tensors did not hold is returned as it is.
        ours: The strategy's log.
        reference: The reference's log.
        rank: Any rank of the strategy, for its dtype and its degrees.
        same_backend: Whether Megatron trained the reference, too.

    Raises:
        OSError: A log cannot be read.
    """
    if judgement.verdict.verdict is not VerifyOutcome.HELD or judgement.compared is None:
        return judgement
    rounding = measure_rounding(judgement.compared, rank.dtype, same_backend=same_backend)
    lines, other_lines = scrape_log(ours).iterations, scrape_log(reference).iterations
    values = list(list_logged_values(lines, other_lines, rounding))
    wrong = [value for value in values if value.differs]
    if not wrong:
        held = replace(judgement.verdict, logged=_describe_held(values))
        return replace(judgement, verdict=held)
    first = wrong[0]
    of_first = [value for value in values if value.name == first.name]
    kind, factor = _find_kind(of_first, rank)
    also = dict.fromkeys(f"{CaptureStage.LOG}, {value.name}" for value in wrong)
    verdict = replace(
        judgement.verdict,
        verdict=VerifyOutcome.DIFFERS,
        stage=CaptureStage.LOG,
        module=first.name,
        tensor=f"iteration {first.iteration}",
        ranks=(rank.world_size - 1,),  # The last rank prints.
        kind=kind,
        factor=factor,
        error=first.difference / abs(first.reference) if first.reference else float("inf"),
        tolerance=first.allowed / abs(first.reference) if first.reference else 0.0,
        iteration=first.iteration,
        logged=first.sentence,
        also=tuple(name for name in also if name != f"{CaptureStage.LOG}, {first.name}"),
    )
    return replace(judgement, verdict=verdict)


def measure_rounding(compared: CaptureComparison, dtype: str, *, same_backend: bool) -> Rounding:
    """Return the rounding of one iteration: the larger of the parity's and the tensors' tolerances."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    rate = max(
        ROUNDING_PER_ITERATION[short], 0.0 if same_backend else BACKEND_ROUNDING_PER_ITERATION
    )
    losses, scores, norms = [rate], [0.0], []
    for comparison in compared.comparisons:
        stage, name, slot = comparison.key
        if stage is CaptureStage.LOSS:
            losses.append(comparison.tolerance)
        elif stage is CaptureStage.OUTPUTS and (name.endswith(".router") or slot == SCORES):
            scores.append(comparison.tolerance)
        elif comparison.key == NORM:
            norms.append(comparison.tolerance)
    return Rounding(
        loss=max(losses),
        balancing_loss=max(*losses, *scores),
        norm=max(norms, default=None),
        last_iteration=None if short == "fp32" else MAX_HALF_PRECISION_ITERATIONS,
    )


def list_logged_values(
    ours: Sequence[Iteration], reference: Sequence[Iteration], rounding: Rounding
) -> Iterator[LoggedValue]:
    """Yield the values that both logs print for an iteration: losses first, then norms, then counters.

    A loss is left out if only one of the two lines is a mean over two iterations.
    """
    references = {line.iteration: line for line in reference}
    pairs = [(line, references[line.iteration]) for line in ours if line.iteration in references]
    pairs = [
        pair for pair in pairs if pair[0].iteration <= (rounding.last_iteration or float("inf"))
    ]
    alike = [pair for pair in pairs if pair[0].averaged == pair[1].averaged]
    names = dict.fromkeys(name for pair in alike for name in _read_losses(pair[0]))
    for name in names:
        relative = rounding.loss if name == _LOSS else rounding.balancing_loss
        for line, other in alike:
            mine, its = _read_losses(line).get(name), _read_losses(other).get(name)
            if mine is not None and its is not None:
                unit = last_digit_unit(max(abs(mine), abs(its)))
                yield _make_value(name, line.iteration, (mine, its), unit, relative, _format_loss)
    for line, other in pairs if rounding.norm is not None else ():
        if line.grad_norm is not None and other.grad_norm is not None:
            norms = (line.grad_norm, other.grad_norm)
            relative = rounding.norm or 0.0
            yield _make_value(_NORM, line.iteration, norms, _NORM_UNIT, relative, _format_norm)
    for name, field in _EXACT.items():
        for line, other in pairs:
            mine, its = getattr(line, field), getattr(other, field)
            if mine is not None and its is not None:
                show = _format_loss if field == "learning_rate" else _format_count
                yield LoggedValue(name, line.iteration, mine, its, 0.0, show)


def _read_losses(line: Iteration) -> dict[str, float]:
    """Return the losses of a line by name, the model's own first."""
    model_loss = {} if line.lm_loss is None else {_LOSS: line.lm_loss}
    further_losses = line.extra_metrics or {}
    return model_loss | {
        name: value for name, value in further_losses.items() if name.endswith("loss")
    }


def _make_value(
    name: str,
    iteration: int,
    values: tuple[float, float],
    unit: float,
    rounding: float,
    show: Callable[[float], str],
) -> LoggedValue:
    allowed = allowed_difference(unit, rounding * iteration, max(map(abs, values)))
    return LoggedValue(name, iteration, *values, allowed=allowed, show=show)


def _format_loss(value: float) -> str:
    return f"{value:.6E}"


def _format_norm(value: float) -> str:
    return f"{value:.3f}"


def _format_count(value: float) -> str:
    return f"{value:.15g}"


def _find_kind(values: Sequence[LoggedValue], rank: CapturedRank) -> tuple[str, float | None]:
    """Return the kind of error of a wrong value, and the factor by which the value is wrong.

    The factor is None if the iterations do not share one.
    """
    if all(value.ours == 0 for value in values):
        return "zero", 0.0
    ratios = [value.ours / value.reference for value in values if value.reference]
    factor = ratios[0] if ratios else 0.0
    same = all(abs(ratio - factor) <= _SAME_FACTOR * abs(factor) for ratio in ratios)
    if not factor or not same:
        return "another value", None
    return f"factor {name_factor(factor, rank)}", factor


def _describe_held(values: Sequence[LoggedValue]) -> str | None:
    """Return a sentence without its full stop that names the printed values that agree; None if there are none.

    Args:
        values: Logged values of which none differs. The sentence leaves out the names in `_EXACT`, such as the
            learning rate.
    """
    rounded = [value for value in values if value.name not in _EXACT]
    if not rounded:
        return None
    *first_names, last = dict.fromkeys(value.name for value in rounded)
    names = f"{', '.join(first_names)} and {last}" if first_names else last
    iterations = plural(len({value.iteration for value in rounded}), "iteration")
    same = all(value.ours == value.reference for value in rounded)
    how = "are printed the same" if same else "are printed the same but for rounding"
    return f"{names} of {iterations} {how}"

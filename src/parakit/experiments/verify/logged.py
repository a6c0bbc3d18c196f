"""Compare what a strategy's log prints of each iteration with what its reference's log prints.

A captured loss is what the loss function gives to backward. What the loss function reports, and Megatron prints, is
another value: it may be wrong although every captured tensor agrees. Losses, norms and counters of each line are
therefore compared as they are printed. Two values may differ by one unit of the last printed digit, and by rounding.
Relative to the larger value, the rounding is the iteration's number times the rounding of one iteration. The report's
parity allows losses as much (`src/parakit/reporting/analyse/parity.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.capture import SCORES, CapturedRank, CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
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

LinePair = tuple[Iteration, Iteration]
"""The lines of one iteration in the strategy's log and in the reference's log."""

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
"""Values that no rounding changes: the field of `Iteration` by the name that Megatron prints.

The number of zeros is left out, because rounding changes it: a gradient that is only rounding is exactly zero under
one strategy and not under another (tp2 of gpt2-tiny printed 0 zeros where baseline printed 1).
"""


@dataclass(frozen=True)
class Rounding:
    """The rounding of one iteration that the reference measured, relative to a value."""

    loss: float
    """Rounding of the model's own loss."""
    balancing_loss: float
    """Rounding of auxiliary, z and MTP losses, which follow from routers' scores too."""
    norm: float | None
    """Rounding of the gradient norm; None if the optimizer computes no norm, so that none is compared."""
    last_iteration: int | None = None
    """The last iteration that is compared; None compares all."""


@dataclass(frozen=True)
class LoggedValue:
    """A value of one iteration that both logs print."""

    name: str
    """Name of the value as Megatron prints it."""
    iteration: int
    ours: float
    """Value in the strategy's log."""
    reference: float
    """Value in the reference's log."""
    allowed: float
    """Largest absolute difference of the two values that rounding explains."""
    show: Callable[[float], str]
    """Writes a value as Megatron prints it."""

    @property
    def difference(self) -> float:
        """Absolute difference of the two values."""
        return abs(self.ours - self.reference)

    @property
    def differs(self) -> bool:
        """True if the difference is more than rounding explains, or if a value is NaN."""
        return not self.difference <= self.allowed

    @property
    def sentence(self) -> str:
        """Sentence with both values, and who reports the wrong one. It has no full stop."""
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
        judgement: Any judgement; a judgement whose tensors did not hold is returned unchanged.
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
    lines, reference_lines = scrape_log(ours).iterations, scrape_log(reference).iterations
    values = list(list_logged_values(lines, reference_lines, rounding))
    wrong = [value for value in values if value.differs]
    if wrong:
        verdict = _blame_first_value(judgement.verdict, values, wrong, rank)
    else:
        verdict = replace(judgement.verdict, logged=_describe_held(values))
    return replace(judgement, verdict=verdict)


def _blame_first_value(
    verdict: VerifyVerdict,
    values: Sequence[LoggedValue],
    wrong: Sequence[LoggedValue],
    rank: CapturedRank,
) -> VerifyVerdict:
    """Return the verdict changed to `differs`, about the first of the `wrong` logged values.

    Other wrong values are named in the verdict's `also`.
    """
    first = wrong[0]
    same_name = [value for value in values if value.name == first.name]
    kind, factor = _find_kind(same_name, rank)
    other_names = dict.fromkeys(value.name for value in wrong if value.name != first.name)
    if first.reference:
        error = first.difference / abs(first.reference)
        tolerance = first.allowed / abs(first.reference)
    else:
        error, tolerance = float("inf"), 0.0
    return replace(
        verdict,
        verdict=VerifyOutcome.DIFFERS,
        stage=CaptureStage.LOG,
        module=first.name,
        tensor=f"iteration {first.iteration}",
        ranks=(rank.world_size - 1,),  # The last rank prints.
        kind=kind,
        factor=factor,
        error=error,
        tolerance=tolerance,
        iteration=first.iteration,
        logged=first.sentence,
        also=tuple(f"{CaptureStage.LOG}, {name}" for name in other_names),
    )


def measure_rounding(compared: CaptureComparison, dtype: str, *, same_backend: bool) -> Rounding:
    """Return the rounding of one iteration, relative to a value: what the report's parity allows, or more.

    The rounding is larger if tensors of the capture have larger tolerances. Losses get the tolerance of the captured
    loss, if it is larger. Balancing losses may also get the tolerance of a router. The norm gets the tolerance of the
    gradient norm.

    Args:
        compared: The compared tensors, with the tolerances that the reference measured.
        dtype: Name of the strategy's dtype in PyTorch, such as `bfloat16`.
        same_backend: Whether Megatron trained the reference, too.
    """
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    parity_rounding = ROUNDING_PER_ITERATION[short]
    if not same_backend:
        parity_rounding = max(parity_rounding, BACKEND_ROUNDING_PER_ITERATION)
    loss_tolerances, router_tolerances, norm_tolerances = [parity_rounding], [0.0], []
    for comparison in compared.comparisons:
        stage, name, slot = comparison.key
        is_router = name.endswith(".router") or slot == SCORES
        if stage is CaptureStage.LOSS:
            loss_tolerances.append(comparison.tolerance)
        elif stage is CaptureStage.OUTPUTS and is_router:
            router_tolerances.append(comparison.tolerance)
        elif comparison.key == NORM:
            norm_tolerances.append(comparison.tolerance)
    return Rounding(
        loss=max(loss_tolerances),
        balancing_loss=max(*loss_tolerances, *router_tolerances),
        norm=max(norm_tolerances, default=None),
        last_iteration=None if short == "fp32" else MAX_HALF_PRECISION_ITERATIONS,
    )


def list_logged_values(
    ours: Sequence[Iteration], reference: Sequence[Iteration], rounding: Rounding
) -> Iterator[LoggedValue]:
    """Yield the values that both logs print for an iteration: losses first, then norms, then counters.

    Iterations after `rounding.last_iteration` are left out, and so are the norms if `rounding.norm` is None. A loss is
    left out if only one of the two lines is a mean over two iterations.
    """
    references = {line.iteration: line for line in reference}
    pairs = []
    for line in ours:
        is_compared = rounding.last_iteration is None or line.iteration <= rounding.last_iteration
        if is_compared and line.iteration in references:
            pairs.append((line, references[line.iteration]))
    yield from _list_losses(pairs, rounding)
    if rounding.norm is not None:
        yield from _list_norms(pairs, rounding.norm)
    yield from _list_counters(pairs)


def _list_losses(pairs: Sequence[LinePair], rounding: Rounding) -> Iterator[LoggedValue]:
    """Yield the losses that both lines of a pair print, loss by loss. The names are those of the strategy's lines."""
    # A mean over two iterations is another value than the loss of one.
    comparable = [(line, other) for line, other in pairs if line.averaged == other.averaged]
    names: dict[str, None] = {}  # The keys are a set in the order of the log.
    for line, _ in comparable:
        names |= dict.fromkeys(_read_losses(line))
    for name in names:
        relative = rounding.loss if name == _LOSS else rounding.balancing_loss
        for line, other in comparable:
            loss, reference_loss = _read_losses(line).get(name), _read_losses(other).get(name)
            if loss is None or reference_loss is None:
                continue
            losses = (loss, reference_loss)
            unit = last_digit_unit(max(abs(loss), abs(reference_loss)))
            yield _make_value(name, line.iteration, losses, unit, relative, show=_format_loss)


def _list_norms(pairs: Sequence[LinePair], rounding: float) -> Iterator[LoggedValue]:
    """Yield the gradient norms that both lines of a pair print."""
    for line, other in pairs:
        if line.grad_norm is not None and other.grad_norm is not None:
            norms = (line.grad_norm, other.grad_norm)
            yield _make_value(_NORM, line.iteration, norms, _NORM_UNIT, rounding, _format_norm)


def _list_counters(pairs: Sequence[LinePair]) -> Iterator[LoggedValue]:
    """Yield the values of `_EXACT` that both lines of a pair print, value by value. They may not differ at all."""
    for name, field in _EXACT.items():
        show = _format_loss if field == "learning_rate" else _format_count
        for line, other in pairs:
            value, reference_value = getattr(line, field), getattr(other, field)
            if value is not None and reference_value is not None:
                yield LoggedValue(
                    name, line.iteration, value, reference_value, allowed=0.0, show=show
                )


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
    """Return a logged value with the difference that rounding explains.

    Args:
        name: Name of the value as Megatron prints it.
        iteration: Number of the iteration, with which the rounding grows.
        values: The strategy's value and the reference's.
        unit: One unit of the last printed digit.
        rounding: Rounding of one iteration, relative to the larger value.
        show: Writes a value as Megatron prints it.
    """
    value, reference = values
    largest = max(abs(value), abs(reference))
    allowed = allowed_difference(unit, rounding * iteration, largest)
    return LoggedValue(name, iteration, value, reference, allowed=allowed, show=show)


def _format_loss(value: float) -> str:
    return f"{value:.6E}"


def _format_norm(value: float) -> str:
    return f"{value:.3f}"


def _format_count(value: float) -> str:
    return f"{value:.15g}"


def _find_kind(values: Sequence[LoggedValue], rank: CapturedRank) -> tuple[str, float | None]:
    """Return the kind of error of a wrong value, and the factor by which the value is wrong.

    The kind is `zero`, `factor` with the name of the factor, or `another value`. The factor is None if the
    iterations do not share one, and if every reference value is 0.

    Args:
        values: The values of one name, in all iterations.
        rank: Any rank of the strategy, whose degrees name the factor.
    """
    if all(value.ours == 0 for value in values):
        return "zero", 0.0
    ratios = [value.ours / value.reference for value in values if value.reference]
    if not ratios or ratios[0] == 0:
        return "another value", None
    factor = ratios[0]
    largest_deviation = _SAME_FACTOR * abs(factor)
    if all(abs(ratio - factor) <= largest_deviation for ratio in ratios):
        return f"factor {name_factor(factor, rank)}", factor
    return "another value", None


def _describe_held(values: Sequence[LoggedValue]) -> str | None:
    """Return a sentence without its full stop that names the printed values that agree; None if there are none.

    Args:
        values: Logged values that do not differ. The sentence leaves out the names in `_EXACT`, such as the learning
            rate.
    """
    rounded = [value for value in values if value.name not in _EXACT]
    if not rounded:
        return None
    names = list(dict.fromkeys(value.name for value in rounded))
    enumeration = names[-1]
    if len(names) > 1:
        enumeration = f"{', '.join(names[:-1])} and {names[-1]}"
    num_iterations = len({value.iteration for value in rounded})
    how = "are printed the same"
    if any(value.ours != value.reference for value in rounded):
        how += " but for rounding"
    return f"{enumeration} of {plural(num_iterations, 'iteration')} {how}"

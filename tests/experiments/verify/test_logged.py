"""Printed values of two logs are compared if all tensors of a verification match."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.experiments.verify.logged import (
    Rounding,
    compare_logs,
    list_logged_values,
    measure_rounding,
)
from parakit.logs.iterations import Iteration
from parakit.verify.comparison import CaptureComparison, TensorComparison
from parakit.verify.verdict import Judgement
from tests.verify import captures

LINE = (
    " [2026-11-28 15:54:55.529916] iteration {n:8d}/     500 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): 1238.8 | learning rate: {rate:.6E} | global batch size:     6 | "
    "lm loss: {loss:.6E} |{more} loss scale: 1.0 | grad norm: {norm:.3f} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
LOSSES, NORMS = (10.84542, 10.84629, 10.82214), (1.825, 1.753, 1.711)
FP32 = Rounding(loss=1e-6, balancing_loss=1e-6, norm=1e-5)
Log = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    def write(
        name: str, losses: Any = LOSSES, norms: Any = NORMS, more: str = "", rate: float = 2e-4
    ) -> Path:
        lines = (
            LINE.format(n=n, samples=6 * n, rate=n * rate, loss=loss, norm=norm, more=more)
            for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
        )
        path = tmp_path / name
        path.write_text("".join(lines))
        return path

    return write


def held(rounding: float = 1e-6) -> Judgement:
    keys = ((CaptureStage.LOSS, "loss", "sum"), (CaptureStage.NORM, "grad_norm", "returned"))
    compared = CaptureComparison(
        tuple(TensorComparison(key, rounding, 0.0) for key in keys), (), 2, 2
    )
    return Judgement(VerifyVerdict(VerifyOutcome.HELD), compared)


def judged(ours: Path, reference: Path, **degrees: Any) -> VerifyVerdict:
    rank = captures.rank(world_size=2, **degrees)
    return compare_logs(held(), ours, reference, rank, same_backend=True).verdict


def test_doubled_printed_loss_differs_although_all_tensors_match(log: Log) -> None:
    doubled = log("ours", [2 * loss for loss in LOSSES])
    verdict = judged(doubled, log("reference"), data=(0, 2))
    assert (verdict.verdict, verdict.exit_code) == (VerifyOutcome.DIFFERS, 1)
    assert (verdict.stage, verdict.module, verdict.tensor) == (
        CaptureStage.LOG,
        "lm loss",
        "iteration 1",
    )
    assert (verdict.kind, verdict.iteration, verdict.ranks) == ("factor ×DP", 1, (1,))
    assert verdict.factor == pytest.approx(2)
    assert verdict.error == pytest.approx(1)
    assert verdict.line == (
        "log, lm loss (iteration 1): factor ×DP; the log prints lm loss 2.169084E+01 at iteration 1, "
        "the reference's log 1.084542E+01; every captured tensor agrees, so the loss function reports "
        "a wrong value"
    )


def test_passing_verdict_lists_the_compared_values(log: Log) -> None:
    verdict = judged(log("ours"), log("reference"))
    assert verdict.verdict is VerifyOutcome.HELD
    assert verdict.logged == "lm loss and grad norm of 3 iterations are printed the same"
    near = log("ours", (10.84543, *LOSSES[1:]))
    assert str(judged(near, log("reference")).logged).endswith(
        "are printed the same but for rounding"
    )


def test_difference_beyond_rounding_is_reported_with_its_iteration(log: Log) -> None:
    verdict = judged(log("ours", (*LOSSES[:2], LOSSES[2] + 2e-4)), log("reference"))
    assert (verdict.module, verdict.iteration) == ("lm loss", 3)


def test_wrong_printed_norm_and_learning_rate_are_named(log: Log) -> None:
    wrong = log("ours", norms=[2 * norm for norm in NORMS], rate=3e-4)
    verdict = judged(wrong, log("reference"), data=(0, 2))
    assert (verdict.module, verdict.kind) == ("grad norm", "factor ×DP")
    assert verdict.also == ("log, learning rate",)
    assert "so Megatron reports a wrong value" in str(verdict.logged)


def test_auxiliary_losses_are_compared(log: Log) -> None:
    doubled, reference = (
        log(name, more=f" load_balancing_loss: {value:.6E} |")
        for name, value in (("ours", 2.0), ("reference", 1.0))
    )
    assert judged(doubled, reference).module == "load_balancing_loss"


def test_failed_verdict_is_unchanged_by_logs(tmp_path: Path) -> None:
    nothing = Judgement(VerifyVerdict(VerifyOutcome.NOT_COMPARABLE))
    missing = tmp_path / "none"
    rank = captures.rank()
    assert compare_logs(nothing, missing, missing, rank, same_backend=True) is nothing


def test_a_mean_over_two_iterations_is_compared_with_no_other_loss() -> None:
    alone = Iteration(2, lm_loss=10.8, grad_norm=1.0)
    mean = Iteration(2, lm_loss=10.9, grad_norm=1.0, averaged=True)
    assert [value.name for value in list_logged_values([mean], [alone], FP32)] == ["grad norm"]
    assert [value.name for value in list_logged_values([mean], [mean], FP32)] == [
        "lm loss",
        "grad norm",
    ]


def test_a_value_that_one_log_does_not_print_is_not_compared() -> None:
    without, with_it = (
        Iteration(1, lm_loss=0.0),
        Iteration(1, lm_loss=0.0, grad_norm=2.0),
    )
    (loss,) = list_logged_values([without], [with_it], FP32)
    assert (loss.name, loss.differs) == (
        "lm loss",
        False,
    )  # Megatron prints 0.0 for a skipped iteration.


def test_the_number_of_zeros_depends_on_rounding_and_is_not_compared() -> None:
    without, with_one = (Iteration(1, lm_loss=6.9, num_zeros=count) for count in (0, 1))
    (loss,) = list_logged_values([without], [with_one], FP32)
    assert loss.name == "lm loss"


def test_rounding_is_that_of_tensors_and_at_least_that_of_parity() -> None:
    comparisons = (
        TensorComparison((CaptureStage.LOSS, "loss", "sum"), 2e-6, 0.0),
        TensorComparison(
            (CaptureStage.OUTPUTS, "decoder.layers.0.mlp.router", "output.0"), 3e-3, 0.0
        ),
    )
    compared = cast(CaptureComparison, SimpleNamespace(comparisons=comparisons))
    fp32 = measure_rounding(compared, "float32", same_backend=True)
    assert (fp32.loss, fp32.balancing_loss, fp32.norm) == (2e-6, 3e-3, None)
    assert fp32.last_iteration is None
    half = measure_rounding(compared, "bfloat16", same_backend=True)
    assert (half.loss, half.last_iteration) == (6e-6, 50)

import math

import pytest

from parakit.experiments import load
from parakit.experiments.load import load_experiment
from parakit.experiments.tables.moe import RoutedParity, compare_losses, render
from parakit.launch.options import Options
from parakit.reporting.analyse.entry import Entry
from tests.reporting.factory import report_row


def run(
    backend: str, milliseconds: float = 100, seed: int = 1, dtype: str = "fp32", **changes: object
) -> Entry:
    values: dict[str, object] = {
        "optimizer": "AdamW",
        "activation": "",
        "wall_seconds": 20,
        "losses": {1: 10.0 + seed, 3: 9.0},
        "routing": {1: ((300, 500),), 2: ((400, 400),), 3: ((200, 600),)},
        "validation_loss": 8.0 + seed / 10,
        "accuracy": 0.25 if backend == "native" else None,
        "spec": {"seed": seed, "dtype": dtype},
    }
    return report_row("dp2", milliseconds, backend=backend, **{**values, **changes})  # type: ignore[arg-type]


def row(text: str, backend: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {backend} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_scores_are_means_over_seeds_with_their_range() -> None:
    runs = [run(backend, seed=seed) for seed in (1, 3) for backend in ("megatron", "native")]
    text = render("moe-tiny", runs, ())
    cells = row(text, "native")
    assert cells[4].startswith("10.00 \\[")
    assert cells[6] == "8.2000 (8.1000 to 8.3000)"
    assert cells[7] == "25.00% (25.00% to 25.00%)"
    assert cells[8].startswith(f"{(math.exp(8.1) + math.exp(8.3)) / 2:.0f} (")
    assert row(text, "megatron")[7] == "–"


def test_native_is_called_faster_only_beyond_the_noise() -> None:
    faster = render("m", [run("megatron", 120), run("native", 100)], ())
    assert "dp2 under AdamW: native is faster than Megatron, ×0.833 the time" in faster
    alike = render("m", [run("megatron"), run("native")], ())
    assert "native is within noise of Megatron" in alike


def test_losses_are_compared_with_those_of_the_same_seed() -> None:
    reference = [run("megatron", seed=seed) for seed in (1, 2)]
    same = [run("native", seed=seed) for seed in (2, 1)]
    assert compare_losses(same, reference) == RoutedParity(0, 4, None)
    off = [run("native", losses={1: 11.0, 3: 9.009})]
    assert compare_losses(off, reference).difference == pytest.approx(1e-3)
    assert not compare_losses([run("native", seed=9)], reference).held


def test_losses_after_routing_that_differs_in_iteration_0_are_not_compared() -> None:
    losses = {0: 11.0, 1: 10.0}
    reference = [run("megatron", losses=losses, routing={0: ((3000, 5000),)})]
    other = [run("native", losses=losses, routing={0: ((3001, 4999),)})]
    assert compare_losses(other, reference) == RoutedParity(0, 0, 0)


def test_losses_are_compared_until_a_token_is_routed_to_another_expert() -> None:
    routing = {1: ((300, 500),), 2: ((400, 400),), 3: ((199, 601),)}
    diverged = run("native", losses={1: 11.0, 3: 8.0}, routing=routing)
    assert compare_losses([diverged], [run("megatron")]) == RoutedParity(0, 1, 3)
    text = render("m", [run("megatron"), diverged], ())
    assert "until a token took another expert (iteration 3 at the earliest" in text
    assert row(text, "native")[9] == "0.0e+00 to iteration 2"


def test_many_changed_expert_choices_excuse_a_loss_difference_only_in_16_bits() -> None:
    routing = {1: ((300, 500),), 2: ((400, 400),), 3: ((191, 609),)}
    wrong, in_16_bits = (
        run("native", dtype=dtype, losses={1: 11.0, 3: 8.0}, routing=routing)
        for dtype in ("fp32", "bf16")
    )
    assert not compare_losses([wrong], [run("megatron")]).held
    assert compare_losses([in_16_bits], [run("megatron")]) == RoutedParity(0, 1, 3)


def test_parity_error_above_1e_5_is_reported_as_broken() -> None:
    close = run("native", losses={1: 11.0 * (1 + 0.9e-5)})
    assert "parity held" in render("m", [run("megatron"), close], ())
    apart = run("native", losses={1: 11.0 * (1 + 1.2e-5)})
    assert "parity is broken" in render("m", [run("megatron"), apart], ())


def test_other_optimizer_gives_a_score_difference_instead_of_broken_parity() -> None:
    adamw = [run(backend, seed=seed) for seed in (1, 2) for backend in ("megatron", "native")]
    muon, close = (
        run("native", optimizer="Muon + AdamW", losses={1: 5.0}, validation_loss=loss)
        for loss in (7.0, 8.15)
    )
    text = render("m", [*adamw, muon], ())
    assert "parity held" in text
    assert (
        "Muon's validation loss differs from AdamW's by -1.1500. That is beyond the scatter of AdamW's "
        "runs (0.1000)." in text
    )
    assert "within the scatter" in render("m", [*adamw, close], ())


def test_published_values_are_listed_with_their_known_errors() -> None:
    text = render("m", [run("megatron"), run("native")], ("A note.",))
    assert "| Native PyTorch | 4.80 | 208 s | 0.0703 | 98.74% | 1.07 |" in text
    assert "| Megatron-LM | 4.46 | 224 s | 0.0759 | 98.64% | 1.08 |" in text
    assert "stride-1 windows split at random" in text
    assert "- A note." in text


def test_a_run_that_failed_is_counted_as_missing() -> None:
    failed = run("native", seed=2, status="crashed", samples_ms=(), validation_loss=None, losses={})
    cells = row(render("m", [run("megatron"), run("native"), failed], ()), "native")
    assert cells[10] == "1 of 2"


def test_tiny_model_is_evaluated_at_the_end_on_separate_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "visible_gpus", tuple)
    defaults = Options(extra=("--adam-eps", "1e-7"))
    options = load_experiment("moe", defaults, "moe-tiny").options
    assert (options.micro_batch_size, options.global_batch_size) == (2, 8)
    assert options.extra[:4] == ("--eval-interval", "30", "--eval-iters", "8")
    assert options.extra[4:] == ("--adam-eps", "1e-7")
    assert options.data == "owt-ds/sample-unique_text_document"
    assert load_experiment("moe", Options(data="own")).options.data == "own"
    assert (options.dropout, options.shared_start) == (0, True)


def test_every_repeat_has_its_own_seed_and_at_least_two_repeats_are_needed() -> None:
    for repeats, seeds in ((1, [1234, 1235]), (3, [1234, 1235, 1236])):
        cells = load_experiment("moe", Options(repeats=repeats)).cells
        cell_seeds = [cell.job.options.seed for cell in cells]
        assert list(dict.fromkeys(cell_seeds)) == seeds == sorted(set(cell_seeds))
        assert {cell.repeats for cell in cells} == {1}


def test_each_activation_is_compared_with_the_first_run_of_the_same_activation() -> None:
    gated = [run(backend, activation="SwiGLU") for backend in ("megatron", "native")]
    plain = run("native", activation="SiLU", losses={1: 99.0, 3: 98.0})
    text = render("m", [*gated, plain], ())
    assert "parity held" in text
    assert [line.split(" | ")[3] for line in text.splitlines() if " | AdamW | " in line] == [
        "SwiGLU",
        "SwiGLU",
        "SiLU",
    ]


def test_blueberry_has_gated_experts_on_both_sides_and_the_published_ones_natively() -> None:
    blueberry = load_experiment("blueberry", Options())
    extras = [cell.job.options.extra for cell in blueberry.cells]
    # Flags of all cells come before the flags of a single cell.
    assert {extra[-1] for extra in extras} == {"1024", "--silu"}
    assert [("--swiglu" in extra, "--silu" in extra) for extra in extras] == (
        [(True, False)] * 5 + [(False, True)] * 2
    )
    assert {cell.job.options.backend for cell in blueberry.cells[5:]} == {"native"}

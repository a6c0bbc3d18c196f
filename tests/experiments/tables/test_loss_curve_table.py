from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_patches.fusions import NAMES
from parakit.config.errors import LaunchError
from parakit.experiments.load import load_experiment
from parakit.experiments.tables.loss_curve import WINDOW, compare_curves, mean_curve_distance
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.train import compose_job
from tests.given import run

ANY = Options(data="owt-ds/any", fused=("adamw",))


def _launches(options: Options, target: str = "") -> list[Launch]:
    trained = parse_target(target) if target else None
    experiment = load_experiment("loss_curve", options, trained=trained)
    return [compose_job(cell.job) for cell in experiment.cells]


def test_distance_of_curves_is_computed_from_window_means() -> None:
    level = dict.fromkeys(range(1, 5), 2.0)
    wave = {1: 3.0, 2: 1.0, 3: 3.0, 4: 1.0}
    assert mean_curve_distance(level, wave, 1) == 1.0
    assert mean_curve_distance(level, wave, 2) == 0.0
    assert mean_curve_distance(level, dict.fromkeys(level, 2.5), 2) == 0.5


def test_distance_uses_only_iterations_of_both_runs() -> None:
    assert mean_curve_distance({1: 9.0, 2: 1.0, 3: 2.0}, {2: 1.0, 3: 3.0}, 1) == 0.5
    with pytest.raises(LaunchError, match="share 2 iterations and a window has 3"):
        mean_curve_distance({1: 9.0, 2: 1.0, 3: 2.0}, {2: 1.0, 3: 3.0}, 3)


@pytest.mark.parametrize(("patched_by", "code"), [(0.25, 0), (0.5, 1)])
def test_verdict_compares_distance_of_patches_with_distance_of_seeds(
    patched_by: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = (dict.fromkeys(range(WINDOW), 2.0 + by) for by in (0, 0.25, patched_by))
    study = SimpleNamespace(
        refuse_failed=lambda: None,
        rows=[SimpleNamespace(losses=curve) for curve in curves],
        results=[SimpleNamespace(launch=launch) for launch in _launches(ANY)],
        console=Console(),
    )
    assert compare_curves(study) == code  # type: ignore[arg-type]
    assert f"{patched_by:.2g} with FUSED=adamw, 0.25 with SEED=1235" in capsys.readouterr().out


def test_three_runs_differ_only_in_seed_or_patches() -> None:
    alone, seed, patched = _launches(ANY)
    assert (alone.spec.seed, seed.spec.seed, patched.spec.seed) == (1234, 1235, 1234)
    assert patched.environment == alone.environment | {"KIT_FUSED": "adamw"}
    assert patched.flags == alone.flags
    assert {alone.iterations, patched.iterations} == {200}
    assert alone.spec.dropout == 0.1
    assert alone.initial_checkpoint is None


def test_all_cpu_patches_are_enabled_without_a_fused_variable() -> None:
    *_, patched = _launches(Options(data="owt-ds/any"))
    on_cpu = [name for name in NAMES if not name.startswith("attention_")]
    assert patched.environment["KIT_FUSED"] == ",".join(on_cpu)


def test_on_a_gpu_the_model_keeps_its_batch_and_dropout() -> None:
    options = options_from_texts({"DATA": "owt-ds/any", "RUNTIME": "host"})
    alone, _, patched = _launches(options, "train-baseline-gpt2-large-1gpu")
    assert alone.spec.dropout == 0.1
    assert alone.spec.batch.micro_batch_size == 32
    assert "--no-gradient-accumulation-fusion" in alone.flags
    assert "attention_flash" not in patched.environment["KIT_FUSED"]


def test_a_target_that_cannot_train_here_is_refused() -> None:
    with pytest.raises(LaunchError):
        run("bench NAME=loss-curve", {"ARGS": "--target train-what", "DATA": "owt-ds/any"})

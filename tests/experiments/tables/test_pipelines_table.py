from dataclasses import replace

from parakit.config.model import load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, parse_strategy
from parakit.costs.tensors import rank_parameters
from parakit.experiments.load import load_experiment
from parakit.experiments.tables.pipelines import describe_wrong_losses, judge_claims, render
from parakit.launch.options import Options
from parakit.reporting.analyse.entry import Entry
from tests.experiments.tables.test_zero_and_backends_tables import cells, measured

ITERATIONS = range(1, 6)
BYTES = 4


def trained(strategy: str, *, backend: str = "native", factor: float = 1.0) -> Entry:
    """Return a run whose stages hold the weight versions of their schedule, with `factor` times baseline's losses."""
    devices = 1 if strategy == "baseline" else 2
    split = parse_strategy(strategy, devices)
    spec = spec_from_model(load_model("gpt2-tiny"), split, Batch(2, 8))
    spec = replace(spec, dtype="fp32", shape=replace(spec.shape, tied_embeddings=False))
    held = tuple(
        rank_parameters(spec, stage).total * BYTES * split.weight_versions(stage)
        for stage in range(split.pipeline)
    )
    losses = {iteration: factor * (10 - iteration / 10) for iteration in ITERATIONS}
    bubble = 0.5 if split.pipeline > 1 else None
    fields = {"dtype": "fp32", "shape": spec.shape}
    return measured(
        backend, strategy, 100, spec=fields, weight_bytes=held, losses=losses, bubble=bubble
    )


RUNS = [
    trained("baseline", backend="megatron"),
    trained("pp2", backend="megatron"),
    trained("pipedream-flush2"),
    trained("pipedream2bw", factor=1.01),
    trained("pipedream2", factor=1.02),
]


def test_row_lists_weight_versions_and_gradient_delays_of_stages() -> None:
    text = render("gpt2-tiny", RUNS)
    assert cells(text, "native pipedream2")[5:7] == ["1 0", "26.6 MB (×2) 13.3 MB (×1)"]
    assert cells(text, "native pipedream2bw")[6] == "26.6 MB (×2) 26.6 MB (×2)"
    assert cells(text, "native pipedream-flush2")[3].endswith("held")
    assert cells(text, "megatron pp2")[7] == "50.0% (25.0%)"


def test_only_flushing_pipelines_must_match_the_reference_losses() -> None:
    assert describe_wrong_losses(RUNS) == []
    (sentence,) = describe_wrong_losses([*RUNS, trained("gpipe2", factor=1.01)])
    assert sentence.startswith("native gpipe2 flushes, and its losses differ from baseline's")


def test_claims_of_the_write_up_are_judged_by_measurements() -> None:
    versions, asynchronous, memory, bubble = judge_claims(RUNS)
    assert asynchronous.startswith("“Asynchronous execution”: confirmed")
    assert "here 1 and 0. The losses differ from baseline's by up to 2.0e-02" in asynchronous
    assert versions.startswith("“Weight versioning”: confirmed")
    assert memory.startswith("“Memory usage higher”: contradicted"), "all peaks are equal here"
    assert "cannot be judged" in bubble


def test_every_pipeline_makes_an_update_of_the_same_samples() -> None:
    experiment = load_experiment("pipelines", Options())
    jobs = [cell.job for cell in experiment.cells]
    assert {job.options.global_batch_size for job in jobs} == {8}
    (pipedream,) = [job for job in jobs if job.strategy == "pipedream2"]
    assert pipedream.options.micro_batch_size == 8

"""Comparison of practitioners' strategies with the result of a search for the same model, devices and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parakit.config.model import load_model
from parakit.config.recompute import Recompute
from parakit.config.strategy import Batch, Parallelism
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import duration
from parakit.planner.advice import describe_saving
from parakit.planner.expert_options import DEEP_EP_FLAGS, NO_EXPERT_OPTIONS, ExpertOptions
from parakit.planner.one_strategy import time_strategy
from parakit.planner.options import PlanOptions
from parakit.planner.readings.published import kit_runs
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.residual import (
    Residual,
    compute_residual,
    use_constants_without_source,
)
from parakit.planner.readings.table import PublishedMeasurement, read_measurements
from parakit.planner.request import build_request
from parakit.planner.search import Candidate, Request, evaluate_configuration, search_configurations

Question = tuple[str, int, str, str, int]
QUESTIONS: tuple[Question, ...] = (
    *(("llama3-8b", 8, "H100", "BF16", 0), ("llama3-8b", 8, "H100", "FP8", 0)),
    *(("llama3-70b", 64, "H100", "BF16", 0), ("llama3-70b", 64, "H100", "FP8", 0)),
    *(("llama3.1-405b", 16384, "H100", "BF16", 8192), ("deepseek-v3", 2048, "H800", "FP8", 0)),
    *(("qwen3-235b-a22b", 128, "GB200", "MXFP8", 0), ("gpt-oss-120b", 64, "H100", "BF16", 0)),
    *(("llama3-8b", 32, "B200", "FP8", 131072), ("llama3.1-405b", 128, "GB200", "FP8", 0)),
    *(("mixtral-8x7b", 16, "GH200", "BF16", 0), ("mixtral-8x7b", 64, "GB200", "FP8", 0)),
    ("gpt2-large", 2, "H200", "FP16", 0),
    ("gpt3-xl-1.3b", 16, "V100-16GB", "FP16", 0),
    *(("llama3-8b", 64, "H100", "BF16", 0), ("nemotron4-340b", 256, "H100", "BF16", 0)),
    *(("llama3.1-405b", 1024, "H100", "BF16", 0), ("llama3.1-405b", 1024, "H100", "FP8", 0)),
    *(("qwen3-30b-a3b", 16, "H100", "BF16", 4096), ("qwen3-235b-a22b", 256, "H100", "BF16", 4096)),
    *(("deepseek-v3", 256, "GB200", "BF16", 0), ("deepseek-v3", 256, "B200", "MXFP8", 0)),
    *(("kimi-k2", 256, "GB300", "MXFP8", 0), ("mixtral-8x22b", 256, "B200", "FP8", 0)),
    ("gpt-175b", 512, "A100-80GB", "FP16", 0),
)
"""Model, devices and precision as they are published; where it takes, the length
of a sequence."""


@dataclass(frozen=True)
class Recipe:
    """Published recipe whose time nobody published, for sequences of 4,096 tokens in bf16 with micro batch 1."""

    model: str
    devices: int
    gpu: str
    global_batch: int
    strategy: str
    source: str
    dispatcher_flags: tuple[str, ...] = ()
    """Flags of the token dispatcher, which the searched strategies have too."""
    stage_flags: tuple[str, ...] = ()
    """Flags that place the layers on stages."""


RECIPES = (
    Recipe(
        *("qwen3-235b-a22b", 128, "h100", 1024, "sp4cp2pp16ep8-etp1"),
        "Megatron-Bridge@067f987d recipes/qwen/h100/qwen3_moe.py, one of its replicas",
        DEEP_EP_FLAGS,
        (
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ),
    ),
    Recipe(
        *("mixtral-8x22b", 128, "h100", 256, "sp2pp8ep8-zero1"),
        "Megatron-LM@d98e8a64 mixtral_8x22b_tp2pp8ep8vpp1_release",
    ),
    Recipe(
        *("kimi-k2", 512, "h200", 4096, "sp2pp16ep32-etp1-zero1"),
        "Megatron-Bridge@067f987d recipes/kimi/h100/kimi_k2.py, for 512 H100",
        stage_flags=("--decoder-last-pipeline-num-layers", "1"),
    ),
)
"""Qwen3's recipe has 256 GPUs, and its degrees need 128. It leaves the batch to the user."""


@dataclass(frozen=True)
class Comparison:
    """A published strategy with its prediction, and the strategy that a search finds for the same question."""

    question: str
    """Model, devices and what else the published run states."""
    source: str
    chosen: Candidate
    searched: Candidate
    published_seconds: float | None = None
    """Measured seconds per iteration of the published strategy; None if nobody published them."""

    @property
    def ratio(self) -> float:
        """Ratio of the predicted times: the searched strategy over the published one."""
        return self.searched.seconds.total / self.chosen.seconds.total

    @property
    def why(self) -> str:
        """Text on what the searched strategy saves."""
        if self.searched.spec.parallelism == self.chosen.spec.parallelism:
            return "the same"
        if self.searched.is_tied(self.chosen):
            return "tied"
        if self.ratio > 1:
            return "theirs is outside of what is searched"
        return f"ours {describe_saving(self.searched, self.chosen)}"


def recipes_table() -> str:
    """Return Markdown with a row per recipe."""
    return _comparison_table("recipe for", "recipe", tuple(map(answer_recipe, RECIPES)))


def practitioners_table() -> str:
    """Return Markdown with a row per question."""
    return _comparison_table("what was asked", "source", tuple(map(answer, QUESTIONS)))


def _comparison_table(question: str, source: str, rows: tuple[Comparison, ...]) -> str:
    """Return Markdown with a row per comparison. The time of the published run is left out if no row has one.

    Args:
        question: Name of the first column.
        source: Name of the last column.
        rows: The comparisons.
    """
    seconds = Column[Comparison]("took", lambda row: row.published_seconds, duration)
    has_seconds = any(row.published_seconds is not None for row in rows)
    columns = (
        Column[Comparison](question, lambda row: row.question, right=False),
        Column[Comparison]("published", lambda row: describe_layout(row.chosen), right=False),
        *([seconds] if has_seconds else []),
        Column[Comparison]("predicted", lambda row: row.chosen.seconds.total, duration),
        Column[Comparison]("the search's", lambda row: describe_layout(row.searched), right=False),
        Column[Comparison]("its time over theirs", lambda row: row.ratio, lambda r: f"{r:.2f}"),
        Column[Comparison]("why", lambda row: row.why, right=False),
        Column[Comparison](source, lambda row: row.source, right=False),
    )
    return markdown_table(Table(columns, rows))


def answer_recipe(recipe: Recipe) -> Comparison:
    """Compare a recipe with the strategy that `make plan` finds for the same devices, batch and dispatcher."""
    options = PlanOptions(
        recipe.model,
        recipe.gpu,
        gpus=recipe.devices,
        global_batch=recipe.global_batch,
        seq=4096,
        extra=" ".join(recipe.dispatcher_flags) or None,
    )
    searched = search_configurations(build_request(options)).winner
    assert searched is not None
    extra = " ".join((*recipe.dispatcher_flags, *recipe.stage_flags)) or None
    named = replace(options, strategy=recipe.strategy, micro_batch=1, extra=extra)
    question = (
        f"{recipe.model}, {recipe.devices} {recipe.gpu.upper()}, {recipe.global_batch:,} samples"
    )
    return Comparison(question, recipe.source, time_strategy(named).candidate, searched)


def describe_layout(candidate: Candidate) -> str:
    """Return a text with the strategy, micro batch, recomputation and options for experts of a candidate."""
    spec = candidate.spec
    recomputed = "" if spec.recompute == Recompute() else f", recomputes {spec.recompute}"
    used = candidate.expert_options
    options = ", DeepEP" if used.deep_ep else ""
    options += ", overlapped experts" if used.overlap else ""
    return (
        f"{candidate.strategy}, {spec.batch.micro_batch_size} per micro batch{recomputed}{options}"
    )


def answer(question: Question) -> Comparison:
    """Compare the fastest published run of a question with the search result for the same batch and execution."""
    published = min(_predicted(question), key=_seconds_a_token)
    spec, cluster = published.measured_run.spec, published.measured_run.cluster
    plain = replace(
        spec,
        parallelism=Parallelism(),
        batch=Batch(1, spec.batch.global_batch_size),
        recompute=Recompute(),
    )
    model = replace(load_model("gpt2-large"), name=published.measurement.model, shape=spec.shape)
    request = Request(
        model,
        cluster,
        spec.batch.global_batch_size,
        plain,
        expert_options=ExpertOptions(deep_ep=True, overlap=True),
    )
    searched = search_configurations(request).winner
    assert searched is not None
    chosen = evaluate_configuration(replace(request, expert_options=NO_EXPERT_OPTIONS), spec)
    measurement, length = published.measurement, chosen.spec.shape.seq_length
    text = f"{measurement.model}, {measurement.gpus:,} {measurement.gpu}, {measurement.dtype}, {length:,} tokens"
    return Comparison(text, measurement.source, chosen, searched, published.published_seconds)


def _predicted(question: Question) -> list[Residual]:
    residuals, own_runs = [], [(run.measurement, run) for run in kit_runs()]
    *asked, length = question
    for measurement, known in (
        *((measurement, None) for measurement in read_measurements()[0]),
        *own_runs,
    ):
        stated = [measurement.model, measurement.gpus, measurement.gpu, measurement.dtype.upper()]
        if stated != asked or (length and measurement.seq != length) or not _is_timed(measurement):
            continue
        try:
            residuals.append(
                compute_residual(
                    use_constants_without_source(
                        known or convert_measurement(measurement), measurement.source
                    )
                )
            )
        except RefusedError:
            continue
    return residuals


def _is_timed(measurement: PublishedMeasurement) -> bool:
    return measurement.metric in ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu")


def _seconds_a_token(item: Residual) -> float:
    return item.published_seconds / item.measured_run.spec.tokens_per_iteration

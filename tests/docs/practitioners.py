"""What practitioners chose beside what a search finds for the same model, devices and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.plan.advice import saved
from tools.plan.readings.reading_to_spec import RefusedError, express
from tools.plan.readings.residual import Residual, left_out, residual
from tools.plan.readings.table import Reading, read_readings
from tools.plan.search import Candidate, Request, evaluate, search
from tools.spec.model import load_model
from tools.spec.recompute import Recompute
from tools.spec.strategy import Batch, Parallelism
from tools.text.table import Column, Table, markdown_table
from tools.text.units import duration

QUESTIONS = (
    *(("llama3-8b", 8, "H100", "BF16"), ("llama3-8b", 8, "H100", "FP8")),
    *(("llama3-70b", 64, "H100", "BF16"), ("llama3-70b", 64, "H100", "FP8")),
    *(("llama3.1-405b", 512, "H100", "BF16"), ("llama3.1-405b", 1024, "H100", "FP8")),
    ("llama3.1-405b", 256, "GB200", "FP8"),
    *(("deepseek-v3", 1024, "H100", "bf16"), ("deepseek-v3", 256, "GB200", "MXFP8")),
    *(("qwen3-235b-a22b", 256, "H100", "BF16"), ("qwen3-235b-a22b", 256, "GB200", "MXFP8")),
    *(("gpt-oss-120b", 64, "H100", "BF16"), ("gpt-oss-120b", 64, "GB200", "MXFP8")),
    ("mixtral-8x7b", 64, "GB200", "FP8"),
    ("gpt-176b", 384, "A100-80GB", "BF16"),
)
"""Model, devices and precision as they are published."""
SAME = 0.02
"""Times that are closer are called the same."""


@dataclass(frozen=True)
class Answer:
    """The published layout that trains fastest, and the search's."""

    published: Residual
    theirs: Candidate
    ours: Candidate

    @property
    def question(self) -> str:
        """Model, devices, precision and sequence."""
        reading = self.published.reading
        length = self.theirs.spec.shape.seq_length
        return (
            f"{reading.model}, {reading.gpus:,} {reading.gpu}, {reading.dtype}, {length:,} tokens"
        )

    @property
    def ratio(self) -> float:
        """Predicted time of ours over theirs."""
        return self.ours.seconds.total / self.theirs.seconds.total

    @property
    def why(self) -> str:
        """What ours saves."""
        if self.ours.spec.parallelism == self.theirs.spec.parallelism:
            return "the same"
        if self.ratio > 1 - SAME:
            return "tied" if self.ratio < 1 + SAME else "theirs is outside of what is searched"
        return f"ours {saved(self.ours, self.theirs)}"


def practitioners_table() -> str:
    """Markdown: a row a question."""
    columns = (
        Column[Answer]("what was asked", lambda row: row.question, right=False),
        Column[Answer]("published", lambda row: layout(row.theirs), right=False),
        Column[Answer]("took", lambda row: row.published.published_seconds, duration),
        Column[Answer]("predicted", lambda row: row.theirs.seconds.total, duration),
        Column[Answer]("the search's", lambda row: layout(row.ours), right=False),
        Column[Answer]("its time over theirs", lambda row: row.ratio, lambda r: f"{r:.2f}"),
        Column[Answer]("why", lambda row: row.why, right=False),
        Column[Answer]("source", lambda row: row.published.reading.source, right=False),
    )
    return markdown_table(Table(columns, tuple(map(answer, QUESTIONS))))


def layout(candidate: Candidate) -> str:
    """Strategy, micro batch and recomputation."""
    spec = candidate.spec
    again = "" if spec.recompute == Recompute() else f", recomputes {spec.recompute}"
    return f"{candidate.strategy}, {spec.batch.micro_batch_size} a micro batch{again}"


def answer(question: tuple[str, int, str, str]) -> Answer:
    """The fastest published run of a question, and the search with its batch and its execution."""
    published = min(_predicted(question), key=_seconds_a_token)
    spec, cluster = published.expressed.spec, published.expressed.cluster
    plain = replace(
        spec,
        parallelism=Parallelism(),
        batch=Batch(1, spec.batch.global_batch_size),
        recompute=Recompute(),
    )
    model = replace(load_model("gpt2-large"), name=published.reading.model, shape=spec.shape)
    request = Request(model, cluster, spec.batch.global_batch_size, plain)
    ours = search(request).winner
    assert ours is not None
    return Answer(published, evaluate(request, spec), ours)


def _predicted(question: tuple[str, int, str, str]) -> list[Residual]:
    found = []
    for reading in read_readings()[0]:
        asked = (reading.model, reading.gpus, reading.gpu, reading.dtype) == question
        if asked and _is_timed(reading):
            try:
                found.append(residual(left_out(express(reading), reading.source)))
            except RefusedError:
                continue
    return found


def _is_timed(reading: Reading) -> bool:
    return reading.metric in ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu")


def _seconds_a_token(item: Residual) -> float:
    return item.published_seconds / item.expressed.spec.tokens_per_iteration

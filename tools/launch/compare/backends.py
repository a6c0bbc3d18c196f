"""Megatron, plain PyTorch and DeepSpeed in one table, against forward and backward alone."""

from __future__ import annotations

from collections.abc import Sequence

from tools.launch.compare.measured import DASH, Measured
from tools.launch.compare.zero import interval, megabytes, number, ratio
from tools.report.analyse.statistics import Comparison, Verdict, compare
from tools.spec.run import Backend
from tools.text.table import markdown_rows

RUNS = (
    (Backend.MEGATRON, "dp2"),
    (Backend.NATIVE, "dp2"),
    (Backend.DEEPSPEED, "dp2"),
    (Backend.MEGATRON, "zero3"),
    (Backend.NATIVE, "fsdp2"),
    (Backend.DEEPSPEED, "zero3"),
    (Backend.BARE, "dp2"),
)
"""Replicated, then fully sharded, then the bare passes that overhead is counted from."""

_HEADER = [
    "Backend",
    "Strategy",
    "Status",
    "Parity",
    "ms/iteration [95%]",
    "Passes alone",
    "Overhead",
]
_HEADER += ["Against bare", "Samples/s", "Sent/iteration", "Peak memory", "Loss", "What ran"]


def render(model: str, runs: Sequence[Measured], missing: Sequence[str] = ()) -> str:
    """Markdown: the table, what it says of each backend, and what was left out."""
    bare = next((run for run in runs if run.backend == Backend.BARE), None)
    return "\n\n".join(
        (
            f"# Backends compared: {model}",
            "All start from the same weights and read the same batches in the same order; parity says "
            "whether they print the same losses. Overhead is what an iteration takes over its own "
            "forward and backward, counted without the communication inside them. `bare` is plain "
            "PyTorch's forward and backward on the same ranks at once, without communication, clipping "
            "or update; who is faster than bare has faster kernels.",
            "In write-up 000 the two backends had different optimizers and neither sharded anything, "
            'so its "native is 7.6% faster" says nothing of either.',
            markdown_rows(_HEADER, [_row(run, bare) for run in runs]),
            "\n".join(f"- {sentence}" for sentence in (*verdicts(runs), *missing)),
        )
    )


def verdicts(runs: Sequence[Measured]) -> list[str]:
    """What may be said of each pair that shards alike: faster, slower, or within noise."""
    found = {(run.backend, run.strategy): run for run in runs}
    sentences = []
    for reference, other in (
        (("megatron", "dp2"), ("native", "dp2")),
        (("megatron", "dp2"), ("deepspeed", "dp2")),
        (("megatron", "zero3"), ("native", "fsdp2")),
        (("megatron", "zero3"), ("deepspeed", "zero3")),
    ):
        one, two = found.get(reference), found.get(other)
        if one and two and one.estimate and two.estimate:
            names = f"{two.backend} {two.strategy} against {one.backend} {one.strategy}"
            sentences.append(f"{names}: {_verdict(compare(one.estimate, two.estimate))}")
    return sentences


def _verdict(result: Comparison) -> str:
    speed = f"{abs(1 - 1 / result.ratio):.1%} {'faster' if result.ratio < 1 else 'slower'}"
    if result.verdict in (Verdict.FASTER, Verdict.SLOWER):
        return f"{speed} on this machine."
    return f"{speed}, which is {result.verdict}."


def _signed_percent(share: float | None) -> str:
    return DASH if share is None else f"{share:+.1%}"


def _row(run: Measured, bare: Measured | None) -> list[str]:
    over = ratio(run.milliseconds, bare.milliseconds if bare else None)
    return [
        run.backend,
        run.strategy,
        run.status,
        "" if run is bare else run.parity,
        interval(run),
        DASH if run.pass_seconds is None else f"{run.pass_seconds * 1000:.1f} ms",
        _signed_percent(run.overhead),
        _signed_percent(None if over is None or run is bare else over - 1),
        number(run.samples_per_second),
        megabytes(run.sent_bytes),
        megabytes(run.peak_bytes),
        DASH if run.final_loss is None or run is bare else f"{run.final_loss:.6f}",
        run.implementation,
    ]

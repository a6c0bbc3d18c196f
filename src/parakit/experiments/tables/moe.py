"""The Blueberry experiment's question, its setup corrected: Megatron or plain PyTorch on experts.

Both train the same mixture of experts from the same weights on the same batches under the same
optimizer, sharded alike; Muon, which only one of the published paths had, is beside it. Repeats have
seeds of their own: other weights, another order of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.measurements import find_routing_divergence
from parakit.artifacts.run import Status
from parakit.config.files import ROOT
from parakit.config.flags import Flags
from parakit.config.published import Correction, Figure, load_published
from parakit.data import Split, open_dataset, split_bounds
from parakit.experiments.engine import Study, make_comparison
from parakit.experiments.tables import format_bullets, format_page, format_sentence
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import DASH, bracketed, known, rounded
from parakit.logs import Run
from parakit.reporting import (
    Entry,
    Estimate,
    compare_times,
    describe_conditions,
    estimate_pooled_runs,
)

SOURCE = "000"
LOSS_TOLERANCE = 1e-5
"""Relative, of a loss, against the first kind of the same optimizer and seed."""

SetupKey = tuple[str, str, str, str]
"""Backend, strategy, optimizer, activation."""
SeedRuns = Sequence[Entry]
"""Rows of one kind, a seed each."""


@dataclass(frozen=True)
class RoutedParity:
    """How far losses are apart while the same tokens go to the same experts.

    A router decides: where two experts are all but equal, rounding decides which, and from that
    iteration on two runs train on other sums. Megatron's own strategies diverge in the same way.
    """

    difference: float
    """Largest, relative."""
    compared: int
    """Iterations, over all seeds."""
    diverged: int | None
    """The first iteration in which a token took another expert; None if none did."""

    @property
    def held(self) -> bool:
        """Nothing compared holds nothing."""
        return self.compared > 0 and self.difference <= LOSS_TOLERANCE


def render(model: str, runs: SeedRuns, notes: Sequence[str]) -> str:
    """Markdown; runs of one kind share a row, with the range over their seeds."""
    kinds, found = _group_by_setup(runs), compare_setups(runs)
    diverged = min((each.diverged for each in found if each.diverged is not None), default=None)
    said = [
        *_describe_speeds(kinds),
        format_sentence(
            "moe",
            "parity",
            held="parity held" if all(each.held for each in found) else "parity is broken",
            worst=max(each.difference for each in found),
            until=""
            if diverged is None
            else f" {format_sentence('moe', 'diverged', diverged=diverged)}",
            tolerance=LOSS_TOLERANCE,
        ),
        *_describe_optimizers(runs),
        *notes,
        *describe_conditions(_collect_runs(runs)),
    ]
    rows = tuple(map(_SetupRow, kinds.values(), found))
    published = load_published()
    wrong = tuple(each for each in published.corrections if each.source == SOURCE)
    figures = markdown_table(Table(_PUBLISHED_COLUMNS, published.figures_of(SOURCE)))
    return format_page(
        "moe",
        model=model,
        table=markdown_table(Table(_COLUMNS, rows)),
        said=format_bullets(said),
        published=f"{figures}\n\n{markdown_table(Table(_CORRECTION_COLUMNS, wrong))}",
    )


def compare_setups(runs: SeedRuns) -> list[RoutedParity]:
    """Of every kind against the first of its optimizer and activation."""
    groups = _group_by_setup(runs).values()
    firsts: dict[tuple[str, str], SeedRuns] = {}
    for group in groups:
        firsts.setdefault(_get_optimizer(group), group)
    return [compare_losses(group, firsts[_get_optimizer(group)]) for group in groups]


def compare_losses(group: SeedRuns, reference: SeedRuns) -> RoutedParity:
    """A kind's runs against the reference's of the same seeds."""
    theirs = {_get_seed(row): row for row in reference}
    differences, diverged = list[float](), list[int]()
    for one in group:
        two = theirs.get(_get_seed(one))
        if two is None:
            continue
        first = find_routing_divergence(
            one.routing, two.routing, one.spec.dtype if one.spec else ""
        )
        diverged += [] if first is None else [first]
        common = [i for i in one.losses.keys() & two.losses.keys() if i < (first or math.inf)]
        differences += [abs(one.losses[i] - two.losses[i]) / abs(two.losses[i]) for i in common]
    worst = max(differences, default=0.0)
    return RoutedParity(worst, len(differences), min(diverged, default=None))


def is_evaluated(row: Entry) -> bool:
    """It ended well and was evaluated."""
    return row.status == Status.OK and row.validation_loss is not None


class _SetupRow(NamedTuple):
    group: SeedRuns
    parity: RoutedParity


def _format_run_count(row: _SetupRow) -> str:
    well = sum(map(is_evaluated, row.group))
    return f"{well} of {len(row.group)}" if well < len(row.group) else str(well)


def _format_loss_difference(row: _SetupRow) -> str:
    diverged = row.parity.diverged
    until = f" to iteration {diverged - 1}" if diverged else ""
    return f"{row.parity.difference:.1e}{until}"


def _get_seed(row: Entry) -> int:
    return row.spec.seed if row.spec else 0


def _get_optimizer(group: SeedRuns) -> tuple[str, str]:
    return group[0].optimizer, group[0].activation


def _collect_runs(group: SeedRuns) -> list[Run]:
    return [run for row in group for run in row.configuration.runs]


def _group_by_setup(rows: SeedRuns) -> dict[SetupKey, list[Entry]]:
    kinds: dict[SetupKey, list[Entry]] = {}
    for row in rows:
        kind = row.backend, row.strategy, row.optimizer, row.activation
        kinds.setdefault(kind, []).append(row)
    return kinds


def _format_rate(found: Estimate | None) -> str:
    """Iterations a second."""
    if found is None:
        return DASH
    # A low end of 0 ms is no end of a rate.
    if not found.low or not found.high:
        return rounded(1000 / found.median)
    return bracketed(1000 / found.median, 1000 / found.high, 1000 / found.low, ".2f")


def _format_range(group: SeedRuns, value: Callable[[Entry], float | None], shape: str) -> str:
    found = [one for run in group if (one := value(run)) is not None]
    if not found:
        return DASH
    text = shape.format(mean(found))
    if len(found) == 1:
        return text
    return f"{text} ({shape.format(min(found))} to {shape.format(max(found))})"


def _compute_perplexity(row: Entry) -> float | None:
    loss = row.validation_loss
    return None if loss is None else math.exp(min(20, loss))


def _describe_speeds(kinds: Mapping[SetupKey, SeedRuns]) -> list[str]:
    """Native against Megatron, for each strategy and optimizer that both have."""
    sentences = []
    for (backend, strategy, optimizer, activation), group in kinds.items():
        other = kinds.get(("native", strategy, optimizer, activation))
        one, two = (
            estimate_pooled_runs(_collect_runs(group)),
            estimate_pooled_runs(_collect_runs(other or ())),
        )
        if backend != "megatron" or one is None or two is None:
            continue
        result = compare_times(one, two)
        span = f", {result.span}" if result.span else ""
        verdict = result.verdict.against("Megatron")
        parts = {"strategy": strategy, "optimizer": optimizer, "verdict": verdict, "span": span}
        sentences.append(format_sentence("moe", "speed", ratio=result.ratio, **parts))
    return sentences


def _describe_optimizers(runs: SeedRuns) -> list[str]:
    """Whether the optimizers differ by more than seeds and strategies do."""
    ours, theirs = (
        [
            loss
            for run in runs
            if run.optimizer == name and (loss := run.validation_loss) is not None
        ]
        for name in ("AdamW", "Muon + AdamW")
    )
    if not ours or not theirs:
        return []
    beyond = max(theirs) < min(ours) or max(ours) < min(theirs)
    apart, scatter = mean(theirs) - mean(ours), max(ours) - min(ours)
    where = "beyond" if beyond else "within"
    return [format_sentence("moe", "scores", apart=apart, where=where, scatter=scatter)]


def _make_range_column(
    name: str, value: Callable[[Entry], float | None], shape: str
) -> Column[_SetupRow]:
    return Column(name, lambda row: _format_range(row.group, value, shape))


_COLUMNS: tuple[Column[_SetupRow], ...] = (
    Column("Backend", lambda row: row.group[0].backend),
    Column("Strategy", lambda row: row.group[0].strategy),
    Column("Optimizer", lambda row: row.group[0].optimizer),
    Column("Activation", lambda row: row.group[0].activation or DASH),
    Column(
        "Iterations/s [95%]",
        lambda row: estimate_pooled_runs(_collect_runs(row.group)),
        _format_rate,
    ),
    _make_range_column("Run, start included", lambda run: run.run.status.wall_seconds, "{:.0f} s"),
    _make_range_column("Validation loss", lambda run: run.validation_loss, "{:.4f}"),
    _make_range_column("Accuracy", lambda run: run.accuracy, "{:.2%}"),
    _make_range_column("Perplexity", _compute_perplexity, "{:.0f}"),
    Column("Losses against the first", _format_loss_difference),
    Column("Runs", _format_run_count),
)
_PUBLISHED_COLUMNS: tuple[Column[Figure], ...] = (
    Column("Path", lambda figure: figure.published_as),
    Column("Micro batches/s", lambda figure: figure.micro_batches_per_second, known("{:.2f}")),
    Column("Time", lambda figure: figure.wall_seconds, known("{:.0f} s")),
    Column("Validation loss", lambda figure: figure.final_loss, known("{:.4f}")),
    Column("Accuracy", lambda figure: figure.validation_accuracy, known("{:.2%}")),
    Column("Perplexity", lambda figure: figure.perplexity, known("{:.2f}")),
    Column("But", lambda figure: figure.caution),
)
_CORRECTION_COLUMNS = (
    Column[Correction]("It says", lambda found: found.says),
    Column[Correction]("Right", lambda found: found.right),
)


_HASH_BASE = 0x9E3779B97F4A7C15


def count_shared_windows(prefix: Path, split: str, seq_length: int) -> dict[str, int]:
    """How many windows of the validation documents are, at any offset, in the training documents too.

    A window of `length` tokens is a sample and its last label.
    Windows are compared by a 64-bit hash: different hashes prove that windows differ, so none shared
    is certain; a few shared may be one too many, once in 2^64 pairs.

    Raises:
        DatasetError: The data set is not there or not whole.
    """
    length = seq_length + 1
    training, validation = (
        _read_split_tokens(prefix, split, part) for part in (Split.TRAINING, Split.VALIDATION)
    )
    ours = hash_windows(validation, length)
    shared = np.isin(ours, hash_windows(training, length))
    return {"windows": len(ours), "shared": int(shared.sum()), "length": length}


def hash_windows(tokens: NDArray[Any], length: int) -> NDArray[np.uint64]:
    """A polynomial hash, modulo 2^64, of each window of so many tokens."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.uint64)
    powers = _compute_powers(_HASH_BASE, len(tokens) + 1)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((tokens.astype(np.uint64) + 1) * powers[:-1])))
    # Each window's sum is divided by the power it starts with, so that its place does not count.
    inverse = _compute_powers(pow(_HASH_BASE, -1, 2**64), len(tokens) - length + 1)
    hashes: NDArray[np.uint64] = (sums[length:] - sums[:-length]) * inverse
    return hashes


def _compute_powers(base: int, count: int) -> NDArray[np.uint64]:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _read_split_tokens(prefix: Path, split: str, part: Split) -> NDArray[Any]:
    dataset = open_dataset(prefix)
    bounds = np.array(split_bounds(split, dataset.sequences)[part : part + 2])
    begin, end = dataset.tokens_before(bounds)
    return dataset.stored[begin:end]


def most_common_token_fraction(prefix: Path, split: str) -> float:
    """Share of the validation tokens that are the commonest one: the accuracy of saying it always."""
    counts = np.bincount(_read_split_tokens(prefix, split, Split.VALIDATION))
    return float(counts.max() / counts.sum())


def _render_study(study: Study) -> str:
    """With what the scores are measured on, and what a model that learned nothing would reach."""
    if not study.rows:
        return ""
    launch = study.results[0].launch
    prefix, split = ROOT / launch.data, Flags(launch.flags).text("--split")
    shared = count_shared_windows(prefix, split, launch.model.shape.seq_length)
    notes = (
        format_sentence("moe", "shared", **shared),
        format_sentence("moe", "commonest", share=most_common_token_fraction(prefix, split)),
    )
    return render(study.model, study.rows, (*notes, *study.experiment.left_out))


def _has_failed(study: Study) -> bool:
    held = all(found.held for found in compare_setups(study.rows))
    return not held or not all(map(is_evaluated, study.rows))


OUTPUT = make_comparison(_render_study, _has_failed)

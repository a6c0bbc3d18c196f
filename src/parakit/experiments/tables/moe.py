"""Answer the question of the Blueberry experiment with a corrected setup: experts in Megatron or plain PyTorch.

Both train the same mixture of experts from the same weights on the same batches, with the same optimizer and
sharding. Muon, which only one of the published paths used, is compared as well. A *setup* is a backend, strategy,
optimizer and activation; its repeats have different seeds, which means other weights and another order of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.measurements import find_routing_divergence
from parakit.artifacts.run import Status
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
"""Largest relative difference of a loss to that of the reference with the same seed."""

SetupKey = tuple[str, str, str, str]
"""Backend, strategy, optimizer and activation."""
SeedRuns = Sequence[Entry]
"""Rows of one setup, one per seed."""


@dataclass(frozen=True)
class RoutedParity:
    """Difference of losses to a reference, as long as both route the same tokens to the same experts.

    Where two experts have almost equal scores, rounding decides which one a router chooses. From that iteration on,
    two runs train on different sums. Strategies of Megatron diverge among themselves in the same way.
    """

    difference: float
    """Largest relative difference of a loss."""
    compared: int
    """Number of compared iterations, over all seeds."""
    diverged: int | None
    """First iteration in which a token took another expert; None if none did."""

    @property
    def held(self) -> bool:
        """True if losses were compared and all agree within `LOSS_TOLERANCE`."""
        return self.compared > 0 and self.difference <= LOSS_TOLERANCE


@dataclass(frozen=True)
class _SetupRow:
    """Row of the table: the runs of a setup, and their parity."""

    group: SeedRuns
    parity: RoutedParity


def render(model: str, runs: SeedRuns, notes: Sequence[str]) -> str:
    """Return the page in Markdown; runs of one setup share a row, with the range over their seeds.

    Args:
        model: Name of the model.
        runs: Rows of the report.
        notes: Further sentences for the page.
    """
    setups, parities = _group_by_setup(runs), compare_setups(runs)
    sentences = [
        *_describe_speeds(setups),
        _describe_parity(parities),
        *_describe_optimizers(runs),
        *notes,
        *describe_conditions(_collect_runs(runs)),
    ]
    rows = tuple(map(_SetupRow, setups.values(), parities))
    published = load_published()
    corrections = tuple(
        correction for correction in published.corrections if correction.source == SOURCE
    )
    figures_table = markdown_table(Table(_PUBLISHED_COLUMNS, published.figures_of(SOURCE)))
    corrections_table = markdown_table(Table(_CORRECTION_COLUMNS, corrections))
    return format_page(
        "moe",
        model=model,
        table=markdown_table(Table(_COLUMNS, rows)),
        said=format_bullets(sentences),
        published=f"{figures_table}\n\n{corrections_table}",
    )


def _describe_parity(parities: Sequence[RoutedParity]) -> str:
    """Return the sentence on the parity of all setups, and on the iteration in which routing diverged."""
    iterations = [parity.diverged for parity in parities if parity.diverged is not None]
    until = ""
    if iterations:
        until = f" {format_sentence('moe', 'diverged', diverged=min(iterations))}"
    all_held = all(parity.held for parity in parities)
    return format_sentence(
        "moe",
        "parity",
        held="parity held" if all_held else "parity is broken",
        worst=max(parity.difference for parity in parities),
        until=until,
        tolerance=LOSS_TOLERANCE,
    )


def compare_setups(runs: SeedRuns) -> list[RoutedParity]:
    """Return the parity of each setup with the first setup of the same optimizer and activation."""
    groups = _group_by_setup(runs).values()
    references: dict[tuple[str, str], SeedRuns] = {}
    for group in groups:
        references.setdefault(_get_optimizer(group), group)
    return [compare_losses(group, references[_get_optimizer(group)]) for group in groups]


def compare_losses(group: SeedRuns, reference: SeedRuns) -> RoutedParity:
    """Return the largest relative loss difference between a setup's runs and the reference's runs of the same seeds.

    Iterations from the first different routing on are ignored. Seeds that the reference lacks are left out.
    """
    references_by_seed = {_get_seed(run): run for run in reference}
    differences: list[float] = []
    diverged: list[int] = []
    for run in group:
        reference_run = references_by_seed.get(_get_seed(run))
        if reference_run is None:
            continue
        dtype = run.spec.dtype if run.spec else ""
        first_diverged = find_routing_divergence(run.routing, reference_run.routing, dtype)
        if first_diverged is not None:
            diverged.append(first_diverged)
        for iteration in run.losses.keys() & reference_run.losses.keys():
            if first_diverged is not None and iteration >= first_diverged:
                continue
            reference_loss = reference_run.losses[iteration]
            difference = abs(run.losses[iteration] - reference_loss) / abs(reference_loss)
            differences.append(difference)
    largest = max(differences, default=0.0)
    return RoutedParity(largest, len(differences), min(diverged, default=None))


def is_evaluated(row: Entry) -> bool:
    """Return True if the run ended well and has a validation loss."""
    return row.status == Status.OK and row.validation_loss is not None


def _format_run_count(row: _SetupRow) -> str:
    """Return the number of evaluated runs, such as `3`, or `2 of 3` if some are not."""
    evaluated = sum(map(is_evaluated, row.group))
    total = len(row.group)
    return f"{evaluated} of {total}" if evaluated < total else str(evaluated)


def _format_loss_difference(row: _SetupRow) -> str:
    """Return the largest relative difference of losses, and the last iteration that counts if routing diverged."""
    diverged = row.parity.diverged
    until = f" to iteration {diverged - 1}" if diverged else ""
    return f"{row.parity.difference:.1e}{until}"


def _get_seed(row: Entry) -> int:
    """Return the seed of a run; 0 if it is unknown."""
    return row.spec.seed if row.spec else 0


def _get_optimizer(group: SeedRuns) -> tuple[str, str]:
    """Return optimizer and activation of a setup."""
    return group[0].optimizer, group[0].activation


def _collect_runs(group: SeedRuns) -> list[Run]:
    """Return all runs behind the rows."""
    return [run for row in group for run in row.configuration.runs]


def _group_by_setup(rows: SeedRuns) -> dict[SetupKey, list[Entry]]:
    """Return the rows by setup, in the order of their first rows."""
    groups: dict[SetupKey, list[Entry]] = {}
    for row in rows:
        setup = row.backend, row.strategy, row.optimizer, row.activation
        groups.setdefault(setup, []).append(row)
    return groups


def _format_rate(estimate: Estimate | None) -> str:
    """Return iterations per second with their interval, from milliseconds per iteration."""
    if estimate is None:
        return DASH
    # An interval that starts at 0 ms would end at an infinite rate.
    if not estimate.low or not estimate.high:
        return rounded(1000 / estimate.median)
    return bracketed(1000 / estimate.median, 1000 / estimate.high, 1000 / estimate.low, ".2f")


def _format_range(
    group: SeedRuns, get_value: Callable[[Entry], float | None], template: str
) -> str:
    """Return the mean of a value over the seeds, with its range; runs without the value are left out."""
    values = [value for value in map(get_value, group) if value is not None]
    if not values:
        return DASH
    text = template.format(mean(values))
    if len(values) == 1:
        return text
    return f"{text} ({template.format(min(values))} to {template.format(max(values))})"


def _compute_perplexity(row: Entry) -> float | None:
    """Return the perplexity of the validation loss, at most exp(20) as Megatron prints it; None without a loss."""
    loss = row.validation_loss
    return None if loss is None else math.exp(min(20, loss))


def _describe_speeds(setups: Mapping[SetupKey, SeedRuns]) -> list[str]:
    """Return a sentence per setup that plain PyTorch and Megatron share: how fast PyTorch is against Megatron."""
    sentences = []
    for (backend, strategy, optimizer, activation), group in setups.items():
        if backend != "megatron":
            continue
        native_group = setups.get(("native", strategy, optimizer, activation), ())
        megatron = estimate_pooled_runs(_collect_runs(group))
        native = estimate_pooled_runs(_collect_runs(native_group))
        if megatron is None or native is None:
            continue
        times = compare_times(megatron, native)
        sentence = format_sentence(
            "moe",
            "speed",
            ratio=times.ratio,
            strategy=strategy,
            optimizer=optimizer,
            verdict=times.verdict.against("Megatron"),
            span=f", {times.span}" if times.span else "",
        )
        sentences.append(sentence)
    return sentences


def _describe_optimizers(runs: SeedRuns) -> list[str]:
    """Return a sentence on whether the losses of AdamW and Muon differ by more than their runs scatter.

    The list is empty if one of the optimizers has no validation loss.
    """
    adamw_losses = _list_validation_losses(runs, "AdamW")
    muon_losses = _list_validation_losses(runs, "Muon + AdamW")
    if not adamw_losses or not muon_losses:
        return []
    is_beyond = max(muon_losses) < min(adamw_losses) or max(adamw_losses) < min(muon_losses)
    sentence = format_sentence(
        "moe",
        "scores",
        apart=mean(muon_losses) - mean(adamw_losses),
        where="beyond" if is_beyond else "within",
        scatter=max(adamw_losses) - min(adamw_losses),
    )
    return [sentence]


def _list_validation_losses(runs: Iterable[Entry], optimizer: str) -> list[float]:
    """Return the validation losses of the runs with an optimizer."""
    losses = (run.validation_loss for run in runs if run.optimizer == optimizer)
    return [loss for loss in losses if loss is not None]


def _make_range_column(
    name: str, get_value: Callable[[Entry], float | None], template: str
) -> Column[_SetupRow]:
    """Return the column of a value's mean and range over the seeds."""
    return Column(name, lambda row: _format_range(row.group, get_value, template))


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
    Column[Correction]("It says", lambda correction: correction.says),
    Column[Correction]("Right", lambda correction: correction.right),
)

_HASH_BASE = 0x9E3779B97F4A7C15


def count_shared_windows(prefix: Path, split: str, seq_length: int) -> dict[str, int]:
    """Count the windows of the validation documents that occur in the training documents, at any offset.

    A window is a sample and its last label: `seq_length` + 1 tokens. Windows are compared by a 64-bit hash. A
    count of 0 is certain, because equal windows have equal hashes. A higher count may include a collision of
    hashes, one in 2^64 pairs.

    Args:
        prefix: Data set.
        split: Megatron's `--split`.
        seq_length: Tokens per sample.

    Returns:
        Number of `windows` in the validation documents, number of those that are `shared`, and their `length`.

    Raises:
        DatasetError: The data set does not exist or is incomplete.
    """
    length = seq_length + 1
    training = _read_split_tokens(prefix, split, Split.TRAINING)
    validation = _read_split_tokens(prefix, split, Split.VALIDATION)
    hashes = hash_windows(validation, length)
    is_shared = np.isin(hashes, hash_windows(training, length))
    return {"windows": len(hashes), "shared": int(is_shared.sum()), "length": length}


def hash_windows(tokens: NDArray[Any], length: int) -> NDArray[np.uint64]:
    """Return a polynomial hash, modulo 2^64, of each window of `length` consecutive tokens."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.uint64)
    powers = _compute_powers(_HASH_BASE, len(tokens) + 1)
    sums = np.concatenate(([np.uint64(0)], np.cumsum((tokens.astype(np.uint64) + 1) * powers[:-1])))
    # A window's sum is divided by the power it starts with, so that equal windows at other offsets are equal.
    inverse = _compute_powers(pow(_HASH_BASE, -1, 2**64), len(tokens) - length + 1)
    hashes: NDArray[np.uint64] = (sums[length:] - sums[:-length]) * inverse
    return hashes


def _compute_powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return the powers of `base`, modulo 2^64, with exponents from 0 to `count` - 1."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _read_split_tokens(prefix: Path, split: str, part: Split) -> NDArray[Any]:
    """Return all tokens of one part of a split data set, document after document."""
    dataset = open_dataset(prefix)
    bounds = np.array(split_bounds(split, dataset.sequences)[part : part + 2])
    begin, end = dataset.tokens_before(bounds)
    return dataset.stored[begin:end]


def most_common_token_fraction(prefix: Path, split: str) -> float:
    """Return the fraction of validation tokens that are the most common one.

    It is the accuracy of a model that always predicts this token.
    """
    counts = np.bincount(_read_split_tokens(prefix, split, Split.VALIDATION))
    return float(counts.max() / counts.sum())


def _render_study(study: Study) -> str:
    """Return the page, with notes on the validation data and on the accuracy of a model that learned nothing.

    The page is empty if no run exists.
    """
    if not study.rows:
        return ""
    launch = study.results[0].launch
    if len(launch.data_paths) > 1:  # Each data set of a blend would have numbers of its own.
        return render(study.model, study.rows, study.experiment.left_out)
    prefix, split = launch.data_paths[0], Flags(launch.flags).text("--split")
    windows = count_shared_windows(prefix, split, launch.model.shape.seq_length)
    fraction = most_common_token_fraction(prefix, split)
    notes = (
        format_sentence("moe", "shared", **windows),
        format_sentence("moe", "commonest", share=fraction),
    )
    return render(study.model, study.rows, (*notes, *study.experiment.left_out))


def _has_failed(study: Study) -> bool:
    """Return True if losses differ, or if a run did not end well or has no validation loss."""
    all_held = all(parity.held for parity in compare_setups(study.rows))
    return not all_held or not all(map(is_evaluated, study.rows))


OUTPUT = make_comparison(_render_study, _has_failed)

"""The Blueberry experiment's question, its setup corrected: Megatron or plain PyTorch on experts.

Both train the same mixture of experts from the same weights on the same batches under the same
optimizer, sharded alike; Muon, which only one of the published paths had, is beside it. Repeats have
seeds of their own: other weights, another order of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from tools.launch.compose import Launch
from tools.records.measurements import first_other_choice
from tools.records.run import Status
from tools.report.analyse.comparability import conditions
from tools.report.analyse.configurations import pooled
from tools.report.analyse.entry import Entry
from tools.report.analyse.statistics import Estimate, compare
from tools.report.read.runs import Run
from tools.spec.files import ROOT
from tools.spec.flags import Flags
from tools.spec.published import Correction, Figure, load_published
from tools.study.tables import bullets, known, page
from tools.study.tables.windows import commonest_share, shared_windows
from tools.text.table import Column, Table, markdown_table
from tools.text.units import DASH, bracketed, rounded

SOURCE = "000"
TOLERANCE = 1e-5
"""Relative, of a loss, against the first kind of the same optimizer and seed."""

Kind = tuple[str, str, str, str]
"""Backend, strategy, optimizer, activation."""
Group = Sequence[Entry]
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
        return self.compared > 0 and self.difference <= TOLERANCE


def render(model: str, runs: Group, notes: Sequence[str]) -> str:
    """Markdown; runs of one kind share a row, with the range over their seeds."""
    kinds = _by_kind(runs)
    said = [
        *_speeds(kinds),
        _parity_sentence(parities(runs)),
        *_scores(kinds),
        *notes,
        *conditions(_runs(runs)),
    ]
    rows = tuple(
        _GroupRow(group, parity(group, _reference(group, kinds))) for group in kinds.values()
    )
    table = markdown_table(Table(_COLUMNS, rows))
    return page("moe", model=model, table=table, said=bullets(said), published=_published())


def parities(runs: Group) -> list[RoutedParity]:
    """Of every kind against the first of its optimizer and activation."""
    kinds = _by_kind(runs)
    return [parity(group, _reference(group, kinds)) for group in kinds.values()]


def parity(group: Group, reference: Group) -> RoutedParity:
    """A kind's runs against the reference's of the same seeds."""
    theirs = {_seed(row): row for row in reference}
    pairs = [(row, theirs[_seed(row)]) for row in group if _seed(row) in theirs]
    firsts = [
        first_other_choice(one.routing, two.routing, one.spec.dtype if one.spec else "")
        for one, two in pairs
    ]
    differences = [0.0]
    compared = 0
    for (one, two), first in zip(pairs, firsts, strict=True):
        common = [i for i in one.losses.keys() & two.losses.keys() if i < (first or math.inf)]
        compared += len(common)
        differences += [abs(one.losses[i] - two.losses[i]) / abs(two.losses[i]) for i in common]
    diverged = min((first for first in firsts if first is not None), default=None)
    return RoutedParity(max(differences), compared, diverged)


def is_well(row: Entry) -> bool:
    """It ended well and was evaluated."""
    return row.status == Status.OK and row.validation_loss is not None


def evaluation_notes(launch: Launch) -> list[str]:
    """What the scores are measured on, and what a model that learned nothing would reach."""
    prefix, split = ROOT / launch.data, Flags(launch.flags).text("--split")
    found = shared_windows(prefix, split, launch.model.shape.seq_length)
    return [
        f"{found.shared:,} of the {found.windows:,} validation windows of {found.length} tokens are "
        "in the training documents too.",
        f"Naming the commonest token always would be right for {commonest_share(prefix, split):.1%} of "
        "the validation tokens.",
    ]


@dataclass(frozen=True)
class _GroupRow:
    group: Group
    parity: RoutedParity

    @property
    def runs(self) -> str:
        well = sum(map(is_well, self.group))
        return f"{well} of {len(self.group)}" if well < len(self.group) else str(well)

    @property
    def losses_against_the_first(self) -> str:
        diverged = self.parity.diverged
        until = f" to iteration {diverged - 1}" if diverged else ""
        return f"{self.parity.difference:.1e}{until}"


def _seed(row: Entry) -> int:
    return row.spec.seed if row.spec else 0


def _runs(group: Group) -> list[Run]:
    return [run for row in group for run in row.configuration.runs]


def _by_kind(rows: Group) -> dict[Kind, list[Entry]]:
    kinds: dict[Kind, list[Entry]] = {}
    for row in rows:
        kind = row.backend, row.strategy, row.optimizer, row.activation
        kinds.setdefault(kind, []).append(row)
    return kinds


def _reference(group: Group, kinds: Mapping[Kind, Group]) -> Group:
    own = group[0].optimizer, group[0].activation
    return next(other for kind, other in kinds.items() if kind[2:] == own)


def _rate(found: Estimate | None) -> str:
    """Iterations a second."""
    if found is None:
        return DASH
    # A low end of 0 ms is no end of a rate.
    if not found.low or not found.high:
        return rounded(1000 / found.median)
    return bracketed(1000 / found.median, 1000 / found.high, 1000 / found.low, ".2f")


def _range(group: Group, value: Callable[[Entry], float | None], shape: str) -> str:
    found = [one for run in group if (one := value(run)) is not None]
    if not found:
        return DASH
    text = shape.format(mean(found))
    if len(found) == 1:
        return text
    return f"{text} ({shape.format(min(found))} to {shape.format(max(found))})"


def _perplexity(row: Entry) -> float | None:
    loss = row.validation_loss
    return None if loss is None else math.exp(min(20, loss))


def _speeds(kinds: Mapping[Kind, Group]) -> list[str]:
    """Native against Megatron, for each strategy and optimizer that both have."""
    sentences = []
    for (backend, strategy, optimizer, activation), group in kinds.items():
        other = kinds.get(("native", strategy, optimizer, activation))
        one, two = pooled(_runs(group)), pooled(_runs(other or ()))
        if backend != "megatron" or one is None or two is None:
            continue
        result = compare(one, two)
        span = f", {result.span}" if result.span else ""
        sentences.append(
            f"{strategy} under {optimizer}: native is {result.verdict.against('Megatron')}, "
            f"×{result.ratio:.3f} the time an iteration{span}."
        )
    return sentences


def _parity_sentence(found: Sequence[RoutedParity]) -> str:
    worst = max(parity.difference for parity in found)
    held = "parity held" if all(parity.held for parity in found) else "parity is broken"
    diverged = min((p.diverged for p in found if p.diverged is not None), default=None)
    until = "" if diverged is None else (
        f" until a token took another expert (iteration {diverged} at the earliest; then rounding "
        "decides between two that are all but equal, also between Megatron's own strategies)"
    )  # fmt: skip
    return (
        f"Under one optimizer {held}: no training loss is more than {worst:.1e} of itself from the "
        f"first kind's with the same seed{until}; allowed is {TOLERANCE:.0e}."
    )


def _scores(kinds: Mapping[Kind, Group]) -> list[str]:
    """Whether the optimizers differ by more than seeds and strategies do."""
    ours, theirs = (
        [
            run.validation_loss
            for kind, group in kinds.items()
            for run in group
            if kind[2] == name and run.validation_loss is not None
        ]
        for name in ("AdamW", "Muon + AdamW")
    )
    if not ours or not theirs:
        return []
    apart = max(theirs) < min(ours) or max(ours) < min(theirs)
    return [
        f"After the same iterations Muon's validation loss is {mean(theirs) - mean(ours):+.4f} from "
        f"AdamW's, {'beyond' if apart else 'within'} what AdamW's own runs scatter by "
        f"({max(ours) - min(ours):.4f})."
    ]


def _published() -> str:
    published = load_published()
    figures = Table(_PUBLISHED_COLUMNS, published.of(SOURCE))
    wrong = tuple(found for found in published.corrections if found.source == SOURCE)
    return f"{markdown_table(figures)}\n\n{markdown_table(Table(_CORRECTIONS, wrong))}"


def _scores_column(
    name: str, value: Callable[[Entry], float | None], shape: str
) -> Column[_GroupRow]:
    return Column(name, lambda row: _range(row.group, value, shape))


_COLUMNS: tuple[Column[_GroupRow], ...] = (
    Column("Backend", lambda row: row.group[0].backend),
    Column("Strategy", lambda row: row.group[0].strategy),
    Column("Optimizer", lambda row: row.group[0].optimizer),
    Column("Activation", lambda row: row.group[0].activation or DASH),
    Column("Iterations/s [95%]", lambda row: pooled(_runs(row.group)), _rate),
    _scores_column("Run, start included", lambda run: run.run.status.wall_seconds, "{:.0f} s"),
    _scores_column("Validation loss", lambda run: run.validation_loss, "{:.4f}"),
    _scores_column("Accuracy", lambda run: run.accuracy, "{:.2%}"),
    _scores_column("Perplexity", _perplexity, "{:.0f}"),
    Column("Losses against the first", lambda row: row.losses_against_the_first),
    Column("Runs", lambda row: row.runs),
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
_CORRECTIONS = (
    Column[Correction]("It says", lambda found: found.says),
    Column[Correction]("Right", lambda found: found.right),
)

"""The tables of `compare-moe`: measured, then as published, then what may be said of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import yaml

from tools.launch.compare.moe_measured import MoeRun
from tools.launch.compare.zero import number
from tools.records.routing import first_other_choice
from tools.report.analyse.statistics import Estimate, Verdict, compare, estimate
from tools.spec.published import FILE, load_published
from tools.text.table import markdown_rows
from tools.text.units import DASH

TOLERANCE = 1e-5
"""Relative, of a loss, against the first kind of the same optimizer and seed."""

_HEADER = ["Backend", "Strategy", "Optimizer", "Iterations/s [95%]", "Run, start included"]
_HEADER += ["Validation loss", "Accuracy", "Perplexity", "Losses against the first", "Runs"]

Kind = tuple[str, str, str]
Group = Sequence[MoeRun]


def render(model: str, runs: Group, notes: Sequence[str]) -> str:
    """Markdown; runs of one kind stand together, with the range over their seeds."""
    kinds = _by_kind(runs)
    said = [
        *_speeds(kinds),
        _parity_sentence(parities(runs)),
        *_scores(kinds),
        *notes,
        *_conditions(runs),
    ]
    rows = [_row(group, parity(group, _reference(group, kinds))) for group in kinds.values()]
    return "\n\n".join(
        (
            f"# Mixture of experts, Megatron against plain PyTorch: {model}",
            "All runs of a seed start from the same weights and read the same batches; validation "
            "documents are never trained on. Scores are means over seeds, with their range.",
            markdown_rows(_HEADER, rows),
            "\n".join(f"- {sentence}" for sentence in said),
            "## As published (write-up 000, blueberry-79m, two RTX 4090)",
            _published(),
        )
    )


@dataclass(frozen=True)
class Parity:
    """How far losses are apart while the same tokens go to the same experts.

    A router decides: where two experts are all but equal, rounding decides which, and from that
    iteration on two runs train on other sums. Megatron's own strategies part in the same way.
    """

    difference: float
    """Largest, relative."""
    compared: int
    """Iterations, over all seeds."""
    parted: int | None
    """The first iteration in which a token took another expert; None if none did."""

    @property
    def held(self) -> bool:
        """Nothing compared holds nothing."""
        return self.compared > 0 and self.difference <= TOLERANCE


def parity(group: Group, reference: Group) -> Parity:
    """A kind's runs against the reference's of the same seeds."""
    theirs = {run.seed: run for run in reference}
    pairs = [(run, theirs[run.seed]) for run in group if run.seed in theirs]
    differences = [0.0]
    compared = 0
    for one, two in pairs:
        until = first_other_expert(one, two) or math.inf
        common = [i for i in one.losses.keys() & two.losses.keys() if i < until]
        compared += len(common)
        differences += [abs(one.losses[i] - two.losses[i]) / abs(two.losses[i]) for i in common]
    parted = [at for pair in pairs if (at := first_other_expert(*pair)) is not None]
    return Parity(max(differences), compared, min(parted, default=None))


def first_other_expert(one: MoeRun, two: MoeRun) -> int | None:
    """The first iteration in which an expert got another number of tokens."""
    return first_other_choice(one.routing, two.routing)


def parities(runs: Group) -> list[Parity]:
    """Of every kind against the first of its optimizer."""
    kinds = _by_kind(runs)
    return [parity(group, _reference(group, kinds)) for group in kinds.values()]


def _by_kind(runs: Group) -> dict[Kind, list[MoeRun]]:
    kinds: dict[Kind, list[MoeRun]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    return kinds


def _reference(group: Group, kinds: dict[Kind, list[MoeRun]]) -> Group:
    return next(other for kind, other in kinds.items() if kind[2] == group[0].optimizer)


def _times(group: Group) -> Estimate | None:
    return estimate([run.samples_ms for run in group])


def _row(group: Group, found: Parity) -> list[str]:
    first = group[0]
    well = sum(run.is_well for run in group)
    return [
        *first.kind,
        _rate(_times(group)),
        _range(group, lambda run: run.wall_seconds, "{:.0f} s"),
        _range(group, lambda run: run.validation_loss, "{:.4f}"),
        _range(group, lambda run: run.accuracy, "{:.2%}"),
        _range(group, lambda run: _perplexity(run.validation_loss), "{:.0f}"),
        f"{found.difference:.1e}" + (f" to iteration {found.parted - 1}" if found.parted else ""),
        f"{well} of {len(group)}" if well < len(group) else str(well),
    ]


def _rate(found: Estimate | None) -> str:
    if found is None:
        return DASH
    if found.low is None or found.high is None:
        return number(1000 / found.median)
    return f"{1000 / found.median:.2f} [{1000 / found.high:.2f}, {1000 / found.low:.2f}]"


def _range(group: Group, value: Callable[[MoeRun], float | None], shape: str) -> str:
    found = [known for run in group if (known := value(run)) is not None]
    if not found:
        return DASH
    text = shape.format(mean(found))
    if len(found) == 1:
        return text
    return f"{text} ({shape.format(min(found))} to {shape.format(max(found))})"


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(20, loss))


def _speeds(kinds: dict[Kind, list[MoeRun]]) -> list[str]:
    """Native against Megatron, for each strategy and optimizer that both have."""
    sentences = []
    for (backend, strategy, optimizer), group in kinds.items():
        other = kinds.get(("native", strategy, optimizer))
        one, two = _times(group), _times(other or ())
        if backend != "megatron" or one is None or two is None:
            continue
        result = compare(one, two)
        span = f", 95% {result.low:.3f} to {result.high:.3f}" if result.low and result.high else ""
        joint = "of" if result.verdict is Verdict.NOISE else "than"
        sentences.append(
            f"{strategy} under {optimizer}: native is {result.verdict} {joint} Megatron, "
            f"×{result.ratio:.3f} the time an iteration{span}."
        )
    return sentences


def _parity_sentence(found: Sequence[Parity]) -> str:
    worst = max(parity.difference for parity in found)
    held = "parity held" if all(parity.held for parity in found) else "parity is broken"
    parted = min((p.parted for p in found if p.parted is not None), default=None)
    until = "" if parted is None else (
        f" until a token took another expert (iteration {parted} at the earliest; then rounding "
        "decides between two that are all but equal, also between Megatron's own strategies)"
    )  # fmt: skip
    return (
        f"Under one optimizer {held}: no training loss is more than {worst:.1e} of itself from the "
        f"first kind's with the same seed{until}; allowed is {TOLERANCE:.0e}."
    )


def _scores(kinds: dict[Kind, list[MoeRun]]) -> list[str]:
    """Whether the optimizers differ by more than seeds and layouts do."""
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


def _conditions(runs: Group) -> list[str]:
    machines, commits = ({getattr(run, name) for run in runs} for name in ("machine", "commit"))
    return [f"Measured on {'; '.join(sorted(machines))}, kit at {', '.join(sorted(commits))}."]


def _published() -> str:
    header = ["Path", "Micro batches/s", "Time", "Validation loss", "Accuracy", "Perplexity", "But"]
    figures: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["figures"]
    rows = [
        [
            figure["published_as"],
            f"{figure['micro_batches_per_second']:.2f}",
            f"{figure['wall_seconds']} s",
            f"{figure['final_loss']:.4f}",
            f"{figure['validation_accuracy']:.2%}",
            f"{figure['perplexity']:.2f}",
            figure["caution"],
        ]
        for figure in figures
        if figure["source"] == "000"
    ]
    wrong = [c for c in load_published().corrections if c.source == "000"]
    listed = markdown_rows(["It says", "Right"], [[c.says, c.right] for c in wrong])
    return f"{markdown_rows(header, rows)}\n\n{listed}"

"""The tables of `compare-moe`: measured, then as published, then what may be said of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import yaml

from tools.launch.compare_zero import number
from tools.launch.moe_measured import MoeRun
from tools.report.markdown import table
from tools.report.published import FILE, load_published
from tools.report.statistics import Estimate, Verdict, compare, estimate
from tools.report.wording import DASH

TOLERANCE = 1e-5
"""Relative, of every iteration's loss, against the first kind of the same optimizer and seed."""

_HEADER = ["Backend", "Strategy", "Optimizer", "Iterations/s [95%]", "Run, start included"]
_HEADER += ["Validation loss", "Accuracy", "Perplexity", "Losses against the first", "Runs"]

Kind = tuple[str, str, str]
Group = Sequence[MoeRun]


def render(model: str, runs: Group, notes: Sequence[str]) -> str:
    """Markdown; runs of one kind stand together, with the range over their seeds."""
    kinds = _by_kind(runs)
    said = [
        *_speeds(kinds),
        _parity_sentence(worst_difference(runs)),
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
            table(_HEADER, rows),
            "\n".join(f"- {sentence}" for sentence in said),
            "## As published (write-up 000, blueberry-79m, two RTX 4090)",
            _published(),
        )
    )


def worst_difference(runs: Group) -> float | None:
    """The largest of all kinds; what `TOLERANCE` is held against."""
    kinds = _by_kind(runs)
    found = [parity(group, _reference(group, kinds)) for group in kinds.values()]
    return max((difference for difference in found if difference is not None), default=None)


def parity(group: Group, reference: Group) -> float | None:
    """Largest relative difference of any iteration's loss from the same seed's reference."""
    theirs = {run.seed: run.losses for run in reference}
    pairs = [
        (loss, theirs[run.seed][iteration])
        for run in group
        for iteration, loss in run.losses.items()
        if iteration in theirs.get(run.seed, {})
    ]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def _by_kind(runs: Group) -> dict[Kind, list[MoeRun]]:
    kinds: dict[Kind, list[MoeRun]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    return kinds


def _reference(group: Group, kinds: dict[Kind, list[MoeRun]]) -> Group:
    return next(other for kind, other in kinds.items() if kind[2] == group[0].optimizer)


def _times(group: Group) -> Estimate | None:
    return estimate([run.samples_ms for run in group])


def _row(group: Group, difference: float | None) -> list[str]:
    first = group[0]
    well = sum(run.is_well for run in group)
    return [
        *first.kind,
        _rate(_times(group)),
        _range(group, lambda run: run.wall_seconds, "{:.0f} s"),
        _range(group, lambda run: run.validation_loss, "{:.4f}"),
        _range(group, lambda run: run.accuracy, "{:.2%}"),
        _range(group, lambda run: _perplexity(run.validation_loss), "{:.0f}"),
        DASH if difference is None else f"{difference:.1e}",
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


def _parity_sentence(worst: float | None) -> str:
    if worst is None:
        return "No losses can be compared."
    held = "parity held" if worst <= TOLERANCE else "parity is broken"
    return (
        f"Under one optimizer {held}: no training loss is more than {worst:.1e} of itself from the "
        f"first kind's with the same seed (allowed: {TOLERANCE:.0e})."
    )


def _scores(kinds: dict[Kind, list[MoeRun]]) -> list[str]:
    """Whether the optimizers differ by more than seeds do."""
    adamw, muon = (
        [run.validation_loss for run in kinds.get(("native", "dp2", name), []) if run.is_well]
        for name in ("AdamW", "Muon + AdamW")
    )
    ours = [loss for loss in adamw if loss is not None]
    theirs = [loss for loss in muon if loss is not None]
    if not ours or not theirs:
        return []
    apart = max(theirs) < min(ours) or max(ours) < min(theirs)
    noise = "beyond" if apart else "within"
    return [
        f"After the same iterations Muon's validation loss is {mean(theirs) - mean(ours):+.4f} from "
        f"AdamW's, {noise} what seeds scatter."
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
    listed = table(["It says", "Right"], [[c.says, c.right] for c in wrong])
    return f"{table(header, rows)}\n\n{listed}"

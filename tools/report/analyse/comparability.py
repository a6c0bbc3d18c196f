"""What two runs do differently, before anybody says which is faster."""

from __future__ import annotations

from dataclasses import dataclass

from tools.report.analyse.configurations import Configuration
from tools.report.analyse.labels import link_rate
from tools.report.analyse.no_te import patches, shares_gpu
from tools.report.analyse.statistics import Comparison, compare
from tools.report.read.runs import Run


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on both sides; None is unknown."""

    what: str
    reference: str
    other: str
    part_of_strategy: bool = False
    """Follows from the strategy itself (ranks, padding for TP), so it is no flaw, but is listed."""


@dataclass(frozen=True)
class SpeedComparison:
    """One configuration against its reference."""

    reference: str
    """Name of the reference's row."""
    other: str
    per_iteration: Comparison | None
    """None where the iterations hold different work: then a speedup per iteration is refused."""
    per_token: Comparison | None
    """Time a token, over all devices."""
    per_device: float | None
    """Tokens/s/device over the reference's: 1 is perfect scaling."""
    differences: tuple[Difference, ...]


def compare_speed(reference: Configuration, other: Configuration) -> SpeedComparison:
    """Compare the times of two configurations, per iteration only if both do the same work."""
    one, two = reference.newest.setup, other.newest.setup
    ours, theirs = one.tokens_per_iteration, two.tokens_per_iteration
    per_iteration = per_token = None
    per_device = None
    shared = shares_gpu(reference.newest) or shares_gpu(other.newest)
    if reference.estimate and other.estimate and ours and theirs and not shared:
        per_token = compare(reference.estimate, other.estimate, ours / theirs)
        per_iteration = per_token if ours == theirs else None
        if one.world_size and two.world_size:
            per_device = one.world_size / two.world_size / per_token.ratio
    return SpeedComparison(
        reference=reference.newest.name,
        other=other.newest.name,
        per_iteration=per_iteration,
        per_token=per_token,
        per_device=per_device,
        differences=tuple(differences(reference.newest, other.newest)),
    )


def differences(reference: Run, other: Run) -> list[Difference]:
    """Everything the runs should share for their times to be comparable, and do not."""
    one, two = reference.setup, other.setup
    pairs = (
        ("devices", one.world_size, two.world_size, True),
        ("tokens per iteration", one.tokens_per_iteration, two.tokens_per_iteration, False),
        ("sequence length", one.seq_length, two.seq_length, False),
        ("padded vocabulary", one.padded_vocabulary, two.padded_vocabulary, True),
        ("data", _data(reference), _data(other), False),
        ("dropout", one.dropout, two.dropout, False),
        ("precision", one.dtype or None, two.dtype or None, False),
        ("optimizer", one.optimizer or None, two.optimizer or None, False),
        ("recomputation", one.recompute or "none", two.recompute or "none", False),
        ("Adam's state", adam_state(reference), adam_state(other), False),
        ("Megatron", one.megatron or None, two.megatron or None, False),
        ("host", _host(reference), _host(other), False),
        ("link between the ranks", _link(reference), _link(other), False),
        ("patches", patches(reference), patches(other), False),
        ("ranks on one GPU", shares_gpu(reference), shares_gpu(other), False),
    )
    return [
        Difference(what, _text(a), _text(b), expected) for what, a, b, expected in pairs if a != b
    ]


def adam_state(run: Run) -> str | None:
    """Whether Adam's moments existed: fp16 skips its first steps, and allocates them after."""
    counts = [i.skipped_iterations for i in run.log.iterations if i.skipped_iterations is not None]
    if not counts:
        return None
    updates = sum(count == 0 for count in counts)
    return "existed" if updates else "never existed (every step was skipped)"


def _data(run: Run) -> str | None:
    dataset = run.setup.dataset
    return (dataset.sha256 or dataset.prefix) if dataset else None


def _host(run: Run) -> str | None:
    return run.record.host.name if run.record else None


def _link(run: Run) -> str | None:
    return link_rate(run) if run.record else None


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)

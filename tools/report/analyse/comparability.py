"""What differs between two runs, stated before their times are compared."""

from __future__ import annotations

from dataclasses import dataclass

from tools.report.analyse.configurations import Configuration, fused_patches, link_rate, plant_name
from tools.report.analyse.statistics import Comparison, compare
from tools.report.read.runs import Run
from tools.spec.run import RunSpec


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
    one, two = reference.newest.spec, other.newest.spec
    per_iteration = per_token = None
    per_device = None
    shared = shares_gpu(one) or shares_gpu(two)
    if reference.estimate and other.estimate and one and two and not shared:
        ours, theirs = one.tokens_per_iteration, two.tokens_per_iteration
        per_token = compare(reference.estimate, other.estimate, ours / theirs)
        per_iteration = per_token if ours == theirs else None
        scale = one.parallelism.world_size / two.parallelism.world_size
        per_device = scale / per_token.ratio
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
    ours, theirs = _conditions(reference), _conditions(other)
    return [
        Difference(what, _text(ours[what]), _text(theirs[what]), what in _OF_STRATEGY)
        for what in ours
        if ours[what] != theirs[what]
    ]


_OF_STRATEGY = ("devices", "padded vocabulary")


def _conditions(run: Run) -> dict[str, object]:
    """What should be the same on both sides, by its name; None is unknown."""
    spec, record = run.spec, run.record
    return {
        "devices": spec and spec.parallelism.world_size,
        "tokens per iteration": spec and spec.tokens_per_iteration,
        "sequence length": spec and spec.shape.seq_length,
        "padded vocabulary": spec and spec.padded_vocabulary,
        "data": run.data,
        "dropout": spec and spec.dropout,
        "precision": spec and spec.dtype,
        "optimizer": spec and spec.optimizer,
        "recomputation": spec and spec.recompute.value,
        "Adam's state": adam_state(run),
        "Megatron": run.megatron or None,
        "code": record and record.code and str(record.code),
        "host": record and record.host.name,
        "link between the ranks": record and link_rate(record.spec),
        "patches": fused_patches(spec),
        "plant": plant_name(spec),
        "ranks on one GPU": shares_gpu(spec),
    }


SHARED = (
    "its ranks shared one GPU: memory and losses are true, times say nothing about the strategy"
)


def shares_gpu(spec: RunSpec | None) -> bool:
    """Whether all ranks were on one GPU."""
    return spec is not None and spec.shares_gpu


def adam_state(run: Run) -> str | None:
    """Whether Adam's moments existed: fp16 skips its first steps, and allocates them after."""
    lines = run.log.iterations
    if not lines.known("skipped_iterations").any():
        return None
    return (
        "existed"
        if (lines.values("skipped_iterations") == 0).any()
        else "never existed (every step was skipped)"
    )


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)

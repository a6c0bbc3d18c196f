"""What differs between two runs, stated before their times are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.identity import essential_arguments
from parakit.config.flag_table import argument_names, flags_with_role
from parakit.config.offload import offload_flags
from parakit.logs import ModelDifference, Run
from parakit.reporting.analyse.configurations import (
    Configuration,
    describe_fused_patches,
    describe_link,
    describe_patch_file,
)
from parakit.reporting.analyse.disturbance import has_more_ranks_than_cores, why_disturbed
from parakit.reporting.analyse.must_agree import describe_differences, describe_unstated_flags
from parakit.reporting.analyse.statistics import TimeComparison, compare_times


@dataclass(frozen=True)
class WorkMismatch:
    """One thing that is not the same on both sides."""

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
    per_iteration: TimeComparison | None
    """None where the iterations hold different work: then a speedup per iteration is refused."""
    per_token: TimeComparison | None
    """Time a token, over all devices; a sample where a log does not print its sequence length."""
    per_device_token: TimeComparison | None
    """Device time a token, where the numbers of devices differ: the verdict is on it. Else None."""
    per_device: float | None
    """Tokens/s/device over the reference's: 1 is perfect scaling."""
    differences: tuple[WorkMismatch, ...]
    caution: str = ""
    """What the comparison takes for granted, or why there is none."""
    model_doubt: str = ""
    """That the two models differ or may differ, and in which flags; empty of one model."""
    device_is_assumed: bool = False
    """Whether neither log names its device, so that the same one is assumed."""

    @property
    def judged_time(self) -> TimeComparison | None:
        """The comparison whose verdict counts: per device where the numbers of devices differ."""
        return self.per_device_token or self.per_token

    def replace_judged(self, adjusted: TimeComparison) -> SpeedComparison:
        """Return the comparison with its judged times replaced by an adjusted verdict."""
        if self.per_device_token:
            return replace(self, per_device_token=adjusted)
        per_iteration = adjusted if self.per_iteration else None
        return replace(self, per_token=adjusted, per_iteration=per_iteration)


def compare_speed(reference: Configuration, other: Configuration) -> SpeedComparison:
    """Compare the times of two configurations, per iteration only if both do the same work."""
    one, two = reference.newest, other.newest
    per_iteration = per_token = per_device_token = None
    per_device = None
    work, caution = None, why_withheld(reference) or why_withheld(other)
    if not caution:
        work, caution = _work(one, two)
        if work and (reason := _other_devices(one, two)):
            work, caution = None, reason
    devices, other_devices = one.num_devices, two.num_devices
    of_model = one.stated_model.differences(two.stated_model)
    if reference.estimate and other.estimate and work:
        per_token = compare_times(reference.estimate, other.estimate, work[0] / work[1])
        per_iteration = per_token if work[0] == work[1] and not of_model else None
        if devices and other_devices and devices != other_devices:
            weight = work[0] / work[1] * other_devices / devices
            per_device_token = compare_times(reference.estimate, other.estimate, weight)
            per_iteration = None
        if one.spec and two.spec:
            scale = one.spec.parallelism.world_size / two.spec.parallelism.world_size
            per_device = scale / per_token.ratio
    return SpeedComparison(
        reference=one.name,
        other=two.name,
        per_iteration=per_iteration,
        per_token=per_token,
        per_device_token=per_device_token,
        per_device=per_device,
        differences=tuple(list_differences(one, two)),
        caution=caution,
        model_doubt=_model_doubt(one, two, of_model),
        device_is_assumed=bool(work) and not one.device and not two.device,
    )


def why_withheld(row: Configuration) -> str:
    """Return why the times of a row say nothing about its strategy; empty where nothing shows that."""
    if row.estimate is None:
        return ""
    if has_more_ranks_than_cores(row.newest):
        return OVERSUBSCRIBED
    return DISTURBED if all(map(why_disturbed, row.runs)) else ""


def why_impossible(reference: Configuration, other: Configuration, speed: SpeedComparison) -> str:
    """Return why a ratio of times cannot be; empty where it can.

    N times as many devices take at least 1/N of the time for the same work, if nothing else differs:
    where the whole interval is below that, something slowed the run on fewer devices down.
    """
    reference_spec, spec = reference.newest.spec, other.newest.spec
    ratio, flaws = speed.per_iteration, [d for d in speed.differences if not d.part_of_strategy]
    recorded = not (reference.newest.is_foreign or other.newest.is_foreign)
    if reference_spec is None or spec is None or ratio is None or flaws or not recorded:
        return ""
    if reference_spec.batch != spec.batch or ratio.low is None or ratio.high is None:
        return ""
    times_as_many = spec.parallelism.world_size / reference_spec.parallelism.world_size
    bound = 1 / times_as_many
    is_below = times_as_many > 1 and ratio.high < bound
    is_above = times_as_many < 1 and ratio.low > bound
    if not is_below and not is_above:
        return ""
    slow = "reference" if is_below else "row"
    return (
        f"×{ratio.ratio:.3f} the time on {times_as_many:g} times as many ranks {IMPOSSIBLE}"
        f" (×{bound:.3f} is the {'least' if is_below else 'most'}), so other programs slowed its {slow}"
        " down; close them and run both again"
    )


def _other_devices(reference: Run, other: Run) -> str:
    """Return why devices allow no verdict on speed: they differ, or one log alone states them."""
    devices = {run.name: run.device for run in (reference, other)}
    if reference.device and other.device:
        if reference.device != other.device:
            return f"their devices differ ({reference.device} | {other.device})"
    elif named := next((name for name, device in devices.items() if device), ""):
        return f"only {named} names its device ({devices[named]}); DEVICE= states it for all logs"
    counts = {run.name: run.num_devices for run in (reference, other)}
    stated = [name for name, count in counts.items() if count]
    if len(stated) == 1:
        return f"only {stated[0]} states its number of devices ({counts[stated[0]]})"
    return ""


def _model_doubt(reference: Run, other: Run, differences: Sequence[ModelDifference]) -> str:
    """Return how two models differ, or what a log does not state of its model; empty if neither."""
    known = [difference for difference in differences if difference.is_known]
    if known:
        return f"their models differ in {describe_differences(known)}"
    unstated = describe_unstated_flags(reference, other, differences)
    return f"their models may differ: {unstated}" if unstated else ""


def _work(reference: Run, other: Run) -> tuple[tuple[int, int] | None, str]:
    """Tokens, else samples, of an iteration of each; None, with the reason, where that is not known.

    With them stands what is taken to be equal, since logs do not print it.
    """
    runs, (one, two) = (reference, other), (reference.spec, other.spec)
    if any(spec and spec.shares_gpu for spec in (one, two)):
        return None, SHARED
    if one and two:
        return (one.tokens_per_iteration, two.tokens_per_iteration), ""
    lacking: dict[tuple[str, ...], list[str]] = {}
    asked: dict[str, list[object]] = {
        "model": [run.model_or_size for run in runs],
        "sequence length": [run.seq_length for run in runs],
    }
    ours, theirs = (run.global_batch_size for run in runs)
    if not ours or not theirs:
        asked = {"global batch size": [ours, theirs]}
    for what, known in asked.items():
        names = tuple(run.name for run, value in zip(runs, known, strict=True) if not value)
        if names:
            lacking.setdefault(names, []).append(f"no {what}")
    caution = "; ".join(
        f"{' and '.join(names)} print{'s' * (len(names) == 1)} {' and '.join(what)}"
        for names, what in lacking.items()
    )
    if not ours or not theirs:
        return None, caution
    caution = f"{caution}, so equal ones are assumed" if caution else ""
    if not any(run.num_devices for run in runs):
        unknown = "neither states its number of devices, so the same is assumed"
        caution = "; ".join(filter(None, (caution, unknown)))
    if reference.seq_length and other.seq_length:
        return (ours * reference.seq_length, theirs * other.seq_length), caution
    return (ours, theirs), caution


def list_differences(reference: Run, other: Run) -> list[WorkMismatch]:
    """Everything the runs should share for their times to be comparable, and do not.

    The flags of their models come first. Of two runs of which one is a foreign log the list has all
    printed arguments that differ.
    """
    of_model = [
        WorkMismatch(difference.flag, difference.reference, difference.other)
        for difference in reference.stated_model.differences(other.stated_model)
        if difference.is_known and difference.flag != "--hidden-dropout"
    ]
    theirs = _conditions(other)
    found = of_model + [
        WorkMismatch(what, value, theirs[what], what in _OF_STRATEGY)
        for what, value in _conditions(reference).items()
        if value != theirs[what]
    ]
    one, two = essential_arguments(reference.arguments), essential_arguments(other.arguments)
    if one and two and (reference.is_foreign or other.is_foreign):
        named = argument_names(mismatch.what for mismatch in of_model)
        for name in sorted({*one, *two} - _SAID - named):
            mine, its = one.get(name, "not given"), two.get(name, "not given")
            if mine != its:
                flag = f"--{name.replace('_', '-')}"
                found.append(WorkMismatch(flag, mine, its, name in _OF_LAYOUT))
    return found


_SAID = frozenset(
    {
        *("optimizer", "fp16", "bf16", "params_dtype", "hidden_dropout"),
        *("group_query_attention", "num_query_groups"),
    }
)
"""Arguments that a condition of its own, or a flag of the model, stands for."""
_OF_LAYOUT = argument_names(flags_with_role("parallelism")) | {
    *("world_size", "data_parallel_size", "transformer_pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size",
    *("padded_vocab_size", "make_vocab_size_divisible_by"),
}
_OF_STRATEGY = ("devices", "padded vocabulary")


def _conditions(run: Run) -> dict[str, str]:
    """What should be the same on both sides, by its name."""
    spec, record = run.spec, run.record
    known = {
        "devices": spec and spec.parallelism.world_size,
        "tokens per iteration": spec and spec.tokens_per_iteration,
        "sequence length": spec and spec.shape.seq_length,
        "padded vocabulary": (spec and spec.padded_vocabulary) or None,
        "data": run.dataset_name,
        "dropout": spec and spec.dropout,
        "precision": spec and spec.dtype,
        "optimizer": spec and spec.optimizer,
        "recomputation": spec and str(spec.recompute),
        "offload": spec and " ".join(offload_flags(spec.offload)),
        "Adam's state": describe_adam_state(run),
        "Megatron": run.megatron or None,
        "code": record and record.code and str(record.code),
        "host": record and record.host.name,
        "link between the ranks": record and describe_link(record.spec),
        "patches": describe_fused_patches(spec),
        "patch file": describe_patch_file(spec),
        "ranks on one GPU": bool(spec and spec.shares_gpu),
    }
    return {what: "unknown" if value is None else str(value) for what, value in known.items()}


SHARED = (
    "its ranks shared one GPU: memory and losses are true, times say nothing about the strategy"
)

OVERSUBSCRIBED = "more ranks than cores, so times say nothing about speed"
DISTURBED = "other programs used the cores, so times say nothing about speed"
SLOWED_REFERENCE = "its reference took longer than is possible"
IMPOSSIBLE = "is impossible"
WITHHELD = (SHARED, OVERSUBSCRIBED, DISTURBED, SLOWED_REFERENCE)
"""Reasons for no verdict that a sentence of the report tells once for all rows."""


def describe_adam_state(run: Run) -> str | None:
    """Whether Adam's moments existed: fp16 skips its first steps, and allocates them after."""
    lines = run.log.iterations
    if not lines.known("skipped_iterations").any():
        return None
    existed = (lines.values("skipped_iterations") == 0).any()
    return "existed" if existed else "never existed (every step was skipped)"


def describe_conditions(runs: Iterable[Run]) -> list[str]:
    """The machines and the kit's commits, which no times may be read without; empty without runs."""
    records = [run.record for run in runs if run.record]
    machines = {f"{r.host.cores} cores of {r.host.cpu}, {r.spec.dtype}" for r in records}
    commits = {(record.kit_commit or "no commit")[:12] for record in records}
    said = f"Measured on {'; '.join(sorted(machines))}, kit at {', '.join(sorted(commits))}."
    return [said] if records else []

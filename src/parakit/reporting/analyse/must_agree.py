"""Which runs must print the same losses, whatever the strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from parakit.artifacts.identity import parse_flag_values
from parakit.logs import REQUIRED_MODEL_FLAGS, ModelDifference, Run

_SCHEDULE = (
    *("train_iters", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_fraction"),
    *("lr_warmup_iters", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    "split",
)
"""Arguments that change losses, and no strategy changes; `train_iters` decides the samples' order."""


NO_START = "no shared starting checkpoint"
DROPOUT = "dropout is on, and its random numbers differ by strategy"
EIGHT_BITS = "products are of 8 bits or fewer, whose repeats differ by an unknown amount"
UNPROVEN = (NO_START, DROPOUT, EIGHT_BITS)
"""Obstacles that are none where the losses of two logs agree all the same."""


NO_SHAPE = "does not state its model's shape"
_MAX_NAMED = 4
"""Differences of two models that are named."""


def why_shape_is_unknown(run: Run) -> str:
    """Return that a foreign log does not state which model it trains; empty where it does."""
    if run.model or not run.is_foreign:
        return ""
    lacking = run.stated_model.lacking
    if not lacking:
        return f"{run.name} does not state how its model was split, or contradicts itself"
    if len(lacking) == len(REQUIRED_MODEL_FLAGS):
        return f"{run.name} {NO_SHAPE}"
    return f"{run.name} does not state its model's {', '.join(lacking)}"


def _obstacle_of_models(reference: Run, other: Run) -> str:
    """Return which flags of the models differ, or are stated by one run alone; empty if none."""
    differences = reference.stated_model.differences(other.stated_model)
    known = [difference for difference in differences if difference.is_known]
    if known:
        return f"different {describe_differences(known)}"
    return describe_unstated_flags(reference, other, differences)


def describe_unstated_flags(
    reference: Run, other: Run, differences: Sequence[ModelDifference]
) -> str:
    """Return which flags of the model one run states and the other does not; empty if none."""
    unstated = {
        reference.name: [flag.flag for flag in differences if not flag.reference],
        other.name: [flag.flag for flag in differences if not flag.other],
    }
    return "; ".join(
        f"{name} does not state {_first(flags)}" for name, flags in unstated.items() if flags
    )


def describe_differences(differences: Sequence[ModelDifference]) -> str:
    """Return the first differences with both values, `--ffn-hidden-size (4096 | 5120)`."""
    return _first([f"{flag.flag} ({flag.reference} | {flag.other})" for flag in differences])


def _first(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], f"{more} more flags"] if more > 0 else names)


def why_losses_may_differ(reference: Run, other: Run) -> str:
    """Why two runs need not print the same losses; empty if they must."""
    if of_models := _obstacle_of_models(reference, other):
        return of_models
    # Of two logs of one strategy equal seeds draw equal weights and dropout masks.
    one, two = reference.spec, other.spec
    of_one_layout = bool(
        reference.is_foreign
        and other.is_foreign
        and (one and two)
        and (one.parallelism, one.batch) == (two.parallelism, two.batch)
    )
    # With another seed the start is another too, which then says less.
    same_seed = (one and one.seed) == (two and two.seed)
    if same_seed and not _share_start(reference, other, of_one_layout):
        return NO_START
    ours, theirs = _list_loss_settings(reference), _list_loss_settings(other)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if (reference.record is None) == (other.record is None):
        # Only where both tell their schedules in the same way.
        mine, its = _schedule(reference), _schedule(other)
        changed = [name for name in _SCHEDULE if mine[name] != its[name]]
        differing += [f"--{name.replace('_', '-')}" for name in changed]
    if differing:
        return f"different {', '.join(differing)}"
    if one and one.fp8_recipe and reference.is_foreign and other.is_foreign:
        return EIGHT_BITS
    if of_one_layout or all(run.spec and run.spec.dropout == 0 for run in (reference, other)):
        return ""
    return DROPOUT


def _share_start(reference: Run, other: Run, of_one_layout: bool) -> bool:
    """Whether both started from the same weights: by their hash, else by the checkpoint's name."""
    ours, theirs = (run.record and run.record.start_weights for run in (reference, other))
    if ours and theirs:
        return ours == theirs
    one, two = reference.start_checkpoint, other.start_checkpoint
    return of_one_layout if one is None and two is None else one == two


def _list_loss_settings(run: Run) -> dict[str, object]:
    """What losses depend on."""
    spec = run.spec
    schedule = spec and spec.parallelism.schedule
    return {
        "device": run.device,
        "data": run.dataset_name,
        "seed": spec and spec.seed,
        "global batch": run.global_batch_size,
        "sequence length": spec and spec.shape.seq_length,
        "precision": spec and (spec.dtype, spec.fp8_recipe),
        "optimizer": spec and spec.optimizer,
        "patch file": spec and spec.patch_file,
        # Without flushes gradients are of older weights, as old as this says.
        "pipeline schedule": schedule and (schedule if schedule.is_asynchronous else ""),
    }


def _schedule(run: Run) -> dict[str, float | str | None]:
    return _schedule_of(run.record.argv) if run.record else _numbers_of(run.arguments)


@lru_cache(maxsize=1024)
def _schedule_of(argv: tuple[str, ...]) -> dict[str, float | str | None]:
    """Of a command line; each run is compared with many."""
    return _numbers_of(parse_flag_values(argv))


def _numbers_of(given: Mapping[str, str]) -> dict[str, float | str | None]:
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}
    found: dict[str, float | str | None] = {}
    for name in _SCHEDULE:
        try:
            found[name] = float(plain.get(name) or "")
        except ValueError:
            found[name] = plain.get(name)
    return found

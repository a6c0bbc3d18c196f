"""Decide which runs must print the same losses, whatever their strategies are."""

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
"""Arguments that change losses and that no strategy changes; `train_iters` decides the samples' order."""


NO_START = "no shared starting checkpoint"
DROPOUT = "dropout is on, and its random numbers differ by strategy"
EIGHT_BITS = "products are of 8 bits or fewer, whose repeats differ by an unknown amount"
UNPROVEN = (NO_START, DROPOUT, EIGHT_BITS)
"""Reasons that do not count if the losses of two foreign logs agree in spite of them."""


DAMAGED_FILE = "the packed file is damaged, so its figures may be wrong"
"""Reason for no verdict on a run's losses and times."""
NO_SHAPE = "does not state its model's shape"
_MAX_NAMED = 4
"""Differences of two models that a sentence names."""


def why_shape_is_unknown(run: Run) -> str:
    """Return why the model of a foreign log is unknown; empty if the model is known, or for a run of the kit."""
    if run.model or not run.is_foreign:
        return ""
    missing = run.stated_model.lacking
    if not missing:
        return f"{run.name} does not state how its model was split, or contradicts itself"
    if len(missing) == len(REQUIRED_MODEL_FLAGS):
        return f"{run.name} {NO_SHAPE}"
    return f"{run.name} does not state its model's {', '.join(missing)}"


def _why_models_differ(reference: Run, other: Run) -> str:
    """Return which flags of the models differ, or are stated by one run alone; empty if none."""
    differences = reference.stated_model.differences(other.stated_model)
    known = [difference for difference in differences if difference.is_known]
    if known:
        return f"different {describe_differences(known)}"
    return describe_unstated_flags(reference, other, differences)


def describe_unstated_flags(
    reference: Run, other: Run, differences: Sequence[ModelDifference]
) -> str:
    """Return a text with the model's flags that only one of the two runs states; empty if there are no such flags."""
    unstated = {
        reference.name: [flag.flag for flag in differences if not flag.reference],
        other.name: [flag.flag for flag in differences if not flag.other],
    }
    return "; ".join(
        f"{name} does not state {_join_first(flags)}" for name, flags in unstated.items() if flags
    )


def describe_differences(differences: Sequence[ModelDifference]) -> str:
    """Return the first differences with both values, `--ffn-hidden-size (4096 | 5120)`."""
    return _join_first([f"{flag.flag} ({flag.reference} | {flag.other})" for flag in differences])


def _join_first(names: Sequence[str]) -> str:
    """Return the first _MAX_NAMED names, and how many more flags there are."""
    more = len(names) - _MAX_NAMED
    return ", ".join([*names[:_MAX_NAMED], f"{more} more flags"] if more > 0 else names)


def why_losses_may_differ(reference: Run, other: Run) -> str:
    """Return why two runs may print different losses; empty if their losses must be equal."""
    model_difference = _why_models_differ(reference, other)
    if model_difference:
        return model_difference
    has_same_layout = _are_logs_of_one_layout(reference, other)
    reference_spec, spec = reference.spec, other.spec
    reference_seed = reference_spec.seed if reference_spec else None
    seed = spec.seed if spec else None
    # With another seed the weights differ too, and then the seed is the better reason.
    if reference_seed == seed and not _share_start(reference, other, has_same_layout):
        return NO_START
    differing = _differing_settings(reference, other)
    if differing:
        return f"different {', '.join(differing)}"
    if reference.is_foreign and other.is_foreign and reference_spec and reference_spec.fp8_recipe:
        return EIGHT_BITS
    # Two logs of one strategy with equal seeds draw equal dropout masks.
    if has_same_layout:
        return ""
    has_dropout = not all(run.spec and run.spec.dropout == 0 for run in (reference, other))
    return DROPOUT if has_dropout else ""


def _are_logs_of_one_layout(reference: Run, other: Run) -> bool:
    """Return True if two foreign logs state the same parallel sizes and the same batch sizes."""
    if not reference.is_foreign or not other.is_foreign:
        return False
    if reference.spec is None or other.spec is None:
        return False
    has_same_split = reference.spec.parallelism == other.spec.parallelism
    return has_same_split and reference.spec.batch == other.spec.batch


def _differing_settings(reference: Run, other: Run) -> list[str]:
    """Return the names of settings and schedule arguments in which two runs differ."""
    settings, other_settings = _list_loss_settings(reference), _list_loss_settings(other)
    differing = [name for name in settings if settings[name] != other_settings[name]]
    if (reference.record is None) != (other.record is None):
        # A run folder and a log state their schedules in different ways, which cannot be compared.
        return differing
    schedule, other_schedule = _parse_schedule(reference), _parse_schedule(other)
    for name in _SCHEDULE:
        if schedule[name] != other_schedule[name]:
            differing.append(f"--{name.replace('_', '-')}")
    return differing


def _share_start(reference: Run, other: Run, has_same_layout: bool) -> bool:
    """Return True if both runs started from the same weights.

    The hashes of the weights are compared, or else the names of the initial checkpoints. If neither run has a
    checkpoint, the result is `has_same_layout`: equal seeds draw equal weights if the parallel sizes are equal.
    """
    weights, other_weights = (run.record and run.record.start_weights for run in (reference, other))
    if weights and other_weights:
        return weights == other_weights
    checkpoint, other_checkpoint = reference.start_checkpoint, other.start_checkpoint
    if checkpoint is None and other_checkpoint is None:
        return has_same_layout
    return checkpoint == other_checkpoint


def _list_loss_settings(run: Run) -> dict[str, object]:
    """Return the settings of a run that influence its losses, by name; the value of an unknown setting is None."""
    settings: dict[str, object] = {
        "device": run.device,
        "data": run.dataset_name,
        "seed": None,
        "global batch": run.global_batch_size,
        "sequence length": None,
        "precision": None,
        "optimizer": None,
        "patch file": None,
        "pipeline schedule": None,
    }
    spec = run.spec
    if spec is not None:
        # An asynchronous schedule computes gradients with older weights, and the schedule decides how old.
        schedule = spec.parallelism.schedule
        settings |= {
            "seed": spec.seed,
            "sequence length": spec.shape.seq_length,
            "precision": (spec.dtype, spec.fp8_recipe),
            "optimizer": spec.optimizer,
            "patch file": spec.patch_file,
            "pipeline schedule": schedule if schedule.is_asynchronous else "",
        }
    return settings


def _parse_schedule(run: Run) -> dict[str, float | str | None]:
    """Return the schedule's arguments of a run by name, numbers as numbers; None for missing ones."""
    return _parse_schedule_of_argv(run.record.argv) if run.record else _parse_values(run.arguments)


@lru_cache(maxsize=1024)
def _parse_schedule_of_argv(argv: tuple[str, ...]) -> dict[str, float | str | None]:
    """Return the schedule's arguments of a command line; cached, as each run is compared with many."""
    return _parse_values(parse_flag_values(argv))


def _parse_values(arguments: Mapping[str, str]) -> dict[str, float | str | None]:
    """Return the values of the learning-rate schedule's arguments by name.

    A value is a float if its text is a number, otherwise the text, or None if the argument is missing.
    """
    texts = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    values: dict[str, float | str | None] = {}
    for name in _SCHEDULE:
        try:
            values[name] = float(texts.get(name) or "")
        except ValueError:
            values[name] = texts.get(name)
    return values

"""Turn a recipe's flags into what the kit trains: a model's `.args` file, a target and its variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from parakit.config.flag_table import FLAGS, flags_with_role
from parakit.config.flags import Flags, drop_flags, merge_flags, pick_flags
from parakit.config.model import training_flags
from parakit.config.run import DeviceKind, RunSpec, spec_from_flags
from parakit.config.strategy import StrategyError, strategy_flags, strategy_name
from parakit.convert.recipe.flags import RecipeFlags
from parakit.convert.recipe.table import VALUE_KINDS, RecipeError, megatron_default

_VARIABLES = {
    "--micro-batch-size": "MICRO_BATCH",
    "--global-batch-size": "GLOBAL_BATCH",
    "--exit-interval": "ITERS",
    "--seed": "SEED",
    "--data-path": "DATA",
}
"""The make variable of each flag that has one."""
_RUN_FLAGS = flags_with_role("start", "parallelism", "stages", "overlap") | {
    "--async-save",
    "--ckpt-format",
    "--num-workers",
    "--transformer-impl",
}
"""Flags of a strategy, a device or a run. They do not belong into a model's file; EXTRA= has them."""

_NEVER = str(10**9)
"""An interval in iterations that no run reaches."""


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe of Megatron-Bridge in the kit's form: a model's flags, a make target and make variables."""

    spec: RunSpec
    family: str
    """Folder of `examples/` whose training flags come before those of the model's file."""
    model_flags: tuple[str, ...]
    """Flags of the model's `.args` file."""
    variables: Mapping[str, str]
    """Make variables of the target."""

    @property
    def target(self) -> str:
        """Make target that trains the recipe."""
        ranks = self.spec.parallelism.world_size
        return f"train-{strategy_name(self.spec.parallelism)}-{self.spec.model}-{ranks}gpu"


def build_imported_recipe(
    reading: RecipeFlags, name: str, ranks: int | None = None
) -> ImportedRecipe:
    """Split a recipe's flags into the flags of a model named `name`, the strategy, and make variables.

    A recipe does not state a number of GPUs. `ranks` None takes the smallest number that its strategy allows.

    Raises:
        RecipeError: The strategy does not fit on `ranks` GPUs, a flag is missing, or the recipe states a number
            of samples to train and no number of iterations.
    """
    flags = reading.flags
    spec = _read_spec(flags, name, ranks)
    family = "moe" if spec.shape.experts else "gpt3"
    strategy = strategy_flags(spec.parallelism)
    # The kit asks for `--log-throughput` in every run.
    run_flags = (*_VARIABLES, *_RUN_FLAGS, "--log-throughput")
    other_flags = {argument for argument in (*strategy, *run_flags) if argument.startswith("--")}
    model_flags = drop_flags(flags, other_flags)
    batch_flags = pick_flags(flags, ("--micro-batch-size", "--global-batch-size"))
    extra = [*drop_flags(pick_flags(flags, _RUN_FLAGS), strategy)]
    variables = {}
    for flag, variable in _VARIABLES.items():
        flag_and_values = pick_flags(flags, (flag,))
        if len(flag_and_values) == 2:
            variables[variable] = flag_and_values[1]
    if len(Flags(flags).texts("--data-path")) > 1:
        # DATA= takes one data set; several, with weights, can only be given as a flag.
        extra += pick_flags(flags, ("--data-path",))
    if extra:
        variables["EXTRA"] = shlex.join(extra)
    return ImportedRecipe(
        spec=spec,
        family=family,
        model_flags=_override_family_flags(merge_flags(model_flags, batch_flags), family),
        variables=variables,
    )


def model_name(text: str) -> str:
    """Return a model's name for a file's name: `My Recipe.py` becomes `my-recipe.py`.

    Other characters than letters, digits and dots become hyphens; the name may become empty.
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _read_spec(flags: tuple[str, ...], name: str, ranks: int | None) -> RunSpec:
    """Return the run that a recipe's flags define on `ranks` GPUs.

    `ranks` None takes the smallest number of GPUs that the strategy allows.

    Raises:
        RecipeError: The strategy does not fit on `ranks` GPUs, or the flags define no run.
    """
    degrees = Flags(flags).fields("parallelism")
    fewest_ranks = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    # Expert-parallel ranks are taken from context- and data-parallel ones.
    fewest_ranks *= -(-degrees["expert"] // degrees["context"])
    try:
        return spec_from_flags(flags, ranks or fewest_ranks, DeviceKind.GPU, name)
    except StrategyError as error:
        raise RecipeError(
            f"{str(error).rstrip('.')}: GPUS={ranks or fewest_ranks} does not fit."
        ) from None
    except (ValueError, ZeroDivisionError) as error:
        raise RecipeError(f"The recipe defines no run: {error}") from None


def _override_family_flags(arguments: tuple[str, ...], family: str) -> tuple[str, ...]:
    """Return the flags of a model's file, extended by flags that undo the training flags of its family.

    The kit puts the family's training flags before the flags of the file. A flag that the recipe leaves out
    would therefore get the family's value. So each such flag is added with Megatron's default.

    Raises:
        RecipeError: A flag of the family cannot be undone.
    """
    flags = Flags(arguments)
    overrides: list[str] = []
    for argument in training_flags(family):
        is_flag = argument.startswith("--")
        if not is_flag or flags.has(argument) or argument in _VARIABLES or argument in _RUN_FLAGS:
            continue
        default = megatron_default(FLAGS[argument])
        values = None
        if default is not None:
            values = VALUE_KINDS[FLAGS[argument].kind].arguments(default)
        overrides += [argument, *values] if values else _undo_family_flag(argument, flags)
    # Megatron takes either `--lr-warmup-iters` or `--lr-warmup-fraction`.
    replaced = ("--lr-warmup-iters",) if "--lr-warmup-fraction" in overrides else ()
    return (*drop_flags(arguments, replaced), *overrides)


def _undo_family_flag(flag: str, flags: Flags) -> list[str]:
    """Return arguments that undo a flag of the family for which Megatron has no default.

    `flags` are the recipe's flags. The result is empty for a flag that does not have to be undone.

    Raises:
        RecipeError: The recipe has neither a number of iterations nor a learning rate.
    """
    if flag == "--lr-warmup-fraction":
        decay_iterations = flags.integer("--lr-decay-iters", flags.integer("--train-iters", 1))
        return [flag, repr(flags.integer("--lr-warmup-iters") / decay_iterations)]
    if flag == "--lr-decay-iters":
        return [flag, flags.text("--train-iters")]
    if flag == "--eval-interval":
        return [flag, _NEVER]
    if flag == "--train-iters":
        raise RecipeError(
            f"train.train_samples={flags.text('--train-samples')}: the kit's models are trained by "
            "iterations; give the recipe train.train_iters."
        )
    if flag == "--lr":
        raise RecipeError("optimizer.lr is None, so the recipe has no learning rate; set it.")
    return []

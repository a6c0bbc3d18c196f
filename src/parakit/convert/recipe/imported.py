"""What a recipe's flags are in the kit: a model's `.args` file, a target's name and its variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from parakit.config.flag_table import FLAGS, of_role
from parakit.config.flags import Flags, drop_flags, merge_flags, pick_flags
from parakit.config.model import training_flags
from parakit.config.run import DeviceKind, RunSpec, spec_of_flags
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
_OF_A_RUN = of_role("start", "parallelism", "stages", "overlap") | {
    "--async-save",
    "--ckpt-format",
    "--num-workers",
    "--transformer-impl",
}
"""Flags of a strategy, a device or a run, which do not belong into a model's file: EXTRA= has them."""

_NEVER = str(10**9)


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe as the kit has it."""

    spec: RunSpec
    family: str
    """The folder of `examples/` whose training flags its model's file comes after."""
    model_flags: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def target(self) -> str:
        """The make target that trains it."""
        ranks = self.spec.parallelism.world_size
        return f"train-{strategy_name(self.spec.parallelism)}-{self.spec.model}-{ranks}gpu"


def build_imported_recipe(
    reading: RecipeFlags, name: str, ranks: int | None = None
) -> ImportedRecipe:
    """A recipe's flags as a model of that name, a target and variables.

    No recipe says how many GPUs train it: without `ranks` the fewest that its strategy allows.

    Raises:
        RecipeError: The strategy does not multiply to `ranks`, or a flag is missing.
    """
    flags = Flags(reading.flags)
    degrees = flags.fields("parallelism")
    fewest = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    fewest *= -(-degrees["expert"] // degrees["context"])
    try:
        spec = spec_of_flags(reading.flags, ranks or fewest, DeviceKind.GPU, name)
    except StrategyError as error:
        raise RecipeError(
            f"{str(error).rstrip('.')}: GPUS={ranks or fewest} does not fit."
        ) from None
    except (ValueError, ZeroDivisionError) as error:
        raise RecipeError(f"The recipe defines no run: {error}") from None
    family = "moe" if spec.shape.experts else "gpt3"
    layout = strategy_flags(spec.parallelism)
    of_run = (*_VARIABLES, *_OF_A_RUN, "--log-throughput")  # The kit always asks for the last one.
    own = drop_flags(reading.flags, {word for word in (*layout, *of_run) if word.startswith("--")})
    batch = pick_flags(reading.flags, ("--micro-batch-size", "--global-batch-size"))
    extra = [*drop_flags(pick_flags(reading.flags, _OF_A_RUN), layout)]
    given = ((each, pick_flags(reading.flags, (flag,))) for flag, each in _VARIABLES.items())
    variables = {variable: words[1] for variable, words in given if len(words) == 2}
    if len(flags.texts("--data-path")) > 1:  # Several, with weights.
        extra += pick_flags(reading.flags, ("--data-path",))
    if extra:
        variables["EXTRA"] = shlex.join(extra)
    return ImportedRecipe(
        spec, family, _over_the_familys(merge_flags(own, batch), family), variables
    )


def model_name(text: str) -> str:
    """A file's name as a model's: `My Recipe.py` is `my-recipe`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _over_the_familys(flags: tuple[str, ...], family: str) -> tuple[str, ...]:
    """The flags with Megatron's defaults written out where the family's models are trained otherwise."""
    given = Flags(flags)
    familys = training_flags(family)
    more: list[str] = []
    for flag in (word for word in familys if word.startswith("--")):
        if given.has(flag) or flag in _VARIABLES or flag in _OF_A_RUN:
            continue
        default = megatron_default(FLAGS[flag])
        words = None if default is None else VALUE_KINDS[FLAGS[flag].kind].words(default)
        more += [flag, *words] if words else _as_if_absent(flag, given)
    dropped = ("--lr-warmup-iters",) if "--lr-warmup-fraction" in more else ()
    return (*drop_flags(flags, dropped), *more)


def _as_if_absent(flag: str, given: Flags) -> list[str]:
    """Words that undo a flag of the family's."""
    if flag == "--lr-warmup-fraction":  # Megatron takes either this or --lr-warmup-iters.
        decay = given.integer("--lr-decay-iters", given.integer("--train-iters", 1))
        return [flag, repr(given.integer("--lr-warmup-iters") / decay)]
    if flag == "--lr-decay-iters":
        return [flag, given.text("--train-iters")]
    if flag == "--eval-interval":
        return [flag, _NEVER]
    if flag == "--train-iters":
        raise RecipeError(
            f"train.train_samples={given.text('--train-samples')}: the kit's models are trained by "
            "iterations; give the recipe train.train_iters."
        )
    if flag == "--lr":
        raise RecipeError("optimizer.lr is None, so the recipe has no learning rate; set it.")
    return []

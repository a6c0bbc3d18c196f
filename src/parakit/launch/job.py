"""A run as the user names it: a training target with make's variables.

`parse_target` reads it from the target's name, and `Job` writes it as a make command or as arguments.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.model import ALIASES as MODEL_ALIASES
from parakit.config.model import Model, is_model_file, load_model, model_name_of_file, model_names
from parakit.config.run import DeviceKind
from parakit.config.strategy import (
    PUBLISHED_STRATEGIES,
    StrategyError,
    parse_strategy,
    strategy_flags,
)
from parakit.launch.options import NO_OPTIONS, Options, format_variables

ALIASES = {
    "train-gpt3-345m-1gpu-x-model-parallelism": "train-baseline-gpt3-345m-1gpu",
    "train-gpt3-857m-2gpu-x-model-parallelism": "train-dp2-gpt3-857m-2gpu",
    "train-tp2-sq-gpt2-large-2gpu": "train-sp2-gpt2-large-2gpu",
}
"""Other target names: those of the published experiments and of their author's Makefile (`x` is "without")."""

_SCRIPT = re.compile(
    r"set -euo pipefail\n"
    r'cd "\$\(dirname "\$0"\)/\.\./\.\."\n'
    r'exec "\$\{KIT_PYTHON:-\.venv/bin/python\}" -m parakit run (?P<strategy>\S+) "\$@"'
    r"(?: --(?P<flags>[\w\s./=-]*))?"
)
"""Pattern of a launch script, without comments, that only names its strategy and Megatron flags."""

_TARGET = re.compile(r"train-(?P<middle>.+)-(?P<devices>\d+(?:gpu|cpu))")
_DEVICES = re.compile(r"([1-9]\d*)(gpu|cpu)")


@dataclass(frozen=True)
class Job:
    """One training run as its user names it: strategy, model, devices and make variables."""

    strategy: str
    model: Model
    devices: int
    """Number of ranks on all nodes."""
    device: DeviceKind
    options: Options = NO_OPTIONS
    script_flags: tuple[str, ...] | None = None
    """Megatron flags that a launch script gives for its strategy; None takes those of the strategy's grammar."""

    @property
    def target(self) -> str:
        """The make target, such as `train-tp2-gpt2-tiny-2cpu`."""
        return f"train-{self.name}"

    @property
    def name(self) -> str:
        """The target's name without its verb, such as `tp2-gpt2-tiny-2cpu`."""
        return f"{self.strategy}-{self.model.name}-{self.device_suffix}"

    @property
    def device_suffix(self) -> str:
        """Number and kind of devices as a target's name ends, such as `2gpu`."""
        return f"{self.devices}{self.device}"

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags that select the strategy.

        Raises:
            StrategyError: The strategy's degrees do not multiply to its devices.
        """
        grammar_flags = strategy_flags(parse_strategy(self.strategy, self.devices))
        return grammar_flags if self.script_flags is None else self.script_flags

    @property
    def variables(self) -> Mapping[str, str]:
        """Make's variables with which the target trains exactly this job."""
        return format_variables(self.options)

    @property
    def parakit_arguments(self) -> tuple[str, ...]:
        """Arguments of `python -m parakit` that start the job, as a launch script passes them."""
        return ("run", self.strategy, self.model.name, self.device_suffix, "--", *self.flags)

    @property
    def script(self) -> str | None:
        """The strategy's launch script, relative to the repository root; None if the strategy has none."""
        script = f"examples/{self.model.family}/train_{self.strategy}.sh"
        return script if (ROOT / script).is_file() else None

    def read_script_flags(self) -> tuple[str, ...] | None:
        """Return the Megatron flags of the strategy's launch script.

        None means that the job has no script, or that somebody has edited it to do more than name the strategy and
        its flags. Only a shell can evaluate such a script.
        """
        if self.script is None:
            return None
        text = (ROOT / self.script).read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
        match = _SCRIPT.fullmatch("\n".join(filter(None, lines)))
        if match is None or match["strategy"] != self.strategy:
            return None
        return tuple((match["flags"] or "").split())

    def with_options(self, options: Options) -> Job:
        """Return the job with other make variables."""
        return replace(self, options=options)

    def with_strategy(self, strategy: str, devices: int | None = None) -> Job:
        """Return the job with another strategy of the grammar, and with `devices` ranks unless that is None."""
        return replace(self, strategy=strategy, devices=devices or self.devices, script_flags=None)


def format_make_command(target: str, variables: Mapping[str, str]) -> str:
    """Return the make command with its variables, quoted for a shell; empty variables are left out."""
    assignments = (f"{name}={shlex.quote(text)}" for name, text in variables.items() if text)
    return " ".join(("make", target, *assignments))


def parse_target(name: str, options: Options = NO_OPTIONS) -> Job:
    """Return the job that a target's name describes.

    Raises:
        LaunchError: The name does not have a target's form, or its strategy or model is unknown. The message
            lists near names.
    """
    match = _TARGET.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise LaunchError(
            f"Target '{name}' is not train-<strategy>-<model>-<N>gpu or …<N>cpu; {_suggest_targets(name)}."
        )
    model_file = file_model = None
    if options.model and is_model_file(options.model):
        model_file, file_model = options.model, model_name_of_file(options.model)
    strategy, model = _split_strategy_and_model(match["middle"], name, file_model)
    if file_model not in (None, model):
        raise LaunchError(
            f"Target '{name}' is of {model}, and MODEL= is a file of {file_model}; name '{file_model}' in the "
            "target, or leave MODEL= out."
        )
    devices, device = parse_devices(match["devices"])
    return Job(strategy, load_model(model, model_file), devices, device, options)


def parse_devices(text: str, variable: str = "") -> tuple[int, DeviceKind]:
    """Return number and kind of devices of a text such as `2gpu`.

    Raises:
        LaunchError: The text has another form; the message names `variable` if one holds the text.
    """
    match = _DEVICES.fullmatch(text)
    if match is None:
        shown = f"{variable}={text}" if variable else f"'{text}'"
        raise LaunchError(f"{shown} is not a number of devices such as 2cpu or 8gpu.")
    return int(match[1]), DeviceKind(match[2])


def list_example_targets() -> tuple[str, ...]:
    """Return the `train-…` targets of the six published strategies for every model, on GPUs and on CPU ranks.

    An error message about an unknown target suggests the nearest of these names.
    """
    targets = []
    for model in model_names():
        for strategy in PUBLISHED_STRATEGIES:
            num_devices = 1 if strategy == "baseline" else 2
            for device in DeviceKind:
                targets.append(f"train-{strategy}-{model}-{num_devices}{device}")
    return tuple(targets)


def _split_strategy_and_model(middle: str, name: str, file_model: str | None) -> tuple[str, str]:
    """Split the text between `train-` and the devices, such as `tp2-gpt2-tiny`; return strategy and model.

    Args:
        middle: The text to split. It ends with the name or an alias of a model.
        name: The complete target, for the error message.
        file_model: Name of the model that the file in MODEL= defines; None if MODEL= names no file.

    Raises:
        LaunchError: The model is unknown, or the strategy is not in the grammar.
    """
    names = [*model_names(), *MODEL_ALIASES]
    if file_model:
        names.append(file_model)
    # The longest name is tried first, because one model's name may end in another's.
    for model in sorted(names, key=len, reverse=True):
        if middle.endswith(f"-{model}"):
            strategy = middle.removesuffix(f"-{model}")
            _check_strategy(strategy)
            return strategy, MODEL_ALIASES.get(model, model)
    # No known model ends the text, so `load_model` raises an error here, which suggests similar names.
    strategy, _, model = middle.partition("-")
    try:
        load_model(model)
    except ValueError as error:
        raise LaunchError(f"Target '{name}': {error}") from None
    _check_strategy(strategy)
    return strategy, model


def _check_strategy(strategy: str) -> None:
    """Raise a LaunchError if a strategy's name has a word that the grammar does not know.

    The degrees are checked later, when the number of devices is known.
    """
    try:
        parse_strategy(strategy, devices=-1)
    except StrategyError as error:
        if "Unknown strategy" in str(error):
            raise LaunchError(str(error)) from None


def _suggest_targets(name: str) -> str:
    """Return the last clause of an error message: the targets with similar names, or how to list all targets."""
    near = difflib.get_close_matches(name, (*list_example_targets(), *ALIASES), n=3, cutoff=0.3)
    if not near:
        return "'make help' lists targets, 'make list' models and strategies"
    return f"the nearest are {', '.join(near)}"

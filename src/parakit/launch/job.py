"""One run as it is asked for: a training target with make's variables, read from and written as both."""

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
    EXAMPLE_STRATEGIES,
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
"""Target names of the published experiments and of their author's Makefile (`x`: without)."""

_SCRIPT = re.compile(
    r"set -euo pipefail\n"
    r'cd "\$\(dirname "\$0"\)/\.\./\.\."\n'
    r'exec "\$\{KIT_PYTHON:-\.venv/bin/python\}" -m parakit run (?P<strategy>\S+) "\$@"'
    r"(?: --(?P<flags>[\w\s./=-]*))?"
)
"""A launch script without its comments that only names its strategy and Megatron flags without shell syntax."""

_TARGET = re.compile(r"train-(?P<middle>.+)-(?P<devices>\d+(?:gpu|cpu))")
_DEVICES = re.compile(r"([1-9]\d*)(gpu|cpu)")


@dataclass(frozen=True)
class Job:
    """What is trained, where, and with which variables."""

    strategy: str
    model: Model
    devices: int
    """Ranks over all nodes."""
    device: DeviceKind
    options: Options = NO_OPTIONS
    script_flags: tuple[str, ...] | None = None
    """Megatron's, that a launch script gives for its strategy; None are the grammar's."""

    @property
    def target(self) -> str:
        """The make target."""
        return f"train-{self.name}"

    @property
    def name(self) -> str:
        """What every target of it ends with."""
        return f"{self.strategy}-{self.model.name}-{self.device_suffix}"

    @property
    def device_suffix(self) -> str:
        """`2gpu`."""
        return f"{self.devices}{self.device}"

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags that make the strategy.

        Raises:
            StrategyError: Its degrees do not multiply to its devices.
        """
        grammars = strategy_flags(parse_strategy(self.strategy, self.devices))
        return grammars if self.script_flags is None else self.script_flags

    @property
    def variables(self) -> Mapping[str, str]:
        """Make's, under which its target trains exactly this."""
        return format_variables(self.options)

    @property
    def parakit_arguments(self) -> tuple[str, ...]:
        """Arguments of `python -m parakit` that start the job, as a launch script passes them."""
        return ("run", self.strategy, self.model.name, self.device_suffix, "--", *self.flags)

    @property
    def script(self) -> str | None:
        """The strategy's own launch script, from the repository's root; None if it has none."""
        script = f"examples/{self.model.family}/train_{self.strategy}.sh"
        return script if (ROOT / script).is_file() else None

    def read_script_flags(self) -> tuple[str, ...] | None:
        """Return the Megatron flags of the strategy's launch script.

        None means that the job has no script, or that its script does more than name the strategy and its
        flags, because somebody has edited it. Only a shell can tell what such a script does.
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
        """The same with other variables."""
        return replace(self, options=options)

    def with_strategy(self, strategy: str, devices: int | None = None) -> Job:
        """The same model by another strategy of the grammar."""
        return replace(self, strategy=strategy, devices=devices or self.devices, script_flags=None)


def format_make_command(target: str, variables: Mapping[str, str]) -> str:
    """As a shell takes it."""
    given = (f"{name}={shlex.quote(text)}" for name, text in variables.items() if text)
    return " ".join(("make", target, *given))


def parse_target(name: str, options: Options = NO_OPTIONS) -> Job:
    """Take a target's name apart.

    Raises:
        LaunchError: It is not of the form, or its strategy or model is unknown; with the near names.
    """
    match = _TARGET.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise LaunchError(
            f"Target '{name}' is not train-<strategy>-<model>-<N>gpu or …<N>cpu; {_nearest(name)}."
        )
    own = options.model if options.model and is_model_file(options.model) else None
    known = model_name_of_file(own) if own else None
    strategy, model = _split(match["middle"], name, known)
    if known not in (None, model):
        raise LaunchError(
            f"Target '{name}' is of {model}, and MODEL= is a file of {known}; name '{known}' in the "
            "target, or leave MODEL= out."
        )
    return Job(strategy, load_model(model, own), *parse_devices(match["devices"]), options)


def parse_devices(text: str, variable: str = "") -> tuple[int, DeviceKind]:
    """`2gpu` as 2 and its kind.

    Raises:
        LaunchError: It is no such text; with the variable that has it, if one has.
    """
    match = _DEVICES.fullmatch(text)
    if match is None:
        given = f"{variable}={text}" if variable else f"'{text}'"
        raise LaunchError(f"{given} is not a number of devices such as 2cpu or 8gpu.")
    return int(match[1]), DeviceKind(match[2])


def list_example_targets() -> tuple[str, ...]:
    """Targets of the six strategies for every model, as candidates for hints."""
    return tuple(
        f"train-{strategy}-{model}-{1 if strategy == 'baseline' else 2}{device}"
        for model in model_names()
        for strategy in PUBLISHED_STRATEGIES
        for device in DeviceKind
    )


def _split(middle: str, name: str, own: str | None) -> tuple[str, str]:
    known = (*model_names(), *MODEL_ALIASES, *([own] if own else []))
    for model in sorted(known, key=len, reverse=True):
        if middle.endswith(f"-{model}"):
            strategy = middle.removesuffix(f"-{model}")
            _check_strategy(strategy)
            return strategy, MODEL_ALIASES.get(model, model)
    strategy, _, model = middle.partition("-")
    try:
        load_model(model)
    except ValueError as error:
        raise LaunchError(f"Target '{name}': {error}") from None
    return strategy, model


def _check_strategy(strategy: str) -> None:
    """Refuse words outside the grammar; degrees are checked against the devices later."""
    try:
        parse_strategy(strategy, devices=-1)
    except StrategyError as error:
        if "Unknown strategy" in str(error):
            near = difflib.get_close_matches(strategy, EXAMPLE_STRATEGIES, n=3, cutoff=0.3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise LaunchError(f"{error}{hint}") from None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, (*list_example_targets(), *ALIASES), n=3, cutoff=0.3)
    return (
        f"the nearest are {', '.join(near)}"
        if near
        else "'make help' lists targets, 'make list' models and strategies"
    )

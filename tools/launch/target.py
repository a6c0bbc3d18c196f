"""Target names: `train-<strategy>-<model>-<N>gpu` and `…<N>cpu`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tools.launch.errors import LaunchError
from tools.spec.files import ROOT
from tools.spec.model import ALIASES as MODEL_ALIASES
from tools.spec.model import load_model, model_in_environment, model_names
from tools.spec.run import DeviceKind
from tools.spec.strategy import EXAMPLES, NAMED, StrategyError, parse_strategy

ALIASES = {
    "train-gpt3-345m-1gpu-x-model-parallelism": "train-baseline-gpt3-345m-1gpu",
    "train-gpt3-857m-2gpu-x-model-parallelism": "train-dp2-gpt3-857m-2gpu",
    "train-tp2-sq-gpt2-large-2gpu": "train-sp2-gpt2-large-2gpu",
}
"""Target names of the published experiments and of their author's Makefile (`x`: without)."""

_TARGET = re.compile(r"train-(?P<middle>.+)-(?P<devices>\d+(?:gpu|cpu))")
_DEVICES = re.compile(r"([1-9]\d*)(gpu|cpu)")


@dataclass(frozen=True)
class Target:
    """The parts of a target's name."""

    strategy: str
    model: str
    devices: int
    device: DeviceKind

    @property
    def name(self) -> str:
        """The name it was parsed from, in its canonical form."""
        return f"train-{self.strategy}-{self.model}-{self.devices}{self.device}"


def parse_target(name: str) -> Target:
    """Take a target's name apart.

    Raises:
        LaunchError: It is not of the form, or its strategy or model is unknown; with the near names.
    """
    match = _TARGET.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise LaunchError(
            f"Target '{name}' is not train-<strategy>-<model>-<N>gpu or …<N>cpu; {_nearest(name)}."
        )
    strategy, model = _split(match["middle"], name)
    own = model_in_environment()
    if own not in (None, model):
        raise LaunchError(
            f"Target '{name}' is of {model}, and MODEL= is a file of {own}; name '{own}' in the target, "
            "or leave MODEL= out."
        )
    return Target(strategy, model, *parse_devices(match["devices"]))


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


def script_of(target: Target) -> str | None:
    """The strategy's own launch script, relative to the repository root; None if it has none."""
    script = f"examples/{load_model(target.model).family}/train_{target.strategy}.sh"
    return script if (ROOT / script).is_file() else None


def published_names() -> tuple[str, ...]:
    """Targets of the six strategies for every model, as candidates for hints."""
    return tuple(
        f"train-{strategy}-{model}-{1 if strategy == 'baseline' else 2}{device}"
        for model in model_names()
        for strategy in NAMED
        for device in DeviceKind
    )


def _split(middle: str, name: str) -> tuple[str, str]:
    for model in sorted((*model_names(), *MODEL_ALIASES), key=len, reverse=True):
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
            near = difflib.get_close_matches(strategy, EXAMPLES, n=3, cutoff=0.3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise LaunchError(f"{error}{hint}") from None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, (*published_names(), *ALIASES), n=3, cutoff=0.3)
    return f"the nearest are {', '.join(near)}" if near else "'make list' shows them"

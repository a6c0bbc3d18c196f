"""What a sweep is asked to cover, from the variables MODELS, STRATEGIES, BACKENDS and DEVICES."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.launch.errors import LaunchError
from tools.launch.target import parse_target
from tools.spec.run import Backend, DeviceKind

DEFAULTS = {
    "MODELS": "gpt2-tiny gpt3-64m",
    "STRATEGIES": "baseline dp2",
    "BACKENDS": "megatron native",
    "DEVICES": "1cpu 2cpu",
    "NAME": "sweep",
}

_DEVICES = re.compile(r"([1-9]\d*)(gpu|cpu)")
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Request:
    """The four axes; the first backend is the one that the others are compared with."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    backends: tuple[Backend, ...]
    devices: tuple[tuple[int, DeviceKind], ...]
    name: str
    """Of the report folder."""


def request_from_environment(environment: Mapping[str, str] = os.environ) -> Request:
    """Read the axes; words may be apart by spaces or commas.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices; it is named.
    """

    def words(variable: str) -> tuple[str, ...]:
        text = environment.get(variable) or DEFAULTS[variable]
        return tuple(dict.fromkeys(text.replace(",", " ").split()))

    def each[T](variable: str, convert: Callable[[str], T], wanted: str) -> tuple[T, ...]:
        found = []
        for word in words(variable):
            try:
                found.append(convert(word))
            except ValueError:
                raise LaunchError(f"{variable}: {word} is not {wanted}.") from None
        return tuple(found)

    models, strategies = words("MODELS"), words("STRATEGIES")
    for model in models:
        for strategy in strategies:
            parse_target(f"train-{strategy}-{model}-1cpu")
    return Request(
        models=models,
        strategies=strategies,
        backends=each("BACKENDS", Backend, "megatron, native, deepspeed or bare"),
        devices=each("DEVICES", _devices, "a number of devices such as 2cpu or 8gpu"),
        name=each("NAME", _name, "a folder's name")[0],
    )


def _devices(text: str) -> tuple[int, DeviceKind]:
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]), DeviceKind(match[2])


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(text)
    return text

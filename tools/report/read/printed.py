"""What a log says was trained, by the arguments in it, and on which device.

What is not printed is not known: no degree, batch or length is taken to be 1 or a default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from tools.report.read.lines import read_lines
from tools.spec.flag_table import FLAGS, KnownFlag
from tools.spec.hardware import load_hardware
from tools.spec.model import ModelShape, load_model, model_names
from tools.spec.run import Backend, RunSpec, spec_of_printed
from tools.spec.strategy import Batch, Sharding

_DEGREES = tuple(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
_STAGES = {"1": Sharding.ZERO1, "2": Sharding.ZERO2, "3": Sharding.ZERO3}
_LARGEST = 10**9
"""No size, degree or batch of a model is larger; what is, is damaged."""
_DEFINING = ("shape", "parallelism", "architecture", "stages")
"""Roles of flags that a model and its layout follow from."""
_MAX_VALUE = 40
_FEWEST_OF_ALL = 100
"""Arguments of a list that was not shortened by hand."""
_FIRST_LINES = 5000
"""From the beginning on; a device is named before training."""


def printed_spec(arguments: Mapping[str, str], global_batch_size: int | None) -> RunSpec | None:
    """What printed arguments say was trained; None where they do not define it, or contradict.

    Args:
        arguments: As `canonical` gives them.
        global_batch_size: Of the log's lines, where they name one.
    """
    if not _is_consistent(arguments) or _lacks_a_size(arguments):
        return None
    try:
        spec = spec_of_printed(arguments)
    except (ArithmeticError, ValueError):
        return None
    if spec is None or not _is_possible(spec):
        return None
    # A batch of 0 stands for one that is not known.
    micro = spec.batch.micro_batch_size if "micro_batch_size" in arguments else 0
    printed = spec.batch.global_batch_size if "global_batch_size" in arguments else 0
    spec = replace(
        spec, model=_model_of(spec.shape), batch=Batch(micro, global_batch_size or printed)
    )
    return _with_deepspeed(spec, arguments)


def readable(arguments: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Arguments without those whose value is not of its kind, and these as text.

    Such a one costs itself and none of the others; what defines a model stays, and defines none.
    """
    kept, unread = {}, []
    for name, value in arguments.items():
        flag = FLAGS.get(f"--{name.replace('_', '-')}")
        fits = flag is None or _is_of_kind(flag, value)
        if not fits:
            unread.append(f"{name} {value[:_MAX_VALUE]}")
        if fits or (flag and flag.role in _DEFINING):
            kept[name] = value
    return kept, unread


def _is_of_kind(flag: KnownFlag, value: str) -> bool:
    parse = {"whole": int, "decimal": float}.get(flag.kind)
    if parse is None or value in ("", "None", "True", "False"):
        return True
    try:
        parse(value)
    except ValueError:
        return False
    return True


def _lacks_a_size(arguments: Mapping[str, str]) -> bool:
    """Whether one of two sizes that a whole list always has together is lost: it has no default then."""
    is_whole = len(arguments) >= _FEWEST_OF_ALL
    return is_whole and ("ffn_hidden_size" in arguments) != ("kv_channels" in arguments)


def _is_consistent(arguments: Mapping[str, str]) -> bool:
    """Whether ranks and degrees are printed, and multiply."""
    world = _integer(arguments, "world_size")
    data = _integer(arguments, "data_parallel_size")
    degrees = [_integer(arguments, name) for name in _DEGREES]
    if degrees[0] is None or (world is None and data is None):
        return False
    ranks = 1
    for degree in degrees:
        ranks *= 1 if degree is None else degree
    if min([degree for degree in (*degrees, world, data) if degree is not None]) < 1:
        return False
    return world is None or (world % ranks == 0 and data in (None, world // ranks))


def _integer(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None


def _is_possible(spec: RunSpec) -> bool:
    """Whether every size is one that a model can have; those of the shape are no less than its least."""
    shape, split, batch = (vars(part) for part in (spec.shape, spec.parallelism, spec.batch))
    sizes = [size for part in (shape, split, batch) for size in part.values() if type(size) is int]
    least = min(split["expert"], split["virtual_stages"], *batch.values())
    return least >= 1 and 0 <= min(sizes) <= max(sizes) <= _LARGEST and 0 <= spec.dropout <= 1


def _with_deepspeed(spec: RunSpec, arguments: Mapping[str, str]) -> RunSpec:
    """The sharding that DeepSpeed's own configuration sets."""
    stage = arguments.get("zero_optimization_stage")
    if stage is None:
        return spec
    sharding = _STAGES.get(stage, Sharding.NONE)
    parallelism = replace(spec.parallelism, sharding=sharding)
    return replace(spec, parallelism=parallelism, backend=Backend.DEEPSPEED)


def _model_of(shape: ModelShape) -> str:
    """The model of a shape, whatever its vocabulary: a log prints the tokenizer's."""
    for name, known in _known_shapes():
        same = replace(
            shape, vocabulary=known.vocabulary, vocabulary_multiple=known.vocabulary_multiple
        )
        if same == known:
            return name
    return ""


@cache
def _known_shapes() -> tuple[tuple[str, ModelShape], ...]:
    """Read once, for all logs."""
    return tuple((name, load_model(name).shape) for name in model_names())


def device_named(path: Path) -> str:
    """The driver's name of the device, as `nvidia-smi`'s table or a trainer's own line has it.

    Empty where the log names none, or several.

    Raises:
        OSError: The file cannot be read.
    """
    names, pattern = _device_names()
    found = {
        names[match.casefold()]
        for line in islice(read_lines(path), _FIRST_LINES)
        for match in pattern.findall(line)
    }
    return found.pop() if len(found) == 1 else ""


@cache
def _device_names() -> tuple[dict[str, str], re.Pattern[str]]:
    """Every known name by its lower case, and what finds them, longer names first."""
    devices = load_hardware().devices.values()
    names = {
        name.casefold(): device.nvml_names[0] for device in devices for name in device.nvml_names
    }
    gpus = sorted((name for name in names if name.startswith("nvidia")), key=len, reverse=True)
    return names, re.compile(rf"(?:{'|'.join(map(re.escape, gpus))})(?![\w-])", re.IGNORECASE)

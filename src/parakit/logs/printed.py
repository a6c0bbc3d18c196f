"""Read from a log's arguments what was trained, and from its lines on which device.

A value that is not printed is unknown: no degree, batch size or length is taken to be 1 or a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from parakit.config.flag_table import FLAGS
from parakit.config.hardware import load_hardware
from parakit.config.model import GPT2_VOCABULARY, ModelShape, load_model, model_names
from parakit.config.run import Backend, RunSpec, spec_from_printed_arguments
from parakit.config.strategy import Batch, Sharding
from parakit.logs.lines import read_lines

_DEGREES = tuple(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
_RANKS = ("world_size", "data_parallel_size")
_STAGES = {"1": Sharding.ZERO1, "2": Sharding.ZERO2, "3": Sharding.ZERO3}
_LARGEST = 10**9
"""Largest size, degree or batch size of a model. A larger number is damaged."""
_MODEL_ROLES = ("shape", "parallelism", "architecture", "stages")
"""Roles of flags that define a model and its parallelism."""
_MAX_VALUE = 40
FEWEST_OF_ALL = 100
"""Fewest arguments of a complete list, which nobody has shortened."""
_FIRST_LINES = 5000
"""Lines at the beginning of a log that are searched for a device, which is named before training."""


def parse_printed_spec(
    arguments: Mapping[str, str], global_batch_size: int | None
) -> RunSpec | None:
    """Return the run that the arguments in a log describe: model, parallelism, batch and precision.

    None means that arguments are missing, damaged or contradictory. A batch size or vocabulary size that the log
    does not print is 0.

    Args:
        arguments: The arguments, as `canonicalise_arguments` returns them.
        global_batch_size: Global batch size of the log's lines; None if they do not state it.
    """
    # A complete list has both of these arguments. If one is lost, it must not get its default.
    is_complete = len(arguments) >= FEWEST_OF_ALL
    is_damaged = is_complete and ("ffn_hidden_size" in arguments) != ("kv_channels" in arguments)
    if is_damaged or not _do_degrees_fit_ranks(arguments):
        return None
    try:
        spec = spec_from_printed_arguments(arguments)
    except (ArithmeticError, ValueError):
        return None
    if spec is None:
        return None
    if not _has_possible_sizes(spec):
        return None
    model_name = _known_shapes().get(_without_read_vocabulary_size(spec.shape), "")
    # The log prints the size of the tokenizer's vocabulary, and the spec has the padded one.
    shape = replace(spec.shape, vocabulary=_read_vocabulary_size(arguments))
    batch = _select_printed_batch(arguments, spec.batch, global_batch_size)
    spec = replace(spec, model=model_name, shape=shape, batch=batch)
    return _add_deepspeed(spec, arguments)


def _has_possible_sizes(spec: RunSpec) -> bool:
    """Return True if the sizes of model, parallelism and batch are possible. Other sizes show a damaged log."""
    split, batch_sizes = spec.parallelism, _list_integers(spec.batch)
    if min(split.expert, split.virtual_stages, *batch_sizes) < 1:
        return False
    sizes = [*_list_integers(spec.shape), *_list_integers(split), *batch_sizes]
    return min(sizes) >= 0 and max(sizes) <= _LARGEST and 0 <= spec.dropout <= 1


def _list_integers(part: object) -> list[int]:
    """Return the values of a data class that are integers and not truth values."""
    return [value for value in vars(part).values() if type(value) is int]


def _select_printed_batch(
    arguments: Mapping[str, str], batch: Batch, global_batch_size: int | None
) -> Batch:
    """Return the batch sizes that a log states. A size that the log does not state is 0.

    `global_batch_size` is the size in the log's lines, or None. It has priority over the printed argument.
    """
    micro = batch.micro_batch_size if "micro_batch_size" in arguments else 0
    printed = batch.global_batch_size if "global_batch_size" in arguments else 0
    return Batch(micro, global_batch_size or printed)


def _add_deepspeed(spec: RunSpec, arguments: Mapping[str, str]) -> RunSpec:
    """Return a run with DeepSpeed's backend and sharding if its arguments name DeepSpeed; else return the run."""
    stage = arguments.get("zero_optimization_stage")
    if stage is None and arguments.get("deepspeed") != "True":
        return spec
    sharding = _STAGES.get(stage or "", Sharding.NONE)
    parallelism = replace(spec.parallelism, sharding=sharding)
    return replace(spec, parallelism=parallelism, backend=Backend.DEEPSPEED)


def _read_vocabulary_size(arguments: Mapping[str, str]) -> int:
    """Return the size of the tokenizer's vocabulary, or else the padded size; 0 if the arguments have neither."""
    usual = str(GPT2_VOCABULARY) if arguments.get("tokenizer_type") == "GPT2BPETokenizer" else ""
    texts = (arguments.get("vocab_size", ""), usual, arguments.get("padded_vocab_size", ""))
    return next((int(text) for text in texts if text.isdecimal()), 0)


def _do_degrees_fit_ranks(arguments: Mapping[str, str]) -> bool:
    """Return True if the printed parallel sizes agree with the printed number of ranks.

    The number of ranks must be a multiple of the product of the parallel sizes. The result is also False if a number is
    below 1, or if the tensor-parallel size is missing. The number of ranks or of data-parallel ranks must be stated as
    well.
    """
    degrees = [_read_integer(arguments, name) for name in _DEGREES]
    world, data = [_read_integer(arguments, name) for name in _RANKS]
    tensor = degrees[0]
    if tensor is None or (world is None and data is None):
        return False
    stated = [number for number in (*degrees, world, data) if number is not None]
    if min(stated) < 1:
        return False
    if world is None:
        return True
    ranks_per_replica = math.prod(degree for degree in degrees if degree is not None)
    if world % ranks_per_replica:
        return False
    return data is None or data == world // ranks_per_replica


def _read_integer(arguments: Mapping[str, str], name: str) -> int | None:
    """Return an argument as an integer of at most nine digits; None if it is missing or has another form."""
    text = arguments.get(name, "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None


def drop_unreadable_values(arguments: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the arguments without unreadable numbers, and a text (`name value`) for each unreadable number.

    An unreadable argument of the model or its parallelism is not removed. Without it, the remaining arguments
    would describe another model.
    """
    readable, unread = dict(arguments), []
    for name, value in arguments.items():
        flag = FLAGS.get(f"--{name.replace('_', '-')}")
        parse = {"whole": int, "decimal": float}.get(flag.kind) if flag else None
        if flag is None or parse is None or value in ("", "None", "True", "False"):
            continue
        if flag.name == "--moe-layer-freq" and value.startswith("["):  # A number, or a list.
            continue
        try:
            parse(value)
        except ValueError:
            unread.append(f"{name} {value[:_MAX_VALUE]}")
            if flag.role not in _MODEL_ROLES:
                del readable[name]
    return readable, unread


@cache
def _known_shapes() -> dict[ModelShape, str]:
    """Return the names of the known models by shape. The shape does not include the vocabulary.

    If several models have the same shape, the name of the first model is used.
    """
    named = [
        (_without_read_vocabulary_size(load_model(name).shape), name) for name in model_names()
    ]
    return dict(reversed(named))


def _without_read_vocabulary_size(shape: ModelShape) -> ModelShape:
    return replace(shape, vocabulary=0, vocabulary_multiple=1)


def find_device_name(path: Path) -> str:
    """Return the name of the device that a log names, for example in the table of `nvidia-smi`.

    The name is empty if the first _FIRST_LINES lines name no device, or several different devices.

    Raises:
        OSError: The file cannot be read.
    """
    names, pattern = _load_device_names()
    devices = set()
    for line in islice(read_lines(path), _FIRST_LINES):
        lower_case = line.casefold()
        # Searching a vendor takes a twentieth of the time that the pattern takes.
        if not any(vendor in lower_case for vendor in _VENDORS):
            continue
        known = {names[match.casefold()] for match in pattern.findall(line)}
        devices |= known or {" ".join(match.split()) for match in _OTHER_DEVICES.findall(line)}
    return devices.pop() if len(devices) == 1 else ""


def find_device_in_arguments(arguments: Mapping[str, str]) -> str:
    """Return the kind of device that the arguments imply, or an empty text if they imply none.

    Only HCCL, the communication library of Ascend, implies a kind. It does not tell which of Ascend's NPUs it is.
    """
    return "Ascend NPU" if arguments.get("distributed_backend") == "hccl" else ""


_VENDORS = (
    *("nvidia", "tesla", "ascend", "instinct", "tpu v", "gaudi", "data center gpu max", "mlu"),
)
_OTHER_DEVICES = re.compile(
    r"\b(?:Ascend ?9\d0\w*|(?:AMD )?Instinct MI\d{2,3}\w*|TPU v\d[a-z]{0,5}|(?:Intel )?Gaudi ?\d|"
    r"Data Center GPU Max \d{4}|MLU\d{3}\w*|"
    r"NVIDIA (?:GeForce |Quadro |Tesla )?(?:RTX )?(?:[A-Z]{1,2}\d{1,3}|\d{4})(?: Ti| SUPER)?)\b(?![-\w])",
    re.IGNORECASE,
)
"""Devices whose peak rates are unknown here. Their names keep their runs from being compared with others."""


def _load_device_names() -> tuple[dict[str, str], re.Pattern[str]]:
    """Return the names of known devices by their spelling in lower case, and a pattern that finds NVIDIA's names.

    The pattern has longer names first, because a longer name may begin with a shorter one.
    """
    names: dict[str, str] = {}
    for device in load_hardware().devices.values():
        for spelling in device.nvml_names:
            names[spelling.casefold()] = device.nvml_names[0]
    gpus = [spelling for spelling in names if spelling.startswith(("nvidia", "tesla"))]
    gpus.sort(key=len, reverse=True)
    alternatives = "|".join(re.escape(gpu) for gpu in gpus)
    # A longer word is another name.
    return names, re.compile(rf"(?:{alternatives})(?![\w-])", re.IGNORECASE)

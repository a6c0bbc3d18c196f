"""What a log says was trained, by the arguments in it, and on which device.

What is not printed is not known: no degree, batch or length is taken to be 1 or a default.
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
"""No size, degree or batch of a model is larger; what is, is damaged."""
_DEFINING = ("shape", "parallelism", "architecture", "stages")
"""Roles of flags that a model and its layout follow from."""
_MAX_VALUE = 40
FEWEST_OF_ALL = 100
"""Arguments of a list that was not shortened by hand."""
_FIRST_LINES = 5000
"""From the beginning on; a device is named before training."""


def parse_printed_spec(
    arguments: Mapping[str, str], global_batch_size: int | None
) -> RunSpec | None:
    """What printed arguments say was trained; None where they do not define it, or contradict.

    Args:
        arguments: As `canonical` gives them.
        global_batch_size: Of the log's lines, where they name one.
    """
    # Of two sizes that a whole list always has together one may be lost: it has no default then.
    is_whole = len(arguments) >= FEWEST_OF_ALL
    torn = is_whole and ("ffn_hidden_size" in arguments) != ("kv_channels" in arguments)
    if torn or not _ranks_multiply(arguments):
        return None
    try:
        spec = spec_from_printed_arguments(arguments)
    except (ArithmeticError, ValueError):
        return None
    if spec is None:
        return None
    # No size is one that a model cannot have.
    parts = _, split, batch = tuple(
        {name: size for name, size in vars(part).items() if type(size) is int}
        for part in (spec.shape, spec.parallelism, spec.batch)
    )
    sizes = [size for part in parts for size in part.values()]
    least = min(split["expert"], split["virtual_stages"], *batch.values())
    if least < 1 or min(sizes) < 0 or max(sizes) > _LARGEST or not 0 <= spec.dropout <= 1:
        return None
    # A batch of 0 stands for one that is not known; a log prints the tokenizer's vocabulary.
    micro = spec.batch.micro_batch_size if "micro_batch_size" in arguments else 0
    printed = spec.batch.global_batch_size if "global_batch_size" in arguments else 0
    name = _known_shapes().get(_without_vocabulary(spec.shape), "")
    shape = replace(spec.shape, vocabulary=_vocabulary(arguments))
    known = Batch(micro, global_batch_size or printed)
    spec = replace(spec, model=name, shape=shape, batch=known)
    stage = arguments.get("zero_optimization_stage")
    if stage is None and arguments.get("deepspeed") != "True":
        return spec
    parallelism = replace(spec.parallelism, sharding=_STAGES.get(stage or "", Sharding.NONE))
    return replace(spec, parallelism=parallelism, backend=Backend.DEEPSPEED)


def _vocabulary(arguments: Mapping[str, str]) -> int:
    """Entries of the tokenizer, else as padded; 0 where the log does not say."""
    usual = str(GPT2_VOCABULARY) if arguments.get("tokenizer_type") == "GPT2BPETokenizer" else ""
    said = (arguments.get("vocab_size", ""), usual, arguments.get("padded_vocab_size", ""))
    return next((int(text) for text in said if text.isdecimal()), 0)


def _ranks_multiply(arguments: Mapping[str, str]) -> bool:
    """Whether ranks and degrees are printed, and multiply."""
    texts = [arguments.get(name, "").strip() for name in (*_DEGREES, *_RANKS)]
    numbers = [int(text) if re.fullmatch(r"-?\d{1,9}", text) else None for text in texts]
    *degrees, world, data = numbers
    known = [number for number in numbers if number is not None]
    if degrees[0] is None or (world is None and data is None) or min(known) < 1:
        return False
    ranks = math.prod(degree or 1 for degree in degrees)
    return world is None or (world % ranks == 0 and data in (None, world // ranks))


def drop_unreadable_values(arguments: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Arguments without those whose value is not of its kind, and these as text.

    Such a one costs itself and none of the others; what defines a model stays, and defines none.
    """
    kept, unread = dict(arguments), []
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
            if flag.role not in _DEFINING:
                del kept[name]
    return kept, unread


@cache
def _known_shapes() -> dict[ModelShape, str]:
    """The models' names, read once for all logs; of equal shapes the first."""
    named = [(_without_vocabulary(load_model(name).shape), name) for name in model_names()]
    return dict(reversed(named))


def _without_vocabulary(shape: ModelShape) -> ModelShape:
    return replace(shape, vocabulary=0, vocabulary_multiple=1)


def find_device_name(path: Path) -> str:
    """The driver's name of the device, as `nvidia-smi`'s table or a trainer's own line has it.

    Empty where the log names none, or several.

    Raises:
        OSError: The file cannot be read.
    """
    names, pattern = _device_names()
    found = set()
    for line in islice(read_lines(path), _FIRST_LINES):
        plain = line.casefold()
        # Looking for a vendor takes a twentieth of what the pattern takes.
        if not any(vendor in plain for vendor in _VENDORS):
            continue
        found |= {names[match.casefold()] for match in pattern.findall(line)}
        found |= {" ".join(match.split()) for match in _OTHER_DEVICES.findall(line)}
    return found.pop() if len(found) == 1 else ""


def find_device_in_arguments(arguments: Mapping[str, str]) -> str:
    """Return the kind of device that the arguments imply; empty where they imply none.

    HCCL, the library of Ascend's devices, says no more than that they are NPUs.
    """
    return "Ascend NPU" if arguments.get("distributed_backend") == "hccl" else ""


_VENDORS = ("nvidia", "tesla", "ascend", "instinct")
_OTHER_DEVICES = re.compile(r"\b(?:Ascend ?9\d0\w*|(?:AMD )?Instinct MI\d{2,3}\w*)", re.IGNORECASE)
"""Devices of which no rate is known here; their names keep them from being compared with others."""


@cache
def _device_names() -> tuple[dict[str, str], re.Pattern[str]]:
    """Every known name by its lower case, and what finds them, longer names first."""
    devices = load_hardware().devices.values()
    names = {
        name.casefold(): device.nvml_names[0] for device in devices for name in device.nvml_names
    }
    of_driver = (name for name in names if name.startswith(("nvidia", "tesla")))
    gpus = sorted(of_driver, key=len, reverse=True)
    return names, re.compile(rf"(?:{'|'.join(map(re.escape, gpus))})(?![\w-])", re.IGNORECASE)

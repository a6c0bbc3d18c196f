"""A checkpoint of any format that Megatron's users have, described without reading a tensor's values."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from parakit.artifacts.pickles import describe_saved
from parakit.artifacts.run import CHECKPOINTS_FOLDER, RUN_FILE
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    FORMAT,
    METADATA,
    TRACKER_FILE,
    DamagedCheckpointError,
    Shape,
    StoredMetadata,
    StoredPart,
    StoredTensor,
    describe_object,
    read_finished_iteration,
    read_metadata,
)
from parakit.checkpoint.full_tensors import (
    LEGACY_FILE,
    ReplicatedPiece,
    find_missing_ranks,
    join_rank_files,
    stack_fsdp_tensors,
)
from parakit.config.files import describe_file_problem, open_regular_file, read_regular_file
from parakit.config.huggingface import ConfigError, read_config
from parakit.config.run import RunSpec, spec_from_printed_arguments

TORCH_DIST, FSDP, LEGACY, HUGGING_FACE = "torch_dist", "fsdp_dtensor", "torch", "huggingface"
"""Megatron's names of its formats (`--ckpt-format`), and Hugging Face's safetensors."""

_WEIGHTS = ("embedding.", "decoder.", "output_layer.", "encoder.", "mtp.")
COMMON, COMMON_FILE = "common_state/", "common.pt"
"""What every rank has alike: from 0.19 on an object beside the tensors, before a file."""
_OWN_OBJECTS = ("args", "iteration")
_PLAIN = (str, int, float, list, tuple, type(None))


_STACKED = re.compile(r"\blayers\.(?!\d)")


def is_stacked(name: str) -> bool:
    """Whether a tensor holds all layers: its name has no layer's number."""
    return _STACKED.search(name) is not None


class UnknownFormatError(ValueError):
    """A folder that is no checkpoint, or one of a format that is not read."""


def tensor_kind(name: str) -> str:
    """Of a tensor: `weight` or `optimizer`."""
    return "optimizer" if "optimizer" in name.split(".") or "exp_avg" in name else "weight"


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says of itself."""

    folder: Path
    format: str
    iteration: int | None
    arguments: Mapping[str, str]
    """Those that saved it, as a log prints them; empty where there are none."""
    stored: StoredMetadata
    """Whole tensors, all layers stacked; of Hugging Face's formats under their own names."""
    states: tuple[str, ...]
    """Of `optimizer`, `scheduler` and `random`, those that are there."""
    problems: tuple[str, ...]
    """What of it cannot be read, a sentence each."""
    optimizer_format: str = ""
    """Of the distributed optimizer, as Megatron calls it; empty where nothing says it."""
    copies: tuple[ReplicatedPiece, ...] = ()
    """What ranks hold beside, and which must be the same."""
    unknown_model: str = ""
    """Why no tensors can be derived from a config.json of Hugging Face; empty where they can."""

    @cached_property
    def weights(self) -> dict[str, StoredTensor]:
        """All but the optimizer's tensors, in the order of their names."""
        held = sorted(self.stored.tensors.items())
        return {name: one for name, one in held if tensor_kind(name) == "weight"}

    @cached_property
    def spec(self) -> RunSpec | None:
        """The run that its arguments describe; None where they do not."""
        return spec_from_printed_arguments(self.arguments) if self.arguments else None

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        return sum(math.prod(one.shape) for one in self.weights.values())

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of tensors, by name."""
        return {name: one.shape for name, one in self.stored.tensors.items()}

    @property
    def vocabulary_rows(self) -> int:
        """Of the padded vocabulary; 0 where no tensor says it."""
        return self.shapes.get(EMBEDDING, (0,))[0]


def read_contents(folder: Path) -> Contents:
    """Describe a checkpoint: its own folder (`iter_…`), or one whose tracker names the newest, also a
    run's that holds such a one.

    Raises:
        UnknownFormatError: It is none, or of a format that is not read.
    """
    if (folder / RUN_FILE).is_file():
        folder /= CHECKPOINTS_FOLDER
    _refuse_special_tracker(folder)
    newest = read_finished_iteration(folder)
    if newest is not None:
        folder /= f"iter_{newest:07d}"
    if not folder.is_dir():
        raise UnknownFormatError(f"{folder} is no folder; name one that holds a checkpoint.")
    backend = _backend(folder)
    if backend == "zarr" or any(folder.glob("*/.zarray")):
        raise UnknownFormatError(
            f"{folder} is a checkpoint in the zarr format, which Megatron removed; load it with "
            "Megatron-Core 0.10 or older and save it with --ckpt-format torch_dist."
        )
    if backend or (folder / METADATA).exists():
        return _distributed(folder, backend)
    ranks = sorted(folder.glob(f"mp_rank_*/{LEGACY_FILE}"))
    if ranks:
        return _legacy(folder, ranks)
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return _hugging_face(folder)
    raise UnknownFormatError(
        f"{folder} holds no {METADATA}, no mp_rank_… folder and no safetensors; name the folder of a "
        "checkpoint (iter_…), or the one above it."
    )


def _refuse_special_tracker(folder: Path) -> None:
    """Refuse a tracker file that is a pipe or a device: it names no iteration.

    Raises:
        UnknownFormatError: It is one.
    """
    flaw = describe_file_problem(folder / TRACKER_FILE)
    if flaw and flaw != "is missing":
        raise UnknownFormatError(
            f"{folder / TRACKER_FILE} {flaw}; name the folder of one checkpoint (iter_…)."
        )


def _backend(folder: Path) -> str:
    try:
        return str(json.loads(read_regular_file(folder / FORMAT)).get("sharded_backend", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _distributed(folder: Path, backend: str) -> Contents:
    """PyTorch's distributed checkpoint: Megatron's torch_dist, or FSDP's DTensors."""
    kind = TORCH_DIST if backend else FSDP
    try:
        stored = read_metadata(folder)
    except DamagedCheckpointError as error:
        nothing = StoredMetadata({}, (), {})
        return Contents(
            folder, kind, parse_folder_iteration(folder), {}, nothing, (), (f"{error}.",)
        )
    problems = list(_unreadable(folder, stored))
    if kind == FSDP and any(name.startswith(_WEIGHTS) for name in stored.tensors):
        kind = TORCH_DIST
        flaw = describe_file_problem(folder / FORMAT) or "does not say a format"
        problems.append(f"{FORMAT} {flaw}: Megatron takes the checkpoint for one of torch's own.")
    common: Any = {}
    try:
        common = _common(folder, stored, kind)
    except DamagedCheckpointError as error:
        problems.append(f"{error}.")
    objects = tuple(stored.objects)
    held = {
        "optimizer": common.get("optimizer") or any("exp_avg" in name for name in stored.tensors),
        "scheduler": any(name.startswith("opt_param_scheduler") for name in (*common, *objects)),
        "random": any(name.startswith("rng_state") for name in objects),
    }
    return Contents(
        folder,
        kind,
        common.get("iteration", parse_folder_iteration(folder)),
        _arguments(common.get("args")),
        stored if kind == TORCH_DIST else stack_fsdp_tensors(stored),
        tuple(name for name, found in held.items() if found),
        tuple(problems),
        (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", ""),
    )


def _common(folder: Path, stored: StoredMetadata, kind: str) -> dict[str, Any]:
    """Read the state that every rank has alike.

    Raises:
        DamagedCheckpointError: A torch_dist checkpoint has none, or it cannot be read.
    """
    path = folder / COMMON_FILE
    part = next((at for name, at in stored.objects.items() if name.startswith(COMMON)), None)
    if path.exists():
        part = StoredPart(path.name, 0, path.stat().st_size)
    if part is None and kind == TORCH_DIST:
        raise DamagedCheckpointError(
            f"{COMMON_FILE} is missing, without which Megatron loads no {TORCH_DIST} checkpoint"
        )
    if part is None:  # FSDP's, an object each.
        kept = {name: stored.objects[name] for name in _OWN_OBJECTS if name in stored.objects}
        return {name: describe_object(folder, at) for name, at in kept.items()}
    found = describe_object(folder, part)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


def _unreadable(folder: Path, stored: StoredMetadata) -> Iterator[str]:
    """Pieces that are missing, that do not fit together, and files that are too short for them."""
    for name, tensor in stored.tensors.items():
        lacking = sorted(tensor.sizes.keys() - tensor.parts.keys())
        if lacking:
            yield f"{name} lacks the piece at {list(lacking[0])}."
        if flaw := _covering_flaw(tensor):
            yield f"The pieces of {name} {flaw}."
    for file, parts in stored.parts_by_file.items():
        path = folder / file
        if flaw := describe_file_problem(path):
            yield f"{file} {flaw}, with {len(parts)} pieces."
            continue
        size, end = path.stat().st_size, max(at.offset_bytes + at.length_bytes for at in parts)
        if size < end:
            yield f"{file} is truncated: it has {size} bytes of at least {end}."
        if any(a.offset_bytes + a.length_bytes > b.offset_bytes for a, b in pairwise(parts)):
            yield f"{METADATA} puts two pieces at one place of {file}."


def _covering_flaw(tensor: StoredTensor) -> str:
    for begin, size in tensor.sizes.items():
        ends = (at + length for at, length in zip(begin, size, strict=True))
        if any(end > whole for end, whole in zip(ends, tensor.shape, strict=True)):
            return f"reach beyond its shape {list(tensor.shape)} at {list(begin)}"
    held, whole = sum(map(math.prod, tensor.sizes.values())), math.prod(tensor.shape)
    return "" if held == whole else f"hold {held} of its {whole} elements"


def _legacy(folder: Path, ranks: list[Path]) -> Contents:
    """A file a model-parallel rank, each a pickle."""
    problems, held = list[str](), dict[str, Any]()
    for path in ranks:
        try:
            with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
                held[path.parent.name] = describe_saved(archive)
        except Exception as error:  # A damaged pickle raises anything.
            problems.append(f"{path.parent.name}/{path.name} cannot be read ({error}).")
    iteration = parse_folder_iteration(folder)
    for name, found in held.items():
        own = found.get("iteration", iteration)
        if iteration is not None and own != iteration:
            problems.append(f"{name} is of iteration {own}, not of {iteration}.")
    arguments = next(filter(None, (_arguments(one.get("args")) for one in held.values())), {})
    stored, copies = join_rank_files(folder, held, arguments)
    lacking = find_missing_ranks({path.parent.name for path in ranks}, arguments)
    problems += (f"{name} is missing, which its arguments have." for name in lacking)
    keys = {"optimizer": "optimizer", "opt_param_scheduler": "scheduler", "rng_state": "random"}
    states = [state for key, state in keys.items() if any(one.get(key) for one in held.values())]
    return Contents(
        folder,
        LEGACY,
        iteration,
        arguments,
        stored,
        tuple(states),
        tuple(problems or _unreadable(folder, stored)),
        copies=copies,
    )


def _hugging_face(folder: Path) -> Contents:
    from parakit.convert import ConversionError, TensorFolder, read_source

    tensors: dict[str, StoredTensor] = {}
    problems: tuple[str, ...] = ()
    unknown = ""
    config = folder / "config.json"
    try:
        if config.exists():
            read_config(config)  # One that is damaged is a fault; one of another family is none.
        for one in TensorFolder(folder).tensors.values():
            dtype = str(one.dtype).removeprefix("torch.")
            tensors[one.name] = StoredTensor(one.shape, dtype, {}, {})
    except (ConversionError, ConfigError) as error:
        problems = (str(error),)
    try:
        if not problems:
            read_source(folder)
    except ConversionError as error:
        problems = (str(error),)
    except ConfigError as error:  # A model of no family that is known.
        unknown = str(error).removesuffix(".")
    stored = StoredMetadata(tensors, (), {})
    return Contents(folder, HUGGING_FACE, None, {}, stored, (), problems, unknown_model=unknown)


def _arguments(namespace: Any) -> dict[str, str]:
    """As Megatron prints them; objects of its own classes are left out."""
    values = getattr(namespace, "__dict__", {})
    return {name: str(value) for name, value in values.items() if isinstance(value, _PLAIN)}


def parse_folder_iteration(folder: Path) -> int | None:
    """Which iteration a checkpoint's own folder (`iter_…`) says that it is of."""
    match = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else None

"""Read what a checkpoint holds, in any format that Megatron's users have.

The input is a folder. The result is `Contents`: arguments, names, shapes and dtypes of tensors, and the faults
that show without reading the values of a tensor.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from parakit.artifacts.pickles import describe_saved, find_foreign_function
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    FORMAT,
    METADATA,
    DamagedCheckpointError,
    Shape,
    StoredMetadata,
    StoredPart,
    StoredTensor,
    describe_object,
    find_foreign_function_in,
    read_metadata,
)
from parakit.checkpoint.full_tensors import (
    LEGACY_FILE,
    ReplicatedPiece,
    find_missing_ranks,
    has_legacy_names,
    join_rank_files,
    stack_fsdp_tensors,
)
from parakit.checkpoint.locate import UnknownFormatError, locate_checkpoint
from parakit.config.files import describe_file_problem, open_regular_file, read_regular_file
from parakit.config.huggingface import ConfigError, read_config
from parakit.config.run import RunSpec, spec_from_printed_arguments

TORCH_DIST, FSDP, LEGACY, HUGGING_FACE = "torch_dist", "fsdp_dtensor", "torch", "huggingface"
TORCHTITAN = "torchtitan"
"""Names of the formats: Megatron's (`--ckpt-format`), Hugging Face's safetensors, and torchtitan's own names."""

_WEIGHT_PREFIXES = ("embedding.", "decoder.", "output_layer.", "encoder.", "mtp.")
_MODEL_PARTS = "|".join(map(re.escape, _WEIGHT_PREFIXES))
COMMON, COMMON_FILE = "common_state/", "common.pt"
"""Where a torch_dist checkpoint stores the common state, which is identical on all ranks.

Megatron 0.19 and later store an object whose name has this prefix, and earlier versions store this file.
"""
_FSDP_COMMON_OBJECTS = ("args", "iteration")
_TRAINER_STATES = ("train_state.", "lr_scheduler.", "dataloader.")
"""Beginnings of the names under which torchtitan stores what is neither a weight nor a moment."""
_SPLIT_RANK_FILE = "model_rng.pt"
_TORCHTITAN_EMBEDDING = "tok_embeddings.weight"
_NEMO_PREFIX = "module."
"""Beginning of the names of all weights in checkpoints of NeMo 2."""
_PRINTED_TYPES = (str, int, float, list, tuple, type(None))


_STACKED = re.compile(r"\blayers\.(?!\d)")


def is_stacked(name: str) -> bool:
    """Return True if a tensor of this name holds all layers: the name has no layer number."""
    return _STACKED.search(name) is not None


def tensor_kind(name: str) -> str:
    """Return `optimizer` for a tensor of the optimizer's or of torchtitan's trainer's state, else `weight`."""
    is_state = "optimizer" in name.split(".") or "exp_avg" in name
    return "optimizer" if is_state or name.startswith(_TRAINER_STATES) else "weight"


@dataclass(frozen=True)
class Contents:
    """The description of a checkpoint, without the values of its tensors."""

    folder: Path
    format: str
    iteration: int | None
    arguments: Mapping[str, str]
    """Arguments of the run that saved the checkpoint, as a log prints them; empty without any."""
    stored: StoredMetadata
    """Full tensors with all layers stacked; those of Hugging Face's formats under their own names."""
    states: tuple[str, ...]
    """The states that the checkpoint holds: some of `optimizer`, `scheduler` and `random`."""
    problems: tuple[str, ...]
    """A sentence for each part that cannot be read."""
    optimizer_format: str = ""
    """Megatron's name for the form of the distributed optimizer's state; empty if it is not stored."""
    copies: tuple[ReplicatedPiece, ...] = ()
    """Pieces that further ranks hold of a tensor. They must equal the pieces in `stored`."""
    trainer: str = ""
    """The trainer that saved the checkpoint, if it is built on Megatron-Core and not Megatron itself."""
    has_legacy_names: bool = False
    """True if the tensors have the names of Megatron's models before Megatron-Core, which are read as today's."""
    unknown_model: str = ""
    """The reason why the tensors of a Hugging Face model are unknown; empty if its config.json defines them."""

    @cached_property
    def weights(self) -> dict[str, StoredTensor]:
        """All tensors but the optimizer's, sorted by name."""
        return {
            name: tensor
            for name, tensor in sorted(self.stored.tensors.items())
            if tensor_kind(name) == "weight"
        }

    @cached_property
    def spec(self) -> RunSpec | None:
        """The run that the arguments describe; None if they describe none."""
        return spec_from_printed_arguments(self.arguments) if self.arguments else None

    @property
    def parameters(self) -> int:
        """The number of elements in all weights."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor, by name."""
        return {name: tensor.shape for name, tensor in self.stored.tensors.items()}

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding, which are the padded vocabulary; 0 without an embedding."""
        return self.shapes.get(EMBEDDING, (0,))[0]


def read_contents(folder: Path) -> Contents:
    """Read the description of a checkpoint, without the values of its tensors.

    Args:
        folder: The checkpoint's own folder (`iter_…`), a folder whose tracker file names the newest
            checkpoint, the folder of a run of this kit, a model `hub/NAME`, a folder of NeMo 2 or torchtitan,
            or a folder with Hugging Face's files.

    Raises:
        UnknownFormatError: The folder holds no checkpoint, or one of a format that is not read.
    """
    located = locate_checkpoint(folder)
    contents = replace(_read_folder(located.folder), trainer=located.trainer)
    if located.arguments:
        # The checkpoint's own arguments win. They are few in checkpoints that the kit or Bridge wrote.
        return replace(contents, arguments={**located.arguments, **contents.arguments})
    return contents


def _read_folder(folder: Path) -> Contents:
    """Read the description of the checkpoint in exactly this folder.

    Raises:
        UnknownFormatError: The folder holds no checkpoint, or one of a format that is not read.
    """
    backend = _read_backend(folder)
    if backend == "zarr" or any(folder.glob("*/.zarray")):
        raise UnknownFormatError(
            f"{folder} is a checkpoint in the zarr format, which Megatron removed; load it with "
            "Megatron-Core 0.10 or older and save it with --ckpt-format torch_dist."
        )
    if backend or (folder / METADATA).exists():
        return _read_distributed(folder, backend)
    rank_files = sorted(folder.glob(f"mp_rank_*/{LEGACY_FILE}"))
    if rank_files:
        return _read_legacy(folder, rank_files)
    if any(folder.glob(f"mp_rank_*/{_SPLIT_RANK_FILE}")):
        raise UnknownFormatError(
            f"{folder} holds {_SPLIT_RANK_FILE} and the optimizer's states in files of their own, as Megatron before "
            "2023 saved them; load it with that Megatron, with --no-load-optim, and save it anew."
        )
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return _read_hugging_face(folder)
    raise UnknownFormatError(
        f"{folder} holds no {METADATA}, no mp_rank_… folder and no safetensors; name the folder of a "
        "checkpoint (iter_…), or the one above it."
    )


def _read_backend(folder: Path) -> str:
    """Return the backend that Megatron's format file names; empty without a readable file."""
    try:
        return str(json.loads(read_regular_file(folder / FORMAT)).get("sharded_backend", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _read_distributed(folder: Path, backend: str) -> Contents:
    """Read a checkpoint of PyTorch's distributed format: Megatron's torch_dist, or FSDP's DTensors.

    A checkpoint with Megatron's tensor names counts as torch_dist, even if its format file is missing.

    Args:
        folder: Folder of the checkpoint's iteration.
        backend: Format that the format file names; empty if there is no such file or it names none.
    """
    try:
        stored = read_metadata(folder)
    except DamagedCheckpointError as error:
        return Contents(
            folder,
            TORCH_DIST if backend else FSDP,
            parse_folder_iteration(folder),
            arguments={},
            stored=StoredMetadata({}, (), {}),
            states=(),
            problems=(f"{error}.",),
        )
    problems = list(_find_unreadable(folder, stored))
    stored = replace(stored, tensors=_remove_nemo_prefix(stored.tensors))
    checkpoint_format = _find_distributed_format(stored, backend)
    if checkpoint_format == TORCH_DIST and not backend:
        flaw = describe_file_problem(folder / FORMAT) or "does not name a format"
        problems.append(f"{FORMAT} {flaw}: Megatron takes the checkpoint for one of torch's own.")
    common: dict[str, Any] = {}
    try:
        common = _read_common_state(folder, stored, checkpoint_format)
    except DamagedCheckpointError as error:
        problems.append(f"{error}.")
    metadata = common.get("content_metadata") or {}
    arguments = _print_arguments(common.get("args"))
    states = _list_distributed_states(stored, common)
    if checkpoint_format in (FSDP, TORCHTITAN):
        stored = stack_fsdp_tensors(stored, arguments)
    return Contents(
        folder,
        checkpoint_format,
        common.get("iteration", parse_folder_iteration(folder)),
        arguments=arguments,
        stored=stored,
        states=states,
        problems=tuple(problems),
        optimizer_format=metadata.get("distrib_optim_sharding_type", ""),
    )


def _find_distributed_format(stored: StoredMetadata, backend: str) -> str:
    """Return the format of a distributed checkpoint, by its tensors' names and by what its format file names.

    `backend` is empty if the format file names none. Then Megatron's names mean torch_dist, and others FSDP.
    """
    if _TORCHTITAN_EMBEDDING in stored.tensors:
        return TORCHTITAN
    has_megatron_names = any(name.startswith(_WEIGHT_PREFIXES) for name in stored.tensors)
    return TORCH_DIST if backend or has_megatron_names else FSDP


def _list_distributed_states(stored: StoredMetadata, common: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of `optimizer`, `scheduler` and `random` a checkpoint of the distributed format holds."""
    has_moments = any("exp_avg" in name for name in stored.tensors)
    scheduler_names = (*common, *stored.objects)
    states = []
    if common.get("optimizer") or has_moments:
        states.append("optimizer")
    if any(name.startswith("opt_param_scheduler") for name in scheduler_names):
        states.append("scheduler")
    if any(name.startswith("rng_state") for name in stored.objects):
        states.append("random")
    return tuple(states)


def _remove_nemo_prefix(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors under Megatron's names: without the prefix that NeMo 2 puts before names of the model."""
    if f"{_NEMO_PREFIX}{EMBEDDING}" not in tensors:
        return dict(tensors)
    return {
        re.sub(rf"(^|\.){re.escape(_NEMO_PREFIX)}(?={_MODEL_PARTS})", r"\1", name): tensor
        for name, tensor in tensors.items()
    }


def _read_common_state(
    folder: Path, stored: StoredMetadata, checkpoint_format: str
) -> dict[str, Any]:
    """Read the common state, which is identical on all ranks. Under FSDP's format this is only arguments and
    iteration.

    Raises:
        DamagedCheckpointError: A torch_dist checkpoint has no such state, or it cannot be read.
    """
    common_part = _find_common_part(folder, stored)
    if common_part is None:
        if checkpoint_format == TORCH_DIST:
            raise DamagedCheckpointError(
                f"{COMMON_FILE} is missing, without which Megatron loads no {TORCH_DIST} checkpoint"
            )
        return {
            name: describe_object(folder, stored.objects[name])
            for name in _FSDP_COMMON_OBJECTS
            if name in stored.objects
        }
    function = find_foreign_function_in(folder, common_part)
    if function:
        raise DamagedCheckpointError(_refuse_function(common_part.file, function))
    common = describe_object(folder, common_part)
    if isinstance(common, list) and common:
        common = common[0]
    return common if isinstance(common, dict) else {}


def _find_common_part(folder: Path, stored: StoredMetadata) -> StoredPart | None:
    """Return the position of the common state: its own file, or else an object of the checkpoint; None without any."""
    path = folder / COMMON_FILE
    if path.exists():
        return StoredPart(path.name, 0, path.stat().st_size)
    for name, part in stored.objects.items():
        if name.startswith(COMMON):
            return part
    return None


def _refuse_function(file: str, function: str) -> str:
    """Return the sentence on a pickle that calls a function, without its full stop."""
    return (
        f"{file} calls {function} when it is loaded, which no trainer stores and which was not executed here; "
        "do not load it"
    )


def _find_unreadable(folder: Path, stored: StoredMetadata) -> Iterator[str]:
    """Yield a sentence for each missing piece or file, for pieces that do not fit together, and for short files."""
    for name, tensor in stored.tensors.items():
        missing_pieces = sorted(tensor.sizes.keys() - tensor.parts.keys())
        if missing_pieces:
            yield f"{name} lacks the piece at {list(missing_pieces[0])}."
        if flaw := _covering_flaw(tensor):
            yield f"The pieces of {name} {flaw}."
    for file, parts in stored.parts_by_file.items():
        path = folder / file
        if flaw := describe_file_problem(path):
            yield f"{file} {flaw}, with {len(parts)} pieces."
            continue
        size_bytes = path.stat().st_size
        needed_bytes = max(part.offset_bytes + part.length_bytes for part in parts)
        if size_bytes < needed_bytes:
            yield f"{file} is truncated: it has {size_bytes} bytes of at least {needed_bytes}."
        if any(
            part.offset_bytes + part.length_bytes > following.offset_bytes
            for part, following in pairwise(parts)
        ):
            yield f"{METADATA} puts two pieces at one offset of {file}."


def _covering_flaw(tensor: StoredTensor) -> str:
    """Return a clause on how the pieces fail to cover the tensor; empty if they cover it exactly."""
    for begin, size in tensor.sizes.items():
        ends = (start + length for start, length in zip(begin, size, strict=True))
        if any(end > length for end, length in zip(ends, tensor.shape, strict=True)):
            return f"reach beyond its shape {list(tensor.shape)} at {list(begin)}"
    stored_elements = sum(map(math.prod, tensor.sizes.values()))
    elements = math.prod(tensor.shape)
    if stored_elements == elements:
        return ""
    return f"hold {stored_elements} of its {elements} elements"


def _read_legacy(folder: Path, rank_files: list[Path]) -> Contents:
    """Read a checkpoint of the format `torch`: one pickle per model-parallel rank."""
    content_by_rank, problems = _read_rank_files(rank_files)
    contents_of_ranks = content_by_rank.values()
    iteration = parse_folder_iteration(folder)
    for rank, content in content_by_rank.items():
        rank_iteration = content.get("iteration", iteration)
        if iteration is not None and rank_iteration != iteration:
            problems.append(f"{rank} is of iteration {rank_iteration}, not of {iteration}.")
    # All ranks store the same arguments, and those of the first rank that has any are used.
    arguments: dict[str, str] = {}
    for content in contents_of_ranks:
        arguments = arguments or _print_arguments(content.get("args"))
    stored, copies = join_rank_files(folder, content_by_rank, arguments)
    for name in find_missing_ranks({path.parent.name for path in rank_files}, arguments):
        problems.append(f"{name} is missing: the checkpoint's arguments imply it.")
    keys = {"optimizer": "optimizer", "opt_param_scheduler": "scheduler", "rng_state": "random"}
    states = []
    for key, state in keys.items():
        if any(content.get(key) for content in contents_of_ranks):
            states.append(state)
    return Contents(
        folder,
        LEGACY,
        iteration,
        arguments=arguments,
        stored=stored,
        states=tuple(states),
        problems=tuple(problems or _find_unreadable(folder, stored)),
        copies=copies,
        has_legacy_names=any(has_legacy_names(content) for content in contents_of_ranks),
    )


def _read_rank_files(rank_files: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of each rank's file by the name of its folder, and sentences on files with a fault.

    A file that cannot be read is missing from the contents.
    """
    content_by_rank: dict[str, Any] = {}
    problems: list[str] = []
    for path in rank_files:
        try:
            with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
                function = find_foreign_function(archive)
                if function:
                    problems.append(f"{_refuse_function(path.name, function)}.")
                content_by_rank[path.parent.name] = describe_saved(archive)
        except Exception as error:  # A damaged pickle raises anything.
            problems.append(f"{path.parent.name}/{path.name} cannot be read ({error}).")
    return content_by_rank, problems


def _read_hugging_face(folder: Path) -> Contents:
    """Read a folder of safetensors with its config.json.

    A damaged config.json is listed in `problems`. An unknown model family is no problem, and its name and the
    reason are in `unknown_model`.
    """
    from parakit.convert import ConversionError, TensorFolder, read_source

    tensors: dict[str, StoredTensor] = {}
    problems: tuple[str, ...] = ()
    unknown_model = ""
    config = folder / "config.json"
    try:
        if config.exists():
            read_config(config)
        for tensor in TensorFolder(folder).tensors.values():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[tensor.name] = StoredTensor(tensor.shape, dtype, sizes={}, parts={})
    except (ConversionError, ConfigError) as error:
        problems = (str(error),)
    if not problems:
        try:
            read_source(folder)
        except ConversionError as error:
            problems = (str(error),)
        except ConfigError as error:
            unknown_model = str(error).removesuffix(".")
    return Contents(
        folder,
        HUGGING_FACE,
        iteration=None,
        arguments={},
        stored=StoredMetadata(tensors, (), {}),
        states=(),
        problems=problems,
        unknown_model=unknown_model,
    )


def _print_arguments(namespace: Any) -> dict[str, str]:
    """Return arguments as Megatron prints them, by name, without objects of Megatron's own classes."""
    values = getattr(namespace, "__dict__", {})
    return {name: str(value) for name, value in values.items() if isinstance(value, _PRINTED_TYPES)}


def parse_folder_iteration(folder: Path) -> int | None:
    """Return the iteration in the name of a checkpoint's folder (`iter_0000100`, `step-100`); None without one."""
    match = re.fullmatch(r"(?:iter_|step-)(\d+)", folder.name)
    return int(match[1]) if match else None

"""Read and write the tensors of a folder in the safetensors format, one tensor at a time.

A folder holds one file (`model.safetensors`), or several files and an index that names the file of each
tensor. A `TensorHeader` is a tensor's name, shape and type without its values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parakit.convert.hf.progress import ConversionError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest size of a written file in bytes, the same as in `save_pretrained`."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's name, shape and type, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFolder:
    """The tensors of a folder. The headers are read at once, and the values only when `read` is called."""

    def __init__(self, folder: Path) -> None:
        """Read the header of every file.

        Raises:
            ConversionError: The folder has no safetensors, a file is missing or damaged, a tensor is
                not where the index says, or a type is none of fp32, fp16 and bf16.
        """
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, TensorHeader] = {}
        index = _read_index(folder)
        for file in _list_files(folder, index):
            self._read_headers(file)
        for name, file_name in index.items():
            if self._files.get(name) != folder / file_name:
                raise ConversionError(
                    f"{folder / INDEX} names {name} in {file_name}, which does not hold it; download "
                    "the folder again."
                )

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor's values."""
        with safe_open(self._files[name], framework="pt") as file:
            values: Tensor = file.get_tensor(name)
            return values.clone()

    def _read_headers(self, path: Path) -> None:
        """Read the headers of one file, and add them to `tensors`.

        Raises: ConversionError: The file cannot be read, or a type cannot be converted.
        """
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open returns no mapping
                    tensor = file.get_slice(name)
                    dtype = _DTYPES.get(tensor.get_dtype())
                    if dtype is None:
                        raise ConversionError(
                            f"{path} holds {name} as {tensor.get_dtype()}; only "
                            f"{', '.join(_DTYPES)} can be converted."
                        )
                    self.tensors[name] = TensorHeader(name, tuple(tensor.get_shape()), dtype)
                    self._files[name] = path
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} cannot be read ({error}); download it again.") from None


def list_differing_tensors(first: TensorFolder, second: TensorFolder) -> list[str]:
    """Return the sorted names of tensors that only one folder has, or whose shape, dtype or bits differ."""
    return [
        name
        for name in sorted(first.tensors.keys() | second.tensors.keys())
        if first.tensors.get(name) != second.tensors.get(name)
        or not torch.equal(_view_bytes(first.read(name)), _view_bytes(second.read(name)))
    ]


def _view_bytes(values: Tensor) -> Tensor:
    """Return the bytes of the values in their order, uint8; equal bytes are equal also for NaN."""
    return values.contiguous().view(-1).view(torch.uint8)


def _list_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """Return the folder's safetensors files.

    Raises:
        ConversionError: The folder has no safetensors file, or the index names a file that is missing.
    """
    if (folder / FILE).is_file() and not (folder / INDEX).is_file():
        return [folder / FILE]
    files = [folder / name for name in dict.fromkeys(index.values())]
    missing_files = [file.name for file in files if not file.is_file()]
    if missing_files:
        raise ConversionError(
            f"{folder} lacks {missing_files[0]}, which {INDEX} names; download the folder again."
        )
    if files:
        return files
    raise ConversionError(
        f"{folder} holds no {FILE} and no {INDEX}{_explain_missing_weights(folder)}."
    )


def _explain_missing_weights(folder: Path) -> str:
    """Return a clause in brackets on what a folder without safetensors holds instead; empty if that is unknown."""
    if (folder / "adapter_config.json").is_file():
        return (
            " (it is an adapter of PEFT: join it to its model with merge_and_unload, and save the result "
            "with save_pretrained)"
        )
    pickles = sorted(folder.glob("pytorch_model*.bin*"))
    if not pickles:
        return ""
    names_or_is = "names pickles" if pickles[0].suffix == ".json" else "is a pickle"
    return f" ({pickles[0].name} {names_or_is}: save it with save_pretrained first)"


def _read_index(folder: Path) -> Mapping[str, str]:
    """Read the file name of each tensor from the folder's index; empty for a folder without an index.

    Raises:
        ConversionError: The index is no JSON object with a `weight_map`.
    """
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: Path(file).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is no index of tensors ({error}).") from None


def write_tensors(
    folder: Path,
    headers: Sequence[TensorHeader],
    values: Iterable[Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as safetensors to a folder. If one file would be too large, write several files and an index.

    Args:
        folder: The folder; it must exist.
        headers: The tensors in the order in which they are written.
        values: The tensors' values in the same order. Each tensor is written before the next is taken from the
            iterable, so only one tensor has to be in memory.
        shard_bytes: Upper limit for the bytes of tensors in a file. A larger tensor gets a file of its own.
    """
    shards: list[list[TensorHeader]] = [[]]
    for header in headers:
        bytes_in_shard = sum(other.size_bytes for other in shards[-1])
        if shards[-1] and bytes_in_shard + header.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(header)
    remaining_values = iter(values)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = FILE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {header.name: name for header in shard}
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, remaining_values)
    if len(shards) > 1:
        total_size = sum(header.size_bytes for header in headers)
        index = {
            "metadata": {"total_size": total_size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(file: BinaryIO, shard: Sequence[TensorHeader], values: Iterator[Tensor]) -> None:
    """Write one safetensors file: the header's length, the header as JSON, the values in order.

    One tensor per header is taken from `values`.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for header in shard:
        end = offset + header.size_bytes
        entries[header.name] = {
            "dtype": _DTYPE_NAMES[header.dtype],
            "shape": list(header.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for header in shard:
        tensor = next(values)
        assert tuple(tensor.shape) == header.shape
        assert tensor.dtype == header.dtype
        file.write(memoryview(numpy.asarray(_view_bytes(tensor))))

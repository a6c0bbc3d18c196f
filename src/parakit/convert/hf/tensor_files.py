"""Tensors of a folder in the safetensors format, in one file or several, a tensor at a time."""

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
"""Most of a written file, as `save_pretrained` has it."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """A tensor of a folder, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFolder:
    """What a folder holds; values are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Read every file's header.

        Raises:
            ConversionError: There is no such file, or one is damaged or of an unknown type.
        """
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, TensorHeader] = {}
        indexed = _indexed(folder)
        for file in _files_of(folder, indexed):
            self._describe(file)
        for name, named in indexed.items():
            if self._files.get(name) != folder / named:
                raise ConversionError(
                    f"{folder / INDEX} names {name} in {named}, which does not hold it; download the "
                    "folder again."
                )

    def read(self, name: str) -> Tensor:
        """A tensor's values, in memory of their own."""
        with safe_open(self._files[name], framework="pt") as file:
            values: Tensor = file.get_tensor(name)
            return values.clone()

    def _describe(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    found = file.get_slice(name)
                    dtype = _DTYPES.get(found.get_dtype())
                    if dtype is None:
                        raise ConversionError(
                            f"{path} holds {name} as {found.get_dtype()}; only "
                            f"{', '.join(_DTYPES)} can be converted."
                        )
                    self.tensors[name] = TensorHeader(name, tuple(found.get_shape()), dtype)
                    self._files[name] = path
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} cannot be read ({error}); download it again.") from None


def list_differing_tensors(one: TensorFolder, other: TensorFolder) -> list[str]:
    """Names that only one has, or whose shape, type or bits differ."""
    return [
        name
        for name in sorted(one.tensors.keys() | other.tensors.keys())
        if one.tensors.get(name) != other.tensors.get(name)
        or not torch.equal(_bits(one.read(name)), _bits(other.read(name)))
    ]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _files_of(folder: Path, indexed: Mapping[str, str]) -> list[Path]:
    if (folder / FILE).is_file() and not (folder / INDEX).is_file():
        return [folder / FILE]
    files = [folder / name for name in dict.fromkeys(indexed.values())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConversionError(
            f"{folder} lacks {missing[0]}, which {INDEX} names; download the folder again."
        )
    if files:
        return files
    pickled = next(folder.glob("pytorch_model*.bin"), None)
    also = f" ({pickled.name} is a pickle: save it with save_pretrained first)" if pickled else ""
    raise ConversionError(f"{folder} holds no {FILE} and no {INDEX}{also}.")


def _indexed(folder: Path) -> Mapping[str, str]:
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: Path(file).name for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is no index of tensors ({error}).") from None


def write_tensors(
    folder: Path,
    described: Sequence[TensorHeader],
    values: Iterable[Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors, whose values come in their order, each when it is made, to files of at most
    `shard_bytes`, unless one tensor is more."""
    shards: list[list[TensorHeader]] = [[]]
    for one in described:
        held = sum(each.size_bytes for each in shards[-1])
        if shards[-1] and held + one.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(one)
    left, count = iter(values), len(shards)
    weights: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        weights |= {one.name: name for one in shard}
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, left)
    if count > 1:
        total = sum(one.size_bytes for one in described)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(file: BinaryIO, shard: Sequence[TensorHeader], values: Iterator[Tensor]) -> None:
    """A file: the header's length, the header as JSON, the values one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for one in shard:
        end = offset + one.size_bytes
        header[one.name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for one in shard:
        tensor = next(values)
        assert tuple(tensor.shape) == one.shape
        assert tensor.dtype == one.dtype
        file.write(memoryview(numpy.asarray(_bits(tensor))))

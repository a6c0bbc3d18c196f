"""Pickles read for what they say, without running anything that they name.

Every class becomes a stand-in that takes its arguments and state and does nothing. Of what `torch.save`
wrote only the description is read: a tensor becomes its shape and type, and its values stay on the disk.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from typing import Any

_TYPES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Double": "float64",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""torch's names of a storage and of what is in it."""


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor of an archive of `torch.save`, without its values."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of it; empty for one that its storage does not tell."""


class StandIn:
    """Any class that a pickle names: takes its arguments and state, does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """What a pickle gets by a name's attribute, and calls."""
        return self

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def append(self, _: Any) -> None:
        """As a list that is rebuilt."""

    def __setitem__(self, _: Any, __: Any) -> None: ...


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle with a stand-in for every class that it names but plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in; keys are distinguished by identity, so equal ones do not coincide."""
        return _KNOWN.get((module, name)) or type(name.rpartition(".")[2], (StandIn,), {})

    def persistent_load(self, pid: Any) -> str:
        """The type of a storage: `("storage", FloatStorage, key, device, elements)`."""
        return _TYPES.get(pid[1].__name__.removesuffix("Storage"), "")


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of plain containers, numbers and text; refuses one that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refused: what a pickle names can be run by it.

        Raises:
            pickle.UnpicklingError: Always.
        """
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain data is read")


def describe_saved(archive: zipfile.ZipFile) -> Any:
    """What `torch.save` wrote, tensors as `DescribedTensor`; values are not read.

    Raises:
        Exception: A damaged pickle raises anything.
    """
    name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
    with archive.open(name) as file:
        return InertUnpickler(file).load()


def _tensor(dtype: str, _: int, size: tuple[int, ...], *__: Any) -> DescribedTensor:
    return DescribedTensor(tuple(size), dtype)


def _parameter(data: Any, *_: Any) -> Any:
    return data


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}

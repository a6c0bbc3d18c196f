"""Pickles read for what they say, and written again, without running anything that they name.

Every class becomes a stand-in that takes its arguments and state and does nothing. Of what `torch.save`
wrote only the description is read: a tensor becomes its shape and type, and its values stay on the disk.
What is read to be written again keeps tensors as they are named, and their values are copied.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

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
    storage: str = ""
    """The member of the archive that holds its values, and where in it they lie."""
    begin: int = 0
    strides: tuple[int, ...] = ()


class StandIn:
    """Any class that a pickle names: takes its arguments and state, does nothing, is written again."""

    __slots__ = ("__dict__", "called", "elements", "given", "items", "state")
    source: tuple[str, str]
    """The module, and the name in it."""
    called: bool
    given: tuple[Any, ...]
    state: Any
    elements: list[Any]
    items: dict[Any, Any]

    def __new__(cls, *given: Any, **_: Any) -> StandIn:
        """As a pickle makes an object, with or without calling its class."""
        made = super().__new__(cls)
        made.called, made.given, made.state = False, given, None
        made.elements, made.items = [], {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.called = True

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """What a pickle gets by a name's attribute, and calls."""
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def append(self, value: Any) -> None:
        """As a list that is rebuilt."""
        self.elements.append(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """As it was made."""
        own = type(self)
        made = (own, self.given) if self.called else (copyreg.__newobj__, (own, *self.given))  # type: ignore[attr-defined]
        return (*made, self.state, iter(self.elements), iter(self.items.items()))


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle with a stand-in for every class that it names but plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in; keys are distinguished by identity, so equal ones do not coincide."""
        return _KNOWN.get((module, name)) or make_stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """The type of a storage and its key: `("storage", FloatStorage, key, device, elements)`."""
        return _TYPES.get(pid[1].__name__.removesuffix("Storage"), ""), pid[2]


def make_stand_in(module: str, name: str) -> type[StandIn]:
    """A class that stands for the one of that name."""
    return type(name.rpartition(".")[2], (StandIn,), {"source": (module, name)})


@dataclass(frozen=True, eq=False)
class SavedStorage:
    """The values of a tensor in an archive of `torch.save`."""

    pid: tuple[Any, ...]
    """`("storage", FloatStorage, key, device, elements)`, the class as a stand-in."""
    data: bytes


class _Rewritable(InertUnpickler):
    """Keeps every name and every storage, so that the same can be written."""

    def __init__(self, file: BinaryIO, storage: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._classes = dict[tuple[str, str], type[StandIn]]()
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """One stand-in for each name, as equal names are written once."""
        return self._classes.setdefault((module, name), make_stand_in(module, name))

    def persistent_load(self, pid: Any) -> SavedStorage:
        """A storage with its values."""
        return SavedStorage(pid, self._storage(pid[2]))


class _Rewriter(pickle._Pickler):
    """Writes stand-ins under the names that they stand for."""

    write: Callable[[bytes], None]
    memoize: Callable[[Any], None]

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, 2)
        self.storages = dict[str, bytes]()

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not issubclass(obj, StandIn):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + "\n".join((*obj.source, "")).encode())
        self.memoize(obj)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, SavedStorage):
            return None
        self.storages[obj.pid[2]] = obj.data
        return obj.pid


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
    # The whole member: only its end has the checksum compared.
    return InertUnpickler(io.BytesIO(archive.read(name))).load()


def rewrite_saved(saved: bytes, change: Callable[[Any], Any]) -> bytes:
    """What `torch.save` wrote, with the content that `change` makes of its own: in that, classes are
    stand-ins, and tensors are made of a `SavedStorage`.

    Raises:
        Exception: A damaged pickle raises anything.
    """
    with zipfile.ZipFile(io.BytesIO(saved)) as old:
        members = {member.partition("/")[2]: old.read(member) for member in old.namelist()}
        root = old.namelist()[0].partition("/")[0]
    pickled = io.BytesIO(members["data.pkl"])
    content = change(_Rewritable(pickled, lambda key: members[f"data/{key}"]).load())
    written = io.BytesIO()
    writer = _Rewriter(written)
    writer.dump(content)
    kept = {name: data for name, data in members.items() if not name.startswith("data/")}
    stored = {f"data/{key}": data for key, data in writer.storages.items()}
    new = io.BytesIO()
    with zipfile.ZipFile(new, "w") as archive:
        for name, data in (kept | {"data.pkl": written.getvalue()} | stored).items():
            archive.writestr(f"{root}/{name}", data)
    return new.getvalue()


def read_values(archive: zipfile.ZipFile, described: DescribedTensor) -> Tensor:
    """The values of a tensor in an archive of `torch.save`."""
    import torch

    root = archive.namelist()[0].partition("/")[0]
    data = bytearray(archive.read(f"{root}/data/{described.storage}"))
    dtype = getattr(torch, described.dtype)
    if not data:
        return torch.empty(described.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    values = flat.as_strided(described.shape, described.strides, described.begin)
    # A part of a larger storage would keep all of it in memory.
    return values if values.numel() == flat.numel() else values.clone()


def _tensor(
    of: tuple[str, str], begin: int, size: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> DescribedTensor:
    return DescribedTensor(tuple(size), *of, begin, tuple(strides))


class _Dict(dict[Any, Any]):
    """Takes attributes, which a module's state has beside its tensors."""


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
}

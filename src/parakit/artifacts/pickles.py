"""Read and rewrite pickles without executing anything that they name.

Every class that a pickle names becomes a stand-in that takes arguments and state and does nothing. A file of
`torch.save` can be described: a tensor becomes its shape and dtype, and its values are not read. Or the file can be
rewritten: then tensors stay as they are, and their values are copied.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
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
"""torch's names of dtypes, by the names of their storages (`FloatStorage`)."""


@dataclass(frozen=True)
class DescribedTensor:
    """Description of a tensor in an archive of `torch.save`, without its values."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype; empty if the storage does not tell it."""
    storage: str = ""
    """Member of the archive that holds the values."""
    begin: int = 0
    """Index of the first element in the storage."""
    strides: tuple[int, ...] = ()


class StandIn:
    """Replacement for an object of a class that a pickle names, so that the class need not be imported.

    It stores the arguments and the state of the object, and can be pickled again.
    """

    __slots__ = ("__dict__", "arguments", "elements", "is_called", "items", "state")
    source: tuple[str, str]
    """Module and name of the class."""
    is_called: bool
    """True if the pickle calls the class, False if the pickle only makes an object of it."""
    arguments: tuple[Any, ...]
    state: Any
    elements: list[Any]
    items: dict[Any, Any]

    def __new__(cls, *arguments: Any, **_: Any) -> StandIn:
        """Make an object as a pickle does, with or without calling its class."""
        stand_in = super().__new__(cls)
        stand_in.is_called, stand_in.arguments, stand_in.state = False, arguments, None
        stand_in.elements, stand_in.items = [], {}
        return stand_in

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_called = True

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """Return the object itself, for pickles that call an attribute of a class."""
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def append(self, value: Any) -> None:
        """Store an element, if the pickle rebuilds a list."""
        self.elements.append(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Return how to make the object again, as in the pickle that it came from."""
        maker: tuple[Any, ...] = (type(self), self.arguments)
        if not self.is_called:
            maker = (copyreg.__newobj__, (type(self), *self.arguments))  # type: ignore[attr-defined]
        return (*maker, self.state, iter(self.elements), iter(self.items.items()))


class InertUnpickler(pickle.Unpickler):
    """Unpickler that makes a stand-in for every class except plain containers, so no code of a file is run."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for the class. Stand-ins are compared by identity, so no two keys are equal."""
        return _KNOWN.get((module, name)) or make_stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return dtype and key of a storage: `pid` is `("storage", FloatStorage, key, device, elements)`."""
        return _DTYPES.get(pid[1].__name__.removesuffix("Storage"), ""), pid[2]


def make_stand_in(module: str, name: str) -> type[StandIn]:
    """Return a stand-in class for the class `name` of `module`."""
    return type(name.rpartition(".")[2], (StandIn,), {"source": (module, name)})


@dataclass(frozen=True, eq=False)
class SavedStorage:
    """Values of a tensor in an archive of `torch.save`."""

    pid: tuple[Any, ...]
    """`("storage", FloatStorage, key, device, elements)`, with a stand-in for the class."""
    data: bytes


class _RewritableUnpickler(InertUnpickler):
    """Unpickler that keeps every name and every storage, so that the pickle can be written again."""

    def __init__(self, file: BinaryIO, storage: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._classes = dict[tuple[str, str], type[StandIn]]()
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return the one stand-in of a name, so that equal names stay equal when they are written."""
        return self._classes.setdefault((module, name), make_stand_in(module, name))

    def persistent_load(self, pid: Any) -> SavedStorage:
        """Return a storage with its values."""
        return SavedStorage(pid, self._storage(pid[2]))


class _RewritingPickler(pickle._Pickler):
    """Pickler that writes stand-ins under the names of their classes, and collects storages."""

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
    """Unpickler of plain containers, numbers and text, which refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse a name, because a pickle can execute what it names.

        Raises:
            pickle.UnpicklingError: Always.
        """
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain data is read")


def _read_pickle(archive: zipfile.ZipFile) -> bytes:
    """Return the pickle of a `torch.save` file. It is read to its end, because only there its checksum is compared.

    Raises:
        ValueError: The archive has no pickle.
    """
    for name in archive.namelist():
        if name.endswith("data.pkl"):
            return archive.read(name)
    raise ValueError("it has no data.pkl")


def describe_saved(archive: zipfile.ZipFile) -> Any:
    """Return the object that `torch.save` wrote, with a `DescribedTensor` for each tensor. No values are read.

    Raises: Exception: The pickle is damaged; the type of the exception is not defined.
    """
    return InertUnpickler(io.BytesIO(_read_pickle(archive))).load()


def find_foreign_function(archive: zipfile.ZipFile) -> str | None:
    """Return the name of a suspicious function that `torch.load` would call for a file; None if there is none.

    A function is suspicious if no trainer stores it. Classes, functions of torch, and functions of Python's own
    containers are not suspicious.

    Raises: Exception: The pickle is damaged; the type of the exception is not defined.
    """
    unpickler = _NamingUnpickler(io.BytesIO(_read_pickle(archive)))
    unpickler.load()
    for name in unpickler.names:
        if _is_foreign_function(name):
            return name
    return None


def _is_foreign_function(name: str) -> bool:
    """Return True for a function, or a class that starts programs, outside of the trusted packages."""
    root, last = name.partition(".")[0], name.rpartition(".")[2]
    if root in _TRUSTED_PACKAGES or name in _TRUSTED_NAMES:
        return False
    # Classes are stored with their objects, and making an object of most classes does nothing.
    return root in _UNTRUSTED_PACKAGES or not last.lstrip("_")[:1].isupper()


class _NamingUnpickler(InertUnpickler):
    """Unpickler that also collects the names in the pickle, and the attributes of classes that it calls."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.names: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for the class, and note `module.name` as Python 3 names it."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.names.append(f"{module}.{name}")
        if (module, name) == ("builtins", "getattr"):
            return functools.partial(_Attribute, self.names)
        return super().find_class(module, name)


class _Attribute(StandIn):
    """Attribute of a stand-in, which notes its name if the pickle calls it."""

    source = ("builtins", "getattr")

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """Note the name of the attribute, and return the object itself."""
        names, owner, attribute = self.arguments
        names.append(".".join((*getattr(owner, "source", ("",)), str(attribute))))
        return self


_TRUSTED_PACKAGES = frozenset(
    (
        *("torch", "numpy", "collections", "copyreg", "_codecs", "argparse", "enum", "types"),
        *("megatron", "apex", "transformer_engine", "nemo", "lightning", "omegaconf", "datetime"),
    )
)
"""Packages whose functions trainers store, such as those that rebuild a tensor or an array."""
_TRUSTED_NAMES = {"functools.partial"} | frozenset(
    f"builtins.{name}"
    for name in (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int"),
        *("list", "object", "range", "set", "slice", "str", "tuple", "type"),
    )
)
_UNTRUSTED_PACKAGES = frozenset(
    (
        "os",
        "posix",
        "nt",
        "subprocess",
        "sys",
        "importlib",
        "runpy",
        "shutil",
        "socket",
        "pty",
        "ctypes",
    )
)
"""Packages of Python of which a checkpoint needs neither functions nor classes."""


def rewrite_saved(saved: bytes, change: Callable[[Any], Any]) -> bytes:
    """Return the bytes of a `torch.save` file after its content is changed by `change`.

    Args:
        saved: Content of the file.
        change: Gets the stored object and returns the object to store. In both, classes are stand-ins, and
            tensors are made of a `SavedStorage`.

        Raises: Exception: The pickle is damaged; the type of the exception is not defined.
    """
    # All members are in one folder of the archive, the root.
    with zipfile.ZipFile(io.BytesIO(saved)) as old:
        names = old.namelist()
        members = {name.partition("/")[2]: old.read(name) for name in names}
    root = names[0].partition("/")[0]

    def read_storage(key: str) -> bytes:
        return members[f"data/{key}"]

    pickled = io.BytesIO(members["data.pkl"])
    content = change(_RewritableUnpickler(pickled, read_storage).load())
    written = io.BytesIO()
    writer = _RewritingPickler(written)
    writer.dump(content)
    # The old storages are replaced by those of the new content.
    new_members = {name: data for name, data in members.items() if not name.startswith("data/")}
    new_members["data.pkl"] = written.getvalue()
    for key, data in writer.storages.items():
        new_members[f"data/{key}"] = data
    new_file = io.BytesIO()
    with zipfile.ZipFile(new_file, "w") as archive:
        for name, data in new_members.items():
            archive.writestr(f"{root}/{name}", data)
    return new_file.getvalue()


def read_values(archive: zipfile.ZipFile, described: DescribedTensor) -> Tensor:
    """Read the values of a described tensor from its archive."""
    import torch

    root = archive.infolist()[0].filename.partition("/")[0]
    data = bytearray(archive.read(f"{root}/data/{described.storage}"))
    dtype = getattr(torch, described.dtype)
    if not data:
        return torch.empty(described.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    values = flat.as_strided(described.shape, described.strides, described.begin)
    # A view of a part of a storage would keep the full storage in memory.
    return values if values.numel() == flat.numel() else values.clone()


def _describe_tensor(
    storage: tuple[str, str], begin: int, size: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> DescribedTensor:
    """Return the description of a tensor. The unpickler calls this in place of torch's function that rebuilds tensors.

    `storage` is the dtype and the member of the archive, as `InertUnpickler.persistent_load` returns it.
    """
    dtype, member = storage
    return DescribedTensor(tuple(size), dtype, member, begin, tuple(strides))


class _DictWithAttributes(dict[Any, Any]):
    """Dict that can have attributes, as the state of a module does."""


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): _DictWithAttributes,
    ("torch._utils", "_rebuild_tensor_v2"): _describe_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
}

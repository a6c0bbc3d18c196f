"""Execute the Python files of `PATCH_FILE=`, a user's changes of Megatron, on every rank before training.

The files run in their order, after Megatron is imported and the kit's patches are applied, so their
replacements are what trains. Their hash is compared with the one in the run's record, so that the record
names exactly what ran.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from parakit.config import variables

SEPARATOR = ","
"""Separator of several files in `PATCH_FILE=`."""

_MODULE = "kit_patch_file"
"""Name of the module in which a file is executed."""


class PatchFileError(RuntimeError):
    """An error about a file that is missing, changed or fails; one sentence that names the file."""


def execute_patch_file(environment: Mapping[str, str]) -> str | None:
    """Execute the files that `environment` names, each as a module, and return their names.

    The result is the value of the variable, or None if it is not set. Megatron is imported first.

    Raises:
        PatchFileError: A file is missing, differs from the recorded hash, or raises an exception.
    """
    if "KIT_PLANT" in environment:
        raise PatchFileError(f"KIT_PLANT= is {variables.PATCH_FILE}= now.")
    names = environment.get(variables.PATCH_FILE)
    if not names:
        return None
    paths = [Path(name) for name in names.split(SEPARATOR)]
    codes = _read_files(paths, environment.get(variables.PATCH_FILE_SHA256))
    importlib.import_module("megatron.training")
    for path, code in zip(paths, codes, strict=True):
        _execute(path, code)
    return names


def patch_file_sha256(codes: Iterable[bytes]) -> str:
    """Return the SHA-256 of the contents of one or several files, joined in their order, in hex."""
    return hashlib.sha256(b"".join(codes)).hexdigest()


def _execute(path: Path, code: bytes) -> None:
    """Execute the content of a file as the module `kit_patch_file`.

    Raises:
        PatchFileError: The code raised an exception; the sentence names the file and the line.
    """
    module = ModuleType(_MODULE, None)
    module.__file__ = str(path)
    # dataclasses and pickle look up classes in the module that sys.modules has by their module's name.
    sys.modules[_MODULE] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102 - as asked
    except Exception as error:
        # The cause is suppressed: it would be printed first, and the log's first error would then name
        # neither the file nor the line.
        raise PatchFileError(
            f"{_locate_error(error, path)}: {type(error).__name__}: {error}"
        ) from None


def _read_files(paths: Sequence[Path], sha256: str | None) -> list[bytes]:
    """Return the contents of the files; `sha256` None skips the comparison of hashes.

    Raises:
        PatchFileError: A file cannot be read, or the contents have another hash.
    """
    try:
        codes = [path.read_bytes() for path in paths]
    except OSError as error:
        raise PatchFileError(
            f"PATCH_FILE={error.filename} cannot be read here ({error.strerror})."
        ) from None
    if sha256 and patch_file_sha256(codes) != sha256:
        names = SEPARATOR.join(map(str, paths))
        raise PatchFileError(
            f"PATCH_FILE={names} is not the file whose hash the run recorded, {sha256[:12]}; it was "
            "changed after the run was composed."
        )
    return codes


def _locate_error(error: Exception, path: Path) -> str:
    """Return 'PATCH_FILE=file.py, line 3' for the innermost line of the file in the error's traceback.

    The line is left out if the traceback has none of the file's.
    """
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"PATCH_FILE={path}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"PATCH_FILE={path}, line {lines[-1]}" if lines else f"PATCH_FILE={path}"

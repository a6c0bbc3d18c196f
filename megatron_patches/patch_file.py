"""Python files that every rank executes before it trains (`PATCH_FILE=`): changes of Megatron to try.

They run after Megatron is imported and the kit's patches are applied, in their order, so what they
replace is what trains. They are compared with the hash that the run's record holds: what ran is what is
recorded.
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
"""Between files."""

_MODULE = "kit_patch_file"


class PatchFileError(RuntimeError):
    """A file is not the one of the run's record, or failed; one sentence that names it."""


def execute_patch_file(environment: Mapping[str, str]) -> str | None:
    """Execute the files that the environment names, as modules; returns the name, None without one.

    Raises:
        PatchFileError: One is missing, has changed, or an exception came out of it.
    """
    if "KIT_PLANT" in environment:
        raise PatchFileError(f"KIT_PLANT= is {variables.PATCH_FILE}= now.")
    name = environment.get(variables.PATCH_FILE)
    if not name:
        return None
    paths = [Path(one) for one in name.split(SEPARATOR)]
    codes = _read(paths, environment.get(variables.PATCH_FILE_SHA256))
    importlib.import_module("megatron.training")
    for path, code in zip(paths, codes, strict=True):
        _execute(path, code)
    return name


def patch_file_sha256(codes: Iterable[bytes]) -> str:
    """Of what one file or several hold."""
    return hashlib.sha256(b"".join(codes)).hexdigest()


def _execute(path: Path, code: bytes) -> None:
    module = ModuleType(_MODULE, None)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # Where dataclasses and pickle look for what it defines.
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102 - as asked
    except Exception as error:
        # Without its cause, which would be the first error of the log, without file and line.
        raise PatchFileError(f"{_place(error, path)}: {type(error).__name__}: {error}") from None


def _read(paths: Sequence[Path], sha256: str | None) -> list[bytes]:
    try:
        codes = [path.read_bytes() for path in paths]
    except OSError as error:
        raise PatchFileError(
            f"PATCH_FILE={error.filename} cannot be read here ({error.strerror})."
        ) from None
    if sha256 and patch_file_sha256(codes) != sha256:
        named = SEPARATOR.join(map(str, paths))
        raise PatchFileError(
            f"PATCH_FILE={named} is not the file whose hash the run recorded, {sha256[:12]}; it was "
            "changed after the run was composed."
        )
    return codes


def _place(error: Exception, path: Path) -> str:
    """`PATCH_FILE=file.py, line 3`: the file's own line that was reached."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"PATCH_FILE={path}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"PATCH_FILE={path}, line {lines[-1]}" if lines else f"PATCH_FILE={path}"

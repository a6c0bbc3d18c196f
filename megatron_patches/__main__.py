"""`python -m megatron_patches ENTRY ARGS…`: patch Megatron as this machine needs, then run ENTRY with ARGS.

The environment variable `KIT_DEVICE` names the device of the ranks (`cpu` or `gpu`, by default `gpu`).
An entry in a Megatron-LM checkout runs that checkout's Megatron; any other entry runs the installed wheel.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from megatron_patches.context import RuntimeContext, find_context
from megatron_patches.entry import freeze_imports, name_entry_in_errors
from megatron_patches.patch_file import execute_patch_file
from megatron_patches.registry import SKIPPED_PREFIX, PatchError, apply_patches, skipped_targets
from megatron_patches.stacks import dump_stacks_on_request
from parakit.config import variables


def main(arguments: list[str]) -> None:
    """Apply the patches and run the entry; exit with a sentence if that is not possible.

    `arguments` are the path of the entry and the entry's own arguments.
    """
    if not arguments:
        sys.exit("Usage: python -m megatron_patches ENTRY ARGS…")
    entry = Path(arguments[0])
    if not entry.is_file():
        sys.exit(
            f"There is no entry {entry}; MEGATRON_LM must name a checkout with pretrain_gpt.py."
        )
    dump_stacks_on_request()
    try:
        context = find_context(entry, os.environ.get(variables.DEVICE, "gpu"))
        with freeze_imports():
            # The kit's modules are imported before the checkout is on the path, so that no file of
            # the checkout can take the place of a module of the kit.
            from megatron_patches.catalogue import PATCHES

            # Python does the same when it starts a file: the file's folder comes first on the path, and
            # sys.argv begins with the file.
            sys.path.insert(0, str(entry.resolve().parent))
            sys.argv = [str(entry), *arguments[1:]]
            applied = apply_patches(PATCHES, context)
    except (PatchError, LookupError, ValueError) as error:
        sys.exit(str(error))
    announce(context, applied)
    # runpy would make the entry sys.modules["__main__"]. Every process that Megatron spawns to write a
    # checkpoint would then import the entry, torch and Megatron again, unpatched.
    enter(compile(entry.read_bytes(), str(entry), "exec"), str(entry))


def write_whole_lines() -> None:
    """Make stdout and stderr write each line at once, together with its end.

    Without buffering, `print` writes a line and its end separately, and the lines of several ranks mix
    in their common log.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def announce(context: RuntimeContext, applied: Sequence[str]) -> None:
    """Execute the files of `PATCH_FILE=`, if any, and print on rank 0 what of Megatron is changed.

    Raises:
        PatchFileError: A patch file is missing, has changed or fails.
    """
    write_whole_lines()
    patch_file = execute_patch_file(os.environ)
    if int(os.environ.get("RANK", "0")) == 0:
        untested = "" if context.knows_megatron else " (not tried)"
        line = (
            f"> Megatron {context.megatron}{untested}, patched: {', '.join(applied) or 'nothing'}"
        )
        if skipped_targets:
            line += f", {SKIPPED_PREFIX}{', '.join(skipped_targets)}"
        if patch_file:
            line += f", patch file: {patch_file}"
        print(line, flush=True)


def enter(code: CodeType, entry: str) -> None:
    """Run the code of the file `entry` as `__main__`; a sentence it exits with begins with its name."""
    with name_entry_in_errors(entry):
        exec(code, {"__name__": "__main__", "__file__": entry})  # noqa: S102 - as asked


if __name__ == "__main__":
    main(sys.argv[1:])

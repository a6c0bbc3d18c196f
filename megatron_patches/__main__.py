"""`python -m megatron_patches ENTRY ARGS…`: patch Megatron as this machine needs, run ENTRY with ARGS.

`KIT_DEVICE` names what the ranks run on (`cpu` or `gpu`). An entry in a Megatron-LM checkout runs that
checkout's Megatron; any other runs the installed wheel's.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from megatron_patches.context import RuntimeContext, find_context
from megatron_patches.entry import kept_imports, named_refusals
from megatron_patches.patch_file import execute_patch_file
from megatron_patches.registry import WITHOUT, PatchError, apply_patches, left_out
from megatron_patches.stacks import dump_stacks_on_request
from parakit.config import variables


def main(arguments: list[str]) -> None:
    """Patch and run; exits with a sentence if it cannot."""
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
        with kept_imports():
            # The kit's modules first: a checkout has a package called `tools` as well.
            from megatron_patches.catalogue import PATCHES

            # As if the entry had been started itself: its folder comes first, and sys.argv is its own.
            sys.path.insert(0, str(entry.resolve().parent))
            sys.argv = [str(entry), *arguments[1:]]
            applied = apply_patches(PATCHES, context)
    except (PatchError, LookupError, ValueError) as error:
        sys.exit(str(error))
    announce(context, applied)
    # Not runpy: it would make the entry sys.modules["__main__"], and every process that Megatron
    # spawns to write a checkpoint would import the entry, torch and Megatron again, unpatched.
    enter(compile(entry.read_bytes(), str(entry), "exec"), str(entry))


def write_whole_lines() -> None:
    """Write each printed line at once.

    Unbuffered, `print` writes a line and its end apart, and those of ranks that share a log mix.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def announce(context: RuntimeContext, applied: Sequence[str]) -> None:
    """Execute the patch file, if there is one, and print what of Megatron is changed, once a run."""
    write_whole_lines()
    patched = execute_patch_file(os.environ)
    if int(os.environ.get("RANK", "0")) == 0:
        tried = "" if context.knows_megatron else " (not tried)"
        print(
            f"> Megatron {context.megatron}{tried}, patched: {', '.join(applied) or 'nothing'}"
            + (f", {WITHOUT}{', '.join(left_out)}" if left_out else "")
            + (f", patch file: {patched}" if patched else ""),
            flush=True,
        )


def enter(code: CodeType, entry: str) -> None:
    """Run an entry's code as if it had been started itself; a sentence that it ends with names it."""
    with named_refusals(entry):
        exec(code, {"__name__": "__main__", "__file__": entry})  # noqa: S102 - as asked


if __name__ == "__main__":
    main(sys.argv[1:])

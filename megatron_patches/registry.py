"""How a patch is described and applied.

A patch names what it replaces, why, and the Megatron versions it knows. A target that has moved, or
an untested version, stops the run before training instead of changing it silently.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_patches.context import WHAT_IS_KNOWN, RuntimeContext


class PatchError(RuntimeError):
    """Megatron or torch is not what a patch was written for."""


@dataclass(frozen=True)
class Replacement:
    """One name, and the function that makes its new value from its present one."""

    target: str
    """`package.module:Attribute.attribute`."""
    make: Callable[[Any], Any]
    since: Version | None = None
    """First Megatron version that has the target."""
    before: Version | None = None
    """First Megatron version that no longer has it."""

    def exists_in(self, megatron: Version) -> bool:
        """Whether this version of Megatron should have the target."""
        is_new_enough = self.since is None or self.since <= megatron
        return is_new_enough and (self.before is None or megatron < self.before)


@dataclass(frozen=True)
class Patch:
    """Replacements that belong to one reason."""

    name: str
    reason: str
    needed: Callable[[RuntimeContext], bool]
    replacements: tuple[Replacement, ...]


def cpu_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """What CPU ranks alone need."""
    return Patch(name, reason, lambda context: context.on_cpu, replacements)


def no_te_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """What is needed where Transformer Engine is missing."""
    return Patch(name, reason, lambda context: not context.has_transformer_engine, replacements)


def fused_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """What `FUSED=` switches on by this name."""
    return Patch(f"fused {name}", reason, lambda context: name in context.fused, replacements)


def around(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes a function's new value of one that takes the original before its own arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replaced

    return make


def check_version(context: RuntimeContext) -> None:
    """Refuse a Megatron that the patches do not know, unless the user lets an unknown one train.

    Raises:
        PatchError: It is none that `context.is_known`.
    """
    if not context.knows_megatron and not context.allow_unknown_megatron:
        at = f" at {context.commit}" if context.commit else ""
        raise PatchError(
            f"Megatron {context.megatron}{at} is not known to the patches (they know "
            f"{WHAT_IS_KNOWN}); point MEGATRON_LM at one of those, or unset it for the wheel; "
            "ALLOW_UNKNOWN_MEGATRON=1 tries it."
        )


def apply_patches(patches: Iterable[Patch], context: RuntimeContext) -> tuple[str, ...]:
    """Apply those patches that the context needs; return their names.

    In a Megatron that was not tried and that the user lets train, a target that is not there is left
    out; `left_out` has it.

    Raises:
        PatchError: The version is unknown, or a target is not where the patch expects it.
    """
    check_version(context)
    applied = [patch for patch in patches if patch.needed(context)]
    lenient = context.allow_unknown_megatron and not context.knows_megatron
    for patch in applied:
        for replacement in patch.replacements:
            if replacement.exists_in(context.megatron):
                try:
                    _replace(patch, replacement, context)
                except PatchError:
                    if not lenient:
                        raise
                    left_out.append(f"{patch.name} ({replacement.target})")
    return tuple(patch.name for patch in applied)


WITHOUT = "but for targets that it lacks: "
"""What comes before their list in a log."""
left_out: list[str] = []
"""Patches with a target that an unknown Megatron does not have, in this process."""


def _replace(patch: Patch, replacement: Replacement, context: RuntimeContext) -> None:
    module_name, _, path = replacement.target.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for name in owners:
            owner = getattr(owner, name)
        # A property must be read from the class's own dictionary; getattr would evaluate it.
        present = owner.__dict__.get(attribute) if isinstance(owner, type) else None
        original = present if isinstance(present, property) else getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"Patch '{patch.name}' ({patch.reason}) expects {replacement.target}, which Megatron "
            f"{context.megatron} with this torch does not have ({error})."
        ) from error
    setattr(owner, attribute, replacement.make(original))

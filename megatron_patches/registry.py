"""Describe and apply patches, which replace names in Megatron and torch at run time.

A patch names its targets, the reason, and the Megatron versions that have the targets. A missing target or an
untested version of Megatron stops the run before training. Otherwise a patch that no longer fits would silently
change what is trained.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import Version

from megatron_patches.context import WHAT_IS_KNOWN, RuntimeContext


class PatchError(RuntimeError):
    """An error that says that Megatron or torch is not the version a patch was written for."""


@dataclass(frozen=True)
class Replacement:
    """One target, and the function that makes its new value from its original value."""

    target: str
    """Name that is replaced, as `package.module:Class.attribute`."""
    make: Callable[[Any], Any]
    since: Version | None = None
    """First Megatron version that has the target; None if all have it."""
    before: Version | None = None
    """First Megatron version that no longer has the target; None if all have it."""

    def exists_in(self, megatron: Version) -> bool:
        """Return True if this version of Megatron should have the target."""
        is_new_enough = self.since is None or self.since <= megatron
        is_old_enough = self.before is None or megatron < self.before
        return is_new_enough and is_old_enough


@dataclass(frozen=True)
class Patch:
    """Replacements that are made together, for one reason."""

    name: str
    """Name in the log's line of patches."""
    reason: str
    """What would happen without the patch; error messages repeat it."""
    needed: Callable[[RuntimeContext], bool]
    """Returns True if the patch has to be applied in this context."""
    replacements: tuple[Replacement, ...]


def cpu_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """Return a patch that is applied on CPU ranks only."""
    return Patch(name, reason, lambda context: context.on_cpu, replacements)


def no_te_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """Return a patch that is applied where Transformer Engine is missing, on GPUs and on CPU ranks."""
    return Patch(name, reason, lambda context: not context.has_transformer_engine, replacements)


def fused_patch(name: str, reason: str, *replacements: Replacement) -> Patch:
    """Return a patch that is applied only if `FUSED=` has this name."""
    return Patch(f"fused {name}", reason, lambda context: name in context.fused, replacements)


def wrap_original(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn `call`, which takes the replaced function as its first argument, into a `Replacement.make`.

    A `Replacement.make` takes the original function and returns the function that replaces it. Here the
    returned function calls `call(original, *args, **kwargs)`, and has the name and docstring of the original.
    `wrap_original` is used as a decorator.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return wrapper

    return make


def check_version(context: RuntimeContext) -> None:
    """Refuse a Megatron that the patches were not tested with, unless ALLOW_UNKNOWN_MEGATRON=1.

    Raises:
        PatchError: `context.is_known` gives False for the version and the commit.
    """
    if not context.knows_megatron and not context.allow_unknown_megatron:
        commit = f" at {context.commit}" if context.commit else ""
        raise PatchError(
            f"Megatron {context.megatron}{commit} is not known to the patches (they know "
            f"{WHAT_IS_KNOWN}); point MEGATRON_LM at one of those, or unset it for the wheel; "
            "ALLOW_UNKNOWN_MEGATRON=1 tries it."
        )


def apply_patches(patches: Iterable[Patch], context: RuntimeContext) -> tuple[str, ...]:
    """Apply the patches that the context needs, in their order, and return their names.

    In an untested Megatron that the user allows (ALLOW_UNKNOWN_MEGATRON=1), a missing target is skipped
    and added to `skipped_targets`.

    Raises:
        PatchError: The version is untested and not allowed, or a tested Megatron lacks a target.
    """
    check_version(context)
    needed = [patch for patch in patches if patch.needed(context)]
    may_skip = context.allow_unknown_megatron and not context.knows_megatron
    for patch in needed:
        for replacement in patch.replacements:
            if not replacement.exists_in(context.megatron):
                continue
            try:
                _replace(patch, replacement, context)
            except PatchError:
                if not may_skip:
                    raise
                skipped_targets.append(f"{patch.name} ({replacement.target})")
    return tuple(patch.name for patch in needed)


SKIPPED_PREFIX = "but for targets that it lacks: "
"""Text before the list of skipped targets in the log."""
skipped_targets: list[str] = []
"""Skipped targets in this process, each as 'patch (target)': an untested Megatron does not have them."""


def _replace(patch: Patch, replacement: Replacement, context: RuntimeContext) -> None:
    """Import the target's module and replace the target.

    Raises:
        PatchError: The module or the attribute does not exist.
    """
    module_name, _, path = replacement.target.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for name in owners:
            owner = getattr(owner, name)
        original = _read_attribute(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"Patch '{patch.name}' ({patch.reason}) expects {replacement.target}, which Megatron "
            f"{context.megatron} with this torch does not have ({error})."
        ) from error
    replaced = replacement.make(original)
    setattr(owner, attribute, replaced)
    if isinstance(owner, ModuleType) and callable(original):
        for module in modules_with_copy(original, attribute, owner):
            setattr(module, attribute, replaced)


def _read_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a module or class. A property of a class is returned itself and not evaluated.

    Raises:
        AttributeError: There is no such attribute.
    """
    if isinstance(owner, type):
        attribute = owner.__dict__.get(name)
        if isinstance(attribute, property):
            return attribute
    return getattr(owner, name)


def modules_with_copy(original: Any, name: str, owner: ModuleType) -> list[ModuleType]:
    """Return the loaded modules of `owner`'s package that have imported `original` under the name `name`.

    `from module import name` makes a copy of the name, which a change of the module does not reach. Modules of
    torch are not returned, because the patches change only calls from Megatron.
    """
    package = owner.__name__.partition(".")[0]
    if package == "torch":
        return []
    modules = []
    for module_name, module in tuple(sys.modules.items()):
        is_of_package = module_name.partition(".")[0] == package
        if module is owner or not is_of_package or not isinstance(module, ModuleType):
            continue
        if vars(module).get(name) is original:
            modules.append(module)
    return modules

"""The capture replaces functions during an iteration in every module that has imported them."""

import sys
from collections.abc import Callable
from types import ModuleType
from unittest import mock

from megatron_patches.capture.step import wrap_in_importers


def test_function_is_wrapped_in_every_importing_module_and_restored() -> None:
    owner, plain, patched, elsewhere = (
        ModuleType(f"stand_in.{name}")
        for name in ("optimizer.clip", "optimizer.plain", "optimizer.patched", "model.layer")
    )
    owner.norm = plain.norm = elsewhere.norm = original = lambda: 3  # type: ignore[attr-defined]
    patched.norm = lambda: 5  # type: ignore[attr-defined]  # As a patch file would replace it.
    noted: list[int] = []

    def note(function: Callable[[], int]) -> Callable[[], int]:
        def call() -> int:
            noted.append(function())
            return noted[-1]

        return call

    modules = {module.__name__: module for module in (owner, plain, patched, elsewhere)}
    with mock.patch.dict(sys.modules, modules):
        with wrap_in_importers(owner, "norm", note):
            values = [module.norm() for module in (owner, plain, patched, elsewhere)]
        assert plain.norm is original
    assert values == [3, 3, 5, 3]
    assert noted == [3, 5]

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from unittest import mock

import pytest
from packaging.version import Version

from megatron_patches import registry
from megatron_patches.context import RuntimeContext
from megatron_patches.registry import Patch, PatchError, Replacement, apply_patches

CPU = RuntimeContext("cpu", Version("0.19.0"), has_transformer_engine=False)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """Return a stand-in for a module of Megatron."""

    class Layer:
        def width(self) -> int:
            return 3

    made = ModuleType("patched_here")
    made.Layer = Layer  # type: ignore[attr-defined]
    made.answer = lambda: 1  # type: ignore[attr-defined]
    sys.modules["patched_here"] = made
    yield made
    del sys.modules["patched_here"]


def patch(*replacements: Replacement, needed: bool = True) -> Patch:
    return Patch("test", "it must change", lambda _: needed, replacements)


def twice(original):  # type: ignore[no-untyped-def]
    return lambda *arguments: 2 * original(*arguments)


def test_functions_and_methods_are_replaced_by_wrappers_of_them(module: ModuleType) -> None:
    both = patch(
        Replacement("patched_here:answer", twice), Replacement("patched_here:Layer.width", twice)
    )
    assert apply_patches([both], CPU) == ("test",)
    assert (module.answer(), module.Layer().width()) == (2, 6)


def test_a_function_is_replaced_in_every_module_that_has_imported_it(module: ModuleType) -> None:
    importer, other = ModuleType("patched_here.importer"), ModuleType("patched_here.other")
    importer.answer = module.answer  # type: ignore[attr-defined]
    other.answer = function_of_other = lambda: 5  # type: ignore[attr-defined]
    foreign = ModuleType("foreign")
    foreign.answer = module.answer  # type: ignore[attr-defined]
    with mock.patch.dict(
        sys.modules, {added.__name__: added for added in (importer, other, foreign)}
    ):
        apply_patches([patch(Replacement("patched_here:answer", twice))], CPU)
    assert importer.answer is module.answer
    assert module.answer() == 2
    assert other.answer is function_of_other
    assert foreign.answer() == 1


def test_a_patch_that_is_not_needed_changes_nothing(module: ModuleType) -> None:
    assert (
        apply_patches([patch(Replacement("patched_here:answer", twice), needed=False)], CPU) == ()
    )
    assert module.answer() == 1


def test_missing_target_stops_the_run_with_its_name(module: ModuleType) -> None:
    moved = patch(Replacement("patched_here:Layer.height", twice))
    with pytest.raises(
        PatchError, match=r"Patch 'test' \(it must change\) expects patched_here:Layer\.height"
    ):
        apply_patches([moved], CPU)


def test_a_target_is_expected_only_in_the_versions_that_have_it(module: ModuleType) -> None:
    gone = Replacement("patched_here:gone", twice, before=Version("0.17"))
    later = Replacement("patched_here:later", twice, since=Version("0.21"))
    apply_patches([patch(gone, later)], CPU)
    assert module.answer() == 1


@pytest.mark.parametrize("version", ["0.13.1", "0.20.0", "1.0"])
def test_unknown_megatron_is_refused_before_any_replacement(
    module: ModuleType, version: str
) -> None:
    unknown = RuntimeContext("cpu", Version(version), has_transformer_engine=False)
    with pytest.raises(PatchError, match=f"Megatron {version} is not known to the patches"):
        apply_patches([patch(Replacement("patched_here:answer", twice))], unknown)
    assert module.answer() == 1
    wanted = replace(unknown, allow_unknown_megatron=True)
    assert apply_patches([patch(Replacement("patched_here:answer", twice))], wanted) == ("test",)


@pytest.mark.parametrize("version", ["0.14.0", "0.15.0rc2", "0.16.1", "0.19.5"])
def test_releases_since_the_published_commit_are_known(module: ModuleType, version: str) -> None:
    known = RuntimeContext("cpu", Version(version), has_transformer_engine=False)
    assert apply_patches([patch(Replacement("patched_here:answer", twice))], known) == ("test",)


def test_missing_target_of_an_untested_megatron_is_skipped_and_named(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "skipped_targets", [])
    newer = replace(CPU, megatron=Version("0.99"), allow_unknown_megatron=True)
    both = patch(
        Replacement("patched_here:answer", twice), Replacement("patched_here:moved", twice)
    )
    assert apply_patches([both], newer) == ("test",)
    assert registry.skipped_targets == ["test (patched_here:moved)"]
    with pytest.raises(PatchError, match="patched_here:moved"):
        apply_patches([both], replace(CPU, allow_unknown_megatron=True))

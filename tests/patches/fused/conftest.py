"""Compiled functions run as they are written: these tests are about arithmetic, not the compiler."""

import pytest
import torch

from megatron_patches.cpu.no_dynamo import skip_compilation
from megatron_patches.fused import compile_once


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run functions uncompiled except in slow tests, because loading the compiler takes longer than all tests."""
    compile_once.cache_clear()
    if "slow" not in request.keywords:
        monkeypatch.setattr(torch, "compile", skip_compilation)


def devices() -> list[object]:
    """Return the CPU, and a GPU whose tests are skipped with the reason if there is none."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    return ["cpu", pytest.param("cuda", marks=absent)]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)

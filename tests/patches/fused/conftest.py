"""Compiled functions run as they are written: these tests are about arithmetic, not the compiler."""

import warnings
from collections.abc import Iterator

import pytest
import torch

with warnings.catch_warnings():
    # Loading the compiler warns of what torch itself has deprecated (2.11: torch.jit.script_method).
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def devices() -> list[object]:
    """The CPU, and a GPU, which skips with the reason where there is none."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    return ["cpu", pytest.param("cuda", marks=absent)]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)

from collections.abc import Iterator

import numpy as np
import pytest
from packaging.version import Version

from megatron_patches.context import RuntimeContext
from megatron_patches.numpy2_compat import PATCH
from megatron_patches.registry import apply_patches

NUMPY_2 = Version(np.__version__) >= Version("2")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    vars(np).pop("product", None)


@pytest.mark.skipif(not NUMPY_2, reason="this NumPy still has it")
@pytest.mark.parametrize(
    ("megatron", "has"), [("0.15.0rc2", True), ("0.15.3", True), ("0.16.0", False)]
)
def test_old_megatrons_find_numpy_product_under_numpy_2(megatron: str, has: bool) -> None:
    assert not hasattr(np, "product")
    apply_patches([PATCH], RuntimeContext("cpu", Version(megatron), False))
    assert hasattr(np, "product") == has
    if has:
        assert vars(np)["product"]((2, 3)) == 6

from typing import Any

import pytest
import torch

from megatron_patches import shared_device


@pytest.mark.parametrize(("asked", "set_"), [(0, 0), (1, 0), ("cuda:1", 0)])
def test_every_rank_takes_the_only_device(
    asked: Any, set_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    devices: list[int] = []
    shared_device._set_existing_device(devices.append)(asked)
    assert devices == [set_]

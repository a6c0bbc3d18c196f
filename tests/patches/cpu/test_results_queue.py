import queue
import sys
from types import SimpleNamespace

import pytest

from megatron_patches.cpu.results_queue import _use_local_queue


@pytest.mark.parametrize("is_async", [False, True])
def test_queue_is_created_only_for_checkpoints_written_by_another_process(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace(async_save=is_async)
    megatron = SimpleNamespace(get_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    result = _use_local_queue(lambda: "between processes")()
    assert (result == "between processes") is is_async
    assert isinstance(result, queue.Queue) is not is_async

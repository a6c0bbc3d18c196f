import queue
import sys
from types import SimpleNamespace

import pytest

from megatron_patches.cpu.results_queue import _use_local_queue


@pytest.mark.parametrize("is_async", [False, True])
def test_only_a_checkpoint_written_by_another_process_needs_a_queue_between_them(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace(async_save=is_async)
    megatron = SimpleNamespace(get_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    result = _use_local_queue(lambda: "between processes")()
    assert (result == "between processes") is is_async
    assert isinstance(result, queue.Queue) is not is_async

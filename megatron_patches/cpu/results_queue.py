"""Keep the report of a checkpoint's writer in the rank's own process.

Target: `get_write_results_queue` of Megatron's asynchronous file writer (up to 0.16 with a leading
underscore). Megatron keeps the report in a queue in a separate process, which imports torch to read it.
Without the patch, saving would start that process on every CPU rank, which takes longer than a tiny model
takes to train. Only `--async-save` writes in another process and keeps Megatron's queue.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.registry import Replacement, cpu_patch, wrap_original

_local_queue: queue.Queue[Any] = queue.Queue()


@wrap_original
def _use_local_queue(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a queue in this process, or Megatron's queue under `--async-save`."""
    from megatron.training import get_args

    return original(*args, **kwargs) if get_args().async_save else _local_queue


_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_FIRST_IN_RANK = Version("0.15.0rc0")
"""First Megatron version that can write in the rank itself; before, it always writes in another process."""
_FIRST_PUBLIC = Version("0.17.0rc0")
"""First Megatron version in which the function has no leading underscore."""

PATCH = cpu_patch(
    "results_queue",
    "a writer's report is kept by a process that imports torch for it",
    Replacement(
        f"{_MODULE}:_get_write_results_queue",
        _use_local_queue,
        since=_FIRST_IN_RANK,
        before=_FIRST_PUBLIC,
    ),
    Replacement(f"{_MODULE}:get_write_results_queue", _use_local_queue, since=_FIRST_PUBLIC),
)

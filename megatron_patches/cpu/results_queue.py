"""What a checkpoint's writer reports stays in its process on CPU ranks, unless it writes in another.

Megatron keeps the report in a queue of a process of its own, which imports torch to read it: on a CPU
that takes longer than a tiny model takes to train. Only `--async-save` writes in another process.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.context import OLDEST_KNOWN
from megatron_patches.registry import Replacement, around, cpu_patch

_own: queue.Queue[Any] = queue.Queue()


@around
def _within_the_process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    return original(*args, **kwargs) if get_args().async_save else _own


_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_NAMED = Version("0.17.0rc0")

PATCH = cpu_patch(
    "results_queue",
    "a writer's report is kept by a process that imports torch for it",
    # Before, another process wrote in every case.
    Replacement(f"{_MODULE}:_get_write_results_queue", _within_the_process, OLDEST_KNOWN, _NAMED),
    Replacement(f"{_MODULE}:get_write_results_queue", _within_the_process, since=_NAMED),
)

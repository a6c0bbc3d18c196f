"""Megatron-FSDP shards nothing: the kit has no strategy of that, and its checks of flags take it for another."""

from functools import wraps
from typing import Any

from megatron.training import get_args, training

_set_up = training.setup_model_and_optimizer


@wraps(_set_up)
def _shards_nothing(*args: Any, **kwargs: Any) -> Any:
    if get_args().use_megatron_fsdp:
        get_args().data_parallel_sharding_strategy = "no_shard"
    return _set_up(*args, **kwargs)


training.setup_model_and_optimizer = _shards_nothing

"""Train Megatron's GPT in plain PyTorch, with DDP, FSDP2, tensor, expert or pipeline parallelism or DeepSpeed.

This package decides how `BACKEND=native`, `deepspeed`, `bare` and `transformers` train the model that a Megatron
command line describes. It prints Megatron's log lines and starts from the same initial weights, so that the runs
can be compared with Megatron's. The module `settings` checks the flags without importing torch.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.native.batches import MicroBatch, SplitSamples
    from parakit.native.capture import Counterpart, MegatronParameter, wrap_for_capture
    from parakit.native.engines import TorchEngine
    from parakit.native.hooks import ModuleSlots, Taps, find_module_slots
    from parakit.native.parallel import RankLayout
    from parakit.native.settings import (
        FROM_CONFIG,
        IMPORTED,
        MUON_RULE_FLAG,
        PADDED,
        Settings,
        parse_settings,
        refused_value,
        unknown_flags,
    )
    from parakit.native.training import format_parameters_line, main, train
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "FROM_CONFIG",
    "IMPORTED",
    "MUON_RULE_FLAG",
    "PADDED",
    "Counterpart",
    "MegatronParameter",
    "MicroBatch",
    "ModuleSlots",
    "RankLayout",
    "Settings",
    "SplitSamples",
    "Taps",
    "TorchEngine",
    "find_module_slots",
    "format_parameters_line",
    "main",
    "parse_settings",
    "refused_value",
    "train",
    "unknown_flags",
    "wrap_for_capture",
]

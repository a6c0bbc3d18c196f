"""Communication, memory and time of every rank, counted inside the training processes.

This package decides what is counted: bytes of each collective by group and phase, memory by category, and the
time of each part of an iteration. Every rank writes its own files, and `collect_ledgers` joins them to the
files of the run folder. Only `collect_ledgers` is imported outside of training processes.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.accounting.collect import collect_ledgers
    from parakit.accounting.communication import CommunicationLedger
    from parakit.accounting.memory import MemoryLedger
    from parakit.accounting.model_state import gradient_of, is_megatron_fsdp, optimizers
    from parakit.accounting.process_groups import METHODS, CallWatcher
    from parakit.accounting.recorder import Recorder
    from parakit.accounting.routing import record_routing
    from parakit.accounting.timeline import Span, Timeline
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "METHODS",
    "CallWatcher",
    "CommunicationLedger",
    "MemoryLedger",
    "Recorder",
    "Span",
    "Timeline",
    "collect_ledgers",
    "gradient_of",
    "is_megatron_fsdp",
    "optimizers",
    "record_routing",
]

"""Count communication, memory and time of every rank, inside the training processes.

This package decides what is counted: bytes of each collective by group and phase, memory by category, and the
time of each part of an iteration. Every rank writes a record, and `collect_rank_records` joins the records to
the files of the run folder. Only `collect_rank_records` is imported outside of training processes.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.accounting.collect import collect_rank_records
    from parakit.accounting.communication import CommunicationLog
    from parakit.accounting.memory import MemoryAccounting
    from parakit.accounting.model_state import is_megatron_fsdp, list_optimizers, parameter_gradient
    from parakit.accounting.process_groups import PROCESS_GROUP_METHODS, CallWatcher
    from parakit.accounting.recorder import Recorder
    from parakit.accounting.routing import record_routing
    from parakit.accounting.timeline import Span, Timeline
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "PROCESS_GROUP_METHODS",
    "CallWatcher",
    "CommunicationLog",
    "MemoryAccounting",
    "Recorder",
    "Span",
    "Timeline",
    "collect_rank_records",
    "is_megatron_fsdp",
    "list_optimizers",
    "parameter_gradient",
    "record_routing",
]

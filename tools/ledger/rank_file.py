"""A rank's own file while it runs, `rank<N>.json`: its recorder writes it, `collect` gathers it."""

from __future__ import annotations

import msgspec

from tools.ledger.timeline import Span
from tools.records.measurements import RankCommunication, RankMemory, RankTime
from tools.records.routing import RankRouting


class RankLedger(msgspec.Struct, frozen=True):
    """All that one rank counted."""

    rank: int
    communication: RankCommunication
    time: RankTime
    memory: RankMemory | None
    spans: tuple[Span, ...]
    routing: RankRouting | None = None
    """Of a mixture of experts."""

"""How long tests wait: enough for a machine ten times slower that is busy. Only a failure costs it."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds for what takes a second or two: processes that begin and end, nodes that find each other."""

OF_A_RUN = 600.0
"""Seconds for what takes real ranks up to half a minute."""


def until[Answer](ask: Callable[[], Answer], what: str, seconds: float = PATIENCE) -> Answer:
    """Ask again and again; the first answer that is one."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not in {seconds:.0f} s"
        time.sleep(0.02)
    return answer

"""Time limits of tests: enough for a busy machine that is ten times slower. Only failures take this long."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds for what takes a second or two: processes that begin and end, nodes that find each other."""

OF_A_RUN = 600.0
"""Seconds for what takes real ranks up to half a minute."""


def until[Answer](ask: Callable[[], Answer], problem: str, seconds: float = PATIENCE) -> Answer:
    """Call `ask` repeatedly and return its first true answer. Fail with `problem` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{problem}: not in {seconds:.0f} s"
        time.sleep(0.02)
    return answer

"""Launcher that runs `python -m parakit ARGUMENTS…` with ranks from a process that has imported Megatron.

`python -m tests.examples.forked_launcher SOCKET PID ARGUMENTS…`
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from parakit.cli.dispatch import run_target
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch import train
from parakit.launch.compose import Launch
from parakit.launch.supervise.warm import WarmMegatron


class Elsewhere(WarmMegatron):
    """The warm process of another launcher."""

    def __init__(self, address: str, pid: int) -> None:
        self._socket = Path(address)
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid


def forked(ranks: ForkedRanks) -> tuple[str, ...]:
    """Return the command that starts the launcher, without the kit's arguments."""
    served = (str(ranks.warm._socket), str(ranks.warm.pid))
    return (sys.executable, "-m", "tests.examples.forked_launcher", *served)


if __name__ == "__main__":
    _, address, pid, *kit_arguments = sys.argv
    warm, execute = Elsewhere(address, int(pid)), train.execute_launch

    def execute_forked(launch: Launch, *arguments: Any, **named: Any) -> Any:
        return execute(replace(launch, warm=warm), *arguments, **named)

    train.execute_launch = execute_forked
    sys.exit(run_target(kit_arguments[0], kit_arguments[1:]))

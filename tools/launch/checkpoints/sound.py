"""Which checkpoints are sound: after a NaN, only those whose weights have given a loss since.

Megatron saves what it has when it meets a NaN (`rerun_state_machine`, exit code 16), before the update
that would use it; but the weights themselves may be what is damaged.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tools.launch.progress import LogFollower
from tools.records import run as records
from tools.records.run import Status


def newest_number_before_nan(run: Path) -> int | None:
    """The newest iteration that gave a loss in a run's last attempt, if that ended in NaN, else None.

    A checkpoint of that iteration or a later one has given no loss yet.
    """
    if not (run / records.STATUS_FILE).is_file():
        return None
    if records.read_status(run).status is not Status.NAN:
        return None
    newest = last = 0
    with closing(LogFollower(run / records.LOG_FILE)) as log:
        for found in log.new_iterations():
            if found.iteration <= last:  # Another attempt, from the checkpoint before it.
                newest = found.iteration - 1
            last = found.iteration
            newest = newest if found.has_nan else last
    return newest

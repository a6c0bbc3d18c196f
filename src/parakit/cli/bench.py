"""The handler of `make bench` without NAME=: run the benches that take minutes, one after another."""

from __future__ import annotations

import os
import subprocess
import sys

from parakit.cli.commands import BENCH_NAME, BENCHED_BY_DEFAULT, BENCHES
from parakit.config.files import ROOT


def run_default_benches() -> int:
    """Run the benches that take minutes, each in its own process; stop at the first bench that fails.

    Returns:
        The exit code of the last bench that ran.
    """
    for bench in BENCHES[:BENCHED_BY_DEFAULT]:
        name = bench.name.partition("=")[2]
        # MAKEFLAGS names the variables of this command. The bench would refuse those that it does not use.
        environment = {**os.environ, "MAKEFLAGS": "", BENCH_NAME.name: name}
        command = (sys.executable, "-m", "parakit", "bench")
        code = subprocess.call(command, env=environment, cwd=ROOT)
        if code:
            return code
    return 0

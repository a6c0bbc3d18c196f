"""Real runs of gpt2-tiny on two CPU ranks that faults happen to, each with its own launcher."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from parakit.artifacts import run as records
from parakit.artifacts.run import StatusRecord
from parakit.config.files import ROOT
from parakit.config.published import load_published
from parakit.launch.supervise.interruption import is_alive
from parakit.logs.runs import Run, load_folder
from parakit.reporting.analyse.parity import Curve, loss_curve
from parakit.reporting.analyse.report import build_report
from tests.patience import OF_A_RUN, until
from tests.small import SMALL

ITERATIONS, SAVE_EVERY = 12, 4


PROGRAM = (sys.executable, "-m", "parakit")


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int | IO[bytes] = subprocess.PIPE,
    program: Sequence[str] = PROGRAM,
) -> psutil.Popen:
    """Start `python -m parakit ARGUMENTS`, or another program with these arguments."""
    return psutil.Popen(
        (*program, *arguments),
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=output == subprocess.PIPE,
    )


def processes_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """Return the live processes of a launcher's run by name: `launcher`, `supervisor`, `torchrun`, `rank 0`, …"""
    processes_by_name = {"launcher": launcher}
    with suppress(psutil.NoSuchProcess):
        for process in launcher.children(recursive=True):
            with suppress(psutil.Error):
                name = _name_of(process) if is_alive(process) else None
                if name:  # A rank is listed before the processes that it starts.
                    processes_by_name.setdefault(name, process)
    return processes_by_name


def _name_of(process: psutil.Process) -> str | None:
    rank = process.environ().get("RANK")
    if rank is not None:
        return f"rank {rank}"
    # The supervisor's command line contains that of torchrun, whose own command line starts with its module.
    modules = {
        "parakit.launch.supervise.supervisor": "supervisor",
        "torch.distributed.run": "torchrun",
    }
    return modules.get(" ".join(process.cmdline()[2:3]))


@dataclass
class Ended:
    """A run after it has ended."""

    folder: Path
    exit_code: int
    output: str

    @property
    def status(self) -> StatusRecord:
        return records.read_status(self.folder)

    @property
    def run(self) -> Run:
        """The run as the report reads it. It must be readable whatever happened to the run."""
        run = load_folder(self.folder)
        assert build_report("r", [run], load_published()).entries
        return run


@dataclass
class Victim:
    """A running training."""

    launcher: psutil.Popen
    folder: Path
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    """Processes by their names, as `processes_of` gives them."""
    family: list[psutil.Process] = field(default_factory=list)
    """All processes that the launcher started."""

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        return {
            int(name.removeprefix("rank ")): process
            for name, process in self.processes.items()
            if name.startswith("rank ")
        }

    def wait_for(self, text: str) -> None:
        """Wait until the log contains a text."""
        log = self.folder / records.LOG_FILE

        def is_said() -> bool:
            if text in log.read_text(errors="replace"):
                return True
            assert self.launcher.poll() is None, log.read_text()[-2000:]
            return False

        until(is_said, f"'{text}' did not appear in {log}", OF_A_RUN)
        self.look()

    def look(self) -> None:
        """Record the processes that exist now."""
        self.processes = processes_of(self.launcher)
        self.family = self.launcher.children(recursive=True)

    def end(self) -> Ended:
        """Wait until all processes have ended. The supervisor of a killed launcher writes the status first."""
        output, _ = self.launcher.communicate(timeout=OF_A_RUN)
        until(lambda: not any(map(is_alive, self.family)), "processes are left", OF_A_RUN)
        return Ended(self.folder, self.launcher.returncode, output)


class Kit:
    """Starter of runs in a single runs folder, with the arguments and variables that `make` would pass."""

    def __init__(self, runs: Path, data: Path, starting_weights: Path) -> None:
        self.runs, self.undisturbed = runs / "disturbed", runs / "undisturbed"
        for folder in (self.runs, self.undisturbed):
            folder.mkdir()
            (folder / ".start").symlink_to(starting_weights)
        self.environment = {
            **os.environ,
            "ITERS": str(ITERATIONS),
            "MICRO_BATCH": "2",
            "GLOBAL_BATCH": "4",
            "DROPOUT": "0.1",
            "DATA": str(data),
            "RUNS": str(self.runs),
            "LEDGER": "0",
        }
        self.program: Sequence[str] = PROGRAM
        self._whole: dict[str, Ended] = {}

    def start(
        self, strategy: str, ranks: int = 2, arguments: tuple[str, ...] = (), **variables: str
    ) -> Victim:
        """Start a run that saves, and wait for its folder. `arguments` replace those of its target."""
        runs = Path(variables.get("RUNS", self.runs))
        before = set(runs.glob("2*"))
        model = "moe-tiny" if "ep" in strategy else "gpt2-tiny"
        ranks = 1 if strategy == "baseline" else ranks
        arguments = arguments or (f"train-{strategy}-{model}-{ranks}cpu",)
        extra = " ".join((*SMALL, variables.get("EXTRA", "")))
        run_variables = {"SAVE_EVERY": str(SAVE_EVERY), **variables, "EXTRA": extra}
        launcher = self._launch(arguments, run_variables)

        def made() -> list[Path]:
            new_runs = [
                path for path in set(runs.glob("2*")) - before if (path / "log.txt").exists()
            ]
            if not new_runs and launcher.poll() is not None:
                raise AssertionError(launcher.communicate()[0])
            return new_runs

        return Victim(launcher, until(made, "no run folder appeared", OF_A_RUN)[0])

    def train(self, strategy: str, ranks: int = 2, **variables: str) -> Ended:
        """Train a run to its end without a fault."""
        return self.start(strategy, ranks, **variables).end()

    def resume(self, folder: Path, *arguments: str, **variables: str) -> Ended:
        """Resume a run. The result has the folder of the resumed training, the same or a new one."""
        before = set(self.runs.glob("2*"))
        launcher = self._launch(("resume", str(folder), *arguments), variables)
        output, _ = launcher.communicate(timeout=OF_A_RUN)
        made = set(self.runs.glob("2*")) - before
        return Ended(made.pop() if made else folder, launcher.returncode, output)

    def undisturbed_run(self, strategy: str, ranks: int = 2, **variables: str) -> Ended:
        """Train the same run without faults and saves, in a separate runs folder."""
        key = json.dumps([strategy, ranks, variables])
        if key not in self._whole:
            settings = {"SAVE_EVERY": "", "RUNS": str(self.undisturbed), **variables}
            ended = self.train(strategy, ranks, **settings)
            assert ended.exit_code == 0, ended.output
            self._whole[key] = ended
        return self._whole[key]

    def whole_curve(self, strategy: str, ranks: int = 2, **variables: str) -> Curve:
        """Return the losses of the undisturbed run."""
        return loss_curve(self.undisturbed_run(strategy, ranks, **variables).run)

    def _launch(self, arguments: tuple[str, ...], variables: dict[str, str]) -> psutil.Popen:
        return launch(arguments, {**self.environment, **variables}, program=self.program)


def same_losses(resumed: Run, whole: Curve) -> None:
    """Assert that losses are identical on every line that is not an average, up to the last iteration."""
    ours = loss_curve(resumed)
    assert max(ours) == max(whole)
    common = ours.keys() & whole.keys()
    assert len(common) >= ITERATIONS - 3
    assert {n: ours[n] for n in common} == {n: whole[n] for n in common}


def kill(process: psutil.Process) -> None:
    """Kill a process, or do nothing if it has ended: on a busy machine a run may end before the kill."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


WHO = ("launcher", "rank 0", "rank 1", "supervisor", "torchrun")
"""Names of a run's processes, as `processes_of` gives them."""


def moment(seed: int) -> tuple[str, float]:
    """Return a random moment from the first save to the last: a line of the log and a pause after it."""
    choose = random.Random(seed)
    return f"iteration {choose.randint(SAVE_EVERY, ITERATIONS - 1):8d}/", choose.uniform(0, 1.0)

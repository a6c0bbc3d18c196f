"""Real runs of gpt2-tiny on two CPU ranks that something happens to, each under its own launcher."""

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
    words: Sequence[str],
    environment: Mapping[str, str],
    output: int | IO[bytes] = subprocess.PIPE,
    program: Sequence[str] = PROGRAM,
) -> psutil.Popen:
    """`python -m parakit WORDS`, or another program with these words."""
    return psutil.Popen(
        (*program, *words),
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=output == subprocess.PIPE,
    )


def processes_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of a launcher's run that live: `launcher`, `supervisor`, `torchrun`, `rank 0`, …"""
    found = {"launcher": launcher}
    with suppress(psutil.NoSuchProcess):
        for process in launcher.children(recursive=True):
            with suppress(psutil.Error):
                name = _name_of(process) if is_alive(process) else None
                if name:  # A rank comes before what it starts.
                    found.setdefault(name, process)
    return found


def _name_of(process: psutil.Process) -> str | None:
    rank = process.environ().get("RANK")
    if rank is not None:
        return f"rank {rank}"
    # The supervisor's command line holds torchrun's; torchrun's module comes first in its own.
    modules = {
        "parakit.launch.supervise.supervisor": "supervisor",
        "torch.distributed.run": "torchrun",
    }
    return modules.get(" ".join(process.cmdline()[2:3]))


@dataclass
class Ended:
    """A run after what happened to it."""

    folder: Path
    exit_code: int
    output: str

    @property
    def status(self) -> StatusRecord:
        return records.read_status(self.folder)

    @property
    def run(self) -> Run:
        """As the report reads it; it must be reportable whatever happened."""
        run = load_folder(self.folder)
        assert build_report("r", [run], load_published()).entries
        return run


@dataclass
class Victim:
    """A run that trains."""

    launcher: psutil.Popen
    folder: Path
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    """By their names, as `processes_of` gives them."""
    family: list[psutil.Process] = field(default_factory=list)
    """All that the launcher started."""

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        return {
            int(name.removeprefix("rank ")): process
            for name, process in self.processes.items()
            if name.startswith("rank ")
        }

    def wait_for(self, text: str) -> None:
        """Wait until the log says something."""
        log = self.folder / records.LOG_FILE

        def is_said() -> bool:
            if text in log.read_text(errors="replace"):
                return True
            assert self.launcher.poll() is None, log.read_text()[-2000:]
            return False

        until(is_said, f"'{text}' did not appear in {log}", OF_A_RUN)
        self.look()

    def look(self) -> None:
        """See which processes there are now."""
        self.processes = processes_of(self.launcher)
        self.family = self.launcher.children(recursive=True)

    def end(self) -> Ended:
        """Wait for the end of all; the supervisor of a killed launcher first writes the status."""
        output, _ = self.launcher.communicate(timeout=OF_A_RUN)
        until(lambda: not any(map(is_alive, self.family)), "processes are left", OF_A_RUN)
        return Ended(self.folder, self.launcher.returncode, output)


class Kit:
    """Starts and resumes runs in one runs folder, as `make` would."""

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
        self, strategy: str, ranks: int = 2, words: tuple[str, ...] = (), **variables: str
    ) -> Victim:
        """Start a run that saves, and wait for its folder; `words` are asked instead of its target."""
        runs = Path(variables.get("RUNS", self.runs))
        before = set(runs.glob("2*"))
        model = "moe-tiny" if "ep" in strategy else "gpt2-tiny"
        ranks = 1 if strategy == "baseline" else ranks
        words = words or (f"train-{strategy}-{model}-{ranks}cpu",)
        extra = " ".join((*SMALL, variables.get("EXTRA", "")))
        own = {"SAVE_EVERY": str(SAVE_EVERY), **variables, "EXTRA": extra}
        launcher = self._launch(words, own)

        def made() -> list[Path]:
            found = [path for path in set(runs.glob("2*")) - before if (path / "log.txt").exists()]
            if not found and launcher.poll() is not None:
                raise AssertionError(launcher.communicate()[0])
            return found

        return Victim(launcher, until(made, "no run folder appeared", OF_A_RUN)[0])

    def train(self, strategy: str, ranks: int = 2, **variables: str) -> Ended:
        """A run that nothing happens to."""
        return self.start(strategy, ranks, **variables).end()

    def resume(self, folder: Path, *words: str, **variables: str) -> Ended:
        """Resume a run; the folder of what was trained, its own or a new one."""
        before = set(self.runs.glob("2*"))
        launcher = self._launch(("resume", str(folder), *words), variables)
        output, _ = launcher.communicate(timeout=OF_A_RUN)
        made = set(self.runs.glob("2*")) - before
        return Ended(made.pop() if made else folder, launcher.returncode, output)

    def undisturbed_run(self, strategy: str, ranks: int = 2, **variables: str) -> Ended:
        """The same run if nothing happens to it and nothing is saved, in a runs folder of its own."""
        key = json.dumps([strategy, ranks, variables])
        if key not in self._whole:
            settings = {"SAVE_EVERY": "", "RUNS": str(self.undisturbed), **variables}
            ended = self.train(strategy, ranks, **settings)
            assert ended.exit_code == 0, ended.output
            self._whole[key] = ended
        return self._whole[key]

    def whole_curve(self, strategy: str, ranks: int = 2, **variables: str) -> Curve:
        """Losses of the undisturbed run."""
        return loss_curve(self.undisturbed_run(strategy, ranks, **variables).run)

    def _launch(self, words: tuple[str, ...], variables: dict[str, str]) -> psutil.Popen:
        return launch(words, {**self.environment, **variables}, program=self.program)


def same_losses(resumed: Run, whole: Curve) -> None:
    """To the last digit, on every line that is no average; and to the end."""
    ours = loss_curve(resumed)
    assert max(ours) == max(whole)
    common = ours.keys() & whole.keys()
    assert len(common) >= ITERATIONS - 3
    assert {n: ours[n] for n in common} == {n: whole[n] for n in common}


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


WHO = ("launcher", "rank 0", "rank 1", "supervisor", "torchrun")
"""Names of a run's processes, as `processes_of` gives them."""


def moment(seed: int) -> tuple[str, float]:
    """A line of the log, and a pause after it: anywhere from the first save to the last."""
    choose = random.Random(seed)
    return f"iteration {choose.randint(SAVE_EVERY, ITERATIONS - 1):8d}/", choose.uniform(0, 1.0)

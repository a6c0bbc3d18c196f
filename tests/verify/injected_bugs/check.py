"""Shows that each injected bug is a bug of strategies alone, and where
(`python -m tests.verify.injected_bugs.check`).

For each injected bug of `bugs.yaml` two pairs are trained for three iterations, with and without it. On
one rank both must be the same bit for bit: losses, norm, gradients, state and weights. In its strategy
they must part, first at the stage and module that the file states. Both runs of a pair have one
strategy, so nothing is aligned and no tolerance is used: every tensor's hash is compared.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_patches.patch_file import SEPARATOR
from parakit.config import variables
from parakit.config.files import read_yaml
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch.compose import Launch
from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job
from tests.verify.injected_bugs.trace import STAGES, first_difference

FOLDER = Path(__file__).parent
STEPS = 3
"""Iterations that are trained."""


@dataclass(frozen=True)
class InjectedBug:
    """An entry of `bugs.yaml`."""

    id: str
    file: str
    catalogue: str
    strategy: str
    model: str
    stage: str
    module: str
    kind: str
    devices: int = 2
    dtype: str = "fp32"
    extra: str = ""
    reference: str = ""
    """A strategy; empty is one rank."""
    extra_b: str = ""
    both: bool = False
    """Whether the reference is injected as well."""
    trace: Sequence[str] = ()
    """Stage and module as a trace names them, where it cannot see what verify compares."""
    also: str = ""
    """Another module that must be found to be wrong by itself."""
    says: str = ""
    """Words that the verdict's first line must hold: its kind, or the source."""
    step: int = 2
    """The traced iteration: the first one's learning rate is 0."""

    @property
    def path(self) -> Path:
        """Of the file, or of several as PATCH_FILE= takes them."""
        return Path(SEPARATOR.join(str(FOLDER / file) for file in self.file.split(SEPARATOR)))

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Further flags of the strategy alone."""
        return tuple(shlex.split(self.extra_b))

    @property
    def flags(self) -> tuple[str, ...]:
        """Further flags of strategy and reference."""
        half = () if self.dtype == "fp32" else (f"--{self.dtype}",)
        return (*shlex.split(self.extra), *half)


def injected_bugs(table: str = "bugs.yaml") -> tuple[InjectedBug, ...]:
    """Return the bugs of a table beside this file; those of `bugs.yaml` in the order of the stages."""
    return tuple(InjectedBug(**entry) for entry in read_yaml(FOLDER / table))


_TRACED = """import os
from pathlib import Path

from megatron_patches.patch_file import execute_patch_file
from parakit.config import variables
from tests.verify.injected_bugs.trace import Trace

execute_patch_file({{variables.PATCH_FILE: {bug!r}}})
Trace(Path({folder!r}) / f"trace{{os.environ['RANK']}}.json", {step}, {last}).install()
"""
"""What every rank executes as its patch file: the injected bug itself, then the trace around all."""


class Checker:
    """Trains with and without injected bugs, each once: injected bugs of several strategies may share a
    file."""

    def __init__(self, data: str, folder: Path, ranks: ForkedRanks) -> None:
        self._data, self._folder, self._ranks = data, folder, ranks
        self._trained = cache(self._train)

    def check(self, bug: InjectedBug) -> tuple[str, str, str]:
        """A problem, empty if there is none, and stage and module where the strategy first parts.

        Raises:
            RuntimeError: A run failed; its folder is named.
        """
        # The flags of the strategy alone are none of one rank's: it may refuse them.
        baseline_bug = replace(bug, strategy="baseline", devices=1, extra_b="")
        if self._run(baseline_bug, injected=True) != self._run(baseline_bug, injected=False):
            return "changes the run on one rank", "", ""
        before, after = self._run(bug, injected=False), self._run(bug, injected=True)
        stage, module = first_difference(before, after)
        if "initialised" in bug.says:  # All runs load one start.
            return "changes the run" if stage else "", stage, module
        if not stage:
            return "changes nothing in its strategy", stage, module
        # The norm that a trace sees is of all parameters.
        stated = (bug.stage, "grad_norm" if bug.stage == "norm" else bug.module)
        expected = tuple(bug.trace) or stated
        # A trace sees a module inside of the wrong one first: it compares hashes, and so inputs too.
        inside = not bug.trace and stage == bug.stage and module.startswith(f"{bug.module}.")
        if (stage, module) != expected and not inside:
            return f"expected {', '.join(expected)}", stage, module
        return "", stage, module

    def _run(self, bug: InjectedBug, injected: bool) -> list[dict[str, Any]]:
        flags = (*bug.flags, *bug.own_flags)
        path = bug.path if injected else None
        return self._trained(bug.strategy, bug.model, bug.devices, flags, bug.step, path)

    def _train(
        self,
        strategy: str,
        model: str,
        devices: int,
        flags: Sequence[str],
        step: int,
        path: Path | None,
    ) -> list[dict[str, Any]]:
        launch = self._launch(f"train-{strategy}-{model}-{devices}cpu", flags)
        ensure_initial_checkpoint(launch, Console(quiet=True), self._ranks.exit_code)
        # Runs differ in more than a name holds, and one that failed may be tried again.
        name = f"{strategy}-{model}-{path.stem if path else 'healthy'}-"
        folder = Path(tempfile.mkdtemp(prefix=name, dir=self._folder))
        bug, traced = str(path or ""), folder / "traced.py"
        traced.write_text(_TRACED.format(bug=bug, folder=str(folder), step=step, last=STEPS))
        failure = self._ranks.run(launch, folder / "log.txt", {variables.PATCH_FILE: str(traced)})
        traces = [folder / f"trace{rank}.json" for rank in range(devices)]
        if failure or not all(trace.is_file() for trace in traces):
            raise RuntimeError(failure or f"a rank has no trace, see {folder}")
        return [json.loads(trace.read_text()) for trace in traces]

    def _launch(self, name: str, flags: Sequence[str]) -> Launch:
        options = Options(
            iterations=STEPS,
            micro_batch_size=2,
            global_batch_size=8,
            shared_start=True,
            noisy_start=True,
            data=self._data,
            runs=self._folder,
            extra=tuple(flags),
            ledger=False,
        )
        target = parse_target(name)
        return compose_job(target.with_options(options))


def main() -> None:
    """Check the injected bugs that are named, or all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="owt-ds/sample_text_document")
    parser.add_argument("--folder", type=Path, required=True, help="for logs and traces")
    parser.add_argument("ids", nargs="*")
    arguments = parser.parse_args()
    with closing(ForkedRanks()) as ranks:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        checker = Checker(arguments.data, arguments.folder.resolve(), ranks)
        failed = [bug.id for bug in chosen(arguments.ids) if not reported(checker, bug)]
    print(f"{len(failed)} failed: {', '.join(failed) or 'none'}")
    raise SystemExit(bool(failed))


def chosen(ids: Sequence[str]) -> Iterator[InjectedBug]:
    """Those that are named; all where none is."""
    return (bug for bug in injected_bugs() if not ids or bug.id in ids)


def reported(checker: Checker, bug: InjectedBug) -> bool:
    """Check one and print its line; True if it is as stated."""
    begin = time.monotonic()
    assert bug.stage in STAGES, bug
    try:
        problem, stage, module = checker.check(bug)
    except RuntimeError as error:
        problem, stage, module = str(error), "", ""
    seconds = time.monotonic() - begin
    print(f"{bug.id:42} {stage:21} {module:60} {seconds:5.0f} s  {problem or 'ok'}", flush=True)
    return not problem


if __name__ == "__main__":
    main()

"""Shows that each plant is a bug of layouts alone, and where (`python -m tests.verify.plants.check`).

For each plant of `plants.yaml` two pairs are trained for three iterations, with and without it. On one
rank both must be the same bit for bit: losses, norm, gradients, state and weights. In its layout they
must part, first at the stage and module that the file states. Both runs of a pair have one layout, so
nothing is aligned and no tolerance is used: every tensor's hash is compared.
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

from tests.verify.plants.trace import STAGES, first_difference
from tools.launch.compose import Launch
from tools.launch.job import parse_target
from tools.launch.options import Options
from tools.launch.train import compose_job
from tools.spec import variables
from tools.spec.files import read_yaml
from tools.study.verify.verifier import ForkedRanks

FOLDER = Path(__file__).parent
STEPS = 3
"""Iterations that are trained."""


@dataclass(frozen=True)
class Plant:
    """An entry of `plants.yaml`."""

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
    """Whether the reference is planted as well."""
    trace: Sequence[str] = ()
    """Stage and module as a trace names them, where it cannot see what verify compares."""
    step: int = 2
    """The traced iteration: the first one's learning rate is 0."""

    @property
    def path(self) -> Path:
        """Of the file."""
        return FOLDER / self.file

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Further flags of the layout alone."""
        return tuple(shlex.split(self.extra_b))

    @property
    def flags(self) -> tuple[str, ...]:
        """Further flags of layout and reference."""
        half = () if self.dtype == "fp32" else (f"--{self.dtype}",)
        return (*shlex.split(self.extra), *half)


def plants() -> tuple[Plant, ...]:
    """All, in the order of the stages."""
    return tuple(Plant(**entry) for entry in read_yaml(FOLDER / "plants.yaml"))


_TRACED = """import os
from pathlib import Path

from megatron_patches.plant import execute_plant
from tools.spec import variables
from tests.verify.plants.trace import Trace

execute_plant({{variables.PLANT: {plant!r}}})
Trace(Path({folder!r}) / f"trace{{os.environ['RANK']}}.json", {step}, {last}).install()
"""
"""What every rank executes as its plant: the plant itself, then the trace around all."""


class Checker:
    """Trains with and without plants, each once: plants of several layouts may share a file."""

    def __init__(self, data: str, folder: Path, ranks: ForkedRanks) -> None:
        self._data, self._folder, self._ranks = data, folder, ranks
        self._trained = cache(self._train)

    def check(self, plant: Plant) -> tuple[str, str, str]:
        """A problem, empty if there is none, and stage and module where the layout first parts.

        Raises:
            RuntimeError: A run failed; its folder is named.
        """
        # The flags of the layout alone are none of one rank's: it may refuse them.
        one = replace(plant, strategy="baseline", devices=1, extra_b="")
        if self._run(one, planted=True) != self._run(one, planted=False):
            return "changes the run on one rank", "", ""
        before, after = self._run(plant, planted=False), self._run(plant, planted=True)
        stage, module = first_difference(before, after)
        if not stage:
            return "changes nothing in its layout", stage, module
        # The norm that a trace sees is of all parameters.
        stated = (plant.stage, "grad_norm" if plant.stage == "norm" else plant.module)
        expected = tuple(plant.trace) or stated
        # A trace sees a module inside of the wrong one first: it compares hashes, and so inputs too.
        inside = not plant.trace and stage == plant.stage and module.startswith(f"{plant.module}.")
        if (stage, module) != expected and not inside:
            return f"expected {', '.join(expected)}", stage, module
        return "", stage, module

    def _run(self, plant: Plant, planted: bool) -> list[dict[str, Any]]:
        flags = (*plant.flags, *plant.own_flags)
        path = plant.path if planted else None
        return self._trained(plant.strategy, plant.model, plant.devices, flags, plant.step, path)

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
        # Runs differ in more than a name holds, and one that failed may be tried again.
        name = f"{strategy}-{model}-{path.stem if path else 'healthy'}-"
        folder = Path(tempfile.mkdtemp(prefix=name, dir=self._folder))
        plant, traced = str(path or ""), folder / "traced.py"
        traced.write_text(_TRACED.format(plant=plant, folder=str(folder), step=step, last=STEPS))
        failure = self._ranks.run(launch, folder / "log.txt", {variables.PLANT: str(traced)})
        traces = [folder / f"trace{rank}.json" for rank in range(devices)]
        if failure or not all(trace.is_file() for trace in traces):
            raise RuntimeError(failure or f"a rank has no trace, see {folder}")
        return [json.loads(trace.read_text()) for trace in traces]

    def _launch(self, name: str, flags: Sequence[str]) -> Launch:
        options = Options(
            iterations=STEPS,
            micro_batch_size=2,
            global_batch_size=8,
            shared_start=False,
            data=self._data,
            runs=self._folder,
            extra=tuple(flags),
            ledger=False,
        )
        target = parse_target(name)
        return compose_job(target.under(options))


def main() -> None:
    """Check the plants that are named, or all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="owt-ds/sample_text_document")
    parser.add_argument("--folder", type=Path, required=True, help="for logs and traces")
    parser.add_argument("ids", nargs="*")
    given = parser.parse_args()
    with closing(ForkedRanks()) as ranks:
        given.folder.mkdir(parents=True, exist_ok=True)
        checker = Checker(given.data, given.folder.resolve(), ranks)
        failed = [plant.id for plant in chosen(given.ids) if not reported(checker, plant)]
    print(f"{len(failed)} failed: {', '.join(failed) or 'none'}")
    raise SystemExit(bool(failed))


def chosen(ids: Sequence[str]) -> Iterator[Plant]:
    """Those that are named; all where none is."""
    return (plant for plant in plants() if not ids or plant.id in ids)


def reported(checker: Checker, plant: Plant) -> bool:
    """Check one and print its line; True if it is as stated."""
    begin = time.monotonic()
    assert plant.stage in STAGES, plant
    try:
        problem, stage, module = checker.check(plant)
    except RuntimeError as error:
        problem, stage, module = str(error), "", ""
    seconds = time.monotonic() - begin
    print(f"{plant.id:42} {stage:21} {module:60} {seconds:5.0f} s  {problem or 'ok'}", flush=True)
    return not problem


if __name__ == "__main__":
    main()

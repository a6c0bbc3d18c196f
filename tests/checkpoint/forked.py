"""Real runs whose ranks are forked from a process that has imported Megatron: most of their time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parakit.launch import train as training
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.resume import resume_run
from parakit.launch.supervise.warm import WarmPool
from parakit.launch.train import start_job


class Runs:
    """Trains and resumes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._console = Console(stderr=True)

    def train(self, target: str, **options: Any) -> Path:
        """The folder of a run that ended well."""
        job = parse_target(target).with_options(replace(Options(runs=self.folder), **options))
        return self._new(start_job(job, self._console))

    def resume(self, run: Path, strategy: str, ckpt: Path, iterations: int) -> Path:
        """As 'make resume RUN= STRATEGY= CKPT= ITERS='."""
        options = Options(runs=self.folder, iterations=iterations)
        return self._new(resume_run(run, strategy, options, self._console, str(ckpt)))

    def _new(self, exit_code: int) -> Path:
        newest = max(self.folder.glob("2*"), key=lambda run: (run / "run.json").stat().st_mtime_ns)
        assert exit_code == 0, (newest / "log.txt").read_text()[-3000:]
        return newest


@contextmanager
def forked(folder: Path) -> Iterator[Runs]:
    """Runs in a folder."""
    execute = training.execute_launch
    with WarmPool() as pool:

        def warm(launch: Launch, *arguments: Any, **more: Any) -> Any:
            return execute(launch.fork_from_pool(pool), *arguments, **more)

        training.execute_launch = warm
        try:
            yield Runs(folder)
        finally:
            training.execute_launch = execute

"""Six real runs of gpt2-tiny on CPU ranks under Megatron, shared by the tests of this folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from tools.launch.execute import execute
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar
from tools.records import run as records
from tools.report.read.scrape import scrape_log
from tools.report.read.scraped import ScrapedLog

ITERATIONS = 6


@dataclass(frozen=True)
class Run:
    """A finished run and what its log says."""

    folder: Path
    status: records.StatusRecord
    record: records.RunRecord
    log: ScrapedLog

    @property
    def losses(self) -> list[float]:
        return [line.lm_loss for line in self.log.iterations if line.lm_loss is not None]

    @property
    def parameters(self) -> dict[tuple[int, int], int]:
        return {
            (count.tensor_rank, count.pipeline_rank): count.parameters
            for count in self.log.parameters
        }


class Trainer:
    """Trains a target into one runs folder, from one shared start."""

    def __init__(self, runs: Path, data: Path) -> None:
        self.options = Options(
            iterations=ITERATIONS,
            micro_batch_size=2,
            global_batch_size=8,
            data=str(data),
            runs=runs,
        )

    def __call__(self, name: str, **changes: object) -> Run:
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        launch = compose_target(target, flags_of_grammar(target), options)
        console = Console(quiet=True)
        ensure_start_checkpoint(launch, options, console)
        folder, status = execute(launch, options.runs, console, target.strategy)
        log = scrape_log(folder / records.LOG_FILE)
        return Run(folder, status, records.read_run(folder), log)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, sample_prefix: Path) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("runs"), sample_prefix)


@pytest.fixture(scope="session")
def six(train: Trainer) -> dict[str, Run]:
    names = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")
    return {
        name: train(f"train-{name}-gpt2-tiny-{1 if name == 'baseline' else 2}cpu") for name in names
    }


@pytest.fixture(scope="session")
def eight(six: dict[str, Run], train: Trainer) -> dict[str, Run]:
    """The six, interleaved PP2 and the distributed optimizer."""
    return six | {name: train(f"train-{name}-gpt2-tiny-2cpu") for name in ("vpp2", "zero1")}

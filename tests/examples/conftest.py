"""Real runs of gpt2-tiny and moe-tiny on CPU ranks, shared by the tests of this folder."""

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

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
from tools.spec.run import Backend

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


Wanted = tuple[str, dict[str, object]]
"""A target, and what differs from the options of all."""


class Trainer:
    """Trains targets into one runs folder, from one shared start."""

    def __init__(self, runs: Path, data: Path) -> None:
        self.options = Options(
            iterations=ITERATIONS,
            micro_batch_size=2,
            global_batch_size=8,
            data=str(data),
            runs=runs,
        )
        self._starts: defaultdict[Path | None, Lock] = defaultdict(Lock)

    def __call__(self, name: str, **changes: object) -> Run:
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        launch = compose_target(target, flags_of_grammar(target), options)
        console = Console(quiet=True)
        with self._starts[launch.start_checkpoint]:
            ensure_start_checkpoint(launch, options, console)
        folder, status = execute(launch, options.runs, console, target.strategy)
        log = scrape_log(folder / records.LOG_FILE)
        return Run(folder, status, records.read_run(folder), log)

    def together(self, wanted: Mapping[str, Wanted]) -> dict[str, Run]:
        """Runs by name, two at a time: a run leaves cores idle while it starts and ends."""
        with ThreadPoolExecutor(2) as pool:
            runs = pool.map(lambda one: self(one[0], **one[1]), wanted.values())
            return dict(zip(wanted, runs, strict=True))


EVALUATED = {"extra": ("--eval-interval", str(ITERATIONS), "--eval-iters", "2")}
NATIVE = {"backend": Backend.NATIVE}
SIX = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")


def dense(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-gpt2-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


def of_experts(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-moe-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


FIXTURES: dict[str, dict[str, Wanted]] = {
    "six": {name: dense(name) for name in SIX},
    "eight": {name: dense(name) for name in (*SIX, "vpp2", "zero1")},
    "zero3": {"zero3": dense("zero3")},
    "refused": {"refused": dense("baseline", extra=("--check-for-spiky-loss",))},
    "native": {
        "native baseline": dense("baseline", **NATIVE),
        "native tp2": dense("tp2", **NATIVE),
    },
    "experts": {"experts": of_experts("baseline", **EVALUATED)},
    "ep2": {"ep2": of_experts("ep2")},
    "native_experts": {"native experts": of_experts("baseline", **EVALUATED, **NATIVE)},
    "spread_experts": {"spread experts": of_experts("ep2", **EVALUATED, **NATIVE)},
}
"""The runs that several tests look at, by the fixture that gives them."""

ALONE = "pp2"
"""What it waits for is looked at, so it trains without another run beside it."""


@pytest.fixture(scope="session")
def train(
    tmp_path_factory: pytest.TempPathFactory, sample_prefix: Path, starting_weights: Path
) -> Trainer:
    runs = tmp_path_factory.mktemp("runs")
    (runs / ".start").symlink_to(starting_weights)
    return Trainer(runs, sample_prefix)


@pytest.fixture(scope="session")
def trained(train: Trainer, request: pytest.FixtureRequest) -> dict[str, Run]:
    """All runs that the collected tests look at, each trained once."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    wanted = {
        k: v for fixture, runs in FIXTURES.items() if fixture in asked for k, v in runs.items()
    }
    # Those on one rank first: two of them start at a time, and write the two starts.
    ordered = sorted(wanted, key=lambda name: "1cpu" not in wanted[name][0])
    runs = train.together({name: wanted[name] for name in ordered if name != ALONE})
    return runs | {name: train(wanted[name][0]) for name in ordered if name == ALONE}


@pytest.fixture(scope="session")
def six(trained: dict[str, Run]) -> dict[str, Run]:
    return {name: trained[name] for name in FIXTURES["six"]}


@pytest.fixture(scope="session")
def eight(trained: dict[str, Run]) -> dict[str, Run]:
    """The six, interleaved PP2 and the distributed optimizer."""
    return {name: trained[name] for name in FIXTURES["eight"]}


@pytest.fixture(scope="session")
def zero3(trained: dict[str, Run]) -> Run:
    return trained["zero3"]


@pytest.fixture(scope="session")
def refused(trained: dict[str, Run]) -> Run:
    """Megatron under an option that the kit's entry does not cover."""
    return trained["refused"]


@pytest.fixture(scope="session")
def native(trained: dict[str, Run]) -> dict[str, Run]:
    """Plain PyTorch on one rank and under TP 2."""
    return {name: trained[f"native {name}"] for name in ("baseline", "tp2")}


@pytest.fixture(scope="session")
def experts(trained: dict[str, Run]) -> Run:
    """A mixture of experts on one rank, validated after the last iteration."""
    return trained["experts"]


@pytest.fixture(scope="session")
def ep2(trained: dict[str, Run]) -> Run:
    return trained["ep2"]


@pytest.fixture(scope="session")
def native_experts(trained: dict[str, Run]) -> Run:
    return trained["native experts"]


@pytest.fixture(scope="session")
def spread_experts(trained: dict[str, Run]) -> Run:
    """Plain PyTorch with the experts over two ranks."""
    return trained["spread experts"]

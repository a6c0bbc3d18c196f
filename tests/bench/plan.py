"""`make bench NAME=plan`: processor time of the planner's search and of a report, relative to a plain loop.

The ratio to a loop of the same Python is the same on a slow machine and on a busy one.
"""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

from rich.console import Console

from parakit.artifacts import run as records
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import Model, load_model
from parakit.config.run import flags_from_spec, spec_from_model
from parakit.config.strategy import PUBLISHED_STRATEGIES, Batch, Parallelism, parse_strategy
from parakit.planner.search import Request, search_configurations
from parakit.planner.time.cluster import Cluster
from parakit.reporting.build import BuildOptions, build
from tests.bench.scrape import synthetic_lines

ROUNDS, RUNS, ITERATIONS = 3, 100, 200
Work = Callable[[], object]


def compared(work: Mapping[str, Work], passes: int = 5_000_000) -> Iterator[str]:
    """Return a line per piece of work: its median time relative to so many passes of a loop."""
    for name, do in work.items():
        rounds = [(_spent(do), _spent(lambda: _loop(passes))) for _ in range(ROUNDS)]
        seconds, loop = map(median, zip(*rounds, strict=True))
        yield f"{name}: {seconds:.2f} s of processor time, {seconds / loop:.1f} times the loop's"


def of_search(model: Model, devices: int, gpu: str, global_batch: int) -> Work:
    """Return a function that searches for the fastest strategies of a model."""
    device = device_by_key(gpu)
    cluster = Cluster(device, devices, 8, link_by_key(device.link), link_by_key(device.network))
    template = spec_from_model(model, Parallelism(), Batch(1, global_batch))
    return lambda: search_configurations(Request(model, cluster, global_batch, template))


def of_report(folder: Path, runs: int = RUNS) -> Work:
    """Return a function that reports so many runs of six strategies, all with distinct flags."""
    for number in range(runs):
        _write_run(folder / "runs", number)
    options = BuildOptions("many", runs_root=folder / "runs", reports_root=folder / "reports")
    return lambda: build(options, Console(file=io.StringIO()))


def against_its_import(folder: Path, runs: int = RUNS) -> str:
    """Return a line on a report of so many runs in a separate process, relative to the imports of `make report`.

    The imports include matplotlib with its SVG writer and the template engine, which are loaded on first use. The
    ratio without them is given too. Modules are compiled already, as in a second call of a user.
    """
    of_report(folder, runs)
    options = f"'many', runs_root=Path('{folder}/runs'), reports_root=Path('{folder}/reports')"
    alone = "import parakit.reporting.build"
    needed = f"import matplotlib.figure, matplotlib.backends.backend_svg, jinja2; {alone}"
    program = (
        "import io; from pathlib import Path; from rich.console import Console;"
        "from parakit.reporting.build import BuildOptions, build;"
        f"build(BuildOptions({options}), Console(file=io.StringIO()))"
    )
    compiled = {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
    environment = {**os.environ, **compiled}
    # Programs take turns, after a first round in which modules are compiled.
    rounds = [
        [_of_child(child_program, environment) for child_program in (program, needed, alone)]
        for _ in range(ROUNDS + 1)
    ]
    whole, import_, part = map(median, zip(*rounds[1:], strict=True))
    return (
        f"report of {runs} runs, {ITERATIONS} iterations each: {whole:.2f} s of processor time, "
        f"{whole / import_:.1f} times what importing it takes ({import_:.2f} s; {whole / part:.1f} times"
        f" the {part:.2f} s without matplotlib and templates)"
    )


def _of_child(program: str, environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run((sys.executable, "-c", program), check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_run(runs: Path, number: int) -> None:
    model, strategy, name = (
        load_model("gpt2-tiny"),
        PUBLISHED_STRATEGIES[number % len(PUBLISHED_STRATEGIES)],
        f"run-{number:03d}",
    )
    split = parse_strategy(strategy, 1 if strategy == PUBLISHED_STRATEGIES[0] else 2)
    spec = replace(spec_from_model(model, split, Batch(2, 8)), strategy=strategy)
    argv = (*model.flags, *flags_from_spec(spec), "--variant", str(number))
    host = records.HostRecord("here", "a processor", 2, 2**34, ("a processor",) * split.world_size)
    entry = records.MegatronEntry("pretrain_gpt.py", "0.19.0")
    (runs / name).mkdir(parents=True)
    record = records.RunRecord(name, "now", spec, ITERATIONS, argv, (), {}, entry, host, {})
    records.write_run(runs / name, record)
    (runs / name / records.LOG_FILE).write_text("".join(synthetic_lines(ITERATIONS)))


def _loop(passes: int) -> int:
    return sum(number * number % 7 for number in range(passes))


def _spent(work: Work) -> float:
    began = process_time()
    work()
    return process_time() - began


def main() -> None:
    """Print a line per piece of work."""
    large, llama = load_model("gpt3-175b"), load_model("llama3-8b")
    shape = replace(llama.shape, layers=126, hidden=16384, heads=128, ffn_hidden=53248)
    llama_405b = replace(llama, shape=shape)
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "search of gpt3-175b on 1,024 a100": of_search(large, 1024, "a100", 1536),
            "search of 405B on 16,384 h100": of_search(llama_405b, 16384, "h100", 2048),
            f"report of {RUNS} runs": of_report(Path(folder)),
        }
        for line in compared(work):
            print(line, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(against_its_import(Path(folder)), flush=True)


if __name__ == "__main__":
    main()

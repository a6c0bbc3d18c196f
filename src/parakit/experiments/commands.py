"""What make's targets run: an experiment by its name, and what each kind of table makes of its runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.experiments.definition import SWEEP, Experiment
from parakit.experiments.engine import Output, Study, run_experiment
from parakit.experiments.load import AXES, load_experiment, load_sweep
from parakit.experiments.verify.command import verify
from parakit.experiments.verify.pairs import PREFIX
from parakit.experiments.zero_prediction import predict_zero
from parakit.formatting.terminal import say
from parakit.formatting.units import joined
from parakit.launch import Options, parse_target
from parakit.reporting import Entry

PREDICTIONS: dict[str, Callable[[Namespace], int]] = {"zero": predict_zero}
"""What predicts an experiment without training, by the experiment's name."""


def run_named_experiment(
    name: str,
    options: Options,
    console: Console,
    model: str | None = None,
    given: Namespace | None = None,
) -> int:
    """Run an experiment by the name of its file, or predict it on the device GPU=; return its exit code.

    With `--target` every cell trains that target.

    Raises:
        LaunchError: There is none of this name, it cannot work here, or a run did not end well; or GPU=,
            DTYPE= or JSON= stands where nothing is predicted.
        ValueError: It cannot be predicted; one sentence.
    """
    if given is not None and getattr(given, "gpu", None):
        if name not in PREDICTIONS:
            raise LaunchError(
                f"GPU= predicts the experiment {joined(list(PREDICTIONS))}, not {name}; leave it out."
            )
        return PREDICTIONS[name](given)
    for variable in ("dtype", "json"):
        if getattr(given, variable, None):
            raise LaunchError(
                f"{variable.upper()}= of an experiment is its prediction's; name a device too, such as "
                "GPU=a100-80g."
            )
    target = getattr(given, "target", None)
    trained = parse_target(target) if target else None
    return _run_experiment(load_experiment(name, options, model, trained), console)


def run_parity_check(options: Options, console: Console, verify: bool = False) -> int:
    """The demo's runs as a check: 0 if all ended well and every loss curve is that of baseline.

    With `verify` a strategy whose losses do not agree is verified tensor by tensor.

    Raises:
        LaunchError: It cannot work here.
    """
    demo = load_experiment("demo", options)
    output = Output(partial(report_parity, verifies=verify))
    return run_experiment(replace(demo, report="parity"), output, console)


def run_sweep(given: Namespace, options: Options, console: Console) -> int:
    """The sweep NAME= with the axes that are set; 0 if all is there.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or no cell is legal.
    """
    axes = {name: getattr(given, name.lower()) or "" for name in AXES}
    return _run_experiment(load_sweep(given.name or SWEEP, options, axes), console)


def _run_experiment(experiment: Experiment, console: Console) -> int:
    return run_experiment(experiment, find_output(experiment.file.table), console)


def report_parity(study: Study, verifies: bool = False) -> int:
    """The report, and a sentence for each strategy whose losses do not agree with baseline's.

    With `verifies` such a strategy is verified tensor by tensor, and the report says where it begins.
    """
    code = study.report()
    wrong = [row.strategy for row in study.rows if row.parity.verdict.startswith("broken")]
    if verifies and wrong:
        for result in study.results:
            job = result.cell.job
            if job.strategy in wrong and result.runs:
                plain = replace(
                    job.options, iterations=None, micro_batch_size=None, global_batch_size=None
                )
                verify(
                    f"{PREFIX}{job.name}", Namespace(), plain, study.console, also=result.runs[0]
                )
        code = study.report()
    broken = describe_broken_parity(study.rows)
    for sentence in broken:
        say(study.console, sentence, "red")
    if not broken:
        say(study.console, "Parity: every strategy's losses agree with baseline's.")
    return code or int(bool(broken))


def describe_broken_parity(rows: Sequence[Entry]) -> list[str]:
    """A sentence for every row whose parity is not `reference` or `held`."""
    return [
        f"Parity of {row.strategy}: {row.parity.verdict or 'not known'} (status {row.status})."
        for row in rows
        if row.parity.verdict not in ("reference", "held")
    ]


_OUTPUTS = {"report": Output(Study.report), "parity": Output(report_parity)}


def find_output(table: str) -> Output:
    """What an experiment's `table:` names: a kind of the kit's own, or a module with an `OUTPUT`."""
    if table in _OUTPUTS:
        return _OUTPUTS[table]
    path = table if "." in table else f"parakit.experiments.tables.{table}"
    found: Output = import_module(path).OUTPUT
    return found

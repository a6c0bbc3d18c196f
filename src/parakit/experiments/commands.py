"""Run experiments as make's targets do, and find the table that each experiment makes from its runs."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from rich.console import Console

from parakit.config.errors import LaunchError, suggest_names
from parakit.experiments.definition import SWEEP, Experiment
from parakit.experiments.engine import Output, Study, run_experiment
from parakit.experiments.load import AXES, load_experiment, load_sweep
from parakit.experiments.tutorial.commands import is_tutorial, run_tutorial
from parakit.experiments.verify.command import verify
from parakit.experiments.verify.pairs import PREFIX
from parakit.experiments.zero_prediction import predict_zero
from parakit.formatting.terminal import say
from parakit.formatting.units import joined
from parakit.launch import Options, parse_target
from parakit.reporting import Entry

PUBLISHED = "published"
"""Name of the experiment with the six runs of the H200 notes."""

_TABLES = Path(__file__).with_name("tables")

PREDICTIONS: dict[str, Callable[[Namespace], int]] = {"zero": predict_zero}
"""Functions that predict an experiment without training, by the experiment's name."""


def run_named_experiment(
    name: str,
    options: Options,
    console: Console,
    model: str | None = None,
    variables: Namespace | None = None,
) -> int:
    """Train all runs of an experiment and print its table; with GPU= predict the table instead.

    Args:
        name: Name of the experiment's file in `examples/experiments/`.
        options: Make variables of every run.
        console: Shows progress and tables.
        model: Value of MODEL=; None takes the model that the file names.
        variables: Arguments that only some experiments have: GPU=, DTYPE= and JSON= of a prediction, and the make
            target that all runs share, such as `train-dp2-gpt2-tiny-2cpu`. None leaves them all unset.

    Returns:
        The exit code: 0 if all went well.

    Raises:
        LaunchError: No experiment has this name, or it cannot run on this machine. GPU= is set and the
            experiment has no prediction, or DTYPE= or JSON= is set without GPU=.
        ValueError: The prediction fails.
    """
    arguments = variables or Namespace()
    if is_tutorial(name):
        return run_tutorial(name, arguments, options, console)
    if getattr(arguments, "chapter", None):
        raise LaunchError(f"CHAPTER= is of the tutorial, not of {name}; add NAME=tutorial.")
    if getattr(arguments, "calibrate", None):
        raise LaunchError(
            f"CALIBRATE= applies only to predictions of the tutorial, not to {name}; leave it out."
        )
    if getattr(arguments, "gpu", None):
        if name not in PREDICTIONS:
            raise LaunchError(
                f"GPU= predicts the experiments {joined([*PREDICTIONS, 'tutorial'])}, not {name}; leave it out."
            )
        return PREDICTIONS[name](arguments)
    for variable in ("dtype", "json"):
        if getattr(arguments, variable, None):
            raise LaunchError(
                f"{variable.upper()}= applies only to the prediction of an experiment; add the device to "
                "predict, such as GPU=a100-80g."
            )
    target = getattr(arguments, "target", None)
    trained = parse_target(target) if target else None
    return _run_experiment(load_experiment(name, options, model, trained), console)


def reproduce(variables: Namespace, options: Options, console: Console) -> int:
    """Train the published runs that NAME= names: the six of the H200 notes, or those of the tutorial.

    Raises:
        LaunchError: NAME= is neither, a variable of the tutorial is set without it, or the runs cannot work here.
    """
    name = variables.name or PUBLISHED
    if name != PUBLISHED and not is_tutorial(name):
        raise LaunchError(
            f"NAME={name} was not published; reproduce has {PUBLISHED} and tutorial, and 'make experiment "
            f"NAME={name}' runs a file of examples/experiments."
        )
    if name == PUBLISHED:
        for variable in ("devices", "model"):
            if getattr(variables, variable, None):
                raise LaunchError(
                    f"{variable.upper()}= is for the tutorial; add NAME=tutorial, or leave it out."
                )
    return run_named_experiment(name, options, console, variables=variables)


def run_parity_check(options: Options, console: Console, verify: bool = False) -> int:
    """Train the demo's strategies; return 0 if all runs ended well and every loss curve agrees with baseline's.

    With `verify`, a strategy whose losses do not agree is verified tensor by tensor.

    Raises:
        LaunchError: The demo cannot run here.
    """
    demo = load_experiment("demo", options)
    output = Output(partial(report_parity, verifies=verify))
    return run_experiment(replace(demo, report="parity"), output, console)


def run_sweep(variables: Namespace, options: Options, console: Console) -> int:
    """Run the sweep NAME= over MODELS=, STRATEGIES=, BACKENDS= and DEVICES=; return 0 if all of its runs ended well.

    Raises:
        LaunchError: A variable names an unknown model, strategy, backend or number of devices, or none of their
            combinations can be trained.
    """
    axes = {name: getattr(variables, name.lower()) or "" for name in AXES}
    return _run_experiment(load_sweep(variables.name or SWEEP, options, axes), console)


def _run_experiment(experiment: Experiment, console: Console) -> int:
    """Train an experiment's runs and make the table that its file names; return the exit code."""
    return run_experiment(experiment, find_output(experiment.file.table), console)


def report_parity(study: Study, verifies: bool = False) -> int:
    """Write the report and print whether every strategy's losses agree with baseline's; return 0 if they do.

    With `verifies`, strategies that do not agree are verified tensor by tensor, and the report shows the results.
    """
    code = study.write_report()
    strategies = {row.strategy for row in study.rows if row.parity.verdict.startswith("broken")}
    if verifies and strategies:
        _verify_strategies(study, strategies)
        code = study.write_report()
    broken = describe_broken_parity(study.rows)
    for sentence in broken:
        say(study.console, sentence, "red")
    if not broken:
        say(study.console, "Parity: every strategy's losses agree with baseline's.")
    if code:
        return code
    return 1 if broken else 0


def _verify_strategies(study: Study, strategies: Container[str]) -> None:
    """Verify some strategies of a study tensor by tensor; copy each result to the strategy's newest run folder.

    A strategy without a finished run is left out.
    """
    for result in study.results:
        job = result.cell.job
        if job.strategy not in strategies or not result.runs:
            continue
        newest_run = result.runs[0]
        # A verification has iterations and batches of its own.
        options = replace(
            job.options, iterations=None, micro_batch_size=None, global_batch_size=None
        )
        target = f"{PREFIX}{job.name}"
        verify(target, Namespace(), options, study.console, also=newest_run)


def describe_broken_parity(rows: Sequence[Entry]) -> list[str]:
    """Return one sentence per row whose losses differ from the reference's, or were not compared with them."""
    return [
        f"Parity of {row.strategy}: {row.parity.verdict or 'not known'} (status {row.status})."
        for row in rows
        if row.parity.verdict not in ("reference", "held")
    ]


_OUTPUTS = {"report": Output(Study.write_report), "parity": Output(report_parity)}
"""Outputs that no module of `tables/` defines."""


def find_output(table: str) -> Output:
    """Return the output that an experiment's `table:` names.

    It is `report`, `parity`, a module of `tables/`, or the dotted name of another module with an `OUTPUT`.

    Raises:
        LaunchError: There is no such table; the message suggests a similar one.
    """
    if table in _OUTPUTS:
        return _OUTPUTS[table]
    module = table if "." in table else f"parakit.experiments.tables.{table}"
    output: Output | None = None
    if _module_exists(module):
        output = getattr(import_module(module), "OUTPUT", None)
    if output is None:
        known = [*_OUTPUTS, *(path.stem for path in _TABLES.glob("[a-z]*.py"))]
        hint = suggest_names(table, known, "other experiments in examples/experiments name theirs")
        raise LaunchError(f"There is no table '{table}' for an experiment's key 'table'; {hint}")
    return output


def _module_exists(name: str) -> bool:
    """Return True if a module of this dotted name exists. No module is imported but its parent packages."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # A parent package is missing.
        return False

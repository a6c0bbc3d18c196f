"""The command line: `scrape` prints what logs say, `build` writes a report, `bench` measures.

`explain` answers from ledgers what a strategy costs, `trace` draws an iteration.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tools.records.run import Status, StatusRecord
from tools.report.read.diagnosis import classify_log
from tools.report.read.iterations import Iteration
from tools.report.read.scrape import scrape_runs
from tools.report.read.scraped import ScrapedLog
from tools.spec.settings import add_options, program


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit code is 0, 1 for findings, 2 for bad usage."""
    arguments = command_line().parse_args(argv)
    command: int = arguments.run(arguments)
    return command


def log_as_json(log: ScrapedLog, status: StatusRecord) -> dict[str, Any]:
    """Everything a log says; what it does not say is null or left out of an iteration."""
    return {
        "path": log.path,
        "part": log.part,
        "parts": log.parts,
        "status": status.status.value,
        "reason": status.reason,
        "rank": status.rank,
        "dialect": log.generation.name,
        "iterations": [iteration_as_json(found) for found in log.iterations],
        "restarts": list(log.restarts),
        "parameters": msgspec.to_builtins(log.parameters),
        "memory": msgspec.to_builtins(log.memory),
        "theoretical_parameters_billions": log.theoretical_parameters_billions,
        "theoretical_memory": msgspec.to_builtins(log.theoretical_memory),
        "timers": msgspec.to_builtins(log.timers),
        "validation": msgspec.to_builtins(log.validation),
        "checkpoints": msgspec.to_builtins(log.checkpoints),
        "exit_reason": log.exit_reason,
        "notes": list(log.notes),
    }


def iteration_as_json(found: Iteration) -> dict[str, Any]:
    """An iteration's fields; those that the line lacks are left out, NaN becomes null."""
    fields = msgspec.to_builtins(found)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
        if value is not None and (value is not False)
    }


def _scrape(arguments: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    unreadable = 0
    for path in arguments.logs:
        try:
            logs = scrape_runs(path)
        except OSError as error:
            unreadable += 1
            reason = f"{path} cannot be read: {error.strerror}; check the path."
            print(reason, file=sys.stderr)
            logs = ()
            nothing = {"path": str(path), "status": Status.NO_LOG, "reason": reason}
            results.append({**nothing, "iterations": []})
            if not arguments.json:
                print(f"{path}: {Status.NO_LOG}, 0 iterations: {reason}")
        for log in logs:
            status = classify_log(log)
            if arguments.json:
                results.append(log_as_json(log, status))
            else:  # Half a million iterations are a large text, which nobody asked for.
                print(_summary(log, status))
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if unreadable else 0


def _build(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tools.report.build import BuildOptions, build
    from tools.spec.hardware import UnknownHardwareError, device_by_key

    try:
        device = device_by_key(arguments.device) if arguments.device else None
    except UnknownHardwareError as error:
        print(f"DEVICE={arguments.device}: {error}", file=sys.stderr)
        return 2
    options = BuildOptions(
        name=arguments.name,
        paths=tuple(arguments.paths) + tuple(arguments.logs or ()),
        runs_root=Path(arguments.runs),
        reports_root=arguments.reports,
        baseline=arguments.baseline and Path(arguments.baseline),
        strict=arguments.strict,
        all_conditions=arguments.all,
        device=device,
        readings=arguments.readings,
    )
    return build(options, Console(highlight=False))


def _explain(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tools.report.explain.explanation import explain_runs

    return explain_runs(arguments.paths, arguments.runs, Console(highlight=False))


def _trace(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tools.report.explain.timelines import trace_run

    return trace_run(arguments.wanted, arguments.runs, Console(highlight=False))


def _summary(log: ScrapedLog, status: StatusRecord) -> str:
    reason = f": {status.reason}" if status.reason else ""
    return f"{log.path}: {status.status.value}, {len(log.iterations)} iterations{reason}"


def command_line() -> argparse.ArgumentParser:
    """The command line, for `--help` and completion."""
    parser = argparse.ArgumentParser(prog=program("tools.report"), description=__doc__)
    commands = parser.add_subparsers(required=True)
    scrape = commands.add_parser(
        "scrape", prog=program("tools.report scrape"), help="print what logs say"
    )
    scrape.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    scrape.add_argument("--json", action="store_true", help="everything, as JSON")
    scrape.set_defaults(run=_scrape)
    build = commands.add_parser(
        "build",
        prog=program("tools.report build"),
        help="write a report folder and print its table",
    )
    build.add_argument(
        "paths", nargs="*", type=Path, metavar="RUN_OR_LOG", help="default: all run folders"
    )
    add_options(build, "report", RUNS="runs")
    build.add_argument("--logs", nargs="*", type=Path, metavar="LOG", help="foreign logs")
    build.add_argument("--reports", type=Path, default=Path("reports"), help="where reports go")
    build.add_argument(
        "--all", action="store_true", help="also rows of older versions and other machines"
    )
    build.set_defaults(run=_build)
    explain = commands.add_parser(
        "explain",
        prog=program("tools.report explain"),
        help="say from the ledgers what each strategy costs",
    )
    explain.add_argument("paths", nargs="*", type=Path, metavar="RUN", help="default: all runs")
    explain.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders are")
    explain.set_defaults(run=_explain)
    trace = commands.add_parser(
        "trace",
        prog=program("tools.report trace"),
        help="draw one iteration of a run, all ranks on one axis",
    )
    trace.add_argument("wanted", nargs="?", metavar="RUN_OR_TARGET", help="default: the newest run")
    trace.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders are")
    trace.set_defaults(run=_trace)
    return parser

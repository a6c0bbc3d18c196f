"""The report's commands: `scrape` prints what logs say, `report` writes a page.

`explain` answers from ledgers what a strategy costs, `trace` draws an iteration.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.run import Status, StatusRecord
from parakit.logs import ScrapedLog, classify_log, scrape_runs

_AS_THEY_ARE = (
    *("parameters", "memory", "theoretical_parameters_billions", "theoretical_memory", "timers"),
    *("validation", "checkpoints", "exit_reason", "notes"),
)


def log_as_json(log: ScrapedLog, status: StatusRecord) -> dict[str, Any]:
    """Everything a log says; what it does not say is null or left out of an iteration, NaN is null."""
    iterations = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in msgspec.to_builtins(found).items()
            if value is not None and value is not False
        }
        for found in log.iterations
    ]
    return {
        "path": log.path,
        "part": log.part,
        "parts": log.parts,
        "status": status.status.value,
        "reason": status.reason,
        "rank": status.rank,
        "dialect": log.generation.name,
        "iterations": iterations,
        "restarts": list(log.restarts),
    } | {name: msgspec.to_builtins(getattr(log, name)) for name in _AS_THEY_ARE}


def scrape(logs: Sequence[Path], json: bool) -> int:
    """Print what logs say; 1 if one cannot be read."""
    results: list[dict[str, Any]] = []
    unreadable = 0
    for path in map(Path, logs):
        try:
            found = scrape_runs(path)
        except OSError as error:
            unreadable += 1
            reason = f"{path} cannot be read: {error.strerror}; check the path."
            print(reason, file=sys.stderr)
            found = ()
            nothing = {"path": str(path), "status": Status.NO_LOG, "reason": reason}
            results.append({**nothing, "iterations": []})
            if not json:
                print(f"{path}: {Status.NO_LOG}, 0 iterations: {reason}")
        for log in found:
            status = classify_log(log)
            if json:
                results.append(log_as_json(log, status))
            else:  # Half a million iterations are a large text, which nobody asked for.
                said = f": {status.reason}" if status.reason else ""
                print(f"{log.path}: {status.status.value}, {len(log.iterations)} iterations{said}")
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if unreadable else 0


def report(given: Namespace) -> int:
    """Write a report folder and print its table; 1 with changes under STRICT=1.

    Raises:
        ValueError: There is no such device.
    """
    from rich.console import Console

    from parakit.config.hardware import UnknownHardwareError, device_by_key
    from parakit.reporting.build import BuildOptions, build

    try:
        device = device_by_key(given.device) if given.device else None
    except UnknownHardwareError as error:
        raise ValueError(f"DEVICE={given.device}: {error}") from None
    named = [repeat for word in given.logs for repeat in named_logs(word)]
    options = BuildOptions(
        name=given.name,
        paths=tuple(path for path, _ in named),
        repeats={path: name for path, name in named if name},
        runs_root=given.runs,
        reports_root=given.reports,
        baseline=given.baseline and Path(given.baseline),
        strict=bool(given.strict),
        all_conditions=given.all,
        device=device,
        readings=given.readings,
    )
    return build(options, Console(highlight=False))


def named_logs(word: str) -> list[tuple[Path, str]]:
    """The logs of a word of LOGS=, each with the name that makes it a repeat: `tp2=1.log,2.log`."""
    name, is_named, paths = word.partition("=")
    if not is_named or "/" in name or Path(word).exists():
        return [(path, "") for path in _matching(word)]
    return [(path, name) for part in filter(None, paths.split(",")) for path in _matching(part)]


def _matching(word: str) -> list[Path]:
    """The files of a pattern, which no shell expands in a variable of make; else the word's own."""
    path = Path(word)
    if path.exists():
        return [path]
    place = Path(path.anchor)
    return sorted(place.glob(str(path.relative_to(place)))) or [path]


def report_arguments(parser: ArgumentParser) -> None:
    """What no variable says."""
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="where reports go")
    parser.add_argument(
        "--all", action="store_true", help="also rows of older versions and other machines"
    )


def explain(run: Sequence[str], runs: Path) -> int:
    """Say from the ledgers what each strategy costs."""
    from rich.console import Console

    from parakit.reporting.explain.explanation import explain_runs

    return explain_runs([Path(one) for one in run], runs, Console(highlight=False))


def trace(run: str | None, runs: Path) -> int:
    """Draw one iteration of a run or a target's newest, all ranks on one axis."""
    from rich.console import Console

    from parakit.reporting.explain.timelines import trace_run

    return trace_run(run, runs, Console(highlight=False))

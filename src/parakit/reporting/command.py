"""The report's commands: `scrape` prints what logs say, `report` writes a page.

`explain` answers from ledgers what a strategy costs, `trace` draws an iteration.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parakit.artifacts.run import Status
from parakit.logs import UnreadableLogError, read_training_logs

if TYPE_CHECKING:
    from parakit.reporting.build import BuildOptions


def scrape(logs: Sequence[Path], json: bool) -> int:
    """Print what logs say; 1 if one cannot be read."""
    results: list[dict[str, Any]] = []
    unreadable = 0
    for path in map(Path, logs):
        try:
            runs = read_training_logs(path)
        except UnreadableLogError as error:
            unreadable += 1
            reason = str(error)
            print(reason, file=sys.stderr)
            runs = ()
            nothing = {"path": str(path), "status": Status.NO_LOG, "reason": reason}
            results.append({**nothing, "iterations": []})
            if not json:
                print(f"{path}: {Status.NO_LOG}, 0 iterations: {reason}")
        for log in runs:
            if json:
                results.append(log.to_dict())
            else:  # Half a million iterations are a large text, which nobody asked for.
                print(log.sentence)
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if unreadable else 0


def report(given: Namespace) -> int:
    """Write a report folder and print its table; 1 with changes under STRICT=1.

    With `--scrape` nothing is written, and `scrape` prints what the logs say.

    Raises:
        ValueError: There is no such device, or an option is missing or contradicts another.
    """
    if given.scrape:
        if not given.logs:
            raise ValueError("'report --scrape' reads logs; name them: LOGS=\"a.log b.log\".")
        return scrape([Path(log) for log in given.logs], given.json)
    if given.json:
        raise ValueError("JSON= is of 'report --scrape'; a report's results.json has its figures.")
    from rich.console import Console

    from parakit.reporting.build import build

    options = replace(
        report_options(given.logs, given.device),
        name=given.name,
        runs_root=given.runs,
        reports_root=given.reports,
        baseline=given.baseline and Path(given.baseline),
        strict=bool(given.strict),
        all_conditions=given.all,
        readings=given.readings,
    )
    return build(options, Console(highlight=False))


def report_options(logs: Sequence[str], device: str | None) -> BuildOptions:
    """Return the options of a report of these run folders and logs.

    Args:
        logs: Paths and patterns, as in LOGS=; none of them means all run folders.
        device: Key of the device of logs that do not name theirs.

    Raises:
        ValueError: There is no such device.
    """
    from parakit.config.hardware import UnknownHardwareError, device_by_key
    from parakit.reporting.build import BuildOptions

    try:
        stated = device_by_key(device) if device else None
    except UnknownHardwareError as error:
        raise ValueError(f"--device {device} (DEVICE={device}): {error}") from None
    named = [repeat for word in logs for repeat in named_logs(word)]
    return BuildOptions(
        paths=tuple(path for path, _ in named),
        repeats={path: name for path, name in named if name},
        device=stated,
    )


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

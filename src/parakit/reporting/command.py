"""Run the report's commands: `report` writes a page, and `report --scrape` prints the contents of logs.

`explain` answers from the runs' measurements what a strategy costs. `trace` draws an iteration.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parakit.artifacts.run import Status
from parakit.logs import UnreadableLogError, read_training_logs

if TYPE_CHECKING:
    from parakit.reporting.build import BuildOptions


def scrape(logs: Sequence[Path], json: bool) -> int:
    """Print the contents of logs as sentences or as JSON; return 1 if a log cannot be read, else 0."""
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
            else:
                # A sentence only, because half a million iterations would be a very long text.
                print(log.sentence)
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if unreadable else 0


def report(variables: Namespace) -> int:
    """Write and print a report; return the exit code of `build`.

    With `--scrape` the contents of logs are printed instead, and nothing is written.

    Raises:
        ValueError: There is no such device, or an option is missing or contradicts another.
    """
    if variables.scrape:
        if not variables.logs:
            raise ValueError("'report --scrape' reads logs; name them: LOGS=\"a.log b.log\".")
        return scrape([path for log in variables.logs for path in _matching(log)], variables.json)
    if variables.json:
        raise ValueError(
            "--json (JSON=) needs --scrape; the figures of a report are in its results.json."
        )
    from parakit.formatting.console import CallerConsole
    from parakit.reporting.build import build

    options = replace(
        report_options(variables.logs, variables.device),
        name=variables.name,
        runs_root=variables.runs,
        reports_root=variables.reports,
        baseline=variables.baseline and Path(variables.baseline),
        strict=bool(variables.strict),
        all_conditions=variables.all,
        readings=variables.readings,
    )
    return build(options, CallerConsole(highlight=False))


def report_options(logs: Sequence[str], device: str | None) -> BuildOptions:
    """Return the options of a report on some run folders and logs.

    Args:
        logs: Paths and patterns, as in LOGS=; an empty sequence means all run folders.
        device: Key of the device for logs that do not name their device; None leaves the device unknown.

    Raises:
        ValueError: There is no such device.
    """
    from parakit.config.hardware import UnknownHardwareError, device_by_key
    from parakit.reporting.build import BuildOptions

    try:
        stated = device_by_key(device) if device else None
    except UnknownHardwareError as error:
        raise ValueError(f"DEVICE={device}: {error}") from None
    paths: list[Path] = []
    names_of_repeats: dict[Path, str] = {}
    for word in logs:
        for path, name in named_logs(word):
            paths.append(path)
            if name:
                names_of_repeats[path] = name
    return BuildOptions(paths=tuple(paths), repeats=names_of_repeats, device=stated)


def named_logs(word: str) -> list[tuple[Path, str]]:
    """Return the paths that one word of LOGS= stands for, each with a name or an empty text.

    The word can be a path or a pattern, and then the name is empty. It can also be `name=path,path`: in
    `tp2=1.log,2.log` both logs get the name `tp2`, which makes them repeats of one configuration. A pattern
    without a match is returned as a path. `-` is standard input, which is copied to a temporary file until the
    program ends.
    """
    name, is_named, paths = word.partition("=")
    # A path may hold "=", too.
    if not is_named or "/" in name or Path(word).exists():
        return [(path, "") for path in _matching(word)]
    # A name may hold "=" as well, such as the label `lr=1e-3`; the paths after it exist.
    parts = word.split("=")
    for end in range(len(parts) - 1, 1, -1):
        candidate = "=".join(parts[end:])
        if all(Path(path).exists() for path in candidate.split(",")):
            name, paths = "=".join(parts[:end]), candidate
            break
    logs = []
    for pattern in paths.split(","):
        if pattern:
            logs += [(path, name) for path in _matching(pattern)]
    return logs


def _matching(word: str) -> list[Path]:
    """Return the files that match a pattern, or the word itself as a path if none matches.

    No shell expands a pattern in a variable of make.
    """
    if word == "-":
        return [_store_standard_input()]
    path = Path(word)
    if path.exists():
        return [path]
    root = Path(path.anchor)
    return sorted(root.glob(str(path.relative_to(root)))) or [path]


@cache
def _store_standard_input() -> Path:
    """Return the path of a temporary file with the content of standard input, because a log is read more than once."""
    folder = Path(tempfile.mkdtemp(prefix="parakit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "standard-input.log"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def report_arguments(parser: ArgumentParser) -> None:
    """Add the options of `report` for which there is no make variable."""
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), help="folder of all reports"
    )


def explain(run: Sequence[str], runs: Path) -> int:
    """Print from the runs' measurements what each strategy costs; return 1 if there is no run."""
    from parakit.formatting.console import CallerConsole
    from parakit.reporting.explain.explanation import explain_runs

    return explain_runs([Path(path) for path in run], runs, CallerConsole(highlight=False))


def trace(run: str | None, runs: Path) -> int:
    """Draw a traced iteration with all ranks on one time axis; return 1 if there is no traced run, else 0.

    Args:
        run: A run folder, or a target whose newest run is drawn; None takes the newest run of all.
        runs: Folder of all runs.
    """
    from parakit.formatting.console import CallerConsole
    from parakit.reporting.explain.timelines import trace_run

    return trace_run(run, runs, CallerConsole(highlight=False))

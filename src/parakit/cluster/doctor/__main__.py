"""Run every check and print the table, or JSON; the exit code is 1 if a check failed."""

import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from parakit.cluster.checks import apptainer, devices, docker, host, network, podman
from parakit.cluster.checks.result import FAIL, PASS, WARN, CheckResult

CHECKS: "tuple[Callable[[], CheckResult | list[CheckResult]], ...]" = (
    host.check_python,
    host.check_packages,
    host.check_programs,
    docker.check_docker,
    podman.check_podman,
    apptainer.check_apptainer,
    devices.check_devices,
    host.check_shared_memory,
    host.check_limits,
    host.check_disk,
    host.check_loopback,
    host.check_host_name,
    network.check_hub,
    network.check_package_index,
    network.check_image_registry,
    network.check_wandb,
    devices.check_all_reduce,
)
COLOURS = {PASS: "32", WARN: "33", FAIL: "31"}


def run_checks() -> "list[CheckResult]":
    """Run all checks concurrently, because most of them wait. The results are in the order of `CHECKS`."""
    with ThreadPoolExecutor(len(CHECKS)) as threads:
        futures = [threads.submit(check) for check in CHECKS]
    results = []  # type: list[CheckResult]
    for future in futures:
        result = future.result()
        results += result if isinstance(result, list) else [result]
    return results


def format_results(results: "list[CheckResult]", width: int, colour: bool) -> str:
    """Return the table as text: status, subject and finding of each check, and the fix below.

    Args:
        results: The results of the checks.
        width: Columns of the terminal, at which lines are broken.
        colour: True to colour the status.
    """
    subject_width = max(len(result.subject) for result in results) + 2
    indent = " " * (len(PASS) + 2 + subject_width)
    text_width = max(30, width - len(indent))
    lines = []
    for result in results:
        status = result.status
        if colour:
            status = f"\x1b[{COLOURS[status]}m{status}\x1b[0m"
        texts = textwrap.wrap(result.finding, text_width, break_on_hyphens=False)
        if result.fix:
            texts += textwrap.wrap("→ " + result.fix, text_width, break_on_hyphens=False)
        lines.append(f"{status}  {result.subject:{subject_width}}{texts[0]}")
        lines += [indent + text for text in texts[1:]]
    return "\n".join(lines)


def main() -> int:
    """Print the table of results, and the number of results per status. With --json, print JSON instead.

    Returns:
        1 if a check failed and a table was printed, else 0.
    """
    results = run_checks()
    if sys.argv[1:] == ["--json"]:
        host = os.environ.get("SLURMD_NODENAME") or platform.node()
        print(json.dumps({"host": host, "results": results}))
        return 0
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = format_results(results, shutil.get_terminal_size((100, 24)).columns, colour)
    statuses = [result.status for result in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in (PASS, WARN, FAIL))
    # A terminal of the C locale accepts ASCII alone, and the doctor must not fail for that reason.
    output = f"{text}\n{counts}\n".encode(sys.stdout.encoding or "ascii", "replace")
    sys.stdout.buffer.write(output)
    return 1 if FAIL in statuses else 0


if __name__ == "__main__":
    sys.exit(main())

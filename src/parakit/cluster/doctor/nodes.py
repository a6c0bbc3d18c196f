"""`make doctor` on a cluster: every node of an allocation, side by side, and which one differs.

`LAUNCHER=slurm NODES=4 make doctor` asks Slurm for nodes; inside an allocation (salloc, sbatch) it takes
those that are there.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from parakit.cluster.checks.devices import check_rates
from parakit.cluster.checks.result import FAIL, PASS, WARN, CheckResult, run_program
from parakit.cluster.sbatch import FIRST_NODE, MASTER_PORT
from parakit.cluster.slurm import parse_slurm_options, split_directives
from parakit.config import settings
from parakit.config.errors import LaunchError
from parakit.config.setting import parse_settings
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.formatting.units import DASH, gb

SECONDS = 420
OUTLIER_FRACTION = 0.2
"""Share of the nodes' median by which a measured rate must differ to be an outlier."""

ALL_REDUCE_SCRIPT = "\n".join(
    (
        *FIRST_NODE,
        "export NNODES=$SLURM_JOB_NUM_NODES NODE_RANK=$SLURM_NODEID",
        MASTER_PORT,
        'exec "$@" -m parakit.launch.link_rates',
    )
)

Answers = Mapping[str, Sequence[CheckResult]]
"""Results by node."""


@dataclass(frozen=True)
class Outlier:
    """A node that differs from the others in one thing."""

    node: str
    subject: str
    finding: str
    others: str


def main() -> int:
    """Print every node's checks, where one differs, and the all-reduce between them."""
    console = Console()
    try:
        srun = srun_command(os.environ)
        answers = ask_nodes(srun)
        between = measure_all_reduce(srun) if len(answers) > 1 else None
    except ValueError as error:
        say(console, str(error), "red")
        return 2
    differing = find_outliers(answers)
    console.print(rich_table(_table(answers, differing), console.width))
    if between is not None:
        say(console, describe_all_reduce(between))
    for one in differing:
        text = f"{one.node} differs: {one.subject}: {one.finding}; others: {one.others}."
        say(console, text, "yellow")
    if not differing:
        console.print(f"{len(answers)} nodes, all alike.", highlight=False)
    failed = any(result.status == FAIL for results in answers.values() for result in results)
    return int(failed or bool(differing))


def ask_nodes(srun: Sequence[str]) -> Answers:
    """Run the doctor on every node.

    Raises:
        LaunchError: Slurm is not here, refuses, or a node gave no answer.
    """
    doctor = (*srun, sys.executable, "-m", "parakit.cluster.doctor", "--json")
    answers = dict(parse_answers(_run(doctor)))
    wanted = _node_count(os.environ)
    if len(answers) != wanted:
        raise LaunchError(f"{len(answers)} of {wanted} nodes answered: {', '.join(answers)}.")
    return answers


def measure_all_reduce(srun: Sequence[str]) -> Mapping[str, Any]:
    """Return what `parakit.launch.link_rates` measures between the nodes.

    Raises:
        LaunchError: It failed on one of them.
    """
    for line in _run((*srun, "bash", "-c", ALL_REDUCE_SCRIPT, "node", sys.executable)).splitlines():
        if line.startswith("{") and (figures := json.loads(line)).get("nodes"):
            return dict(figures)
    raise LaunchError(
        "The all-reduce between the nodes was not measured: no node reported its rate."
    )


def describe_all_reduce(between: Mapping[str, Any]) -> str:
    """A sentence on the all-reduce between nodes, and one on the slowest pair where it is an outlier."""
    (row, *_) = check_rates({**between, "clocks": []})
    text = f"{row.status}: {len(between['nodes'])} nodes: {row.finding}."
    pairs, nodes = between["pairs"], between["nodes"]
    slowest = min(range(len(pairs)), key=pairs.__getitem__)
    if pairs[slowest] < (1 - OUTLIER_FRACTION) * statistics.median(pairs):
        other = nodes[(slowest + 1) % len(nodes)]
        text += (
            f" The slowest pair is {nodes[slowest]} and {other}: {gb(pairs[slowest])} GB/s, and "
            f"the pairs' median is {gb(statistics.median(pairs))} GB/s."
        )
    return text


def srun_command(environment: Mapping[str, str]) -> tuple[str, ...]:
    """srun with one task on each node: of this allocation, or of a new one.

    Raises:
        LaunchError: There is no srun, or a variable is not of its kind.
    """
    if shutil.which("srun") is None:
        raise LaunchError("LAUNCHER=slurm needs Slurm's client (no 'srun' on PATH).")
    count = ("--nodes", str(_node_count(environment)), "--ntasks-per-node=1")
    if "SLURM_JOB_ID" in environment:
        return ("srun", "--overlap", *count)
    slurm = parse_slurm_options(Namespace(**parse_settings(settings.SLURM_SETTINGS, environment)))
    return ("srun", *count, *split_directives(slurm.directives if slurm else ()))


def parse_answers(text: str) -> Sequence[tuple[str, list[CheckResult]]]:
    """Each node's line; what else a node's shell prints is no answer."""
    found = []
    for line in text.splitlines():
        try:
            answer = json.loads(line)
            rows = [CheckResult(*row) for row in answer["results"]]
            found.append((str(answer["host"]), rows))
        except (ValueError, TypeError, KeyError):
            continue
    return sorted(found)


def find_outliers(answers: Answers) -> list[Outlier]:
    """Where a node differs: measured values from the median, all else from what most nodes have.

    Of two nodes that differ either may be right, so both are named.
    """
    found: list[Outlier] = []
    by_what: dict[str, dict[str, CheckResult]] = {}
    for node, results in answers.items():
        for result in results:
            by_what.setdefault(result.subject, {})[node] = result
    for what, rows in by_what.items():
        missing = [node for node in answers if node not in rows]
        rows |= {node: CheckResult(WARN, what, "no such row") for node in missing}
        off, usual = _off(rows)
        for node in sorted(off):
            others = (f"{each}: {rows[each].finding}" for each in sorted(rows) if each != node)
            found.append(Outlier(node, what, rows[node].finding, usual or "; ".join(others)))
    return found


def _off(rows: Mapping[str, CheckResult]) -> tuple[list[str], str]:
    """The nodes that differ, and what the others have; empty where all differ."""
    values = [result.value for result in rows.values()]
    if all(value is not None for value in values):
        middle = statistics.median(value for value in values if value is not None)
        far = OUTLIER_FRACTION * abs(middle)
        off = [node for node, each in rows.items() if abs((each.value or 0) - middle) > far]
    else:
        (usual, count), *_ = Counter(result.finding for result in rows.values()).most_common()
        alone = 2 * count <= len(rows)
        off = [node for node, each in rows.items() if alone or each.finding != usual]
    return off, next((each.finding for node, each in rows.items() if node not in off), "")


def _table(answers: Answers, differing: Sequence[Outlier]) -> Table[str]:
    """A row for each thing that was checked, a column for each node."""
    marked = {(one.node, one.subject) for one in differing}
    rows = {
        node: {result.subject: result for result in results} for node, results in answers.items()
    }

    def of_node(node: str) -> Column[str]:
        def style(what: str) -> str:
            found = rows[node].get(what)
            return "" if found and found.status == PASS and (node, what) not in marked else "yellow"

        def text(found: CheckResult | None) -> str:
            return f"{found.status}: {found.finding}" if found else DASH

        return Column(node, rows[node].get, text, right=False, style=style, wraps=True)

    columns = (Column[str]("what", str, right=False), *map(of_node, answers))
    return Table(columns, tuple(dict.fromkeys(what for found in rows.values() for what in found)))


def _node_count(environment: Mapping[str, str]) -> int:
    allocated = environment.get("SLURM_JOB_NUM_NODES", "")
    if allocated.isdecimal():
        return int(allocated)
    nodes: int | None = parse_settings((settings.NODES,), environment)["nodes"]
    return nodes or 1


def _run(command: Sequence[str]) -> str:
    answer = run_program(list(command), SECONDS)
    if answer.code is None:
        raise LaunchError(f"srun gives no answer ({answer.problem}).")
    if not answer.succeeded:
        raise LaunchError(f"srun fails: {answer.problem[:300]}")
    return answer.out


if __name__ == "__main__":
    sys.exit(main())

"""`make doctor` on a cluster: run the checks on every node, and name the nodes that differ from the others.

`LAUNCHER=slurm NODES=4 make doctor` asks Slurm for nodes. Inside an allocation (salloc, sbatch) it uses the nodes
of the allocation.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
"""The time after which an srun is given up."""
OUTLIER_FRACTION = 0.2
"""The fraction of the nodes' median by which a measured value must differ to be an outlier."""

ALL_REDUCE_SCRIPT = "\n".join(
    (
        *FIRST_NODE,
        "export NNODES=$SLURM_JOB_NUM_NODES NODE_RANK=$SLURM_NODEID",
        MASTER_PORT,
        'exec "$@" -m parakit.launch.link_rates',
    )
)

ResultsByNode = Mapping[str, Sequence[CheckResult]]
"""The results of the checks, by the node's name."""


@dataclass(frozen=True)
class Outlier:
    """A check in which a node differs from the other nodes."""

    node: str
    subject: str
    finding: str
    usual: str
    """The finding of most nodes; if there is none, the findings of all other nodes."""


def main() -> int:
    """Print the checks of every node, the nodes that differ, and the all-reduce between the nodes.

    Returns:
        0 if no check fails and all nodes have the same results. 1 if a check fails or a node differs. 2 if the nodes
        could not be asked.
    """
    console = Console()
    try:
        srun = srun_command(os.environ)
        results_by_node = ask_nodes(srun)
        all_reduce = measure_all_reduce(srun) if len(results_by_node) > 1 else None
    except ValueError as error:
        say(console, str(error), "red")
        return 2
    outliers = find_outliers(results_by_node)
    console.print(rich_table(_make_table(results_by_node, outliers), console.width))
    if all_reduce is not None:
        say(console, describe_all_reduce(all_reduce))
    for outlier in outliers:
        text = f"{outlier.node} differs: {outlier.subject}: {outlier.finding}; others: {outlier.usual}."
        say(console, text, "yellow")
    if not outliers:
        console.print(f"{len(results_by_node)} nodes, no difference.", highlight=False)
    results = chain.from_iterable(results_by_node.values())
    has_failed = any(result.status == FAIL for result in results)
    return 1 if has_failed or outliers else 0


def ask_nodes(srun: Sequence[str]) -> ResultsByNode:
    """Run the doctor on every node, and return the results by node.

    Args:
        srun: The srun that starts one task on each node.

    Raises:
        LaunchError: srun fails, or a node gave no answer.
    """
    doctor = (*srun, sys.executable, "-m", "parakit.cluster.doctor", "--json")
    results = dict(parse_answers(_run_srun(doctor)))
    num_nodes = _parse_node_count(os.environ)
    if len(results) != num_nodes:
        raise LaunchError(f"{len(results)} of {num_nodes} nodes answered: {', '.join(results)}.")
    return results


def measure_all_reduce(srun: Sequence[str]) -> Mapping[str, Any]:
    """Run `parakit.launch.link_rates` on all nodes, and return the measured rates.

    Raises:
        LaunchError: It failed on a node, or no node reported a rate.
    """
    output = _run_srun((*srun, "bash", "-c", ALL_REDUCE_SCRIPT, "node", sys.executable))
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        figures = json.loads(line)
        if figures.get("nodes"):
            return dict(figures)
    raise LaunchError(
        "The all-reduce between the nodes was not measured: no node reported its rate."
    )


def describe_all_reduce(figures: Mapping[str, Any]) -> str:
    """Return a sentence on the all-reduce between nodes, and one on the slowest pair if it is an outlier.

    Args:
        figures: The nodes' names, the rate of all nodes, and the rates of each pair of neighbouring nodes.
    """
    (result, *_) = check_rates({**figures, "clocks": []})
    pair_rates, nodes = figures["pairs"], figures["nodes"]
    text = f"{result.status}: {len(nodes)} nodes: {result.finding}."
    slowest_rate = min(pair_rates)
    median = statistics.median(pair_rates)
    if slowest_rate < (1 - OUTLIER_FRACTION) * median:
        # Pair i is node i and the next node; the last node is paired with the first.
        pair = pair_rates.index(slowest_rate)
        neighbour = nodes[(pair + 1) % len(nodes)]
        text += (
            f" The slowest pair is {nodes[pair]} and {neighbour}: {gb(slowest_rate)} GB/s, "
            f"and the pairs' median is {gb(median)} GB/s."
        )
    return text


def srun_command(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the srun that starts one task on each node of this allocation, or of a new one.

    Raises:
        LaunchError: There is no srun, or a variable is not of its kind.
    """
    if shutil.which("srun") is None:
        raise LaunchError("LAUNCHER=slurm needs Slurm's client (no 'srun' on PATH).")
    count = ("--nodes", str(_parse_node_count(environment)), "--ntasks-per-node=1")
    if "SLURM_JOB_ID" in environment:
        return ("srun", "--overlap", *count)
    slurm = parse_slurm_options(Namespace(**parse_settings(settings.SLURM_SETTINGS, environment)))
    return ("srun", *count, *split_directives(slurm.directives if slurm else ()))


def parse_answers(text: str) -> Sequence[tuple[str, list[CheckResult]]]:
    """Return each node's name and results from the doctor's JSON lines, sorted by name.

    All other lines are ignored, because a node's shell may print some.
    """
    answers = []
    for line in text.splitlines():
        try:
            answer = json.loads(line)
            results = [CheckResult(*row) for row in answer["results"]]
            answers.append((str(answer["host"]), results))
        except (ValueError, TypeError, KeyError):
            continue
    return sorted(answers)


def find_outliers(results_by_node: ResultsByNode) -> list[Outlier]:
    """Return each check in which a node differs from the others, with the node.

    Measured values are compared with the median over the nodes. Other findings are compared with the finding of
    most nodes. If no finding has a majority, as with two nodes that differ, every node is an outlier.
    """
    outliers: list[Outlier] = []
    for subject, results in _group_by_subject(results_by_node).items():
        differing_nodes, usual_finding = _find_differing_nodes(results)
        for node in sorted(differing_nodes):
            usual = usual_finding or _list_other_findings(node, results)
            outliers.append(Outlier(node, subject, results[node].finding, usual))
    return outliers


def _group_by_subject(results_by_node: ResultsByNode) -> dict[str, dict[str, CheckResult]]:
    """Return the results by subject and node. A node without a result of a check gets a warning in its place."""
    by_subject: dict[str, dict[str, CheckResult]] = {}
    for node, results in results_by_node.items():
        for result in results:
            by_subject.setdefault(result.subject, {})[node] = result
    for subject, result_by_node in by_subject.items():
        for node in results_by_node:
            if node not in result_by_node:
                result_by_node[node] = CheckResult(WARN, subject, "no such row")
    return by_subject


def _list_other_findings(node: str, results: Mapping[str, CheckResult]) -> str:
    """Return the findings of all nodes but one, each with its node, sorted by node."""
    other_nodes = sorted(name for name in results if name != node)
    return "; ".join(f"{other}: {results[other].finding}" for other in other_nodes)


def _find_differing_nodes(results: Mapping[str, CheckResult]) -> tuple[list[str], str]:
    """Return the nodes whose result of one check differs, and the usual finding.

    If all results are measured values, nodes far from the median differ. Otherwise the finding of most nodes is
    usual, and nodes with another finding differ. Without a majority, all nodes differ. For measured values, the usual
    finding is the finding of the first node that does not differ. The usual finding is empty if all nodes differ.

    Args:
        results: The results of one check, by node.
    """
    values = {node: result.value for node, result in results.items() if result.value is not None}
    if len(values) == len(results):
        median = statistics.median(values.values())
        tolerance = OUTLIER_FRACTION * abs(median)
        differing = [node for node, value in values.items() if abs(value - median) > tolerance]
    else:
        counts = Counter(result.finding for result in results.values())
        (commonest_finding, count) = counts.most_common(1)[0]
        if 2 * count <= len(results):
            return list(results), ""
        differing = [
            node for node, result in results.items() if result.finding != commonest_finding
        ]
    for node, result in results.items():
        if node not in differing:
            return differing, result.finding
    return differing, ""


def _make_table(results_by_node: ResultsByNode, outliers: Sequence[Outlier]) -> Table[str]:
    """Return a table with a row per check and a column per node; outliers and problems are yellow."""
    columns = [Column[str]("what", str, right=False)]
    subjects: dict[str, None] = {}  # The keys are a set in the order of the checks.
    for node, results in results_by_node.items():
        result_by_subject = {result.subject: result for result in results}
        outlier_subjects = {outlier.subject for outlier in outliers if outlier.node == node}
        columns.append(_make_node_column(node, result_by_subject, outlier_subjects))
        subjects |= dict.fromkeys(result_by_subject)
    return Table(tuple(columns), tuple(subjects))


def _make_node_column(
    node: str, result_by_subject: Mapping[str, CheckResult], outlier_subjects: Collection[str]
) -> Column[str]:
    """Return the column of a node. A check without a result is a dash."""

    def choose_style(subject: str) -> str:
        result = result_by_subject.get(subject)
        has_passed = result is not None and result.status == PASS
        return "" if has_passed and subject not in outlier_subjects else "yellow"

    def format_result(result: CheckResult | None) -> str:
        return f"{result.status}: {result.finding}" if result else DASH

    return Column(
        node,
        result_by_subject.get,
        format_result,
        right=False,
        style=choose_style,
        wraps=True,
    )


def _parse_node_count(environment: Mapping[str, str]) -> int:
    """Return the number of nodes: of the allocation if this is one, else NODES=, else 1."""
    allocated = environment.get("SLURM_JOB_NUM_NODES", "")
    if allocated.isdecimal():
        return int(allocated)
    nodes: int | None = parse_settings((settings.NODES,), environment)["nodes"]
    return nodes or 1


def _run_srun(command: Sequence[str]) -> str:
    """Run a command that begins with srun and return its output.

    Raises:
        LaunchError: srun does not answer in SECONDS, or fails.
    """
    output = run_program(list(command), SECONDS)
    if output.code is None:
        raise LaunchError(f"srun gives no answer ({output.problem}).")
    if not output.succeeded:
        raise LaunchError(f"srun fails: {output.problem[:300]}")
    return output.out


if __name__ == "__main__":
    sys.exit(main())

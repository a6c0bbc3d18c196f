"""`make bench NAME=verify`: every injected bug must be found where it is, and no healthy strategy be called
wrong.

    python -m tests.verify.bench [injected | logged | resumed | live | healthy | turned] [--only ID …]
        [--seeds N]
    python -m tests.verify.bench present --megatron-lm CHECKOUT   each finding in another Megatron

Verifies with the real thing (Megatron on CPU ranks, the capture, `parakit.verify`), on ranks that are
forked from one process, so that a verification takes seconds. Prints the tables of the package's README.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_yaml
from parakit.experiments.matrix.cell import MatrixCell, apply_known_patches
from parakit.experiments.matrix.cells import choose_rows
from parakit.experiments.matrix.commands import list_known_findings, name_version, select_families
from parakit.experiments.matrix.definition import load_matrix
from parakit.experiments.verify.pairs import LaunchPair
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from parakit.launch.code import find_entry
from parakit.launch.data import SMALL_SAMPLE, SMALL_VOCABULARY, make_sample
from parakit.launch.job import parse_target
from parakit.launch.options import Options, read_patch_file
from parakit.verify.findings import Finding, FindingStatus, list_findings
from parakit.verify.verdict import Judgement
from tests.verify.injected_bugs.check import FOLDER, InjectedBug, injected_bugs

HEALTHY = Path(__file__).with_name("healthy.yaml")
SMALL = ("--vocab-size", str(SMALL_VOCABULARY))
"""With `SMALL_SAMPLE`: whether something is found does not depend on the vocabulary."""


class PatientRanks(ForkedRanks):
    """On a busy machine a run of 30 iterations is no hang."""

    start_seconds = 7200.0


@dataclass(frozen=True)
class Bench:
    """Verifies strategies, one after another."""

    data: str
    verifier: Verifier
    megatron_lm: Path | None = None
    """A checkout; None is the installed one."""
    small: bool = False
    """Whether `data` is of the matrix's small vocabulary."""

    def verify(
        self,
        strategy: str,
        model: str,
        devices: int,
        flags: Sequence[str] = (),
        bug: Path | None = None,
        seed: int = 1234,
        iteration: int | None = 2,
        reference: str = "",
        own_arguments: Sequence[str] = (),
        resumed: str = "",
        both: bool = False,
    ) -> Judgement:
        """Verify a strategy; an injected bug is in the strategy alone, as `check.py` shows that it may
        be.

        With `both` it is in the reference as well.
        """
        options = Options(
            data=self.data,
            megatron_lm=self.megatron_lm,
            extra=(*flags, *(SMALL if self.small else ())),
            seed=seed,
            iterations=iteration,
            patch_file=read_patch_file(str(bug)) if bug else None,
        )
        job = parse_target(f"train-{strategy}-{model}-{devices}cpu", options)
        pair = LaunchPair(job, reference, tuple(own_arguments), resumed=resumed)
        return self.verifier.verify(pair, both)


@dataclass(frozen=True)
class Row:
    """An injected bug's line of the table."""

    bug: InjectedBug
    judgement: Judgement
    seconds: float
    fails: str = ""
    """Words of the error that is to end the run; empty where tensors are to be compared."""

    @property
    def found(self) -> bool:
        """Whether stage and module, or the error, are those that the injected bug has."""
        verdict = self.judgement.verdict
        if self.fails:
            return verdict.verdict is VerifyOutcome.NOT_COMPARABLE and self.fails in str(
                verdict.reason
            )
        if not self.bug.stage:
            return verdict.verdict is VerifyOutcome.HELD
        also = (
            any(self.bug.also in location.split(" ") for location in verdict.also)
            or not self.bug.also
        )
        there = (verdict.stage, verdict.module) == (self.bug.stage, self.bug.module)
        return also and there and self.bug.says in verdict.line

    def line(self) -> str:
        """As Markdown."""
        verdict, first = self.judgement.verdict, self.judgement.first
        caught = "yes" if self.found else f"**no** ({self.bug.stage}, {self.bug.module})"
        ratio = f"{first.ratio:.2g}" if first else f"{verdict.worst_ratio or 0:.2g}"
        layout = " ".join((self.bug.strategy, self.bug.model, self.bug.dtype))
        of_bug = f"| {self.bug.id} | {self.bug.catalogue} | {layout} | {caught} |"
        if verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
            answer = self.fails if self.found else f"not comparable: {verdict.reason}"
            return f"{of_bug} {answer} | | | | {self.seconds:.0f} |"
        return (
            f"{of_bug} {verdict.stage or 'held'} | `{verdict.module or ''}` | "
            f"{verdict.kind or ''} | {ratio} | {self.seconds:.0f} |"
        )


INJECTED_HEAD = (
    "| injected bug | catalogue | strategy | found | stage | module | kind | error/tolerance | s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
HEALTHY_HEAD = (
    "| strategy | model | flags | seed | verdict | error/tolerance | compared | s |\n"
    "|---|---|---|---|---|---|---|---|"
)


LOGGED = "logged.yaml"
"""Bugs of what is printed alone."""


def verify_injected(bench: Bench, only: Sequence[str], table: str = "bugs.yaml") -> Iterator[Row]:
    """Verify the strategy of each bug of a table."""
    for bug in injected_bugs(table):
        if only and bug.id not in only:
            continue
        began = time.monotonic()
        judgement = bench.verify(
            bug.strategy,
            bug.model,
            bug.devices,
            bug.flags,
            bug.path,
            iteration=bug.step,
            reference=bug.reference,
            own_arguments=bug.own_flags,
            both=bug.both,
        )
        yield Row(bug, judgement, time.monotonic() - began)


def verify_resumed(bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """Verify the resumed runs that have an injected bug."""
    for entry in read_yaml(FOLDER / "resumed.yaml"):
        resumed = entry.pop("resumed_from", "")
        bug = InjectedBug(**entry)
        if only and bug.id not in only:
            continue
        began = time.monotonic()
        judgement = bench.verify(
            *(bug.strategy, bug.model, bug.devices, bug.flags, bug.path),
            iteration=None,
            own_arguments=bug.own_flags,
            resumed=resumed,
        )
        yield Row(bug, judgement, time.monotonic() - began)


def verify_live(bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """Verify unmodified Megatron where it is known to be wrong, and cured, where it must hold.

    What takes a checkout is left out of the installed one.
    """
    for finding in list_findings():
        if finding.verdict is not FindingStatus.REPRODUCED or (only and finding.id not in only):
            continue
        if finding.checkout and bench.megatron_lm is None:
            continue
        for patch, stated in ((finding.shown_with, True), (finding.patch, False)):
            began = time.monotonic()
            judgement = bench.verify(
                *(finding.strategies[0], finding.model, finding.devices, finding.flags, patch),
                iteration=None,
                reference=finding.reference,
                own_arguments=finding.own_flags,
                resumed=finding.resumed,
                both=True,
            )
            fails = finding.fails if stated else ""
            yield Row(_of_finding(finding, stated), judgement, time.monotonic() - began, fails)


def verify_present(bench: Bench, only: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Verify each finding that has a strategy: a line, and whether the Megatron is judged as it is.

    One that was mended is looked for with its flags, whatever it is first seen in.
    """
    name = name_version(find_entry(bench.megatron_lm))
    for finding in list_findings():
        if not finding.strategies or (only and finding.id not in only):
            continue
        began = time.monotonic()
        try:
            verdict = bench.verify(
                *(finding.strategies[0], finding.model, finding.devices),
                finding.flags,
                finding.shown_with,
                iteration=None,
                reference=finding.reference,
                own_arguments=finding.own_flags,
                resumed=finding.resumed,
                both=True,
            ).verdict
        except LaunchError as error:
            verdict = VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=str(error))
        seen = verdict.verdict is VerifyOutcome.DIFFERS and finding.stage in (None, verdict.stage)
        failed = verdict.verdict is VerifyOutcome.NOT_COMPARABLE
        seen = seen or (failed and bool(finding.fails) and finding.fails in str(verdict.reason))
        stated = name in finding.present
        basis = {**finding.present, **finding.absent}[name]
        yield (
            f"| {finding.id} | {'present' if stated else 'absent'} ({basis}) | "
            f"{'seen' if seen else 'not run' if failed else 'not seen'} | "
            f"{(verdict.reason or verdict.sentence).replace('|', '/')} | "
            f"{time.monotonic() - began:.0f} |",
            failed or seen is stated,
        )


def _of_finding(finding: Finding, stated: bool) -> InjectedBug:
    """As a row of the table: what is to be found, or that nothing is once it is cured."""
    return InjectedBug(
        id=finding.id if stated else f"{finding.id}, cured",
        file="",
        catalogue=finding.thread or "new",
        strategy=finding.strategies[0],
        model=finding.model,
        stage=finding.stage or "" if stated else "",
        module=finding.module if stated else "",
        kind=finding.kind if stated else "",
        devices=finding.devices,
    )


GENERAL = {
    "dense": (
        "row-linear-without-sum",
        "final-layernorm-not-summed",
        "stage-gets-last-micro-batch",
    ),
    "moe": ("experts-outputs-unsorted", "router-not-summed"),
    "mla": ("row-linear-without-sum", "stage-gets-last-micro-batch"),
    "resumed": ("row-linear-without-sum", "stage-gets-last-micro-batch"),
}
"""Injected bugs that act whatever else the model has, by family: cells of the matrix are tried with
them."""


IDLE = {"experts-outputs-unsorted": {"capacity/drops-padded", "dispatcher/all-gather"}}
"""Levels with which an injected bug's code is not reached: padded experts' outputs go back by their
shape."""


def verify_turned(bench: Bench, only: Sequence[str], every: int = 1) -> Iterator[tuple[str, bool]]:
    """Verify rows of the matrix with an injected bug, in the injected bug's strategy: each must be
    called wrong.

    Every so many rows of each family, from the first, which is the model as it is; injected bugs in
    turn.
    """
    whole, by_id = load_matrix(), {bug.id: bug for bug in injected_bugs()}
    known = list_known_findings(version("megatron-core"))
    for family in select_families(whole, Version(version("megatron-core"))):
        choice = itertools.cycle(by_id[name] for name in GENERAL[family.name])
        for row in choose_rows(whole, family)[::every]:
            levels = tuple(level for level in row if level in family.levels)
            for bug in itertools.islice(choice, len(GENERAL[family.name])):
                layout = next(layout for layout in family.layouts if layout.name == bug.strategy)
                cell = MatrixCell(family, layout, levels)
                if IDLE.get(bug.id, set()) & {level.path for level in levels}:
                    continue
                if (
                    whole.is_legal(family, row, layout.name)
                    and apply_known_patches(cell, known) == cell
                ):
                    break
            else:
                continue  # Every strategy of an injected bug refuses it, or shows a known bug.
            if only and family.name not in only:
                continue
            pair = cell.make_pair(Options())
            injected = replace(pair.job.options, patch_file=read_patch_file(str(bug.path)))
            pair = replace(pair, job=pair.job.with_options(injected))
            verdict = bench.verifier.verify(pair).verdict
            names = " ".join(level.name for level in levels)
            sentence = verdict.sentence.replace("|", "/")
            yield (
                f"| {family.name} {layout.name} | {names} | {bug.id} | {sentence} |",
                (verdict.verdict is VerifyOutcome.DIFFERS),
            )


def verify_healthy(bench: Bench, only: Sequence[str], seeds: int) -> Iterator[tuple[str, bool]]:
    """Verify every healthy combination of strategy, features and dtype: a line, and whether it held."""
    for group in read_yaml(HEALTHY):
        for strategy in group["strategies"]:
            for number in range(seeds):
                name, seed = f"{strategy}-{group['model']}", 1234 + number
                if only and name not in only:
                    continue
                began = time.monotonic()
                flags = group.get("flags", "").split()
                devices = group.get("devices", 2)
                reference, extra_arguments = (
                    group.get("reference", ""),
                    group.get("extra_b", "").split(),
                )
                judgement = bench.verify(
                    strategy,
                    group["model"],
                    devices,
                    flags,
                    seed=seed,
                    iteration=group.get("step", 2),
                    reference=reference,
                    own_arguments=extra_arguments,
                )
                verdict = judgement.verdict
                answer = verdict.verdict if verdict.reason is None else verdict.reason
                if verdict.verdict is VerifyOutcome.DIFFERS:
                    answer = f"**differs**: {verdict.stage}, {verdict.module}, {verdict.kind}"
                layout = strategy
                if reference:
                    layout = f"{strategy} against {reference}"
                features = " ".join((*flags, *extra_arguments))
                yield (
                    f"| {layout} | {group['model']} | {features} | {seed} | {answer} | "
                    f"{verdict.worst_ratio or 0:.2f} | {verdict.compared} of {verdict.seen} | "
                    f"{time.monotonic() - began:.0f} |",
                    verdict.verdict is VerifyOutcome.HELD,
                )


def command_line(program: str) -> argparse.ArgumentParser:
    """Return the parser of the bench's options."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "what",
        choices=("injected", "logged", "resumed", "live", "healthy", "turned", "present", "all"),
        nargs="?",
        default="all",
    )
    parser.add_argument(
        "--only", nargs="*", default=(), help="ids of injected bugs, or strategy-model"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="rows of `turned`: each so many")
    parser.add_argument(
        "--folder", type=Path, help="keeps logs and references (else a temporary one)"
    )
    parser.add_argument("--data", default="owt-ds/sample_text_document")
    parser.add_argument("--megatron-lm", type=Path, help="a checkout (else the installed one)")
    return parser


def main(arguments: Sequence[str], program: str = "python -m tests.verify.bench") -> int:
    """Print the tables; 1 if an injected bug was not found, or a healthy strategy called wrong."""
    options = command_line(program).parse_args(arguments)
    missed = 0
    (ROOT / "runs").mkdir(exist_ok=True)
    with ExitStack() as around:
        temporary = tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".bench-verify-")
        folder = options.folder or Path(around.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        ranks = around.enter_context(closing(ForkedRanks(Options(megatron_lm=options.megatron_lm))))
        make_sample(SMALL_SAMPLE, Console())
        small = options.what == "present"
        data = SMALL_SAMPLE if small else options.data
        make_sample(data, Console())
        bench = Bench(data, Verifier(folder.resolve(), ranks), options.megatron_lm, small)
        tables = {
            "injected": verify_injected(bench, options.only),
            "logged": verify_injected(bench, options.only, LOGGED),
            "resumed": verify_resumed(bench, options.only),
            "live": verify_live(bench, options.only),
        }
        for title, rows in tables.items():
            if options.what in (title, "all"):
                print(INJECTED_HEAD)
                for row in rows:
                    print(row.line(), flush=True)
                    missed += not row.found
        if options.what in ("healthy", "all"):
            print(HEALTHY_HEAD)
            for line, held in verify_healthy(bench, options.only, options.seeds):
                print(line, flush=True)
                missed += not held
        if options.what in ("turned", "all"):
            print("| cell | levels | injected bug | verdict |\n|---|---|---|---|")
            for line, differs in verify_turned(bench, options.only, options.every):
                print(line, flush=True)
                missed += not differs
        if options.what == "present":
            print("| finding | judged | here | verdict | s |\n|---|---|---|---|---|")
            for line, agrees in verify_present(bench, options.only):
                print(line, flush=True)
                missed += not agrees
    print(f"{missed} wrong")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

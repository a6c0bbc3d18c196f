"""`make verify-<strategy>-<model>-<N>cpu`: the first tensor in which a strategy differs from a
reference.

Trains the reference and the strategy from the same weights on the same batches up to one iteration,
whose tensors both write (`megatron_patches.capture`); `parakit.verify` compares them. Where errors spread
from module to module, the strategy runs again with the reference's tensors in the place of its own. All
of it is in one folder of the runs folder: two run folders and `verify/<name>/`; the tensors are removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.run import Status, utc_stamp
from parakit.artifacts.verdict import VERIFY_FOLDER, VerifyOutcome
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.flags import Flags, merge_flags
from parakit.experiments.verify.logged import LOG_FILE, compare_logs
from parakit.experiments.verify.pairs import Verification, compose_pair, parse_pair
from parakit.formatting.terminal import say
from parakit.launch import (
    Launch,
    Options,
    WarmPool,
    check_launch,
    describe_chosen_split,
    describe_vocabulary_change,
    ensure_initial_checkpoint,
    execute_launch,
    format_make_command,
    make_sample,
    print_dry_run,
)
from parakit.verify import (
    Capture,
    Drift,
    Judgement,
    VerifyError,
    confirm,
    count_seeds,
    explain_by_parts,
    judge,
    measure_drift,
    needs_parts,
    read_capture,
    reassemble_to_one_rank,
    refuse_comparison,
    write_forced,
    write_page,
    write_verdict,
)

Train = Callable[[str, Launch], str]
"""Trains a launch that is a part of a verification, and leaves its log beside the part's tensors
(`LOG_FILE`); returns how it failed, empty if it did not."""

ROUNDING_PROBES = 3
DRIFT_RUNS = 2
"""Runs of the reference by which it is measured how far earlier iterations' rounding carries."""
FIRST_DRIFT_ITERATION = 2
"""The first iteration in which that is asked: before it no iteration has rounded a state or a weight."""
NEAR_SEEDS = 3
"""Seeds in which an error near its tolerance is looked for, the seed that was asked for included."""
FURTHER_LOSSES = {"auxiliary loss": "--moe-aux-loss-coeff", "z loss": "--moe-z-loss-coeff"}
"""Beside the model's own, by the flags that switch them off."""
_PART_NAMES = {"begun": "strategy with the reference's routing and weights"}
"""What a part is called where it fails."""


@dataclass(frozen=True)
class SharedReferences:
    """Trains a reference once for all strategies that are compared with the same one."""

    folder: Path
    """Takes the references' tensors, hundreds of megabytes each, until `forget`."""

    def around(self, train: Train, scratch: Path) -> Train:
        """`train`, but for references that are here already; tensors are expected in `scratch`."""

        def trained(part: str, launch: Launch) -> str:
            if not part.startswith("reference"):
                return train(part, launch)
            # What its tensors follow from, as far as verifications of one command differ in it.
            names = (variables.PATCH_FILE_SHA256, variables.CAPTURE_ITERATION)
            values = (launch.environment.get(name, "") for name in names)
            words = (*launch.flags, str(launch.devices), str(launch.entry.path), *values)
            key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
            kept = self.folder / f"{part}-{key}"
            if not kept.is_dir():
                if failure := train(part, launch):
                    return failure
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(scratch / part, kept)
            (scratch / part).symlink_to(kept)
            return ""

        return trained

    def forget(self) -> None:
        """Remove them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def verify(
    target: str, given: Namespace, options: Options, console: Console, also: Path | None = None
) -> int:
    """Run a verification; 0 held, 1 differs, 2 not comparable. `also` is a run folder for the results.

    Raises:
        LaunchError: It cannot run here; nothing was written.
    """
    verification = compose_pair(parse_pair(target, given, options))
    if options.dry_run:
        return max(map(print_dry_run, verification.launches))
    folder = options.runs / f"{utc_stamp()}-{verification.pair.target}"
    return run_verification(verification, console, folder, also).verdict.exit_code


def run_verification(
    verification: Verification,
    console: Console,
    folder: Path,
    also: Path | None = None,
    shared: SharedReferences | None = None,
) -> Judgement:
    """Say if another model is verified, check that it can run here, train, judge, print the verdict.

    Args:
        folder: It gets the run folders and the verdict.
        also: A run folder that gets the results as well.
        shared: References of other strategies, of which this one's may be one.

    Raises:
        LaunchError: It cannot run here; nothing was written.
    """
    launches, pair = verification.launches, verification.pair
    for sentence in (
        describe_vocabulary_change(verification.strategy),
        describe_chosen_split(verification.strategy),
    ):
        if sentence:
            say(console, sentence, "yellow")
    for launch in launches:
        make_sample(launch.data, console)
        check_launch(launch)
    results = folder / VERIFY_FOLDER / pair.job.name

    with WarmPool() as pool:
        verification = verification.forked(pool)
        for launch in verification.launches:
            ensure_initial_checkpoint(launch, console)
        with _make_scratch_folder(folder) as scratch:

            def trained(part: str, launch: Launch) -> str:
                """Train as any target does, in a run folder of the part's name."""
                run, status = execute_launch(launch, folder, console, part)
                run.rename(folder / part)
                keep_log(folder / part / LOG_FILE, scratch / part)
                how = f"ended '{status.status}': {status.reason}"
                return "" if status.status is Status.OK else how

            train = trained if shared is None else shared.around(trained, scratch)
            judgement = train_and_judge(verification, scratch, train)
    verdict = replace(
        judgement.verdict,
        reference=pair.other,
        layout=pair.job.strategy,
        mode=verification.mode,
        command=format_make_command(pair.target, pair.variables),
    )
    judgement = replace(judgement, verdict=verdict)
    _write_results(results, judgement)  # Without the tensors there is room again.
    if also is not None:
        shutil.copytree(results, also / VERIFY_FOLDER / results.name, dirs_exist_ok=True)
    _print_verdict(judgement, results, console)
    return judgement


def keep_log(log: Path, tensors: Path) -> None:
    """Copy a run's log beside the tensors that the run has captured, if it has captured any."""
    if tensors.is_dir():
        shutil.copyfile(log, tensors / LOG_FILE)


def train_and_judge(verification: Verification, scratch: Path, train: Train) -> Judgement:
    """Train both with `train`, compare their tensors; where errors spread, train the strategy again.

    If all tensors held, what the logs print is compared. Where the iteration begins with wrong weights,
    the one in which they became wrong is looked for. An error near its tolerance is looked for in other
    seeds, too: rounding exceeds a measured tolerance in few of them, a fault in all.
    """
    judgement = _IterationVerification(
        verification.iteration, verification, scratch, train
    ).judged()
    if judgement.is_near_tolerance and verification.saving is None:
        return _count_wrong_seeds(judgement, verification, scratch, train)
    right, wrong = 0, verification.iteration
    while judgement.begins_before and verification.saving is None and wrong - right > 1:
        tried = (right + wrong) // 2
        earlier = _IterationVerification(tried, verification, scratch, train).judged()
        if earlier.first is None and earlier.verdict.verdict is not VerifyOutcome.HELD:
            break  # It could not be compared.
        if earlier.first is None:
            right = tried
        else:
            judgement, wrong = earlier, tried
    return judgement


def _count_wrong_seeds(
    judgement: Judgement, verification: Verification, scratch: Path, train: Train
) -> Judgement:
    """Return the judgement with the number of seeds in which some tensor is wrong.

    Other seeds start from the same weights, with other batches. A seed that cannot be compared is not
    counted.
    """
    num_wrong = num_seeds = 1
    for number in range(1, NEAR_SEEDS):
        other = verification.with_other_batches(number)
        at_seed = _IterationVerification(
            verification.iteration, other, scratch, train, label=f"-seed-{number}"
        )
        outcome = at_seed.judged().verdict.verdict
        num_seeds += outcome is not VerifyOutcome.NOT_COMPARABLE
        num_wrong += outcome is VerifyOutcome.DIFFERS
    return count_seeds(judgement, num_wrong, num_seeds)


@dataclass(frozen=True)
class _IterationVerification:
    """A verification by the tensors of one iteration."""

    iteration: int
    verification: Verification
    scratch: Path
    train: Train
    label: str = ""
    """Ends the names of what is trained with another seed than is asked for."""

    @property
    def suffix(self) -> str:
        """Ends the names of what is trained for another iteration or seed than is asked for."""
        is_asked_for = self.iteration == self.verification.iteration
        return self.label if is_asked_for else f"{self.label}-{self.iteration}"

    def judged(self) -> Judgement:
        """The judgement on it."""
        try:
            return self._compare_logs(self._judged())
        except VerifyError as error:
            return refuse_comparison(str(error))
        except OSError as error:
            return refuse_comparison(
                f"The tensors in {relative_to_root(self.scratch)} could not be read or written "
                f"({error.strerror}); see to it that there is room, or name another folder with RUNS=."
            )

    def _compare_logs(self, judgement: Judgement) -> Judgement:
        """Return the judgement with what the logs print compared, if all tensors held.

        They are compared once, of the iteration that is asked for and all before it.
        """
        if judgement.verdict.verdict is not VerifyOutcome.HELD or self.suffix:
            return judgement
        # A run from the reference's routing and weights prints what they give.
        part = "begun" if self._tensors("begun").is_dir() else "strategy"
        tensors, reference = self._tensors(part), self._tensors("reference")
        return compare_logs(
            judgement,
            tensors / LOG_FILE,
            reference / LOG_FILE,
            read_capture(tensors).first,
            same_backend=self.verification.may_drift,
        )

    def _judged(self) -> Judgement:
        verification, strategy = self.verification, self.verification.strategy
        reference = self._captured("reference", verification.reference, ROUNDING_PROBES)
        if verification.saving is not None:
            checkpoint = self.scratch / "checkpoint"
            saved = verification.saved(verification.saving, checkpoint)
            if failure := self.train(f"saved{self.suffix}", saved):
                raise VerifyError(f"The saved {failure}")
            strategy = verification.resumed(strategy, checkpoint)
        ours = self._captured("strategy", strategy)
        whole = reassemble_to_one_rank(
            reference, ours, self.scratch / f"whole{self.suffix}" / "reference"
        )
        drifted: Drift = {}
        judgement = judge(whole, ours)
        may_drift = verification.may_drift and self.iteration >= FIRST_DRIFT_ITERATION
        if may_drift and judgement.carries_earlier:
            drifted = self._drift(reference)
            judgement = judge(whole, ours, drifted)
        if judgement.needs_same_start:
            start = self._tensors("start")
            write_forced(whole, ours, start, start_alone=True)
            ours = self._captured("begun", strategy, forced=start)
            judgement = judge(whole, ours, drifted)
            if may_drift and judgement.carries_earlier and not drifted:
                judgement = judge(whole, ours, self._drift(reference))
        if judgement.may_have_spread:
            write_forced(whole, ours, self._tensors("given"))
            try:
                ours = self._captured("forced", strategy, forced=self._tensors("given"))
                judgement = confirm(judgement, whole, ours)
            except VerifyError:
                return judgement
        if verification.may_drift and len(reference.ranks) == 1 and needs_parts(judgement):
            with suppress(VerifyError):
                return self._explained(judgement, reference, ours)
        return judgement

    def _explained(self, judgement: Judgement, reference: Capture, ours: Capture) -> Judgement:
        """With the part of a gradient that is wrong, where the whole does not say what is."""
        launch, without = self.verification.reference, {}
        given = self._tensors("given-to-reference")
        write_forced(reference, reference, given)
        for name, flag in FURTHER_LOSSES.items():
            if launch.model.shape.experts and Flags(launch.flags).number(flag) > 0:
                other = replace(launch, flags=merge_flags(launch.flags, (flag, "0")))
                part = f"reference-without-{flag.removeprefix('--')}"
                without[name] = self._captured(part, other, forced=given)
        parts = self._captured("reference-parts", launch, parts="1")
        return explain_by_parts(judgement, ours, parts, without)

    def _drift(self, reference: Capture) -> Drift:
        names = (f"reference-drifted-{number}" for number in range(DRIFT_RUNS))
        launch = self.verification.reference
        return measure_drift(
            reference, (self._captured(name, launch, drift=name) for name in names)
        )

    def _captured(
        self,
        part: str,
        launch: Launch,
        seeds: int = 0,
        forced: Path | None = None,
        drift: str = "",
        parts: str = "",
    ) -> Capture:
        environment = {
            variables.CAPTURE: relative_to_root(self._tensors(part)),
            variables.CAPTURE_ITERATION: str(self.iteration),
            variables.CAPTURE_SEEDS: str(seeds),
            variables.CAPTURE_FORCED: relative_to_root(forced) if forced else "",
            variables.CAPTURE_DRIFT: drift,
            variables.CAPTURE_PARTS: parts,
        }
        launch = replace(launch, environment={**launch.environment, **environment})
        if failure := self.train(f"{part}{self.suffix}", launch):
            raise VerifyError(f"The {_PART_NAMES.get(part, part)} {failure}")
        return read_capture(self._tensors(part))

    def _tensors(self, part: str) -> Path:
        return self.scratch / f"{part}{self.suffix}"


def _write_results(results: Path, judgement: Judgement) -> None:
    try:
        write_verdict(results, judgement)
        write_page(results, judgement)
    except OSError as error:
        raise LaunchError(
            f"{judgement.verdict.sentence}; it could not be written to {relative_to_root(results)} "
            f"({error.strerror}): see to it that there is room, or name another folder with RUNS=."
        ) from None


@contextmanager
def _make_scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder for the tensors, which are many times the model's size; removed at the end."""
    scratch = folder / "tensors"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise LaunchError(
            f"{relative_to_root(scratch)} cannot be made ({error.strerror}); name another folder with RUNS=."
        ) from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _print_verdict(judgement: Judgement, results: Path, console: Console) -> None:
    verdict = judgement.verdict
    verdict.show_outcome(console)
    if verdict.verdict is VerifyOutcome.HELD and verdict.routing_flips:
        say(console, f"  {verdict.routing_flips} routing choices within rounding differ")
    if verdict.verdict is VerifyOutcome.HELD and verdict.logged:
        say(console, f"the logs: {verdict.logged}")
    if verdict.verdict is VerifyOutcome.DIFFERS:
        path, _, line = (verdict.source or "").rpartition(":")
        if path and os.environ.get("GITHUB_ACTIONS"):  # On the pull request's line.
            say(console, f"::error file={path},line={line}::{verdict.line}")
        say(console, f"  iteration  {verdict.iteration}")
        say(console, f"  ranks      {', '.join(map(str, verdict.ranks))}")
        say(console, f"  error      {verdict.error:.3g}, tolerance {verdict.tolerance:.3g}")
        by_itself = {True: "yes", False: "no: errors of others add up", None: "not asked"}
        say(console, f"  by itself  {by_itself[verdict.confirmed]}")
        for line in verdict.also:
            say(console, f"  also       {line}")
    if verdict.mode:
        say(console, f"compared: {verdict.mode}")
    if verdict.seen:
        own = f", and {verdict.initialised:,} own initial weights" if verdict.initialised else ""
        of = f"{verdict.compared:,} of {verdict.seen:,} tensors"
        say(console, f"compared {of} with {verdict.reference}'s{own}")
    for line in verdict.not_aligned[:5]:
        # Each name once for all layers; `verdict.json` has them all.
        names, _, why = line.rpartition(": ")
        shown = dict.fromkeys(re.sub(r"\.(layers|local_experts)\.\d+", r".\1.*", names).split(" "))
        say(console, f"not compared: {' '.join(shown)}: {why}")
    say(console, f"→ {relative_to_root(results)}/verify.html")

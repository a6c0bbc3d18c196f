"""Verify a strategy: train it and a reference, and find the first tensor in which the two differ.

This is `make verify-<strategy>-<model>-<N>cpu`. Strategy and reference train from the same weights on the same
batches up to one iteration, in which both capture their tensors (`megatron_patches.capture`). `parakit.verify`
compares the tensors. If errors may have spread from one module to others, the strategy runs again with the
reference's tensors as inputs. A verification is one folder in the runs folder: the run folders of its parts, and
`verify/<name>/` with the verdict. The captured tensors are removed.
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
from parakit.artifacts.verdict import VERIFY_FOLDER, VerifyOutcome, VerifyVerdict
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.flags import Flags, merge_flags
from parakit.experiments.verify.changes import list_nearest_changes
from parakit.experiments.verify.logged import LOG_FILE, compare_logs
from parakit.experiments.verify.pairs import LaunchPair, Verification, compose_pair, parse_pair
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
    find_unstable_iteration,
    is_right_without_loss,
    judge,
    measure_drift,
    name_wrong_loss,
    needs_parts,
    read_capture,
    reassemble_to_one_rank,
    refuse_comparison,
    report_unstable_runs,
    write_forced,
    write_page,
    write_verdict,
)

Train = Callable[[str, Launch], str]
"""Function that trains one run of a verification, given the run's name (such as `reference`) and its launch.

It leaves the run's log next to the captured tensors (`LOG_FILE`), and returns why the run failed; empty if it ended
well.
"""

ROUNDING_PROBES = 3
"""Runs of the reference's iteration with inputs changed by rounding, which measure the tolerances."""
DRIFT_RUNS = 2
"""Further runs of the reference that measure how rounding of earlier iterations carries over."""
FIRST_DRIFT_ITERATION = 2
"""First iteration for which drift is measured: before it, no iteration has rounded a state or a weight."""
NEAR_SEEDS = 3
"""Seeds with which an error near its tolerance is verified, the requested seed included."""
EXPERT_LOSSES = {"auxiliary loss": "--moe-aux-loss-coeff", "z loss": "--moe-z-loss-coeff"}
"""Losses of a model with experts beside its main loss, with the flag whose value 0 switches each off."""
MTP_LOSSES = {"MTP loss": "--mtp-loss-scaling-factor"}
"""The same for a model that predicts several tokens per position."""
_MOST_SHOWN_NOT_COMPARED = 5
_PART_NAMES = {"begun": "strategy with the reference's routing and weights"}
"""Names of parts in error messages, where a part's name alone is unclear."""


@dataclass(frozen=True)
class SharedReferences:
    """Store of reference runs' tensors, so that strategies with an equal reference train it once."""

    folder: Path
    """Folder of the tensors, hundreds of megabytes per reference, until `remove`."""
    megatron: str = ""
    """Name of the references' Megatron, such as a commit; empty for the path from which it is run."""
    max_bytes: int | None = None
    """Size in bytes above which a reference is not stored; None stores all."""

    def wrap(self, train: Train, scratch: Path) -> Train:
        """Return a function that trains as `train` does, but takes stored references instead of training them.

        Args:
            train: Function that trains a run and leaves its tensors in the folder `scratch/<name of the run>`.
            scratch: Folder in which a stored reference appears as a link.

        Returns:
            The function. A reference that is not stored yet is trained and, up to `max_bytes`, stored.
        """

        def train_or_link(part: str, launch: Launch) -> str:
            if not part.startswith("reference"):
                return train(part, launch)
            stored = self.folder / f"{part}-{self._hash_reference(launch)}"
            if not stored.is_dir():
                failure = train(part, launch)
                if failure or self._is_too_large(scratch / part):
                    return failure
                stored.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(scratch / part, stored)
            (scratch / part).symlink_to(stored)
            return ""

        return train_or_link

    def remove(self) -> None:
        """Remove all stored references."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_too_large(self, tensors: Path) -> bool:
        """Return True if the files of a folder of tensors have more than `max_bytes` bytes."""
        if self.max_bytes is None:
            return False
        return sum(path.stat().st_size for path in tensors.rglob("*")) > self.max_bytes

    def _hash_reference(self, launch: Launch) -> str:
        """Return a hash by which reference runs with equal tensors are recognised.

        The hash is over the flags, the number of devices, the program, the patch file and the captured iteration.
        Everything else is equal for all verifications that share a folder.
        """
        environment = launch.environment
        parts = (
            *launch.flags,
            str(launch.devices),
            self.megatron or str(launch.entry.path),
            environment.get(variables.PATCH_FILE_SHA256, ""),
            environment.get(variables.CAPTURE_ITERATION, ""),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def verify(
    target: str, variables: Namespace, options: Options, console: Console, also: Path | None = None
) -> int:
    """Run the verification of a target; return 0 if it held, 1 if it differs, 2 if it is not comparable.

    Args:
        target: `verify-<strategy>-<model>-<N>cpu`.
        variables: Arguments that only verifications have, such as REFERENCE=.
        options: Make variables.
        console: Shows progress and verdict.
        also: A run folder that gets a copy of the results, or None.

    Raises:
        LaunchError: The verification cannot run here; nothing was written.
    """
    verification = compose_pair(parse_pair(target, variables, options))
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
    """Train the runs of a verification, and write, print and return the judgement.

    Nothing is trained if a run cannot work on this machine.

    Args:
        verification: The composed strategy and reference.
        console: Shows progress and verdict, and a notice if flags or variables changed the model.
        folder: Folder for the run folders and the results.
        also: A run folder that gets a copy of the results; None makes no copy.
        shared: Stored reference runs of other strategies. The verification takes the stored runs that it needs, and
            stores the references that it trains. None trains all runs.

    Raises:
        LaunchError: The verification cannot run here; nothing was written.
    """
    pair = verification.pair
    _check_launches(verification, console)
    results = folder / VERIFY_FOLDER / pair.job.name
    with WarmPool() as pool:
        verification = verification.fork_from_pool(pool)
        for launch in verification.launches:
            ensure_initial_checkpoint(launch, console)
        with _make_scratch_folder(folder) as scratch:
            train = _train_in_run_folders(folder, scratch, console)
            if shared is not None:
                train = shared.wrap(train, scratch)
            judgement = train_and_judge(verification, scratch, train)
            if pair.is_bf16 and judgement.verdict.verdict is VerifyOutcome.HELD:
                judgement = _repeat_in_fp32(judgement, pair, pool, console, scratch, train)
    verdict = replace(
        judgement.verdict,
        reference=pair.reference_strategy,
        layout=pair.job.strategy,
        mode=verification.mode,
        command=format_make_command(pair.target, pair.variables),
        changed=_list_changes_near_error(judgement.verdict, verification.strategy),
    )
    judgement = replace(judgement, verdict=verdict)
    # Only now, when the tensors are removed, a disk that they filled has room for the results.
    _write_results(results, judgement)
    if also is not None:
        shutil.copytree(results, also / VERIFY_FOLDER / results.name, dirs_exist_ok=True)
    _print_verdict(judgement, results, console)
    return judgement


def _train_in_run_folders(folder: Path, scratch: Path, console: Console) -> Train:
    """Return a function that trains a run in `folder`, in a run folder that is named as the run.

    The function returns why the run failed, or an empty text. It copies the run's log next to the run's tensors, to
    `scratch/<name of the run>`.
    """

    def train(part: str, launch: Launch) -> str:
        run, status = execute_launch(launch, folder, console, part)
        run.rename(folder / part)
        keep_log(folder / part / LOG_FILE, scratch / part)
        if status.status is Status.OK:
            return ""
        return f"ended '{status.status}': {status.reason}"

    return train


def _repeat_in_fp32(
    judgement: Judgement,
    pair: LaunchPair,
    pool: WarmPool,
    console: Console,
    scratch: Path,
    train: Train,
) -> Judgement:
    """Verify a pair that held in bf16 once more in fp32, and return the judgement with the result.

    A wrong computation changes a tensor by a fraction that can be smaller than the rounding of bf16, 1 in 256. It
    is then below every tolerance in bf16, and above them in fp32. If the fp32 runs differ, their judgement is
    returned. If the pair cannot be trained in fp32, the judgement of bf16 is returned with the reason.
    """
    try:
        verification = compose_pair(replace(pair, is_bf16=False)).fork_from_pool(pool)
        for launch in verification.launches:
            check_launch(launch)
            ensure_initial_checkpoint(launch, console)
    except LaunchError as error:
        return _add_fp32_sentence(judgement, f"not repeated in fp32: {error}")
    repeated = _IterationVerification(
        verification.iteration, verification, scratch, train, label="-fp32"
    ).judge_iteration()
    verdict = repeated.verdict
    if verdict.verdict is VerifyOutcome.DIFFERS:
        return _add_fp32_sentence(repeated, "differs in fp32; in bf16 the rounding hides the error")
    if verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
        return _add_fp32_sentence(judgement, f"not compared in fp32: {verdict.reason}")
    ratio = verdict.worst_ratio or 0.0
    return _add_fp32_sentence(
        judgement, f"held in fp32, too: no error is above {ratio:.2f} of its tolerance"
    )


def _add_fp32_sentence(judgement: Judgement, sentence: str) -> Judgement:
    """Return the judgement with a sentence on the repetition in fp32."""
    return replace(judgement, verdict=replace(judgement.verdict, in_fp32=sentence))


def _check_launches(verification: Verification, console: Console) -> None:
    """Print notices on a changed vocabulary or split, make missing sample data, and check each launch.

    Raises:
        LaunchError: A launch cannot run here.
    """
    for notice in (
        describe_vocabulary_change(verification.strategy),
        describe_chosen_split(verification.strategy),
    ):
        if notice:
            say(console, notice, "yellow")
    for launch in verification.launches:
        make_sample(launch.data, console)
        check_launch(launch)


def keep_log(log: Path, tensors: Path) -> None:
    """Copy a run's log next to the tensors that the run has captured; do nothing if it captured none."""
    if tensors.is_dir():
        shutil.copyfile(log, tensors / LOG_FILE)


def train_and_judge(verification: Verification, scratch: Path, train: Train) -> Judgement:
    """Train the runs of a verification with the function `train`, and return the judgement on their tensors.

    If all tensors held, the values that the logs print are compared, too. If the iteration begins with wrong
    weights, the first iteration that differs is found by bisection, and the judgement is about that iteration.
    If an error is near its tolerance, the strategy is verified with other seeds too. Rounding exceeds the
    tolerance with few seeds, and a fault exceeds it with all seeds. Tensors are written to `scratch`.
    """
    iteration = verification.iteration
    judgement = _IterationVerification(iteration, verification, scratch, train).judge_iteration()
    if verification.saving is not None:
        return judgement  # The checkpoint belongs to one seed and one iteration.
    if judgement.is_near_tolerance:
        return _count_wrong_seeds(judgement, verification, scratch, train)
    if judgement.begins_before:
        return _find_first_wrong_iteration(judgement, verification, scratch, train)
    return judgement


def _find_first_wrong_iteration(
    judgement: Judgement, verification: Verification, scratch: Path, train: Train
) -> Judgement:
    """Return the judgement on the first iteration that differs, which is found by bisection.

    The search ends at an iteration whose weights are right at its beginning. It ends early if an iteration cannot be
    compared. The judgement is then about the earliest iteration that is known to differ. Each step trains the strategy
    again. If the runs have different weights after the same iteration, the search cannot go on, and the judgement says
    that the strategy is not the same twice.

    Args:
        judgement: Judgement on the verification's iteration, which begins with wrong weights.
        verification: The composed strategy and reference.
        scratch: Folder for the captured tensors.
        train: Function that trains a run.
    """
    last_right, first_wrong = 0, verification.iteration
    examined = [_IterationVerification(first_wrong, verification, scratch, train)]
    while judgement.begins_before and first_wrong - last_right > 1:
        middle = (last_right + first_wrong) // 2
        examined.append(_IterationVerification(middle, verification, scratch, train))
        earlier = examined[-1].judge_iteration()
        if earlier.verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
            break
        captures = [iteration.read_strategy() for iteration in examined]
        unstable_iteration = find_unstable_iteration(captures)
        if unstable_iteration is not None:
            return report_unstable_runs(judgement, unstable_iteration)
        if earlier.first is not None:
            judgement, first_wrong = earlier, middle
        else:
            last_right = middle
    return judgement


def _count_wrong_seeds(
    judgement: Judgement, verification: Verification, scratch: Path, train: Train
) -> Judgement:
    """Verify a strategy with further seeds; return the judgement with the number of seeds that have a wrong tensor.

    The runs with other seeds start from the same weights and train other batches. A seed whose runs cannot be
    compared is not counted.
    """
    num_wrong = num_seeds = 1  # The judgement itself is about the first seed.
    for number in range(1, NEAR_SEEDS):
        shifted = verification.shift_seed(number)
        label = f"-seed-{number}"
        at_seed = _IterationVerification(shifted.iteration, shifted, scratch, train, label=label)
        outcome = at_seed.judge_iteration().verdict.verdict
        if outcome is VerifyOutcome.NOT_COMPARABLE:
            continue
        num_seeds += 1
        if outcome is VerifyOutcome.DIFFERS:
            num_wrong += 1
    return count_seeds(judgement, num_wrong, num_seeds)


@dataclass(frozen=True)
class _IterationVerification:
    """Verification by the tensors of one iteration.

    The runs `reference` and `strategy` are always trained, and further runs only if a judgement needs them. Each run
    trains up to this iteration, and has a folder of tensors in `scratch`.
    """

    iteration: int
    verification: Verification
    scratch: Path
    train: Train
    label: str = ""
    """End of the runs' names for another seed than the requested one; empty for the requested seed."""

    @property
    def suffix(self) -> str:
        """End of the runs' names; empty for the requested iteration and seed."""
        is_requested = self.iteration == self.verification.iteration
        return self.label if is_requested else f"{self.label}-{self.iteration}"

    def judge_iteration(self) -> Judgement:
        """Train the runs of the iteration, and return the judgement on their tensors and logs.

        If a run fails, or tensors cannot be read or written, the judgement is `not comparable` with the reason.
        """
        try:
            return self._compare_logs(self._judge_tensors())
        except VerifyError as error:
            return refuse_comparison(str(error))
        except OSError as error:
            return refuse_comparison(
                f"The tensors in {relative_to_root(self.scratch)} could not be read or written "
                f"({error.strerror}); see to it that there is room, or name another folder with RUNS=."
            )

    def read_strategy(self) -> Capture:
        """Return the capture of the strategy, which must have been trained.

        Raises:
            VerifyError: The capture is missing or incomplete.
        """
        return read_capture(self._tensor_folder("strategy"))

    def _compare_logs(self, judgement: Judgement) -> Judgement:
        """Compare the values that the logs of strategy and reference print, and return the judgement with the result.

        Logs are compared only if all tensors held, and only for the requested iteration and seed; else the judgement
        is returned unchanged.
        """
        if judgement.verdict.verdict is not VerifyOutcome.HELD or self.suffix:
            return judgement
        # A run from the reference's routing and weights prints the values that these give.
        part = "begun" if self._tensor_folder("begun").is_dir() else "strategy"
        tensors, reference = self._tensor_folder(part), self._tensor_folder("reference")
        return compare_logs(
            judgement,
            tensors / LOG_FILE,
            reference / LOG_FILE,
            read_capture(tensors).first,
            same_backend=self.verification.may_drift,
        )

    def _judge_tensors(self) -> Judgement:
        """Train reference and strategy, and return the judgement on their tensors.

        Further runs are trained in four cases, each of which has a comment below.

        Raises:
            VerifyError: A run failed, or the tensors cannot be compared.
            OSError: Tensors could not be read or written.
        """
        verification = self.verification
        reference = self._capture("reference", verification.reference, probes=ROUNDING_PROBES)
        strategy = verification.strategy
        if verification.saving is not None:
            strategy = self._train_saving_run(verification.saving)
        ours = self._capture("strategy", strategy)
        # The reference's tensors of all ranks, as one rank without parallelism would have them.
        full = reassemble_to_one_rank(
            reference, ours, self.scratch / f"whole{self.suffix}" / "reference"
        )
        drift: Drift = {}
        judgement = judge(full, ours)
        # 1. Rounding in earlier iterations may have caused the error, so its size is measured.
        may_drift = verification.may_drift and self.iteration >= FIRST_DRIFT_ITERATION
        if may_drift and judgement.carries_earlier:
            drift = self._measure_drift(reference)
            judgement = judge(full, ours, drift)
        # 2. Expert choices or initial weights differ, so the strategy starts once more from the reference's.
        if judgement.needs_same_start:
            start = self._tensor_folder("start")
            write_forced(full, ours, start, start_alone=True)
            ours = self._capture("begun", strategy, forced=start)
            judgement = judge(full, ours, drift)
            if may_drift and judgement.carries_earlier and not drift:
                judgement = judge(full, ours, self._measure_drift(reference))
        # 3. An error may have spread from one module to others, so each module gets the reference's inputs.
        if judgement.may_have_spread:
            inputs = self._tensor_folder("given")
            write_forced(full, ours, inputs)
            try:
                ours = self._capture("forced", strategy, forced=inputs)
                judgement = confirm(judgement, full, ours)
            except VerifyError:
                return judgement
        # 4. A gradient is wrong, and the parts of the reference's gradient may show which part is wrong.
        can_capture_parts = verification.may_drift and len(reference.ranks) == 1
        if can_capture_parts and needs_parts(judgement):
            with suppress(VerifyError):
                return self._explain_by_parts(judgement, reference, ours)
        return judgement

    def _train_saving_run(self, saving: Launch) -> Launch:
        """Train the run `saving`, which saves a checkpoint; return the launch of the strategy that resumes from it.

        Raises:
            VerifyError: The run failed.
        """
        checkpoint = self.scratch / "checkpoint"
        launch = self.verification.add_saving_flags(saving, checkpoint)
        failure = self.train(f"saved{self.suffix}", launch)
        if failure:
            raise VerifyError(f"The saved {failure}")
        return self.verification.add_resuming_flags(self.verification.strategy, checkpoint)

    def _explain_by_parts(
        self, judgement: Judgement, reference: Capture, ours: Capture
    ) -> Judgement:
        """Return the judgement with the wrong part of a gradient as the kind of the error.

        The parts are the gradients of each micro batch and of each additional loss. The judgement is returned
        unchanged if no part explains the error. The reference is trained once more to capture the gradient of
        each micro batch. For each additional loss of the model, the reference is also trained once without that
        loss. All modules then get the reference's inputs, so that only the gradient of that loss is missing. If no
        sum of parts explains the error, the strategy is trained without each loss, too.

        Args:
            judgement: Judgement whose first wrong tensor is a gradient.
            reference: Capture of the reference on one rank.
            ours: Capture of the strategy that was judged.

        Raises:
            VerifyError: A run failed.
        """
        launch = self.verification.reference
        captures_without_loss: dict[str, Capture] = {}
        # Earlier iterations without a loss lead to other weights, so the reference's weights, expert choices
        # and module inputs replace those of the runs without a loss.
        inputs = self._tensor_folder("given-to-reference")
        write_forced(reference, reference, inputs)
        for name, flag in list_further_losses(launch).items():
            without_loss = replace(launch, flags=merge_flags(launch.flags, (flag, "0")))
            part = f"reference-without-{flag.removeprefix('--')}"
            captures_without_loss[name] = self._capture(part, without_loss, forced=inputs)
        parts = self._capture("reference-parts", launch, parts="1")
        explained = explain_by_parts(judgement, ours, parts, captures_without_loss)
        if needs_parts(explained) and judgement.may_have_spread:
            return self._find_wrong_loss(judgement, captures_without_loss)
        return explained

    def _find_wrong_loss(
        self, judgement: Judgement, captures_without_loss: dict[str, Capture]
    ) -> Judgement:
        """Return the judgement with a loss as the kind of the error if everything is right without this loss.

        For each loss the strategy is trained once without it, with the reference's tensors as inputs of all modules.

        Args:
            judgement: Judgement whose first wrong tensor is an activation gradient.
            captures_without_loss: Captures of the reference that leave out one loss each, by the name of the loss.

        Raises:
            VerifyError: A run failed.
        """
        launch = self.verification.strategy
        inputs = self._tensor_folder("given")
        for name, flag in list_further_losses(launch).items():
            without_loss = replace(launch, flags=merge_flags(launch.flags, (flag, "0")))
            part = f"strategy-without-{flag.removeprefix('--')}"
            ours = self._capture(part, without_loss, forced=inputs)
            if is_right_without_loss(judgement, ours, captures_without_loss[name]):
                return name_wrong_loss(judgement, name)
        return judgement

    def _measure_drift(self, reference: Capture) -> Drift:
        """Return the relative error that rounding in earlier iterations causes in each weight and optimizer state.

        The error is measured: the reference is trained `DRIFT_RUNS` more times, from weights that are changed by
        rounding.

        Raises:
            VerifyError: A run failed.
        """
        launch = self.verification.reference
        names = [f"reference-drifted-{number}" for number in range(DRIFT_RUNS)]
        captures = (self._capture(name, launch, drift=name) for name in names)
        return measure_drift(reference, captures)

    def _capture(
        self,
        part: str,
        launch: Launch,
        probes: int = 0,
        forced: Path | None = None,
        drift: str = "",
        parts: str = "",
    ) -> Capture:
        """Train one run and return the tensors that it captured.

        Args:
            part: Name of the run, such as `reference`.
            launch: Launch of the run.
            probes: Number of times that the iteration is repeated with inputs changed by rounding.
            forced: Folder of tensors that replace computed tensors of the run; None replaces nothing.
            drift: Seed with which the weights of earlier iterations are changed by rounding; empty changes nothing.
            parts: `1` also captures the gradient of each micro batch.

        Raises:
            VerifyError: The run failed.
        """
        environment = {
            variables.CAPTURE: relative_to_root(self._tensor_folder(part)),
            variables.CAPTURE_ITERATION: str(self.iteration),
            variables.CAPTURE_SEEDS: str(probes),
            variables.CAPTURE_FORCED: relative_to_root(forced) if forced else "",
            variables.CAPTURE_DRIFT: drift,
            variables.CAPTURE_PARTS: parts,
        }
        launch = replace(launch, environment={**launch.environment, **environment})
        failure = self.train(f"{part}{self.suffix}", launch)
        if failure:
            raise VerifyError(f"The {_PART_NAMES.get(part, part)} {failure}")
        return read_capture(self._tensor_folder(part))

    def _tensor_folder(self, part: str) -> Path:
        """Return the folder of the tensors of the run with the name `part`."""
        return self.scratch / f"{part}{self.suffix}"


def list_further_losses(launch: Launch) -> dict[str, str]:
    """Return the losses that a launch adds to its main loss, with the flag whose value 0 switches each off."""
    losses: dict[str, str] = {}
    if launch.model.shape.experts:
        losses |= EXPERT_LOSSES
    if Flags(launch.flags).has("--mtp-num-layers"):
        losses |= MTP_LOSSES
    flags = Flags(launch.flags)
    return {name: flag for name, flag in losses.items() if flags.number(flag) > 0}


def _list_changes_near_error(verdict: VerifyVerdict, strategy: Launch) -> tuple[str, ...]:
    """Return the checkout's changes that are nearest to the source of the wrong tensor, each as file and line.

    The result is empty if the strategy held, or if its Megatron is an installed package or a folder without a
    commit.
    """
    if verdict.source is None or strategy.entry.megatron_commit is None:
        return ()
    checkout = Path(strategy.entry.path).parent
    return tuple(map(str, list_nearest_changes(checkout, verdict.source)))


def _write_results(results: Path, judgement: Judgement) -> None:
    """Write `verdict.json`, `junit.xml`, `first.npz` and `verify.html` into the folder `results`.

    Raises:
        LaunchError: The folder cannot be written; the message holds the verdict.
    """
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
    """Yield a new folder `tensors` in `folder`, and remove it with its content at the end of the `with` block.

    The captured tensors take many times the size of the model.

    Raises:
        LaunchError: The folder cannot be made.
    """
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
    """Print the verdict, the first wrong tensor, the compared and uncompared tensors, and the page's path.

    Lines without content are left out. At most `_MOST_SHOWN_NOT_COMPARED` lines name tensors that were not compared.
    """
    verdict = judgement.verdict
    verdict.show_outcome(console)
    if verdict.verdict is VerifyOutcome.HELD:
        if verdict.routing_flips:
            say(console, f"  {verdict.routing_flips} routing choices within rounding differ")
        if verdict.logged:
            say(console, f"the logs: {verdict.logged}")
    if verdict.verdict is VerifyOutcome.DIFFERS:
        _print_difference(verdict, console)
    if verdict.in_fp32:
        say(console, verdict.in_fp32)
    if verdict.mode:
        say(console, f"compared: {verdict.mode}")
    if verdict.seen:
        say(console, _describe_compared_tensors(verdict))
    for line in verdict.not_aligned[:_MOST_SHOWN_NOT_COMPARED]:
        say(console, f"not compared: {_shorten_tensor_names(line)}")
    say(console, f"→ {relative_to_root(results)}/verify.html")


def _describe_compared_tensors(verdict: VerifyVerdict) -> str:
    """Return how many of the strategy's tensors were compared, and how many of its own initial weights."""
    text = f"compared {verdict.compared:,} of {verdict.seen:,} tensors with {verdict.reference}'s"
    if verdict.initialised:
        text += f", and {verdict.initialised:,} own initial weights"
    return text


def _shorten_tensor_names(line: str) -> str:
    """Return a line `name name …: reason` with `*` for the numbers of layers and experts, and equal names only once.

    `verdict.json` has all names.
    """
    names, _, reason = line.rpartition(": ")
    without_numbers = re.sub(r"\.(layers|local_experts)\.\d+", r".\1.*", names)
    distinct_names = dict.fromkeys(without_numbers.split(" "))
    return f"{' '.join(distinct_names)}: {reason}"


def _print_difference(verdict: VerifyVerdict, console: Console) -> None:
    """Print iteration, ranks and error of the first wrong tensor, and the other independent errors.

    In a GitHub workflow, the nearest changed line is annotated in the pull request, too. If no line of the
    checkout is changed, the source line of the wrong module is annotated.
    """
    annotated = verdict.source or ""
    if verdict.changed:
        annotated = verdict.changed[0]
    path, _, line_number = annotated.rpartition(":")
    if path and os.environ.get("GITHUB_ACTIONS"):
        say(console, f"::error file={path},line={line_number}::{verdict.line}")
    for change in verdict.changed:
        say(console, f"  changed    {change}")
    say(console, f"  iteration  {verdict.iteration}")
    say(console, f"  ranks      {', '.join(map(str, verdict.ranks))}")
    say(console, f"  error      {verdict.error:.3g}, tolerance {verdict.tolerance:.3g}")
    # Whether the module is also wrong with the reference's tensors as inputs. None: it was not run with them.
    by_itself = {True: "yes", False: "no: errors of others add up", None: "not asked"}
    say(console, f"  by itself  {by_itself[verdict.confirmed]}")
    for line in verdict.also:
        say(console, f"  also       {line}")

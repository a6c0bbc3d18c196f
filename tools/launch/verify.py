"""`make verify-<strategy>-<model>-<N>cpu`: the first tensor in which a layout differs from a reference.

Trains the reference and the layout from the same weights on the same batches up to one iteration, whose
tensors both write (`megatron_patches.capture`); `tools.verify` compares them. Where errors spread from
module to module, the layout runs again with the reference's tensors in the place of its own. All of it
is in one folder of the runs folder: two run folders and `verify/<name>/`; the tensors are removed.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.data import make_missing_data
from tools.launch.errors import LaunchError
from tools.launch.execute import execute
from tools.launch.options import Options
from tools.launch.preflight import check
from tools.launch.start import ensure_start_checkpoint
from tools.launch.target import Target, parse_target
from tools.launch.train import compose_target, dry_run, flags_of_grammar
from tools.records.capture import (
    FOLDER_VARIABLE,
    FORCED_VARIABLE,
    ITERATION_VARIABLE,
    SEEDS_VARIABLE,
)
from tools.records.run import Status
from tools.records.verdict import VERIFY_FOLDER, Outcome
from tools.spec import settings
from tools.spec.files import from_root
from tools.spec.run import DeviceKind
from tools.spec.setting import one_of
from tools.spec.strategy import parse_strategy
from tools.verify.captured import VerifyError, read_capture
from tools.verify.page import write_page
from tools.verify.verdict import (
    Judgement,
    confirm,
    judge,
    may_have_spread,
    refused,
    write_forced,
    write_verdict,
)

Train = Callable[[str, Launch], str]
"""Trains a launch that is a part of a verification; returns how it failed, empty if it did not."""

PREFIX = "verify-"
ITERATION = 2
"""The first in which an update has been made: states are there, and weights have moved."""
MICRO_BATCH, MICRO_BATCHES = 2, 3
"""More than one of each, so that a wrong number of them shows, and no usual degree of parallelism."""
SEEDS = 3


@dataclass(frozen=True)
class Verification:
    """What is compared."""

    target: Target
    layout: Launch
    reference_strategy: str
    reference: Launch
    iteration: int

    @property
    def name(self) -> str:
        """As in the make target."""
        return self.target.name.removeprefix("train-")


@dataclass(frozen=True)
class _Training:
    """Trains as any target does, in run folders under one folder."""

    folder: Path
    console: Console

    def __call__(self, part: str, launch: Launch) -> str:
        run, status = execute(launch, self.folder, self.console, part)
        run.rename(self.folder / part)
        return "" if status.status is Status.OK else f"ended '{status.status}': {status.reason}"


def verify(name: str, options: Options, console: Console, also: Path | None = None) -> int:
    """Run a verification; 0 held, 1 differs, 2 not comparable.

    Args:
        name: The make target.
        options: The make variables.
        console: The terminal.
        also: A run folder that gets the results as well.

    Raises:
        LaunchError: It cannot run here; nothing was written.
    """
    verification = compose_verification(name, options)
    launches = (verification.reference, verification.layout)
    if options.dry_run:
        return max(dry_run(launch, options) for launch in launches)
    make_missing_data(launches, console)
    for launch in launches:
        check(launch, options.runs)
        ensure_start_checkpoint(launch, options, console)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = options.runs / f"{stamp}-{PREFIX}{verification.name}"
    results = folder / VERIFY_FOLDER / verification.name
    with _scratch(folder) as scratch:
        judgement = judged(verification, scratch, _Training(folder, console))
        verdict = replace(
            judgement.verdict,
            reference=verification.reference_strategy,
            layout=verification.target.strategy,
            command=_command(verification),
        )
        judgement = replace(judgement, verdict=verdict)
        write_verdict(results, judgement)
        write_page(results, judgement)
    if also is not None:
        shutil.copytree(results, also / VERIFY_FOLDER / verification.name, dirs_exist_ok=True)
    _print(judgement, results, console)
    return judgement.verdict.exit_code


def compose_verification(name: str, options: Options) -> Verification:
    """Compose both launches: same weights, same batches, same micro batches.

    Raises:
        LaunchError: The name is not in the grammar, or the layout does not fit its devices.
    """
    target = parse_target("train-" + name.removeprefix(PREFIX))
    if target.device is not DeviceKind.CPU:
        raise LaunchError(
            f"'{name}' names GPUs, on which the same run does not give the same bits; use …cpu."
        )
    degrees = parse_strategy(target.strategy, target.devices)
    micro = options.micro_batch_size or MICRO_BATCH
    # The interleaved schedule takes multiples of the pipeline's stages.
    least = max(MICRO_BATCHES, degrees.pipeline)
    if degrees.virtual_stages > 1:
        least = 2 * degrees.pipeline
    iteration = options.iterations or ITERATION
    options = replace(
        options,
        iterations=iteration,
        micro_batch_size=micro,
        global_batch_size=options.global_batch_size or micro * degrees.data * least,
        shared_start=True,
        ledger=False,
        saving=None,
        extra=(*_dtype_flags(), *options.extra),
    )
    reference = settings.REFERENCE.value(os.environ) or "baseline"
    devices = target.devices if reference != "baseline" else 1
    other = Target(reference, target.model, devices, target.device)
    own = replace(
        options,
        extra=(*options.extra, *(settings.EXTRA_B.value(os.environ) or ())),
        megatron_lm=settings.MEGATRON_LM_B.value(os.environ) or options.megatron_lm,
    )
    return Verification(
        target, _composed(target, own), reference, _composed(other, options), iteration
    )


def _composed(target: Target, options: Options) -> Launch:
    return compose_target(target, flags_of_grammar(target), options)


def _dtype_flags() -> tuple[str, ...]:
    dtype = settings.VERIFIED_DTYPE.read_as(one_of("fp32", "bf16"), "fp32 or bf16").value(
        os.environ
    )
    return ("--bf16",) if dtype == "bf16" else ()


def judged(verification: Verification, scratch: Path, train: Train) -> Judgement:
    """Train both with `train`, compare their tensors; where errors spread, train the layout again.

    Args:
        verification: What is compared.
        scratch: A folder for the tensors.
        train: Trains a launch.
    """
    reference, layout = verification.reference, verification.layout
    iteration = verification.iteration
    for part, launch, seeds in (("reference", reference, SEEDS), ("layout", layout, 0)):
        failure = train(part, _capturing(launch, scratch / part, iteration, seeds))
        if failure:
            return refused(f"The {part} {failure}")
    try:
        captured = read_capture(scratch / "reference")
        ours = read_capture(scratch / "layout")
        judgement = judge(captured, ours)
        if not may_have_spread(judgement):
            return judgement
        write_forced(captured, ours, scratch / "given")
        again = _capturing(layout, scratch / "forced", iteration, 0, scratch / "given")
        failure = train("forced", again)
        if failure:
            return judgement
        return confirm(judgement, captured, read_capture(scratch / "forced"))
    except VerifyError as error:
        return refused(str(error))


def _capturing(
    launch: Launch, folder: Path, iteration: int, seeds: int, forced: Path | None = None
) -> Launch:
    environment = {
        **launch.environment,
        FOLDER_VARIABLE: from_root(folder),
        ITERATION_VARIABLE: str(iteration),
        SEEDS_VARIABLE: str(seeds),
    }
    if forced is not None:
        environment[FORCED_VARIABLE] = from_root(forced)
    return replace(launch, environment=environment)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for the tensors, which are many times the model's size; removed at the end."""
    scratch = folder / "tensors"
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _command(verification: Verification) -> str:
    given = " ".join(
        f"{name}={shlex.quote(value)}" for name in _NAMES if (value := os.environ.get(name))
    )
    return f"make {PREFIX}{verification.name} {given}".strip()


_NAMES = (
    *("PLANT", "EXTRA", "EXTRA_B", "DTYPE", "REFERENCE", "MEGATRON_LM", "MEGATRON_LM_B", "ITERS"),
    *("SEED", "MICRO_BATCH", "GLOBAL_BATCH", "DROPOUT", "DATA", "FUSED"),
)
"""Variables that say what was verified."""


def _print(judgement: Judgement, results: Path, console: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    verdict = judgement.verdict
    if verdict.verdict is Outcome.NOT_COMPARABLE:
        say(f"not comparable: {verdict.reason}", "red")
    elif verdict.verdict is Outcome.HELD:
        ratio = verdict.worst_ratio or 0.0
        say(f"held: no error is above {ratio:.2f} of its tolerance", "green")
    else:
        say(f"differs at: {verdict.stage}, {verdict.module} ({verdict.tensor})", "red")
        say(f"  kind       {verdict.kind}")
        say(f"  ranks      {', '.join(map(str, verdict.ranks))}")
        say(f"  error      {verdict.error:.3g}, tolerance {verdict.tolerance:.3g}")
        by_itself = {True: "yes", False: "no: errors of others add up", None: "not asked"}
        say(f"  by itself  {by_itself[verdict.confirmed]}")
        say(f"  source     {verdict.source or 'unknown'}")
    if verdict.seen:
        say(f"compared {verdict.compared:,} of {verdict.seen:,} tensors with {verdict.reference}'s")
    for line in verdict.not_aligned[:5]:
        say(f"not compared: {line}")
    say(f"→ {from_root(results)}/verify.html")

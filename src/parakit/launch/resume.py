"""`make resume RUN=…`: a run resumes from its newest valid checkpoint.

In its own strategy it resumes in its own folder: log, events and checkpoints are added to, and what
belongs to one attempt is kept in `attempts/`. In another strategy (STRATEGY=pp2) it is another run, in a
folder of its own that names its parent, because its times and its memory are not its parent's. So it is
from a copy that `make reshard` wrote (CKPT=), which has optimizer states as the new strategy
shards them.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.run import CHECKPOINTS_FOLDER, RunRecord
from parakit.checkpoint import read_contents
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags, count_end_of_document_in_vocabulary, drop_flags, merge_flags
from parakit.config.model import imported_weights_folder, load_model
from parakit.config.run import Backend, PatchFile, RuntimeName
from parakit.config.strategy import (
    Parallelism,
    count_devices,
    parse_strategy,
    strategy_flags,
)
from parakit.config.variables import INTERFACES
from parakit.launch.checkpoints import select_checkpoint
from parakit.launch.code import find_entry
from parakit.launch.compose import (
    INITIAL_CHECKPOINTS_FOLDER,
    Launch,
    ResumePoint,
    adapt_model_to_data,
    compose_launch,
)
from parakit.launch.job import Job
from parakit.launch.options import Options, Saving, read_patch_file
from parakit.launch.preflight import check_launch
from parakit.launch.preflight_gpu import gpu_memory_warning
from parakit.launch.run_folder import hold_run_folder, read_named_run
from parakit.launch.runtime import choose_runtime
from parakit.launch.train import describe_launch, print_dry_run, train_once

PER_ATTEMPT_FLAGS = flags_with_role("start", "attempt")
"""Flags that say how a run began and where it writes, not what is trained."""


def resume_run(
    run: str | Path,
    strategy: str | None,
    options: Options,
    console: Console,
    ckpt: str | None = None,
) -> int:
    """Resume a run, from a copy of its checkpoint where one is named; 0 if it ended well.

    Raises:
        LaunchError: It cannot be resumed; nothing was changed.
    """
    if options.slurm is not None:
        raise LaunchError(
            "LAUNCHER=slurm resumes a job by itself when it is put back: 'scontrol requeue <job>'; "
            "leave it out to resume here, in an allocation or with NNODES= on each host."
        )
    run = Path(run).absolute()
    record = read_named_run(run)
    with ExitStack() as held:
        held.enter_context(hold_run_folder(run, options.nodes))
        stored = (ROOT / Path(ckpt).expanduser()) if ckpt else run / CHECKPOINTS_FOLDER
        choice = select_checkpoint(run, stored)
        loaded = ResumePoint(run.name, stored, choice.checkpoint.iteration)
        saved = _parallelism_of(choice.checkpoint.path) if ckpt else None
        launch = compose_resumed_launch(record, loaded, strategy, options, saved)
        if options.dry_run:
            return print_dry_run(launch)
        if launch.nodes is None:  # Else each node reports to the others what stops it.
            check_launch(launch)
        for checkpoint, flaw in choice.skipped:
            skipped = f"{checkpoint.path.name} is passed over: {flaw}. The one before it is used."
            console.print(skipped, style="yellow", highlight=False)
        console.print(
            f"{run.name} resumes after iteration {loaded.iteration} as {launch.spec.name}: "
            f"{describe_launch(launch)}",
            highlight=False,
        )
        if warning := gpu_memory_warning(launch):
            console.print(warning, style="yellow", highlight=False)
        own_folder = ckpt is None and launch.spec.parallelism == record.spec.parallelism
        if not own_folder:  # The run itself may be resumed at the same time.
            held.close()
        there = replace(launch.job.options, run_folder=run if own_folder else None)
        launch = replace(launch, job=launch.job.with_options(there))
        return 0 if train_once(launch, console, launch.spec.name) else 1


def compose_resumed_launch(
    record: RunRecord,
    resume_point: ResumePoint,
    strategy: str | None,
    options: Options,
    saved: Parallelism | None = None,
) -> Launch:
    """The launch that resumes a run.

    Args:
        record: Of the run that was saved.
        resume_point: The checkpoint.
        strategy: Another strategy; None or the run's own keeps it.
        options: What may change: ITERS=, EXTRA=, SAVE_EVERY=, KEEP=, NET=, HANG_TIMEOUT= and the like.
        saved: The strategy of the checkpoint, where it is not the run's.

    Raises:
        LaunchError: The run cannot be resumed here, or not so.
        StrategyError: The strategy is not in the grammar.
    """
    iterations = options.iterations or record.exit_interval
    if resume_point.iteration >= iterations:
        raise LaunchError(
            f"{record.run} has a checkpoint of iteration {resume_point.iteration} and was to end at "
            f"{iterations}; set ITERS= above {resume_point.iteration}."
        )
    sampled = Flags(record.argv).integer("--train-iters", iterations)
    if iterations > sampled and not Flags(options.extra).has("--train-iters"):
        raise LaunchError(
            f"{record.run} has samples for --train-iters {sampled}, and ITERS={iterations} is beyond; "
            f'EXTRA="--train-iters {iterations}" trains on, and draws its samples in another order.'
        )
    parallelism = _parallelism(record, strategy, saved or record.spec.parallelism)
    # The same global batch, in micro batches that divide it among the new data-parallel ranks.
    whole = record.spec.batch.global_batch_size
    micro = math.gcd(record.spec.batch.micro_batch_size, max(1, whole // parallelism.data))
    # The run's own runtime, image and checkout.
    path = Path(record.entry.path)
    checkout = path.parent if path.is_absolute() and record.runtime == RuntimeName.HOST else None
    lm = options.megatron_lm or checkout
    asked = replace(options, runtime=RuntimeName(record.runtime), megatron_lm=lm)
    runtime = choose_runtime(asked, record.spec.device)
    entry = find_entry(asked.megatron_lm, runtime.pair)
    if entry.megatron_version != record.entry.megatron_version:
        raise LaunchError(
            f"{record.run} was trained by Megatron {record.entry.megatron_version}, and "
            f"{entry.megatron_version} is here; name its checkout with MEGATRON_LM=."
        )
    data = Flags(record.argv).text("--data-path")
    words = count_end_of_document_in_vocabulary(record.argv, entry.megatron_version)
    model = adapt_model_to_data(load_model(record.spec.model, options.model), words, data)
    job = Job(
        strategy or record.spec.name,
        model,
        parallelism.world_size,
        record.spec.device,
        replace(
            asked,
            iterations=iterations,
            micro_batch_size=options.micro_batch_size or micro,
            global_batch_size=whole,
            data=data,
            # What its arguments say counts, whatever the kit's files say today.
            extra=merge_flags(
                count_end_of_document_in_vocabulary(
                    _recorded(record, parallelism), entry.megatron_version
                ),
                options.extra,
            ),
            saving=options.saving or Saving(record.save_every or iterations),
            link_bits_per_second=options.link_bits_per_second or record.spec.link_bits_per_second,
            patch_file=_patch_file(record, options),
            fused=record.spec.fused,
            share_gpu=record.spec.shares_gpu,
            shared_start=False,
        ),
        strategy_flags(parallelism),
    )
    start = imported_weights_folder(model)
    if start is None and record.start_checkpoint:
        start = options.runs / INITIAL_CHECKPOINTS_FOLDER / record.start_checkpoint
    kept = {name: text for name, text in record.environment.items() if name not in INTERFACES}
    resumed = compose_launch(job, runtime).resume_from(resume_point)
    return replace(resumed, initial_checkpoint=start, environment=kept)


def _recorded(record: RunRecord, parallelism: Parallelism) -> tuple[str, ...]:
    """The run's arguments without those that concerned one start, and without another strategy's."""
    of_batch = {"--micro-batch-size", "--global-batch-size"}
    if parallelism == record.spec.parallelism:
        return drop_flags(record.argv, PER_ATTEMPT_FLAGS | of_batch)
    kept = drop_flags(record.argv, PER_ATTEMPT_FLAGS | of_batch | flags_with_role("parallelism"))
    # Megatron pads the vocabulary to a multiple of this times TP; padding rows are saved as well.
    multiple = "--make-vocab-size-divisible-by"
    rows = Flags(record.argv).integer(multiple) * record.spec.parallelism.tensor
    return merge_flags(kept, (multiple, str(max(1, rows // parallelism.tensor))))


def _parallelism_of(checkpoint: Path) -> Parallelism:
    """What the arguments in a checkpoint say that saved it.

    Raises:
        LaunchError: They say nothing.
    """
    spec = read_contents(checkpoint).spec
    if spec is None:
        raise LaunchError(
            f"CKPT={relative_to_root(checkpoint)} does not say which strategy saved it; name a folder that "
            "'make reshard' wrote."
        )
    return spec.parallelism


def _parallelism(record: RunRecord, strategy: str | None, saved: Parallelism) -> Parallelism:
    if record.spec.backend != Backend.MEGATRON:
        raise LaunchError(
            f"{record.run} was trained by BACKEND={record.spec.backend}, which saves nothing."
        )
    strategy = strategy or record.spec.name
    parallelism = record.spec.parallelism
    if strategy != record.spec.name:
        parallelism = parse_strategy(strategy, count_devices(strategy, parallelism.world_size))
    if parallelism.sharding != saved.sharding:
        raise LaunchError(
            f"The checkpoint was saved with {saved.sharding or 'whole optimizer states'}, and "
            f"{strategy} has {parallelism.sharding or 'whole ones'}: Megatron keeps the two in "
            f"different formats; 'make reshard CKPT=… STRATEGY={strategy} TO=folder' writes them anew, "
            "and CKPT=folder resumes from there."
        )
    return parallelism


def _patch_file(record: RunRecord, options: Options) -> PatchFile | None:
    """The run's own, which is in its environment as well; the file must still hold the same."""
    patch_file = record.spec.patch_file
    present = read_patch_file(patch_file.path) if patch_file else None
    if patch_file and present != patch_file:
        raise LaunchError(
            f"PATCH_FILE={patch_file.path} was changed after {record.run} was trained with it; put it "
            "back."
        )
    if options.patch_file not in (None, patch_file):
        raise LaunchError(
            f"{record.run} was trained with "
            f"{f'PATCH_FILE={patch_file.path}' if patch_file else 'no PATCH_FILE='}, which "
            "cannot change when it is resumed; leave PATCH_FILE= out."
        )
    return patch_file

"""`make resume RUN=…`: continue a run from its newest valid checkpoint.

With its own strategy the run continues in its own folder. Log, events and checkpoints are added to, and the files
of the last attempt are moved to `attempts/`. With another strategy (STRATEGY=pp2) it becomes a new run in a new
folder, because its times and memory differ. The new run names its parent. A copy that `make reshard` wrote (CKPT=)
is resumed as a new run too. It holds the optimizer states as the new strategy shards them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.run import CHECKPOINTS_FOLDER, MegatronEntry, RunRecord
from parakit.checkpoint import read_contents
from parakit.config.batch import fit_micro_batch
from parakit.config.blend import format_blend, pair_weights
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags, count_end_of_document_in_vocabulary, drop_flags, merge_flags
from parakit.config.model import Model, imported_weights_folder, load_model
from parakit.config.run import Backend, PatchFile, RuntimeName
from parakit.config.strategy import (
    Parallelism,
    count_devices,
    parse_strategy,
    strategy_flags,
)
from parakit.config.variables import INTERFACES
from parakit.launch.checkpoints import SelectedCheckpoint, select_checkpoint
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
"""Flags on how an attempt begins and where it writes, which do not change what is trained."""


def resume_run(
    run: str | Path,
    strategy: str | None,
    options: Options,
    console: Console,
    ckpt: str | None = None,
) -> int:
    """Resume a run and return 0 if it ended well, else 1.

    Args:
        run: The run folder.
        strategy: Another strategy to resume with; None keeps the run's.
        options: The make variables.
        console: The terminal.
        ckpt: A folder with a copy of the run's checkpoints; None takes the run's own.

    Raises:
        LaunchError: The run cannot be resumed, and nothing was changed.
    """
    if options.slurm is not None:
        raise LaunchError(
            "LAUNCHER=slurm resumes a job by itself when it is put back: 'scontrol requeue <job>'; "
            "leave it out to resume here, in an allocation or with NNODES= on each host."
        )
    run = Path(run).absolute()
    record = read_named_run(run)
    with ExitStack() as lock:
        lock.enter_context(hold_run_folder(run, options.nodes))
        checkpoints_folder = (ROOT / Path(ckpt).expanduser()) if ckpt else run / CHECKPOINTS_FOLDER
        choice = select_checkpoint(run, checkpoints_folder)
        resume_point = ResumePoint(run.name, checkpoints_folder, choice.checkpoint.iteration)
        saved = _read_saved_parallelism(choice.checkpoint.path) if ckpt else None
        launch = compose_resumed_launch(record, resume_point, strategy, options, saved)
        if options.dry_run:
            return print_dry_run(launch)
        # With several nodes, each one reports to the others what stops it.
        if launch.nodes is None:
            check_launch(launch)
        _announce_resumption(launch, resume_point, choice, console)
        run_folder = None
        if ckpt is None and launch.spec.parallelism == record.spec.parallelism:
            run_folder = run
        else:
            # A new folder is written, so the run itself may be resumed at the same time.
            lock.close()
        continued_options = replace(launch.job.options, run_folder=run_folder)
        launch = replace(launch, job=launch.job.with_options(continued_options))
        return 0 if train_once(launch, console, launch.spec.name) else 1


def _announce_resumption(
    launch: Launch, resume_point: ResumePoint, choice: SelectedCheckpoint, console: Console
) -> None:
    """Print which checkpoints are passed over, what is resumed, and a warning if the GPU's memory is close."""
    for checkpoint, flaw in choice.skipped:
        sentence = f"{checkpoint.path.name} is passed over: {flaw}. The one before it is used."
        console.print(sentence, style="yellow", highlight=False)
    console.print(
        f"{resume_point.run} resumes after iteration {resume_point.iteration} as {launch.spec.name}: "
        f"{describe_launch(launch)}",
        highlight=False,
    )
    warning = gpu_memory_warning(launch)
    if warning:
        console.print(warning, style="yellow", highlight=False)


def compose_resumed_launch(
    record: RunRecord,
    resume_point: ResumePoint,
    strategy: str | None,
    options: Options,
    saved: Parallelism | None = None,
) -> Launch:
    """Return the launch that resumes a run from a checkpoint.

    Args:
        record: The record of the run that saved the checkpoint.
        resume_point: The checkpoint.
        strategy: Another strategy; None keeps the run's.
        options: Variables that may change: ITERS=, EXTRA=, SAVE_EVERY=, KEEP=, NET=, HANG_TIMEOUT= and others.
        saved: The parallelism of the checkpoint; None if it is the run's.

    Raises:
        LaunchError: The run cannot be resumed here, or not with these options.
        StrategyError: The strategy is not in the grammar.
    """
    iterations = options.iterations or record.exit_interval
    _refuse_iterations(record, resume_point, iterations, options)
    parallelism = _choose_parallelism(record, strategy, saved or record.spec.parallelism)
    options = _restore_runtime(record, options)
    runtime = choose_runtime(options, record.spec.device)
    _refuse_another_megatron(record, find_entry(options.megatron_lm, runtime.pair))
    data = format_blend(pair_weights(Flags(record.argv).texts("--data-path")))
    arguments = count_end_of_document_in_vocabulary(record.argv, record.entry.megatron_version)
    model = adapt_model_to_data(load_model(record.spec.model, options.model), arguments, data)
    job = Job(
        strategy=strategy or record.spec.name,
        model=model,
        devices=parallelism.world_size,
        device=record.spec.device,
        options=_restore_options(record, options, parallelism, data, iterations),
        script_flags=strategy_flags(parallelism),
    )
    environment = {
        name: text for name, text in record.environment.items() if name not in INTERFACES
    }
    return replace(
        compose_launch(job, runtime).resume_from(resume_point),
        initial_checkpoint=_find_initial_checkpoint(record, model, options),
        environment=environment,
    )


def _refuse_another_megatron(record: RunRecord, entry: MegatronEntry) -> None:
    """Raise LaunchError if the Megatron that would train is of another version than the run's."""
    if entry.megatron_version != record.entry.megatron_version:
        raise LaunchError(
            f"{record.run} was trained by Megatron {record.entry.megatron_version}, but Megatron "
            f"{entry.megatron_version} is here; name a checkout of the former with MEGATRON_LM=."
        )


def _restore_options(
    record: RunRecord, options: Options, parallelism: Parallelism, data: str, iterations: int
) -> Options:
    """Return the options with which a run trains on: those that must not change are the run's own.

    Args:
        record: The record of the run.
        options: Variables of the resume, which may change other properties.
        parallelism: The parallelism to resume with.
        data: The run's data sets, in the form of DATA=.
        iterations: The last iteration to train.

    Raises:
        LaunchError: The run's patch file has changed, or the options name another.
    """
    # The recorded arguments count, because the kit's files may have changed since the run.
    recorded_flags = count_end_of_document_in_vocabulary(
        _select_recorded_flags(record, parallelism), record.entry.megatron_version
    )
    return replace(
        options,
        iterations=iterations,
        micro_batch_size=options.micro_batch_size
        or fit_micro_batch(record.spec.batch, parallelism),
        global_batch_size=record.spec.batch.global_batch_size,
        data=data,
        extra=merge_flags(recorded_flags, options.extra),
        saving=options.saving or Saving(record.save_every or iterations),
        link_bits_per_second=options.link_bits_per_second or record.spec.link_bits_per_second,
        patch_file=_choose_patch_file(record, options),
        fused=record.spec.fused,
        share_gpu=record.spec.shares_gpu,
        shared_start=False,
    )


def _find_initial_checkpoint(record: RunRecord, model: Model, options: Options) -> Path | None:
    """Return the folder of the weights that the run began with; None if Megatron had initialized them."""
    imported = imported_weights_folder(model)
    if imported is not None:
        return imported
    if record.start_checkpoint is None:
        return None
    return options.runs / INITIAL_CHECKPOINTS_FOLDER / record.start_checkpoint


def _refuse_iterations(
    record: RunRecord, resume_point: ResumePoint, iterations: int, options: Options
) -> None:
    """Raise LaunchError if a run cannot train from its checkpoint to iteration `iterations`."""
    if resume_point.iteration >= iterations:
        raise LaunchError(
            f"{record.run} ends at iteration {iterations}, which its checkpoint of iteration "
            f"{resume_point.iteration} has reached; set ITERS= above {resume_point.iteration}."
        )
    sampled = Flags(record.argv).integer("--train-iters", iterations)
    if iterations > sampled and not Flags(options.extra).has("--train-iters"):
        raise LaunchError(
            f"{record.run} has samples for --train-iters {sampled}, and ITERS={iterations} is more; "
            f'EXTRA="--train-iters {iterations}" trains further, with its samples in another order.'
        )


def _restore_runtime(record: RunRecord, options: Options) -> Options:
    """Return the options with the run's own runtime, and its checkout unless MEGATRON_LM= names another."""
    entry = Path(record.entry.path)
    is_checkout = entry.is_absolute() and record.runtime == RuntimeName.HOST
    checkout = entry.parent if is_checkout else None
    return replace(
        options,
        runtime=RuntimeName(record.runtime),
        megatron_lm=options.megatron_lm or checkout,
    )


def _select_recorded_flags(record: RunRecord, parallelism: Parallelism) -> tuple[str, ...]:
    """Return the recorded arguments for a resume, without flags of a single attempt and without batch sizes.

    If the parallelism changes, the flags of the recorded parallelism are removed too, and the padding of the
    vocabulary is kept.
    """
    dropped = PER_ATTEMPT_FLAGS | {"--micro-batch-size", "--global-batch-size"}
    if parallelism == record.spec.parallelism:
        return drop_flags(record.argv, dropped)
    kept = drop_flags(record.argv, dropped | flags_with_role("parallelism"))
    # Megatron pads the vocabulary to this flag's value times TP. Padding rows are saved, so their number
    # must not change.
    multiple = "--make-vocab-size-divisible-by"
    rows = Flags(record.argv).integer(multiple) * record.spec.parallelism.tensor
    return merge_flags(kept, (multiple, str(max(1, rows // parallelism.tensor))))


def _read_saved_parallelism(checkpoint: Path) -> Parallelism:
    """Return the parallelism that saved a checkpoint, from the arguments in the checkpoint.

    Raises:
        LaunchError: The checkpoint holds no arguments.
    """
    spec = read_contents(checkpoint).spec
    if spec is None:
        raise LaunchError(
            f"CKPT={relative_to_root(checkpoint)} does not say which strategy saved it; name a folder that "
            "'make reshard' wrote."
        )
    return spec.parallelism


def _choose_parallelism(record: RunRecord, strategy: str | None, saved: Parallelism) -> Parallelism:
    """Return the parallelism to resume with: that of `strategy`, or the run's if `strategy` is None.

    Raises:
        LaunchError: The run's backend saves no checkpoints, or the strategy shards optimizer states
            differently from `saved`, the parallelism that saved the checkpoint.
    """
    if record.spec.backend != Backend.MEGATRON:
        raise LaunchError(
            f"{record.run} was trained by BACKEND={record.spec.backend}, which saves no checkpoints; "
            "start the run again."
        )
    strategy = strategy or record.spec.name
    parallelism = record.spec.parallelism
    if strategy != record.spec.name:
        parallelism = parse_strategy(strategy, count_devices(strategy, parallelism.world_size))
    if parallelism.sharding != saved.sharding:
        raise LaunchError(
            f"The checkpoint was saved with {saved.sharding or 'unsharded optimizer states'}, and "
            f"{strategy} has {parallelism.sharding or 'unsharded ones'}: Megatron saves the two in "
            f"different formats; 'make reshard CKPT=… STRATEGY={strategy} TO=folder' converts the "
            "checkpoint, and CKPT=folder resumes from there."
        )
    return parallelism


def _choose_patch_file(record: RunRecord, options: Options) -> PatchFile | None:
    """Return the run's own patch file; None if the run was trained without.

    Raises:
        LaunchError: The file has changed since the run, or the options name another.
    """
    patch_file, trained_with = record.spec.patch_file, "no PATCH_FILE="
    if patch_file is not None:
        trained_with = f"PATCH_FILE={patch_file.path}"
        if read_patch_file(patch_file.path) != patch_file:
            raise LaunchError(
                f"{trained_with} was changed after {record.run} was trained with it; restore "
                "the file as it was."
            )
    if options.patch_file not in (None, patch_file):
        raise LaunchError(
            f"{record.run} was trained with {trained_with}, which cannot change when it is resumed; "
            "leave PATCH_FILE= out."
        )
    return patch_file

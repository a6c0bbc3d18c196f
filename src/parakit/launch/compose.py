"""Compose a run's exact command from its job and options.

The result is a `Launch`. Nothing is started here, and no device is queried.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.run import CHECKPOINTS_FOLDER, CodeHashes, MegatronEntry
from parakit.cluster import IMAGE_PYTHON, LOOPBACK, Nodes, data_folders
from parakit.config.batch import choose_batch
from parakit.config.blend import BlendPart, parse_blend
from parakit.config.files import ROOT, relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import (
    Flags,
    count_end_of_document_in_vocabulary,
    drop_flags,
    format_flags,
    merge_flags,
    null_tokenizer_flags,
    values_by_flag,
)
from parakit.config.model import (
    GPT2_VOCABULARY,
    Model,
    apply_flags_to_model,
    imported_weights_folder,
    merge_training_flags,
    replace_vocabulary,
)
from parakit.config.run import Backend, DeviceKind, RunSpec, spec_from_flags
from parakit.config.strategy import UNTIED, Parallelism, parallelism_from_flags
from parakit.config.variables import INTERFACES
from parakit.data import SPLIT_FLAG
from parakit.launch.code import find_entry, identify_code
from parakit.launch.data import (
    DATA_FLAG,
    GPT2_DATA,
    choose_data,
    choose_split_flags,
    sample_index_folder,
)
from parakit.launch.flags import (
    EXIT_SIGNAL_HANDLER,
    IMPORT_TIME_VARIABLES,
    environment_for,
    initial_checkpoint_flags,
    optimizer_flags,
    runtime_flags,
    saving_flags,
    sharding_flags,
)
from parakit.launch.job import Job
from parakit.launch.network import shaped_link_command as shaped
from parakit.launch.options import Options, Saving, patch_file_paths
from parakit.launch.runtime import ON_HOST, Runtime
from parakit.launch.supervise.warm import WarmMegatron, WarmPool

TINY_ITERATIONS, ITERATIONS = 25, 100
INITIAL_CHECKPOINTS_FOLDER = ".start"
"""Folder in the runs folder that holds the initial checkpoints, which runs share."""

DATA_CACHE = "--data-cache-path"

RUN_PLACEHOLDER = "<run folder>"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resumed run loads, and the name of the run that saved it."""

    run: str
    folder: Path
    """Folder of that run's checkpoints."""
    iteration: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags that load the checkpoint. They name its iteration, because the tracker file may name a
        damaged checkpoint.
        """
        return ("--load", relative_to_root(self.folder), "--ckpt-step", str(self.iteration))


@dataclass(frozen=True)
class Launch:
    """A run with everything decided except its run folder."""

    job: Job
    """Target and options that the run was composed from."""
    spec: RunSpec
    """Model shape, parallelism, batch and precision, from which costs are computed."""
    model: Model
    """The model as it is trained: its flags give the shape that `spec` has."""
    iterations: int
    entry: MegatronEntry
    data: str
    """The data set, or the blend, as DATA= names it (`data_parts`)."""
    initial_checkpoint: Path | None
    """The checkpoint whose weights iteration 1 starts from; None starts from Megatron's own initialization."""
    flags: tuple[str, ...]
    """Megatron's arguments without those that name the run folder or depend on the data set's content."""
    environment: dict[str, str]
    runtime: Runtime = ON_HOST
    nodes: Nodes | None = None
    """The machines of a run on several machines; None for a run on this machine alone."""
    time_limit_seconds: float | None = None
    """Time after which the run is ended, with what it has logged by then; None sets no limit."""
    resume_point: ResumePoint | None = None
    """The checkpoint that the run resumes from; None for a run from iteration 1."""
    warm: WarmMegatron | None = None
    """The process with Megatron imported that the ranks are forked from; None starts them with torchrun."""

    @property
    def saving(self) -> Saving | None:
        """The frequency and the number of saved checkpoints; None if the run saves none."""
        return self.job.options.saving

    @property
    def saves_at_stop(self) -> bool:
        """True if the ranks save a last checkpoint when they are asked to stop."""
        flags = Flags((*self.job.flags, *self.flags))
        return self.saving is not None and flags.has(EXIT_SIGNAL_HANDLER)

    @property
    def code(self) -> CodeHashes:
        """Hashes of the files that train, as the files are now."""
        runs_megatron_here = (
            self.spec.backend is Backend.MEGATRON and self.runtime.container is None
        )
        return identify_code(self.entry if runs_megatron_here else None)

    @property
    def data_parts(self) -> tuple[BlendPart, ...]:
        """The data sets of the run: one, or those of a blend."""
        return parse_blend(self.data)

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """Prefixes of the data sets' files. Relative ones start at the repository root, as they do for the ranks."""
        return tuple(ROOT / part.prefix for part in self.data_parts)

    @property
    def devices(self) -> int:
        """Number of ranks on all machines."""
        return self.spec.parallelism.world_size

    @property
    def local_devices(self) -> int:
        """Number of ranks on this machine."""
        return self.devices // self.nodes.count if self.nodes else self.devices

    @property
    def flags_with_sample_indices(self) -> tuple[str, ...]:
        """`flags`, preceded for Megatron by the flag of the folder of its sample indices.

        The folder's name depends on the data set's present content. A folder that EXTRA= names is used instead.
        """
        names_folder = DATA_CACHE in values_by_flag(self.flags)
        if self.spec.backend is not Backend.MEGATRON or names_folder:
            return self.flags
        # Megatron's default folder is beside the data set, where the user may have no right to write.
        paths = [part.prefix for part in self.data_parts]
        folder = sample_index_folder(self.job.options.runs, paths)
        return (DATA_CACHE, relative_to_root(folder), *self.flags)

    def arguments(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """Return all of Megatron's arguments for a run in `run_folder`, which may be a placeholder."""
        load_flags = self.resume_point.flags if self.resume_point else ()
        # Megatron passes to W&B only what it writes to TensorBoard, so TensorBoard is always on.
        output_flags = ["--tensorboard-dir", f"{run_folder}/tensorboard"]
        if self.saving is not None:
            output_flags += ["--save", f"{run_folder}/{CHECKPOINTS_FOLDER}"]
        if "--wandb-project" in self.flags:
            # W&B's client makes a folder `wandb` below the one it is given.
            output_flags += ["--wandb-exp-name", Path(run_folder).name]
            output_flags += ["--wandb-save-dir", run_folder]
        return (*self.flags_with_sample_indices, *load_flags, *output_flags)

    def command(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """Return the whole command, to be run from the repository root.

        In a container it begins with that of the container, such as `docker run`; with a shaped link, with
        `parakit.launch.network`.
        """
        program = (*self._program(), *self.arguments(run_folder))
        if self.spec.link_bits_per_second:
            return shaped(self.spec.link_bits_per_second, self.devices, _python_path(), program)
        container = self.runtime.container
        python = IMAGE_PYTHON if container else _python_path()
        ranks = (*torchrun_command(self.local_devices, python, self.nodes), *program)
        return container.wrap(ranks, self.environment) if container else ranks

    def warm_command(self, run_folder: str) -> tuple[str, ...]:
        """Return the command that has `warm` fork the ranks, in place of `command`."""
        assert self.warm is not None
        return self.warm.command(self.devices, (self.entry.path, *self.arguments(run_folder)))

    def resume_from(self, point: ResumePoint) -> Launch:
        """Return the launch with the checkpoint of `point` loaded in place of the initial checkpoint."""
        flags = drop_flags(self.flags, flags_with_role("start"))
        return replace(self, flags=flags, resume_point=point)

    def join_nodes(self, nodes: Nodes) -> Launch:
        """Return the launch on `nodes`, with gloo on the network interface that connects them.

        Otherwise gloo would use the address of the machine's name, which is often 127.0.1.1. An interface that
        the caller's environment names is used instead.
        """
        if nodes.interface is None:
            return replace(self, nodes=nodes)
        interfaces = {name: os.environ.get(name) or nodes.interface for name in INTERFACES}
        return replace(self, nodes=nodes, environment={**self.environment, **interfaces})

    def fork_from_pool(self, pool: WarmPool) -> Launch:
        """Return the launch with ranks forked from a process of `pool`.

        The launch stays as it is unless it runs Megatron on this machine's CPU, without container or shaped link.
        """
        runs_megatron = self.spec.backend == Backend.MEGATRON
        is_cpu = self.spec.device is DeviceKind.CPU
        needs_new_processes = self.spec.link_bits_per_second or self.nodes or self.runtime.container
        if not runs_megatron or not is_cpu or needs_new_processes:
            return self
        import_time_variables = {
            name: self.environment[name]
            for name in IMPORT_TIME_VARIABLES
            if name in self.environment
        }
        return replace(self, warm=pool.get_process(self.entry.path, import_time_variables))

    def _program(self) -> tuple[str, ...]:
        """Return Python's arguments that start the entry script."""
        if self.spec.backend == Backend.MEGATRON:
            return ("-m", "megatron_patches", self.entry.path)
        # `-m` puts the repository root on Python's path, where the kit's packages are.
        return ("-m", self.entry.path.removesuffix(".py").replace("/", "."))


def compose_launch(job: Job, runtime: Runtime = ON_HOST) -> Launch:
    """Return the launch of a job with Megatron as its backend.

    Raises:
        LaunchError: Megatron is not installed, or the checkout is none.
        StrategyError: The parallel sizes in the flags do not multiply to the number of devices.
    """
    options, device = job.options, job.device
    parallelism = parallelism_from_flags((*job.flags, *options.extra), job.devices)
    data, extra = choose_data(options, device)
    model = adapt_model_to_data(job.model, options.extra, data)
    entry = find_entry(options.megatron_lm, runtime.pair)
    checkpoint = _choose_initial_checkpoint(job, model, entry)
    iterations = options.iterations or (TINY_ITERATIONS if "-tiny" in model.name else ITERATIONS)
    if Flags(extra).integer("--vocab-size") == model.shape.vocabulary:
        extra = drop_flags(extra, ("--vocab-size",))  # The tokenizer's flags name it.
    model_flags = merge_training_flags(model, in_half=device is DeviceKind.GPU)
    # Of a flag that several of these have, the last one counts.
    flags = merge_flags(
        model_flags,
        job.flags,
        runtime_flags(device, parallelism, runtime, options, model),
        sharding_flags(parallelism, entry),
        _batch_flags(job, model, parallelism),
        _data_flags(data, model, model_flags, (*job.flags, *extra)),
        null_tokenizer_flags(model.shape.vocabulary, entry.megatron_version),
        _start_flags(checkpoint, model, parallelism),
        _iteration_flags(model, iterations, options),
        optimizer_flags(options.optimizer, entry.megatron_version),
        options.wandb.flags if options.wandb else (),
        _checkpoint_flags(options, parallelism, entry),
        extra,
    )
    return Launch(
        job=job,
        spec=_describe_run(job, model, flags, entry),
        model=model,
        iterations=iterations,
        entry=entry,
        data=data,
        initial_checkpoint=checkpoint,
        flags=flags,
        environment=environment_for(device, parallelism, checkpoint, options),
        runtime=add_mounts(runtime, data, options),
        nodes=options.nodes,
    )


def _describe_run(job: Job, model: Model, flags: Sequence[str], entry: MegatronEntry) -> RunSpec:
    """Return the run that Megatron's flags define, with those options of the job that are no flags."""
    counted_flags = count_end_of_document_in_vocabulary(flags, entry.megatron_version)
    spec = spec_from_flags(counted_flags, job.devices, job.device, model.name)
    return replace(
        spec,
        fused=job.options.fused,
        link_bits_per_second=job.options.link_bits_per_second,
        shares_gpu=job.options.share_gpu,
        patch_file=job.options.patch_file,
        strategy=job.strategy,
    )


def _checkpoint_flags(
    options: Options, parallelism: Parallelism, entry: MegatronEntry
) -> tuple[str, ...]:
    """Return the flags that save checkpoints; empty if the run saves none."""
    if options.saving is None:
        return ()
    saves_at_stop = options.grace_seconds is not None
    return saving_flags(options.saving, parallelism, entry, saves_at_stop)


def _choose_initial_checkpoint(job: Job, model: Model, entry: MegatronEntry) -> Path | None:
    """Return the folder of the initial checkpoint that a job loads; None if Megatron initializes the weights.

    An imported model loads its own weights. Other models load shared ones on CPU ranks, unless SHARED_START= says
    otherwise.
    """
    options = job.options
    is_shared = options.shared_start
    if is_shared is None:
        is_shared = job.device is DeviceKind.CPU
    if not is_shared and imported_weights_folder(model) is None:
        return None
    is_untied = Flags((*model.flags, *job.flags, *options.extra)).has(UNTIED)
    return initial_checkpoint_path(model, entry, options, is_untied)


def _batch_flags(job: Job, model: Model, parallelism: Parallelism) -> tuple[str, ...]:
    """Return the flags of batch sizes, dropout and seed."""
    options = job.options
    batch = choose_batch(
        model,
        parallelism,
        job.device,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=options.global_batch_size,
    )
    return format_flags(
        {
            "--micro-batch-size": batch.micro_batch_size,
            "--global-batch-size": batch.global_batch_size,
            "--attention-dropout": options.dropout,
            "--hidden-dropout": options.dropout,
            "--seed": options.seed,
        }
    )


def _data_flags(
    data: str, model: Model, model_flags: Sequence[str], own_flags: Sequence[str]
) -> tuple[str, ...]:
    """Return the flags of a data set or a blend, with a split that fits the data.

    Args:
        data: DATA=, one data set or a blend.
        model: The model, whose sequence length decides which splits have samples.
        model_flags: Flags of the model's file. Their split is changed if a part of it would have no sample.
        own_flags: Flags of the job and of EXTRA=. Their split is kept as it is.
    """
    arguments = [argument for part in parse_blend(data) for argument in part.arguments]
    flags = (DATA_FLAG, *arguments)
    if SPLIT_FLAG in values_by_flag(own_flags):
        return flags
    requested_flags = merge_flags(model_flags, own_flags)
    return (*flags, *choose_split_flags(data, requested_flags, model.shape.seq_length))


def _start_flags(
    checkpoint: Path | None, model: Model, parallelism: Parallelism
) -> tuple[str, ...]:
    """Return the flags that load an initial checkpoint; empty without one."""
    if checkpoint is None:
        return ()
    # An imported model states its own multiple, so that only TP pads its vocabulary.
    is_imported = imported_weights_folder(model) is not None
    padded_to = model.shape.vocabulary_multiple if is_imported else 128
    return initial_checkpoint_flags(checkpoint, parallelism, padded_to)


def _iteration_flags(model: Model, iterations: int, options: Options) -> tuple[str, ...]:
    """Return the flags by which Megatron stops after a number of iterations.

    Megatron prepares samples for the --train-iters of the model's file, and stops there. ITERS= may be more.
    """
    flags = ("--exit-interval", str(iterations), "--log-throughput")
    train_iterations = Flags(model.flags).integer("--train-iters", iterations)
    if options.iterations and iterations > train_iterations:
        return ("--train-iters", str(iterations), *flags)
    return flags


def adapt_model_to_data(model: Model, texts: Sequence[str], data: str) -> Model:
    """Return the model with the flags of `texts` applied, and with GPT-2's vocabulary on the kit's data sets.

    An imported model keeps the vocabulary of its weights.
    """
    model = apply_flags_to_model(model, texts)
    has_gpt2_tokens = all(part.prefix in GPT2_DATA for part in parse_blend(data))
    is_imported = imported_weights_folder(model) is not None
    if has_gpt2_tokens and not is_imported:
        return replace_vocabulary(model, GPT2_VOCABULARY)
    return model


def initial_checkpoint_path(
    model: Model, entry: MegatronEntry, options: Options, untied: bool = False
) -> Path:
    """Return the folder of the initial checkpoint that runs of this model, seed and Megatron version share.

    A model with a separate output layer (`untied`), or with noise, has other weights and so another folder. For an
    imported model, the folder of its imported weights is returned.
    """
    imported = imported_weights_folder(model)
    if imported is not None:
        return imported
    determinants = list(model.flags)
    if untied:
        determinants.append(UNTIED)
    if options.noisy_start:
        determinants.append("noise")
    determinants += (str(options.seed), entry.megatron_version)
    key = hashlib.sha256("\n".join(determinants).encode()).hexdigest()[:12]
    return options.runs / INITIAL_CHECKPOINTS_FOLDER / f"{model.name}-{key}"


def torchrun_command(ranks: int, python: str, nodes: Nodes | None = None) -> tuple[str, ...]:
    """Return torchrun's command for `ranks` ranks on this machine.

    On one machine torchrun chooses a free port. Without `--local-addr` it would give its ranks the machine's name
    as the address of rank 0. If that name did not resolve, the ranks would try for ever.
    """
    if nodes:
        flags = nodes.torchrun_flags(ranks)
    else:
        flags = ("--standalone", "--local-addr", LOOPBACK, "--nproc-per-node", str(ranks))
    return (python, "-m", "torch.distributed.run", *flags)


def add_mounts(runtime: Runtime, data: str, options: Options) -> Runtime:
    """Return the runtime with the folders mounted that a container needs besides the kit.

    These are the folders of the data set, of the runs and of patch files. The folder of initial checkpoints is
    mounted too if it is a link in the runs folder. A runtime without container is returned as it is.
    """
    if runtime.container is None:
        return runtime
    folders: list[Path] = []
    for part in parse_blend(data):
        folders += data_folders(ROOT / part.prefix)
    folders.append(options.runs.absolute())
    initial_checkpoints = options.runs / INITIAL_CHECKPOINTS_FOLDER
    if initial_checkpoints.is_symlink() and initial_checkpoints.is_dir():
        folders.append(initial_checkpoints.resolve())
    if options.patch_file:
        folders += [path.parent for path in patch_file_paths(options.patch_file.path)]
    return replace(runtime, container=runtime.container.mounting(*folders))


def _python_path() -> str:
    """Return the path of this Python, relative to the repository root if it lies there."""
    python = Path(sys.executable)
    return str(python.relative_to(ROOT) if python.is_relative_to(ROOT) else python)

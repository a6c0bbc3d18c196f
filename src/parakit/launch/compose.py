"""Compose a run's exact command from its options; starts nothing and asks no device."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.run import CHECKPOINTS_FOLDER, CodeHashes, MegatronEntry
from parakit.cluster import IMAGE_PYTHON, LOOPBACK, Nodes, data_folders
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
from parakit.config.strategy import UNTIED, parallelism_from_flags, scale_batch
from parakit.config.variables import INTERFACES
from parakit.data import SPLIT_FLAG
from parakit.launch.code import find_entry, identify_code
from parakit.launch.data import (
    DEFAULT_DATA,
    GPT2_DATA,
    choose_split_flags,
    sample_index_folder,
)
from parakit.launch.flags import (
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
"""Folder beside the runs that holds the weights which runs share."""

DATA_CACHE = "--data-cache-path"
_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_WEIGHT = re.compile(r"[0-9.]+")
"""The weight of a data set in a blend, before its path."""

RUN_PLACEHOLDER = "<run folder>"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resumed run loads."""

    run: str
    folder: Path
    """Of its checkpoints."""
    iteration: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's; the iteration by number, because the tracker may name one that is damaged."""
        return ("--load", relative_to_root(self.folder), "--ckpt-step", str(self.iteration))


@dataclass(frozen=True)
class Launch:
    """One run, complete except for its run folder."""

    job: Job
    """What was asked for."""
    spec: RunSpec
    """What is trained, and how it is split."""
    model: Model
    """As trained: its flags name the shape that `spec` has."""
    iterations: int
    entry: MegatronEntry
    data: str
    initial_checkpoint: Path | None
    flags: tuple[str, ...]
    """Megatron's arguments but for those that name the run folder or the content of the data set."""
    environment: dict[str, str]
    runtime: Runtime = ON_HOST
    nodes: Nodes | None = None
    """The machines it runs on, where there are several."""
    time_limit_seconds: float | None = None
    """After which the run is ended; what it has logged by then is there."""
    resume_point: ResumePoint | None = None
    warm: WarmMegatron | None = None
    """The process that its ranks are forked from instead of started by torchrun."""

    @property
    def saving(self) -> Saving | None:
        """How often it saves, if it does."""
        return self.job.options.saving

    @property
    def code(self) -> CodeHashes:
        """What trains it, as the files are now."""
        on_disk = self.spec.backend is Backend.MEGATRON and self.runtime.container is None
        return identify_code(self.entry if on_disk else None)

    @property
    def data_path(self) -> Path:
        """The data set's prefix; a relative one is seen from the repository root, as by the ranks."""
        return ROOT / self.data

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.spec.parallelism.world_size

    @property
    def local_devices(self) -> int:
        """Number of ranks on this machine."""
        return self.devices // self.nodes.count if self.nodes else self.devices

    @property
    def flags_with_sample_indices(self) -> tuple[str, ...]:
        """`flags`, and for Megatron the folder of its sample indices, which follows from the data set's
        content when this is called. A folder that EXTRA= names is kept."""
        if self.spec.backend is not Backend.MEGATRON or DATA_CACHE in values_by_flag(self.flags):
            return self.flags
        # Megatron's default folder is beside the data, which may be somebody else's and read-only.
        values = values_by_flag(self.flags)
        blend = [value for flag in _DATA_FLAGS for value in values.get(flag, ())]
        paths = [value for value in blend if not _WEIGHT.fullmatch(value)]
        folder = sample_index_folder(self.job.options.runs, paths)
        return (DATA_CACHE, relative_to_root(folder), *self.flags)

    def arguments(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """Megatron's arguments for a run written to `run_folder`."""
        # TensorBoard always: Megatron passes to W&B only what it writes there.
        written = ["--tensorboard-dir", f"{run_folder}/tensorboard"]
        if self.saving is not None:
            written += ["--save", f"{run_folder}/{CHECKPOINTS_FOLDER}"]
        loaded = self.resume_point.flags if self.resume_point else ()
        if "--wandb-project" in self.flags:
            # W&B's client makes a folder `wandb` below the one it is given.
            written += ["--wandb-exp-name", Path(run_folder).name, "--wandb-save-dir", run_folder]
        return (*self.flags_with_sample_indices, *loaded, *written)

    def command(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """The whole command, from the repository root; in a container, with what starts it."""
        container = self.runtime.container
        program = (*self._program(), *self.arguments(run_folder))
        if self.spec.link_bits_per_second:
            return shaped(self.spec.link_bits_per_second, self.devices, _python(), program)
        python = IMAGE_PYTHON if container else _python()
        ranks = (*torchrun_command(self.local_devices, python, self.nodes), *program)
        if container is None:
            return ranks
        return container.wrap(ranks, self.environment)

    def warm_command(self, run_folder: str) -> tuple[str, ...]:
        """What asks `warm` for the ranks of `command`."""
        assert self.warm is not None
        return self.warm.command(self.devices, (self.entry.path, *self.arguments(run_folder)))

    def resume_from(self, point: ResumePoint) -> Launch:
        """The same from a saved checkpoint, and not from its start."""
        return replace(
            self, flags=drop_flags(self.flags, flags_with_role("start")), resume_point=point
        )

    def join_nodes(self, nodes: Nodes) -> Launch:
        """The same with gloo on the interface that joins the nodes, unless the caller has chosen one.

        gloo would take the address of the machine's name, which is often 127.0.1.1.
        """
        if nodes.interface is None:
            return replace(self, nodes=nodes)
        chosen = {name: os.environ.get(name) or nodes.interface for name in INTERFACES}
        return replace(self, nodes=nodes, environment={**self.environment, **chosen})

    def fork_from_pool(self, pool: WarmPool) -> Launch:
        """The same with ranks of Megatron on this machine's CPU from a process of the pool."""
        elsewhere = self.spec.link_bits_per_second or self.nodes or self.runtime.container
        megatron = self.spec.backend == Backend.MEGATRON
        if elsewhere or not megatron or self.spec.device is not DeviceKind.CPU:
            return self
        known = {
            name: self.environment[name]
            for name in IMPORT_TIME_VARIABLES
            if name in self.environment
        }
        return replace(self, warm=pool.get_process(self.entry.path, known))

    def _program(self) -> tuple[str, ...]:
        if self.spec.backend == Backend.MEGATRON:
            return ("-m", "megatron_patches", self.entry.path)
        # As a module, so that Python finds the kit's packages.
        return ("-m", self.entry.path.removesuffix(".py").replace("/", "."))


def compose_launch(job: Job, runtime: Runtime = ON_HOST) -> Launch:
    """Decide everything about a run of Megatron.

    Raises:
        LaunchError: No Megatron is there.
        StrategyError: The flags' degrees do not multiply to the devices.
    """
    options, device = job.options, job.device
    parallelism = parallelism_from_flags((*job.flags, *options.extra), job.devices)
    data = options.data or DEFAULT_DATA[device]
    model = adapt_model_to_data(job.model, options.extra, data)
    entry = find_entry(options.megatron_lm, runtime.pair)
    own = scale_batch(model.batch, parallelism)
    shared = options.shared_start if options.shared_start is not None else device is DeviceKind.CPU
    shared = shared or imported_weights_folder(model) is not None
    untied = Flags((*model.flags, *job.flags, *options.extra)).has(UNTIED)
    start = initial_checkpoint_path(model, entry, options, untied) if shared else None
    # An imported model says it itself, so that it has no padding but what TP needs.
    padded_to = model.shape.vocabulary_multiple if imported_weights_folder(model) else 128
    iterations = options.iterations or (TINY_ITERATIONS if "-tiny" in model.name else ITERATIONS)
    # A run may be longer than its model's file says, where Megatron and its samples end.
    planned = Flags(model.flags).integer("--train-iters", iterations)
    longer = bool(options.iterations) and iterations > planned
    extra = options.extra
    if Flags(extra).integer("--vocab-size") == model.shape.vocabulary:
        extra = drop_flags(extra, ("--vocab-size",))  # The tokenizer's flags name it.
    own_flags = merge_training_flags(model, in_half=device is DeviceKind.GPU)
    fixes_split = SPLIT_FLAG in values_by_flag((*job.flags, *extra))
    asked = merge_flags(own_flags, job.flags, extra)
    flags = merge_flags(
        own_flags,
        job.flags,
        runtime_flags(device, parallelism, runtime, options, model),
        sharding_flags(parallelism, entry),
        format_flags(
            {
                "--micro-batch-size": options.micro_batch_size or own.micro_batch_size,
                "--global-batch-size": options.global_batch_size or own.global_batch_size,
                "--attention-dropout": options.dropout,
                "--hidden-dropout": options.dropout,
                "--seed": options.seed,
                "--data-path": data,
            }
        ),
        () if fixes_split else choose_split_flags(data, asked, model.shape.seq_length),
        null_tokenizer_flags(model.shape.vocabulary, entry.megatron_version),
        initial_checkpoint_flags(start, parallelism, padded_to) if start else (),
        ("--train-iters", str(iterations)) if longer else (),
        ("--exit-interval", str(iterations), "--log-throughput"),
        optimizer_flags(options.optimizer, entry.megatron_version),
        options.wandb.flags if options.wandb else (),
        saving_flags(options.saving, parallelism, entry) if options.saving else (),
        extra,
    )
    spec = replace(
        spec_from_flags(
            count_end_of_document_in_vocabulary(flags, entry.megatron_version),
            job.devices,
            device,
            model.name,
        ),
        fused=options.fused,
        link_bits_per_second=options.link_bits_per_second,
        shares_gpu=options.share_gpu,
        patch_file=options.patch_file,
        strategy=job.strategy,
    )
    return Launch(
        job=job,
        spec=spec,
        model=model,
        iterations=iterations,
        entry=entry,
        data=data,
        initial_checkpoint=start,
        flags=flags,
        environment=environment_for(device, parallelism, start, options),
        runtime=add_mounts(runtime, data, options),
        nodes=options.nodes,
    )


def adapt_model_to_data(model: Model, words: Sequence[str], data: str) -> Model:
    """The model that `words` make of it; on the kit's own data sets it has their vocabulary.

    One that was imported has that of its weights.
    """
    model = apply_flags_to_model(model, words)
    fixed = data not in GPT2_DATA or imported_weights_folder(model) is not None
    return model if fixed else replace_vocabulary(model, GPT2_VOCABULARY)


def initial_checkpoint_path(
    model: Model, entry: MegatronEntry, options: Options, untied: bool = False
) -> Path:
    """Where the shared starting weights of this model, seed and Megatron are kept.

    A model with a separate output layer (`untied`), or with noise, has other weights, so another folder.
    One that was imported begins with its own.
    """
    if imported := imported_weights_folder(model):
        return imported
    own = (*((UNTIED,) if untied else ()), *(("noise",) if options.noisy_start else ()))
    identity = "\n".join((*model.flags, *own, str(options.seed), entry.megatron_version))
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return options.runs / INITIAL_CHECKPOINTS_FOLDER / f"{model.name}-{key}"


def torchrun_command(ranks: int, python: str, nodes: Nodes | None = None) -> tuple[str, ...]:
    """Return torchrun's command for `ranks` ranks on this machine.

    Without other nodes torchrun chooses a free port. It would give its ranks the machine's name as the
    address of the first one, and ranks whose machine's name does not resolve try that for ever.
    """
    alone = ("--standalone", "--local-addr", LOOPBACK, "--nproc-per-node", str(ranks))
    place = nodes.torchrun_flags(ranks) if nodes else alone
    return (python, "-m", "torch.distributed.run", *place)


def add_mounts(runtime: Runtime, data: str, options: Options) -> Runtime:
    """Mount what may lie outside the kit: folders of the data set, of runs, and of starting weights that
    runs share by a link."""
    if runtime.container is None:
        return runtime
    patch_files = patch_file_paths(options.patch_file.path) if options.patch_file else ()
    start = options.runs / INITIAL_CHECKPOINTS_FOLDER
    shared = (start.resolve(),) if start.is_symlink() and start.is_dir() else ()
    given = (options.runs.absolute(), *shared, *(one.parent for one in patch_files))
    folders = (*data_folders(ROOT / data), *given)
    return replace(runtime, container=runtime.container.mounting(*folders))


def _python() -> str:
    python = Path(sys.executable)
    return str(python.relative_to(ROOT) if python.is_relative_to(ROOT) else python)

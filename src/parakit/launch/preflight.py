"""Check a launch before anything starts or is written; each problem is one sentence with its remedy.

A check yields sentences and asks the package that knows the answer. `check_launch` runs all of them.
"""

from __future__ import annotations

import importlib.util
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from megatron_patches.context import unknown_version_problems
from parakit.checkpoint import describe_model_mismatch
from parakit.cluster import (
    RUN_FILES,
    check_loopback,
    check_room,
    explain_unresolvable,
    refusal_sentences,
)
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flag_table import argument_names, parse_release
from parakit.config.flags import Flags, find_invalid_numbers, find_misspelled_flags
from parakit.config.model import imported_weights_folder
from parakit.config.run import Backend, DeviceKind, RunSpec
from parakit.costs import find_peak_rank, find_violations, total_parameters
from parakit.data import (
    EVAL_ITERATIONS_FLAG,
    SPLIT_FLAG,
    DatasetError,
    DatasetUse,
    dataset_problems,
    idx_path,
    open_dataset,
)
from parakit.formatting.units import GIB, gib, plural
from parakit.launch.backends import backend_problems, optimizer_problems
from parakit.launch.compose import Launch
from parakit.launch.data import OWN_SAMPLES, PUBLISHED
from parakit.launch.network import network_problems
from parakit.launch.options import Saving
from parakit.launch.preflight_attention import attention_problems
from parakit.launch.preflight_gpu import (
    fused_problems,
    gpu_memory_problems,
    gpu_problems,
    runtime_problems,
    sharing_problems,
)
from parakit.launch.supervise.exit_status import read_address_limit

LOG_BYTES = 64 << 20
"""Bytes on the disk that a run's log, samples and event files need."""

LEAST_OPEN_FILES = 64
"""Open files without which torchrun and gloo fail, or wait for ever, before they log a line. A rank opens about 40."""

LEAST_ADDRESS_BYTES = int(3.4 * GIB)
"""Addresses of a process (`ulimit -v`) without which torch 2.15 and Megatron 0.19 cannot be imported. With one
thread the import takes 3.3 GiB; with less it ends in a MemoryError in any of many places."""

_SAVED_BYTES = {"fp32": 12, "fp16": 14, "bf16": 14}
"""Bytes per parameter in a checkpoint: weights, fp32 main weights beside 16-bit ones, Adam's two moments."""
_MOST_SAVED_BYTES = max(_SAVED_BYTES.values())
_INITIAL_BYTES = 4
"""Bytes per parameter in an initial checkpoint, which holds fp32 weights alone."""

_CAPACITY = "--moe-expert-capacity-factor"
_GROUPED = "--moe-grouped-gemm"


def _address_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why ranks would not reach rank 0, for which torch would wait silently."""
    nodes = launch.nodes
    # A container and a namespace of NET= have loopback interfaces of their own.
    if launch.runtime.container is None and not launch.spec.link_bits_per_second:
        yield from refusal_sentences([check_loopback()])
    # Other nodes wait until the name resolves: some clusters register it only once node 0 is there.
    if nodes is None or nodes.rank != 0:
        return
    reason = explain_unresolvable(nodes.address)
    if reason:
        yield (
            f"MASTER_ADDR={nodes.address} has no address on this machine ({reason}); name the address "
            "itself, or enter the name in DNS or /etc/hosts."
        )


def _limit_problems(_: Launch) -> Iterator[str]:
    """Yield a sentence if this shell allows a process too few open files."""
    limit = read_open_files_limit()
    if limit is not None and limit < LEAST_OPEN_FILES:
        yield (
            f"A process may open {limit} files here, and a rank needs {LEAST_OPEN_FILES}; raise the limit "
            "with 'ulimit -n 4096', or as 'nofile' in /etc/security/limits.conf."
        )


def _address_space_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if this shell allows a process fewer addresses than a CPU rank's libraries take.

    Their import would fail in one of many places, or wait for a thread that could not be started.
    """
    limit = read_address_limit()
    if limit is not None and limit < LEAST_ADDRESS_BYTES and launch.runtime.container is None:
        yield (
            f"A process may have {gib(limit)} GiB of addresses here (ulimit -v), and torch and Megatron take "
            f"{gib(LEAST_ADDRESS_BYTES)} GiB when they are imported; raise the limit with 'ulimit -v unlimited'."
        )


def read_open_files_limit() -> int | None:
    """Return the number of files that this process and its ranks may have open; None if it is unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def saving_problems(saving: Saving | None, spec: RunSpec) -> Iterator[str]:
    """Yield a sentence per reason why a run cannot save checkpoints from which it can be resumed."""
    if saving is None:
        return
    backend, sharding = spec.backend, spec.parallelism.sharding
    if backend != "megatron":
        yield (
            f"BACKEND={backend} saves no checkpoints; leave SAVE_EVERY= out, or use BACKEND=megatron."
        )
    if sharding.wraps_modules:
        yield (
            f"{spec.name} cannot be resumed yet, because its {sharding} shards are saved in another "
            "format; leave SAVE_EVERY= out, or use zero1."
        )
    if saving.asynchronous and spec.device is DeviceKind.CPU:
        # Megatron's writer process takes its rank modulo torch.cuda.device_count(), which would be 0.
        yield (
            "ASYNC_SAVE=1 needs GPUs: Megatron's writer process chooses a GPU by number and fails "
            "without one; leave ASYNC_SAVE= out on CPU ranks."
        )


def nodes_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the run cannot be spread over its nodes."""
    nodes = launch.nodes
    if nodes is None:
        return
    if launch.devices % nodes.count:
        yield (
            f"{plural(launch.devices, 'rank')} cannot be split evenly over {nodes.count} nodes; name a "
            f"target whose number of devices is a multiple of {nodes.count}."
        )
    if launch.spec.link_bits_per_second:
        yield "NET= connects CPU ranks of one machine by a shaped link; leave it out with several nodes."
    yield from _gres_problems(launch)
    container = launch.runtime.container
    if container is not None and not container.host_network:
        yield (
            "Other nodes cannot reach a container's own network; let the container use this machine's "
            "network with HOST_NETWORK=1, or set RUNTIME=host."
        )


def _gres_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if a Slurm job asks for another number of GPUs per node than its ranks there.

    Ranks would share GPUs, or GPUs would be idle.
    """
    slurm = launch.job.options.slurm
    if slurm is None or launch.spec.device is not DeviceKind.GPU or launch.spec.shares_gpu:
        return
    gpus, ranks = slurm.gpus_per_node, launch.local_devices
    if gpus is not None and gpus != ranks:
        yield (
            f"SLURM_GRES= or a --gres line asks for {plural(gpus, 'GPU')} per node, and {launch.job.name} on "
            f"{plural(slurm.nodes, 'node')} has {plural(ranks, 'rank')} there; ask for gpu:{ranks}, or name a "
            f"target with {plural(gpus * slurm.nodes, 'GPU')}."
        )


def expert_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why a mixture of experts cannot be trained as asked."""
    shape, flags = launch.model.shape, Flags(launch.flags)
    if not shape.experts or not shape.experts_per_token:
        return
    dropless_factor = shape.experts / shape.experts_per_token
    factor = _read_capacity_factor(flags)
    drops_tokens = factor is not None and 0 <= factor < dropless_factor
    # The ranks of a verification, which has a noisy start, drop the same tokens by other means.
    is_comparable = launch.initial_checkpoint is not None and not launch.job.options.noisy_start
    if is_comparable and drops_tokens:
        yield (
            f"{_CAPACITY} {factor:g} drops tokens, and the strategy decides which, so losses could not "
            "be compared with other runs from the same initial checkpoint; leave it out of EXTRA= (from "
            f"{dropless_factor:g} on no token is dropped), or set SHARED_START=0."
        )
    if flags.has(_GROUPED) and not launch.runtime.transformer_engine:
        yield (
            f"{_GROUPED} needs Transformer Engine, which does not work here; leave it out of EXTRA=, so "
            "that experts are multiplied one after the other."
        )


def _read_capacity_factor(flags: Flags) -> float | None:
    """Return the capacity factor of experts; None if it is not set or no number, which Megatron itself refuses."""
    try:
        return float(flags.text(_CAPACITY))
    except ValueError:
        return None


def fp8_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the run's fp8 products cannot be computed here."""
    if not launch.spec.fp8_recipe:
        return
    name = launch.model.name.removesuffix("-fp8")
    if name == launch.model.name:
        remedy = "leave --fp8-format out"
    else:
        remedy = f"train {name}, or plan this with 'make plan MODEL={launch.model.name}'"
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"BACKEND={launch.spec.backend} has no fp8, only Megatron has; {remedy}."
    elif launch.spec.device is DeviceKind.CPU:
        yield f"fp8 needs Transformer Engine, which runs on GPUs only; {remedy}."
    elif not launch.runtime.transformer_engine:
        yield (
            "fp8 needs Transformer Engine, which does not work here; set RUNTIME=docker, whose image has "
            f"it, or {remedy}."
        )


def version_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the patches may not fit the Megatron that trains.

    A Megatron that only writes the initial checkpoint of another backend's run is checked too. Nothing is checked
    if the launch's environment has the variable `ALLOW_UNKNOWN_MEGATRON`.
    """
    runs_megatron = launch.spec.backend is Backend.MEGATRON or launch.initial_checkpoint is not None
    if runs_megatron and variables.ALLOW_UNKNOWN_MEGATRON not in launch.environment:
        entry, folder = launch.entry, Path(launch.entry.path).parent
        checkout = folder if folder.is_absolute() else None
        yield from unknown_version_problems(entry.megatron_version, entry.megatron_commit, checkout)


def _flag_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per flag whose number is none, and per misspelt Megatron flag.

    A name that a checkout defines passes, and so does every name of a run with a patch file, which may define more.
    """
    yield from find_invalid_numbers(launch.flags).values()
    if launch.spec.backend is not Backend.MEGATRON or variables.PATCH_FILE in launch.environment:
        return
    sentences = find_misspelled_flags(launch.flags)
    checkout = launch.job.options.megatron_lm
    identifiers = _read_identifiers(checkout) if sentences and checkout else set()
    for name, sentence in sentences.items():
        if not argument_names([name]) <= identifiers:
            yield sentence


def _read_identifiers(checkout: Path) -> set[str]:
    """Return all words in the Python files of a Megatron checkout, among which are its arguments' names."""
    identifiers: set[str] = set()
    for file in (*checkout.glob("*.py"), *(checkout / "megatron").rglob("*.py")):
        identifiers.update(re.findall(r"\w+", file.read_text(errors="ignore")))
    return identifiers


def _data_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the data set cannot be used for this run."""
    for part in launch.data_parts:
        yield from _problems_of_data_set(launch, part.prefix)


def _problems_of_data_set(launch: Launch, prefix: str) -> Iterator[str]:
    """Yield a sentence per reason why one data set cannot be used for this run."""
    is_missing = not idx_path(ROOT / prefix).is_file()
    if is_missing and prefix in OWN_SAMPLES and launch.job.options.dry_run:
        return  # A real run would make the sample first.
    if is_missing and prefix == PUBLISHED:
        yield (
            f"The published data set {PUBLISHED} is not there; run 'make prepare-ds-openwebtext-10k', "
            "or name another with DATA=."
        )
        return
    try:
        yield from dataset_problems(open_dataset(ROOT / prefix), _use_of_dataset(launch, prefix))
    except DatasetError as error:
        yield str(error)


def _use_of_dataset(launch: Launch, prefix: str) -> DatasetUse:
    """Return what the run needs of a data set, for the checks of the data set's package."""
    flags = Flags(launch.flags)
    # Without the flag a run does not evaluate before its end.
    eval_interval = flags.integer("--eval-interval", launch.iterations + 1)
    return DatasetUse(
        name=prefix,
        model=launch.model.name,
        vocabulary=launch.model.shape.vocabulary,
        # An imported model's own tokenizer may have fewer entries than the model has rows.
        takes_smaller_vocabulary=imported_weights_folder(launch.model) is not None,
        seq_length=launch.model.shape.seq_length,
        split=flags.text(SPLIT_FLAG),
        eval_iterations=flags.integer(EVAL_ITERATIONS_FLAG, 1),
        reaches_evaluation=eval_interval <= launch.iterations,
    )


def _constraint_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why this version of Megatron refuses the run's parallelism, batch or model."""
    is_patched = variables.PATCH_FILE in launch.environment
    yield from find_violations(
        launch.spec, parse_release(launch.entry.megatron_version), is_patched
    )


def _saving_problems(launch: Launch) -> Iterator[str]:
    """Yield the sentences of `saving_problems` for a launch."""
    return saving_problems(launch.saving, launch.spec)


def _link_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the ranks cannot be connected by a shaped link (`NET=`)."""
    if bits := launch.spec.link_bits_per_second:
        yield from network_problems(bits, launch.devices, launch.spec.device)


def _device_problems(launch: Launch) -> Iterable[str]:
    """Return the sentences on this machine's GPUs; none for CPU ranks."""
    return gpu_problems(launch) if launch.spec.device is DeviceKind.GPU else ()


def _memory_problems(launch: Launch) -> Iterator[str]:
    """Return the sentences on the memory of the GPUs, or of this machine for CPU ranks."""
    is_gpu = launch.spec.device is DeviceKind.GPU
    return gpu_memory_problems(launch) if is_gpu else _cpu_memory_problems(launch)


def _cpu_memory_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the CPU ranks need more memory than this machine has free."""
    _, memory = find_peak_rank(launch.spec)
    needed_bytes = memory.total * launch.local_devices
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        yield (
            f"{launch.model.name} with {launch.spec.name} and a micro batch of "
            f"{launch.spec.batch.micro_batch_size} needs about {gib(needed_bytes)} GiB on "
            f"{plural(launch.local_devices, 'CPU rank')}, and {gib(available_bytes)} GiB are free; lower "
            "MICRO_BATCH= and GLOBAL_BATCH=, or use a smaller model ('make list')."
        )


def _checkpoint_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence for each checkpoint to start from that holds another model.

    The shared initial checkpoint and a checkpoint named in EXTRA= are checked.
    """
    folders: set[Path] = set()
    if launch.initial_checkpoint is not None:
        folders.add(launch.initial_checkpoint)
    named_folder = Flags(launch.flags).text("--load")
    if named_folder:
        folders.add(ROOT / named_folder)
    for folder in sorted(folders):
        problem = describe_model_mismatch(folder, launch.model.shape, launch.model.name)
        if problem:
            yield problem


def _wandb_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence for each missing package that logging to W&B needs."""
    if "--wandb-project" not in launch.flags or launch.runtime.container is not None:
        return
    # Without the package tensorboard, Megatron passes no training metric to W&B and only logs a warning.
    for package in ("wandb", "tensorboard"):
        if importlib.util.find_spec(package) is None:
            yield f"WANDB=1 needs the package {package}, which is not installed; run 'make setup'."


def _disk_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the disk of the runs folder has too little space or too few inodes for the run."""
    runs, ranks = launch.job.options.runs, launch.devices
    existing_folder = next(folder for folder in (runs, *runs.resolve().parents) if folder.is_dir())
    # An old checkpoint is removed only after the new one was verified, so for a while there is one more.
    num_checkpoints = launch.saving.keep + 1 if launch.saving else 0
    bytes_per_parameter = num_checkpoints * _SAVED_BYTES.get(launch.spec.dtype, _MOST_SAVED_BYTES)
    initial = launch.initial_checkpoint
    if initial is not None and not initial.is_dir() and not launch.resume_point:
        bytes_per_parameter += _INITIAL_BYTES
    needed_bytes = LOG_BYTES + bytes_per_parameter * total_parameters(launch.model.shape)
    # A rank writes a communication log and stacks, and two files per checkpoint; the run writes its records.
    needed_files = RUN_FILES + 4 * ranks + num_checkpoints * (2 * ranks + 8)
    room = check_room(
        str(existing_folder),
        needed_bytes,
        "the run",
        "name another folder with RUNS=",
        needed_files,
    )
    yield from refusal_sentences([room])


LaunchCheck = Callable[[Launch], Iterable[str]]
"""A function that yields a sentence for each reason why a launch cannot run."""

RUN_CHECKS: tuple[LaunchCheck, ...] = (
    version_problems,
    _flag_problems,
    expert_problems,
    fp8_problems,
    _saving_problems,
    nodes_problems,
    optimizer_problems,
    fused_problems,
    attention_problems,
    sharing_problems,
    _wandb_problems,
    _checkpoint_problems,
    _constraint_problems,
    backend_problems,
    _data_problems,
)
"""Checks of the run itself, whose result is the same on any machine."""

MACHINE_CHECKS: tuple[LaunchCheck, ...] = (
    _link_problems,
    _device_problems,
    runtime_problems,
    _address_problems,
    _limit_problems,
    _address_space_problems,
)
"""Checks of the machine that starts the run."""

ROOM_CHECKS: tuple[LaunchCheck, ...] = (_memory_problems, _disk_problems)
"""Checks of free memory and disk. What a run needs is undefined if another check refuses the run."""


def check_launch(launch: Launch) -> None:
    """Raise if a run cannot work here, or, for a Slurm job, if it cannot work on any machine.

    Raises:
        LaunchError: There are problems, one sentence per line.
    """
    problems = _list_problems(RUN_CHECKS, launch)
    if launch.job.options.slurm is not None:
        problems += _list_problems((_disk_problems,), launch)
    else:
        problems += _list_problems(MACHINE_CHECKS, launch)
        problems = problems or _list_problems(ROOM_CHECKS, launch)
    if problems:
        raise LaunchError("\n".join(problems))


def _list_problems(checks: Iterable[LaunchCheck], launch: Launch) -> list[str]:
    """Return the sentences of all checks, in the checks' order."""
    return [problem for check in checks for problem in check(launch)]

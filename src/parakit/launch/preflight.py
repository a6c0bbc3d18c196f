"""Checks before anything starts or is written: each failure is one sentence with its remedy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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
from parakit.config.flags import Flags, find_misspelled_flags
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
from parakit.formatting.units import gib, plural
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

LOG_BYTES = 64 << 20
"""Room that a run's log, samples and event files need on the disk."""

_SAVED_BYTES = {"fp32": 12, "fp16": 14, "bf16": 14}
"""A parameter in a checkpoint: weights, fp32 main weights beside 16-bit ones, Adam's two moments."""


_CAPACITY = "--moe-expert-capacity-factor"
_GROUPED = "--moe-grouped-gemm"


def _address_problems(launch: Launch) -> Iterator[str]:
    """Yield why ranks would not find the first of them, for which torch waits without a word."""
    nodes = launch.nodes
    # A container has a loopback interface of its own, and NET= makes namespaces with one.
    if launch.runtime.container is None and not launch.spec.link_bits_per_second:
        yield from refusal_sentences([check_loopback()])
    # Other nodes wait for the name: a cluster may give it an address only once node 0 is there.
    if nodes is not None and nodes.rank == 0 and (reason := explain_unresolvable(nodes.address)):
        yield (
            f"MASTER_ADDR={nodes.address} has no address on this machine ({reason}); name the address "
            "itself, or enter the name in DNS or /etc/hosts."
        )


def saving_problems(saving: Saving | None, spec: RunSpec) -> Iterator[str]:
    """Why a run cannot be saved so that it can be resumed."""
    if saving is None:
        return
    backend, sharding = spec.backend, spec.parallelism.sharding
    if backend != "megatron":
        yield (
            f"BACKEND={backend} saves no checkpoints; leave SAVE_EVERY= out, or use BACKEND=megatron."
        )
    if sharding.wraps_modules:
        yield (
            f"{spec.name} cannot be resumed yet: its {sharding} shards are saved in a "
            "format of their own; leave SAVE_EVERY= out, or use zero1."
        )
    if saving.asynchronous and spec.device is DeviceKind.CPU:
        # Megatron's persistent worker divides its rank by torch.cuda.device_count().
        yield (
            "ASYNC_SAVE=1 needs GPUs: Megatron's writer process chooses one by number and fails "
            "without any; leave it out on CPU ranks."
        )


def nodes_problems(launch: Launch) -> Iterator[str]:
    """Why the run cannot be spread over its nodes."""
    nodes = launch.nodes
    if nodes is None:
        return
    if launch.devices % nodes.count:
        yield (
            f"{plural(launch.devices, 'rank')} cannot be shared evenly by {nodes.count} nodes; name a "
            "target whose number of devices they divide."
        )
    if launch.spec.link_bits_per_second:
        yield "NET= connects CPU ranks of one machine by a shaped link; leave it out with several nodes."
    container = launch.runtime.container
    if container is not None and not container.host_network:
        yield (
            "A container has a network of its own, which other nodes do not reach; allow it this "
            "machine's with HOST_NETWORK=1, or set RUNTIME=host."
        )


def expert_problems(launch: Launch) -> Iterator[str]:
    """Why its experts cannot be trained as asked, a sentence each."""
    shape, flags = launch.model.shape, Flags(launch.flags)
    if not shape.experts or not shape.experts_per_token:
        return
    dropless = shape.experts / shape.experts_per_token
    factor = None
    with suppress(ValueError):  # Megatron refuses what is no number itself.
        factor = float(flags.text(_CAPACITY))
    # A verification sees to it itself that its ranks drop the same.
    compared = launch.initial_checkpoint is not None and not launch.job.options.noisy_start
    if compared and factor is not None and 0 <= factor < dropless:
        yield (
            f"{_CAPACITY} {factor:g} drops tokens, and which ones depends on how ranks share them, so "
            "losses could not be compared with other runs from the same start; leave it out of EXTRA= "
            f"(from {dropless:g} on nothing is dropped), or set SHARED_START=0."
        )
    if flags.has(_GROUPED) and not launch.runtime.transformer_engine:
        yield (
            f"{_GROUPED} is Transformer Engine's, which does not work here; leave it out of EXTRA=, and "
            "experts are multiplied one by one."
        )


def fp8_problems(launch: Launch) -> Iterator[str]:
    """Why products in fewer bits are not computed here, a sentence."""
    if not launch.spec.fp8_recipe:
        return
    name = launch.model.name.removesuffix("-fp8")
    if name == launch.model.name:
        instead = "leave --fp8-format out"
    else:
        instead = f"train {name}, or plan this with 'make plan MODEL={launch.model.name}'"
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"fp8 is Megatron's, and BACKEND={launch.spec.backend} trains without it; {instead}."
    elif launch.spec.device is DeviceKind.CPU:
        yield f"fp8 is Transformer Engine's, on GPUs alone; {instead}."
    elif not launch.runtime.transformer_engine:
        yield (
            "fp8 is Transformer Engine's, which does not work here; set RUNTIME=docker, whose image has "
            f"it, or {instead}."
        )


def version_problems(launch: Launch) -> Iterator[str]:
    """Yield why the Megatron that trains, or writes the starting weights, may not fit the patches."""
    used = launch.spec.backend is Backend.MEGATRON or launch.initial_checkpoint is not None
    if used and variables.ALLOW_UNKNOWN_MEGATRON not in launch.environment:
        entry, folder = launch.entry, Path(launch.entry.path).parent
        checkout = folder if folder.is_absolute() else None
        yield from unknown_version_problems(entry.megatron_version, entry.megatron_commit, checkout)


def _flag_problems(launch: Launch) -> Iterator[str]:
    """Flags that Megatron does not have; a checkout, or a patch file, may add some of its own."""
    wrong = find_misspelled_flags(launch.flags) if launch.spec.backend is Backend.MEGATRON else {}
    if wrong and launch.job.options.megatron_lm:
        checkout = launch.job.options.megatron_lm
        files = [*checkout.glob("*.py"), *(checkout / "megatron").rglob("*.py")]
        own = set(re.findall(r"\w+", " ".join(each.read_text(errors="ignore") for each in files)))
        wrong = {name: said for name, said in wrong.items() if not argument_names([name]) <= own}
    if variables.PATCH_FILE not in launch.environment:
        yield from wrong.values()


def _data_problems(launch: Launch) -> Iterator[str]:
    missing = not idx_path(launch.data_path).is_file()
    if missing and launch.data in OWN_SAMPLES and launch.job.options.dry_run:
        return  # The kit would make it.
    if missing and launch.data == PUBLISHED:
        yield (
            f"The published data set {PUBLISHED} is not there; run 'make prepare-ds-openwebtext-10k', "
            "or name another with DATA=."
        )
        return
    try:
        yield from dataset_problems(open_dataset(launch.data_path), _use_of_dataset(launch))
    except DatasetError as error:
        yield str(error)


def _use_of_dataset(launch: Launch) -> DatasetUse:
    """Return what a run needs of its data set."""
    flags = Flags(launch.flags)
    return DatasetUse(
        name=launch.data,
        model=launch.model.name,
        vocabulary=launch.model.shape.vocabulary,
        # An imported model's own tokenizer may have fewer entries than the model has rows.
        takes_smaller_vocabulary=imported_weights_folder(launch.model) is not None,
        seq_length=launch.model.shape.seq_length,
        split=flags.text(SPLIT_FLAG),
        eval_iterations=flags.integer(EVAL_ITERATIONS_FLAG, 1),
        reaches_evaluation=flags.integer("--eval-interval", launch.iterations + 1)
        <= launch.iterations,
    )


def _constraint_problems(launch: Launch) -> Iterator[str]:
    """Yield why Megatron of this version refuses the run's parallelism, batch or model."""
    patched = variables.PATCH_FILE in launch.environment
    yield from find_violations(launch.spec, parse_release(launch.entry.megatron_version), patched)


def _saving_problems(launch: Launch) -> Iterator[str]:
    return saving_problems(launch.saving, launch.spec)


def _link_problems(launch: Launch) -> Iterator[str]:
    """Yield why the ranks cannot be connected by a shaped link (`NET=`)."""
    if bits := launch.spec.link_bits_per_second:
        yield from network_problems(bits, launch.devices, launch.spec.device)


def _device_problems(launch: Launch) -> Iterable[str]:
    return gpu_problems(launch) if launch.spec.device is DeviceKind.GPU else ()


def _room_in_memory(launch: Launch) -> Iterator[str]:
    on_gpu = launch.spec.device is DeviceKind.GPU
    return gpu_memory_problems(launch) if on_gpu else _memory_problems(launch)


def _memory_problems(launch: Launch) -> Iterator[str]:
    needed = find_peak_rank(launch.spec)[1].total * launch.local_devices
    available = psutil.virtual_memory().available
    if needed > available:
        yield (
            f"{launch.model.name} with {launch.spec.name} and a micro batch of "
            f"{launch.spec.batch.micro_batch_size} needs about {gib(needed)} GiB on "
            f"{plural(launch.local_devices, 'CPU rank')}, and {gib(available)} GiB are free; lower "
            "MICRO_BATCH= and GLOBAL_BATCH=, or use a smaller model ('make list')."
        )


def _checkpoint_problems(launch: Launch) -> Iterator[str]:
    """Weights to begin with must be the model's: the shared start's, or what EXTRA= loads."""
    named = Flags(launch.flags).text("--load")
    folders = {launch.initial_checkpoint, ROOT / named if named else None}
    for folder in sorted(folder for folder in folders if folder is not None):
        problem = describe_model_mismatch(folder, launch.model.shape, launch.model.name)
        if problem:
            yield problem


def _wandb_problems(launch: Launch) -> Iterator[str]:
    if "--wandb-project" not in launch.flags or launch.runtime.container is not None:
        return
    # Without TensorBoard Megatron passes no training metric to W&B, and only logs that.
    for package in ("wandb", "tensorboard"):
        if importlib.util.find_spec(package) is None:
            yield f"WANDB=1 needs the package {package}, which is not installed; run 'make setup'."


def _disk_problems(launch: Launch) -> Iterator[str]:
    runs, saving = launch.job.options.runs, launch.saving
    existing = next(folder for folder in (runs, *runs.resolve().parents) if folder.is_dir())
    # One more than are kept: an old one is removed only after the new one was verified.
    checkpoints = saving.keep + 1 if saving else 0
    # Records, samples, a ledger and stacks of each rank; two files of a rank in each checkpoint.
    files = RUN_FILES + 4 * launch.devices + checkpoints * (2 * launch.devices + 8)
    start = launch.initial_checkpoint
    to_write = start is not None and not start.is_dir() and not launch.resume_point
    saved = _SAVED_BYTES.get(launch.spec.dtype, max(_SAVED_BYTES.values()))
    a_parameter = (4 if to_write else 0) + checkpoints * saved
    needed = LOG_BYTES + a_parameter * total_parameters(launch.model.shape)
    room = check_room(str(existing), needed, "the run", "name another folder with RUNS=", files)
    yield from refusal_sentences([room])


Check = Callable[[Launch], Iterable[str]]
"""A check yields a sentence for each reason why a run cannot work, and asks the package that knows the answer."""

RUN_CHECKS: tuple[Check, ...] = (
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
"""Checks of the run itself, which hold on any machine."""

MACHINE_CHECKS: tuple[Check, ...] = (
    _link_problems,
    _device_problems,
    runtime_problems,
    _address_problems,
)
"""Checks of the machine that starts the run."""

ROOM_CHECKS: tuple[Check, ...] = (_room_in_memory, _disk_problems)
"""Checks of free memory and disk. What a run needs is undefined if another check refuses the run."""


def check_launch(launch: Launch) -> None:
    """Raise if a run cannot work here, or, if Slurm starts it elsewhere, if it cannot work on any machine.

    Raises:
        LaunchError: One or more sentences, a line each.
    """
    problems = _problems_of(RUN_CHECKS, launch)
    if launch.job.options.slurm is not None:
        problems += _problems_of((_disk_problems,), launch)
    else:
        problems += _problems_of(MACHINE_CHECKS, launch)
        problems = problems or _problems_of(ROOM_CHECKS, launch)
    if problems:
        raise LaunchError("\n".join(problems))


def _problems_of(checks: Iterable[Check], launch: Launch) -> list[str]:
    """Return the sentences of all checks, in the checks' order."""
    return [problem for check_run in checks for problem in check_run(launch)]

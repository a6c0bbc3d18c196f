"""Checks before anything starts or is written: each failure is one sentence with its remedy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from packaging.version import Version

from megatron_patches.context import WHAT_IS_KNOWN, is_known
from parakit.checkpoint import other_model_problem
from parakit.cluster import RUN_FILES, check_loopback, check_room, refusals, unresolvable
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flag_table import argument_names, release
from parakit.config.flags import Flags, misspelled
from parakit.config.model import imported_weights
from parakit.config.run import Backend, DeviceKind, RunSpec
from parakit.data import (
    Dataset,
    DatasetError,
    Split,
    divide_into_parts,
    idx_path,
    largest_token,
    open_dataset,
    sizes_sentence,
)
from parakit.formatting.units import gib, plural
from parakit.launch.backends import backend_problems, optimizer_problems
from parakit.launch.compose import Launch
from parakit.launch.data import EVAL_ITERATIONS, OWN_SAMPLES, PUBLISHED, SPLIT, usable_split_flags
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
from parakit.planner import fullest_rank, parameters_total, violations

LOG_BYTES = 64 << 20
"""Room that a run's log, samples and event files need on the disk."""

_SAVED_BYTES = {"fp32": 12, "fp16": 14, "bf16": 14}
"""A parameter in a checkpoint: weights, fp32 main weights beside 16-bit ones, Adam's two moments."""


_CAPACITY = "--moe-expert-capacity-factor"
_GROUPED = "--moe-grouped-gemm"


def check(launch: Launch) -> None:
    """Refuse a run that cannot work here; one that Slurm starts elsewhere, if it cannot on any machine.

    Raises:
        LaunchError: One or more sentences, a line each.
    """
    problems = list(_composition_problems(launch))
    if launch.job.options.slurm is None:
        problems += _problems_here(launch, not problems)
    else:
        problems += _disk_problems(launch)
    if problems:
        raise LaunchError("\n".join(problems))


def _problems_here(launch: Launch, is_sound: bool) -> list[str]:
    """Why this machine cannot run it; of memory and disk only where nothing else is wrong."""
    problems: list[str] = []
    if bits := launch.spec.link_bits_per_second:
        problems += network_problems(bits, launch.devices, launch.spec.device)
    on_gpu = launch.spec.device is DeviceKind.GPU
    problems += gpu_problems(launch) if on_gpu else ()
    problems += runtime_problems(launch)
    problems += _address_problems(launch)
    if is_sound and not problems:
        problems += gpu_memory_problems(launch) if on_gpu else _memory_problems(launch)
        problems += _disk_problems(launch)
    return problems


def _address_problems(launch: Launch) -> Iterator[str]:
    """Yield why ranks would not find the first of them, for which torch waits without a word."""
    nodes = launch.nodes
    # A container has a loopback interface of its own, and NET= makes namespaces with one.
    if launch.runtime.container is None and not launch.spec.link_bits_per_second:
        yield from refusals([check_loopback()])
    # Other nodes wait for the name: a cluster may give it an address only once node 0 is there.
    if nodes is not None and nodes.rank == 0 and (reason := unresolvable(nodes.address)):
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
    compared = launch.start_checkpoint is not None and not launch.job.options.noisy_start
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
    """Why the Megatron that trains, or writes the starting weights, may not fit the patches."""
    version, commit = launch.entry.megatron_version, launch.entry.megatron_commit
    used = launch.spec.backend is Backend.MEGATRON or launch.start_checkpoint is not None
    if (
        used
        and not is_known(Version(version), commit)
        and variables.ALLOW_UNKNOWN_MEGATRON not in launch.environment
    ):
        checkout = Path(launch.entry.path).parent
        of = f" of MEGATRON_LM={checkout}" if checkout.is_absolute() else ""
        at = f" at {commit}" if commit else ""
        yield (
            f"Megatron {version}{at}{of} has not been tried with this kit, which knows "
            f"{WHAT_IS_KNOWN}; name a checkout of one of those with MEGATRON_LM=, or set "
            "ALLOW_UNKNOWN_MEGATRON=1 to train with it."
        )


def _composition_problems(launch: Launch) -> Iterator[str]:
    yield from version_problems(launch)
    yield from _flag_problems(launch)
    yield from expert_problems(launch)
    yield from fp8_problems(launch)
    yield from saving_problems(launch.saving, launch.spec)
    yield from nodes_problems(launch)
    yield from optimizer_problems(launch)
    yield from fused_problems(launch)
    yield from attention_problems(launch)
    yield from sharing_problems(launch)
    yield from _wandb_problems(launch)
    yield from _checkpoint_problems(launch)
    patched = variables.PATCH_FILE in launch.environment
    yield from violations(launch.spec, release(launch.entry.megatron_version), patched)
    yield from backend_problems(launch)
    yield from _data_problems(launch)


def _flag_problems(launch: Launch) -> Iterator[str]:
    """Flags that Megatron does not have; a checkout, or a patch file, may add some of its own."""
    wrong = misspelled(launch.flags) if launch.spec.backend is Backend.MEGATRON else {}
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
        dataset = open_dataset(launch.data_path)
    except DatasetError as error:
        yield str(error)
        return
    beyond = largest_token(dataset) if dataset.vocabulary is None else 0
    yield from _vocabulary_problems(launch, dataset.vocabulary, beyond)
    if dataset.tokens <= launch.model.shape.seq_length:
        yield (
            f"Data set {launch.data} has {dataset.tokens} tokens, less than one sequence of "
            f"{launch.model.shape.seq_length}; prepare a longer one with 'make prepare-ds'."
        )
    else:
        yield from _split_problems(launch, dataset)


def _split_problems(launch: Launch, dataset: Dataset) -> Iterator[str]:
    """Yield why Megatron cannot divide the data set as `--split` asks."""
    flags, length = Flags(launch.flags), launch.model.shape.seq_length
    split, evaluates = flags.text(SPLIT), flags.integer(EVAL_ITERATIONS, 1) > 0
    try:
        parts = divide_into_parts(dataset, split)
    except DatasetError as error:
        yield str(error)
        return
    unusable = [part for part in parts if part.is_unusable(length, evaluates)]
    if unusable:
        name = unusable[0].name
        reason = (
            f"is shorter than one sample of {length + 1:,} tokens, which {EVAL_ITERATIONS} 0 forbids"
            if unusable[0].tokens
            else "has nothing that Megatron could draw a sample from"
        )
        usable = " ".join(usable_split_flags(dataset, length, evaluates))
        fix = f"set EXTRA='{usable}', or " if usable else ""
        yield (
            f"{SPLIT} {split} divides data set {launch.data} into {sizes_sentence(parts)}: the {name} "
            f"part {reason}; {fix}prepare more documents."
        )
    reaches = flags.integer("--eval-interval", launch.iterations + 1) <= launch.iterations
    if evaluates and reaches and parts[Split.VALIDATION].weight == 0:
        yield (
            f"{SPLIT} {split} leaves no validation part, and {EVAL_ITERATIONS} "
            f"{flags.integer(EVAL_ITERATIONS)} evaluates on it; add {EVAL_ITERATIONS} 0 to EXTRA=, or "
            "give the part a weight."
        )


def _vocabulary_problems(launch: Launch, vocabulary: int | None, largest: int) -> Iterator[str]:
    known = launch.model.shape.vocabulary
    # An imported model's own tokenizer may have fewer entries than it has rows.
    fits = imported_weights(launch.model) is not None and (vocabulary or 0) <= known
    fix = "prepare it with the model's tokenizer, or name another with DATA=."
    if vocabulary not in (None, known) and not fits:
        yield (
            f"Data set {launch.data} was made with a vocabulary of {vocabulary}, but "
            f"{launch.model.name} has {known}; {fix}"
        )
    elif largest >= known:
        yield (
            f"Data set {launch.data} holds token {largest}, beyond {launch.model.name}'s vocabulary "
            f"of {known}; {fix}"
        )


def _memory_problems(launch: Launch) -> Iterator[str]:
    needed = fullest_rank(launch.spec)[1].total * launch.local_devices
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
    folders = {launch.start_checkpoint, ROOT / named if named else None}
    for folder in sorted(folder for folder in folders if folder is not None):
        problem = other_model_problem(folder, launch.model.shape, launch.model.name)
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
    start = launch.start_checkpoint
    to_write = start is not None and not start.is_dir() and not launch.resume_point
    saved = _SAVED_BYTES.get(launch.spec.dtype, max(_SAVED_BYTES.values()))
    a_parameter = (4 if to_write else 0) + checkpoints * saved
    needed = LOG_BYTES + a_parameter * parameters_total(launch.model.shape)
    room = check_room(str(existing), needed, "the run", "name another folder with RUNS=", files)
    yield from refusals([room])

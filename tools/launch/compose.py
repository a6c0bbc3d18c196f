"""From what was asked to the exact command: nothing here touches the disk or a device."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_patches.fused.names import dropped_flags
from tools.launch import docker, wandb_logging
from tools.launch.checkpoints.saving import Saving, saving_flags, saving_folder
from tools.launch.cluster.nodes import Nodes
from tools.launch.entry import find_entry, release
from tools.launch.image import MEGATRON_IN_IMAGE
from tools.launch.network import Rate
from tools.launch.network import command as shaped
from tools.launch.optimizers import optimizer_flags
from tools.launch.options import HANG_TIMEOUT_SECONDS, Backend, Options
from tools.launch.runtime import ON_HOST, Runtime
from tools.recipe.arguments import Flags, merge_flags, read_args_file
from tools.recipe.model import (
    GPT2_VOCABULARY,
    ROOT,
    Model,
    changed_model,
    training_flags,
    with_vocabulary,
)
from tools.recipe.strategy import batch_for, parallelism_from_flags
from tools.records import Batch, DeviceKind, Entry, Parallelism, Sharding

RUNTIMES = Path(__file__).parent / "runtimes"
TINY_ITERATIONS, ITERATIONS = 25, 100
DEFAULT_DATA = {
    DeviceKind.CPU: "owt-ds/sample_text_document",
    DeviceKind.GPU: "owt-ds/openwebtext-10k_text_document",
}
UNIQUE_SAMPLE = "owt-ds/sample-unique_text_document"
"""The sample with every paragraph once."""

GPT2_DATA = (*DEFAULT_DATA.values(), UNIQUE_SAMPLE)
"""What the kit prepares holds GPT-2 tokens: whatever is trained on it has GPT-2's vocabulary."""

RUN_PLACEHOLDER = "<run folder>"
FSDP = (Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2)
UNTIED = "--untie-embeddings-and-output-weights"


@dataclass(frozen=True)
class GoesOnFrom:
    """The checkpoint that a resumed run loads."""

    run: str
    folder: Path
    """Of its checkpoints."""
    iteration: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's; the iteration by number, because the tracker may name one that is damaged."""
        return ("--load", from_root(self.folder), "--ckpt-step", str(self.iteration))


@dataclass(frozen=True)
class Launch:
    """One run, decided in full except for the folder it will be written to."""

    strategy: str
    model: Model
    device: DeviceKind
    parallelism: Parallelism
    batch: Batch
    dtype: str
    dropout: float
    seed: int
    iterations: int
    entry: Entry
    data: str
    start_checkpoint: Path | None
    flags: tuple[str, ...]
    """Megatron's arguments but for those that name the run folder."""
    environment: dict[str, str]
    runtime: Runtime = ON_HOST
    ledger: bool = True
    """Whether ranks count what they send, hold and wait for."""
    backend: Backend = Backend.MEGATRON
    network: Rate | None = None
    """Limit of the link between the two halves of the ranks."""
    nodes: Nodes | None = None
    """The machines it runs on, where there are several."""
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS
    saving: Saving | None = None
    goes_on_from: GoesOnFrom | None = None
    shares_gpu: bool = False
    """All ranks are on one GPU, over gloo."""

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.parallelism.world_size

    @property
    def local_devices(self) -> int:
        """Number of ranks on this machine."""
        return self.devices // self.nodes.count if self.nodes else self.devices

    def arguments(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """Megatron's arguments for a run written to `run_folder`."""
        # TensorBoard always: Megatron hands W&B only what it writes there.
        written = ["--tensorboard-dir", f"{run_folder}/tensorboard"]
        if self.saving is not None:
            written += ["--save", saving_folder(run_folder)]
        loaded = self.goes_on_from.flags if self.goes_on_from else ()
        folders = wandb_logging.folder_flags(self.flags, run_folder)
        return (*self.flags, *loaded, *written, *folders)

    def command(self, run_folder: str = RUN_PLACEHOLDER) -> tuple[str, ...]:
        """The whole command, from the repository root; in a container, with what starts it."""
        container = self.runtime.container
        program = (*self._program(), *self.arguments(run_folder))
        if self.network is not None:
            return shaped(self.network, self.devices, _python(), program)
        python = docker.PYTHON if container else _python()
        ranks = (*torchrun(self.local_devices, python, self.nodes), *program)
        if container is None:
            return ranks
        return container.wrap(ranks, self.environment, docker.container_name(run_folder))

    def _program(self) -> tuple[str, ...]:
        if self.backend is Backend.MEGATRON:
            return ("-m", "megatron_patches", self.entry.path)
        # As a module, so that it finds the kit beside it.
        return ("-m", self.entry.path.removesuffix(".py").replace("/", "."))


def compose(
    strategy: str,
    strategy_flags: Sequence[str],
    model: Model,
    devices: int,
    device: DeviceKind,
    options: Options,
    runtime: Runtime = ON_HOST,
) -> Launch:
    """Decide everything about a run.

    Raises:
        LaunchError: No Megatron is there.
        StrategyError: The flags' degrees do not multiply to `devices`.
    """
    parallelism = parallelism_from_flags((*strategy_flags, *options.extra), devices)
    data = options.data or DEFAULT_DATA[device]
    model = model_for(model, options.extra, data)
    entry = entry_of(runtime, options)
    batch = _batch(model, parallelism, options)
    shared = options.shared_start if options.shared_start is not None else device is DeviceKind.CPU
    untied = Flags((*model.flags, *strategy_flags, *options.extra)).has(UNTIED)
    start = start_checkpoint_path(model, entry, options, untied) if shared else None
    dropout = model.dropout if options.dropout is None else options.dropout
    iterations = options.iterations or (TINY_ITERATIONS if "-tiny" in model.name else ITERATIONS)
    flags = merge_flags(
        model_flags(model, device),
        strategy_flags,
        bare_flags(runtime_flags(device, parallelism, runtime), options),
        expert_flags(model, device, runtime),
        ("--micro-batch-size", str(batch.micro_batch_size)),
        ("--global-batch-size", str(batch.global_batch_size)),
        dropout_flags(dropout) if options.dropout is not None else (),
        ("--seed", str(options.seed), "--data-path", data),
        tokenizer_flags(model, entry),
        start_flags(start, parallelism) if start else (),
        ("--exit-interval", str(iterations), "--log-throughput"),
        optimizer_flags(options.optimizer, entry.megatron_version),
        options.wandb.flags if options.wandb else (),
        saving_flags(options.saving, parallelism, entry) if options.saving else (),
        options.extra,
    )
    return Launch(
        strategy=strategy,
        model=model,
        device=device,
        parallelism=parallelism,
        batch=batch,
        dtype=model.dtype if device is DeviceKind.GPU else "fp32",
        dropout=dropout,
        seed=options.seed,
        iterations=iterations,
        entry=entry,
        data=data,
        start_checkpoint=start,
        flags=flags,
        environment=environment_for(device, parallelism, start)
        | (options.wandb.environment if options.wandb else {})
        | bare_environment(options),
        runtime=with_mounts(runtime, data, options),
        ledger=options.ledger,
        network=options.network,
        nodes=options.nodes,
        hang_timeout_seconds=options.hang_timeout_seconds,
        saving=options.saving,
        shares_gpu=options.share_gpu,
    )


def model_for(model: Model, words: Sequence[str], data: str) -> Model:
    """The model that `words` make of it; on the kit's own data sets it has their vocabulary."""
    model = changed_model(model, words)
    return with_vocabulary(model, GPT2_VOCABULARY) if data in GPT2_DATA else model


def bare_flags(flags: Sequence[str], options: Options) -> tuple[str, ...]:
    """A runtime's flags without those that would switch off what `FUSED=` provides; gloo to share."""
    gloo = ("--distributed-backend", "gloo") if options.share_gpu else ()
    return (*(flag for flag in flags if flag not in dropped_flags(options.fused)), *gloo)


def bare_environment(options: Options) -> dict[str, str]:
    """What tells the patches of `FUSED=` and `SHARE_GPU=`."""
    fused = {"KIT_FUSED": ",".join(options.fused)} if options.fused else {}
    return fused | ({"KIT_SHARE_GPU": "1"} if options.share_gpu else {})


def model_flags(model: Model, device: DeviceKind) -> tuple[str, ...]:
    """The family's training flags, then the model's own; CPU ranks compute in fp32."""
    flags = (*training_flags(model.family), *model.flags)
    half = ("--fp16", "--bf16") if device is DeviceKind.CPU else ()
    return tuple(flag for flag in flags if flag not in half)


def entry_of(runtime: Runtime, options: Options) -> Entry:
    """Which Megatron trains: in a container the checkout of its image.

    Raises:
        LaunchError: No Megatron is there.
    """
    pair = runtime.pair
    if pair is None:
        return find_entry(options.megatron_lm)
    entry = f"{MEGATRON_IN_IMAGE}/pretrain_gpt.py"
    return Entry(entry, pair.megatron_version, pair.megatron_commit[:12])


def runtime_flags(
    device: DeviceKind, parallelism: Parallelism, runtime: Runtime = ON_HOST
) -> tuple[str, ...]:
    """What the machine needs, whatever is trained; nothing where NVIDIA's image has it all."""
    if device is DeviceKind.CPU:
        # Megatron-FSDP divides gradients inside the reduction with PREMUL_SUM, which gloo lacks.
        fsdp = parallelism.sharding in (Sharding.ZERO2, Sharding.ZERO3)
        divide = ("--no-gradient-reduce-div-fusion",) if fsdp else ()
        return (*read_args_file(RUNTIMES / "cpu.args"), *divide)
    if not runtime.transformer_engine:
        return read_args_file(RUNTIMES / "host.args")
    # The output layer is Megatron's own also with Transformer Engine, and its fusion is Apex's.
    return () if runtime.apex else ("--no-gradient-accumulation-fusion",)


def expert_flags(model: Model, device: DeviceKind, runtime: Runtime) -> tuple[str, ...]:
    """Grouped GEMM where there is one: Transformer Engine's, which f4fa7d6b has in bf16 only."""
    grouped = device is DeviceKind.GPU and runtime.transformer_engine and model.dtype == "bf16"
    return ("--moe-grouped-gemm",) if model.shape.experts and grouped else ()


def tokenizer_flags(model: Model, entry: Entry) -> tuple[str, ...]:
    """A tokenizer that knows only its size: training reads ids, and must never need the hub.

    Up to 0.17 Megatron's NullTokenizer adds an end-of-document entry to the size it is given.
    """
    added = 1 if release(entry.megatron_version) < (0, 18) else 0
    return (
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(model.shape.vocabulary - added),
    )


def dropout_flags(probability: float) -> tuple[str, ...]:
    """Both of Megatron's dropouts."""
    return ("--attention-dropout", str(probability), "--hidden-dropout", str(probability))


def start_flags(checkpoint: Path, parallelism: Parallelism) -> tuple[str, ...]:
    """Begin iteration 1 from the checkpoint's weights, resharded to this layout.

    Megatron pads the vocabulary to a multiple of 128·TP, and padding rows take part in the softmax;
    dividing the multiple by TP keeps the same rows, and so the same loss, for every strategy.
    """
    multiple = ("--make-vocab-size-divisible-by", str(max(1, 128 // parallelism.tensor)))
    if parallelism.sharding in FSDP:
        return multiple  # megatron_patches/start_weights.py copies the weights in before wrapping.
    load = ("--load", from_root(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng")
    return (*load, "--ckpt-format", "torch_dist", *multiple)


def start_checkpoint_path(
    model: Model, entry: Entry, options: Options, untied: bool = False
) -> Path:
    """Where the shared starting weights of this model, seed and Megatron are kept.

    A model with an output layer of its own (`untied`) is another model, with other weights.
    """
    own = (UNTIED,) if untied else ()
    identity = "\n".join((*model.flags, *own, str(options.seed), entry.megatron_version))
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return options.runs / ".start" / f"{model.name}-{key}"


def environment_for(
    device: DeviceKind, parallelism: Parallelism, start: Path | None = None
) -> dict[str, str]:
    """What the kit sets for the ranks, beyond the caller's environment."""
    environment = {"KIT_DEVICE": device.value, "HF_HUB_OFFLINE": "1"}
    if parallelism.sharding not in FSDP:
        # TP and SP need it before Blackwell; both FSDPs refuse it.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    elif start:
        environment["KIT_START_WEIGHTS"] = from_root(start)
    if device is DeviceKind.GPU:
        # CUDA and NVML then number the GPUs alike, so that samples belong to the rank they name.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if device is DeviceKind.CPU:
        # A rank is one core, so that two ranks have twice what one has; no JIT: it would compile.
        environment |= {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return environment


def torchrun(ranks: int, python: str, nodes: Nodes | None = None) -> tuple[str, ...]:
    """torchrun with so many ranks on this machine; alone it finds a free port by itself."""
    alone = ("--standalone", "--nproc-per-node", str(ranks))
    place = nodes.torchrun_flags(ranks) if nodes else alone
    return (python, "-m", "torch.distributed.run", *place)


def from_root(path: Path) -> str:
    """A path as the ranks see it: relative to the repository root where it lies inside."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)


def with_mounts(runtime: Runtime, data: str, options: Options) -> Runtime:
    """A container sees the kit, and what was named outside it: the data set, the runs."""
    if runtime.container is None:
        return runtime
    folders = (*docker.data_folders(ROOT / data), options.runs.absolute())
    return replace(runtime, container=runtime.container.mounting(*folders))


def _python() -> str:
    python = Path(sys.executable)
    return str(python.relative_to(ROOT) if python.is_relative_to(ROOT) else python)


def _batch(model: Model, parallelism: Parallelism, options: Options) -> Batch:
    own = batch_for(model.batch, parallelism)
    return Batch(
        options.micro_batch_size or own.micro_batch_size,
        options.global_batch_size or own.global_batch_size,
    )

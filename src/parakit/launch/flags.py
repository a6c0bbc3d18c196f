"""Groups of Megatron's flags and environment variables, one function for each reason."""

from __future__ import annotations

from pathlib import Path

from megatron_patches.fusions import dropped_flags
from parakit.artifacts.run import MegatronEntry
from parakit.config import variables
from parakit.config.files import read_args_file, relative_to_root
from parakit.config.flag_table import parse_release
from parakit.config.flags import drop_flags_newer_than, format_flags
from parakit.config.huggingface import EXACT_GELU, TANH_GELU
from parakit.config.model import Model
from parakit.config.run import DeviceKind, OptimizerName
from parakit.config.strategy import Parallelism
from parakit.launch.options import Options, Saving
from parakit.launch.runtime import Runtime

RUNTIMES = Path(__file__).parent / "runtimes"
CPU_RANK_ENVIRONMENT = {
    # A rank is one core, so that two ranks have twice what one has.
    "OMP_NUM_THREADS": "1",
    # No JIT: it would compile.
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # As CUDA's caching allocator does on a GPU, malloc keeps what a tensor gives back. By default glibc
    # returns it to the kernel and clears new pages at each iteration, for strategies unequally often.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776",
}
"""Environment of a CPU rank; to be set before its process starts."""

IMPORT_TIME_VARIABLES = (
    *(variables.DEVICE, variables.FUSED, variables.SHARE_GPU, variables.ALLOW_UNKNOWN_MEGATRON),
    *("HF_HUB_OFFLINE", *CPU_RANK_ENVIRONMENT),
)
"""Variables that decide what is imported and patched; the others a forked rank gets with its run."""


def runtime_flags(
    device: DeviceKind, parallelism: Parallelism, runtime: Runtime, options: Options, model: Model
) -> tuple[str, ...]:
    """Flags that the device needs; none for most models where NVIDIA's image has every library.

    `FUSED=` leaves out those that would disable its patches.
    """
    flags: tuple[str, ...] = ()
    if device is DeviceKind.CPU:
        flags = read_args_file(RUNTIMES / "cpu.args")
        if parallelism.sharding.is_megatron_fsdp:
            # It divides gradients inside the reduction with PREMUL_SUM, which gloo lacks.
            flags = (*flags, "--no-gradient-reduce-div-fusion")
    elif not runtime.transformer_engine:
        flags = read_args_file(RUNTIMES / "host.args")
    elif not runtime.apex:
        # The output layer is Megatron's own also with Transformer Engine, and its fusion is Apex's.
        flags = ("--no-gradient-accumulation-fusion",)
    # Only with the fusion has Megatron's core GELU's tanh approximation.
    tanh = (EXACT_GELU,) if TANH_GELU in model.flags else ()
    dropped = (*dropped_flags(options.fused), *tanh)
    # Grouped GEMM is Transformer Engine's, and f4fa7d6b has it in bf16 only.
    on_te = device is DeviceKind.GPU and runtime.transformer_engine and model.dtype == "bf16"
    grouped = ("--moe-grouped-gemm",) if model.shape.experts and on_te else ()
    return (*(flag for flag in flags if flag not in dropped), *grouped)


def sharding_flags(parallelism: Parallelism, entry: MegatronEntry) -> tuple[str, ...]:
    """What Megatron-FSDP needs beside its own flags.

    Up to 0.17 Megatron takes it without the distributed optimizer as well, but then clips a rank's
    gradients by its own norm, and ends in an error in bf16. 0.15 shards gradients only where their
    reduction overlaps.
    """
    if not parallelism.sharding.is_megatron_fsdp:
        return ()
    version = parse_release(entry.megatron_version)
    overlapped = not parallelism.sharding.shards_weights and version < (0, 16)
    return (
        *(("--use-distributed-optimizer",) if version < (0, 18) else ()),
        *(("--overlap-grad-reduce",) if overlapped else ()),
    )


def initial_checkpoint_flags(
    checkpoint: Path, parallelism: Parallelism, padded_to: int
) -> tuple[str, ...]:
    """Begin iteration 1 from the checkpoint's weights, resharded to this strategy.

    Megatron pads the vocabulary to a multiple of 128·TP, and padding rows take part in the softmax;
    dividing the multiple by TP keeps the same rows, and so the same loss, for every strategy.
    """
    multiple = ("--make-vocab-size-divisible-by", str(max(1, padded_to // parallelism.tensor)))
    if parallelism.sharding.wraps_modules:
        return multiple  # megatron_patches/start_weights.py copies the weights in before wrapping.
    load = (
        "--load",
        relative_to_root(checkpoint),
        "--finetune",
        "--no-load-optim",
        "--no-load-rng",
    )
    return (*load, "--ckpt-format", "torch_dist", *multiple)


def saving_flags(saving: Saving, parallelism: Parallelism, entry: MegatronEntry) -> tuple[str, ...]:
    """Megatron's flags but for the folder: its distributed format, which loads into any strategy."""
    flags = ["--save-interval", str(saving.every), "--ckpt-format", "torch_dist"]
    sharding = parallelism.sharding
    if sharding and not sharding.wraps_modules:
        # Without it the optimizer's shards go back only into the strategy that saved them.
        flags.append("--dist-ckpt-optim-fully-reshardable")
    if saving.asynchronous:
        # Megatron's own writer; its default needs a package that its wheel does not bring.
        flags += ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    return drop_flags_newer_than(flags, entry.megatron_version)


def environment_for(
    device: DeviceKind, parallelism: Parallelism, start: Path | None, options: Options
) -> dict[str, str]:
    """What the kit sets for the ranks, beyond the caller's environment."""
    environment = {variables.DEVICE: device.value, "HF_HUB_OFFLINE": "1"}
    if not parallelism.sharding.wraps_modules:
        # TP and SP need it before Blackwell; both FSDPs refuse it.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    elif start:
        environment[variables.START_WEIGHTS] = relative_to_root(start)
    if device is DeviceKind.GPU:
        # CUDA and NVML then number the GPUs alike, so that samples belong to the rank they name.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if device is DeviceKind.CPU:
        environment |= CPU_RANK_ENVIRONMENT
    if options.wandb:
        environment["WANDB_MODE"] = options.wandb.mode  # W&B's client reads it there.
    if options.share_gpu:
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    patch_file = options.patch_file
    asked = {
        variables.FUSED: ",".join(options.fused),
        variables.SHARE_GPU: "1" if options.share_gpu else "",
        variables.PATCH_FILE: patch_file.path if patch_file else "",
        variables.PATCH_FILE_SHA256: patch_file.sha256 if patch_file else "",
        variables.ALLOW_UNKNOWN_MEGATRON: "1" if options.allow_unknown_megatron else "",
    }
    return environment | {name: text for name, text in asked.items() if text}


def optimizer_flags(name: OptimizerName, megatron_version: str) -> tuple[str, ...]:
    """Muon as published with Blueberry: learning rate 0.01, and 0.001 for parameters that AdamW updates.

    Megatron calls its AdamW `adam`, which is its default.
    """
    if name is OptimizerName.ADAMW:
        return ()
    flags = {
        "--optimizer": "muon",
        "--muon-momentum": 0.95,
        "--muon-nesterov": True,
        "--muon-use-nesterov": True,
        "--muon-scale-mode": "shape_scaling",
        "--muon-coefficient-type": "simple",
        "--muon-num-ns-steps": 5,
        "--muon-no-split-qkv": True,
        "--lr": "0.01",
        "--min-lr": "0.001",
        "--decoupled-lr": "0.001",
        "--decoupled-min-lr": "0.0001",
    }
    return drop_flags_newer_than(format_flags(flags), megatron_version)

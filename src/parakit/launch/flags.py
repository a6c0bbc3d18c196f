"""Choose groups of Megatron's flags and of environment variables: one function per reason."""

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
    # A rank computes on one core, so that two ranks have twice the compute of one.
    "OMP_NUM_THREADS": "1",
    # torch.compile would spend a run's first minutes compiling.
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # malloc reuses freed memory, as CUDA's caching allocator does on a GPU. By default glibc returns the
    # memory of freed tensors to the kernel, and each iteration clears new pages, for some strategies more
    # often than for others.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776",
}
"""Environment of a CPU rank, which must be set before its process starts."""

IMPORT_TIME_VARIABLES = (
    *(variables.DEVICE, variables.FUSED, variables.SHARE_GPU, variables.ALLOW_UNKNOWN_MEGATRON),
    *("HF_HUB_OFFLINE", *CPU_RANK_ENVIRONMENT),
)
"""Variables that decide what is imported and patched. A forked rank gets all other variables with its run."""

EXIT_SIGNAL_HANDLER = "--exit-signal-handler"
"""Megatron's flag by which ranks save a checkpoint and end when one of them gets SIGTERM."""


def runtime_flags(
    device: DeviceKind, parallelism: Parallelism, runtime: Runtime, options: Options, model: Model
) -> tuple[str, ...]:
    """Return the flags of Megatron that a model needs on this device and runtime.

    Most models need no such flags on GPUs in NVIDIA's image. Flags that would disable the patches of `FUSED=` are
    left out.
    """
    flags_left_out = set(dropped_flags(options.fused))
    # Megatron core computes GELU's tanh approximation only with the bias-GELU fusion, which this flag disables.
    if TANH_GELU in model.flags:
        flags_left_out.add(EXACT_GELU)
    device_flags = _device_flags(device, parallelism, runtime)
    flags = [flag for flag in device_flags if flag not in flags_left_out]
    if model.shape.experts and _has_grouped_gemm(device, runtime, model):
        flags.append("--moe-grouped-gemm")
    return tuple(flags)


def _has_grouped_gemm(device: DeviceKind, runtime: Runtime, model: Model) -> bool:
    """Return True if Megatron can compute all experts of a rank in one grouped GEMM.

    Grouped GEMM is a kernel of Transformer Engine, and Megatron f4fa7d6b has it in bf16 only.
    """
    has_kernel = device is DeviceKind.GPU and runtime.transformer_engine
    return has_kernel and model.dtype == "bf16"


def _device_flags(
    device: DeviceKind, parallelism: Parallelism, runtime: Runtime
) -> tuple[str, ...]:
    """Return the flags that every model needs on a device and a runtime; empty in NVIDIA's image."""
    if device is DeviceKind.CPU:
        flags = read_args_file(RUNTIMES / "cpu.args")
        if parallelism.sharding.is_megatron_fsdp:
            # Megatron-FSDP divides gradients in the reduction with PREMUL_SUM, which gloo does not have.
            return (*flags, "--no-gradient-reduce-div-fusion")
        return flags
    if not runtime.transformer_engine:
        return read_args_file(RUNTIMES / "host.args")
    if not runtime.apex:
        # The output layer is Megatron's own even with Transformer Engine, and its fusion needs Apex.
        return ("--no-gradient-accumulation-fusion",)
    return ()


def sharding_flags(parallelism: Parallelism, entry: MegatronEntry) -> tuple[str, ...]:
    """Return the further flags that Megatron-FSDP needs; empty for other shardings.

    Up to 0.17 Megatron-FSDP also starts without the distributed optimizer, but then it clips each rank's
    gradients by that rank's norm, and fails in bf16. Release 0.15 shards gradients only if their reduction
    overlaps backward.
    """
    if not parallelism.sharding.is_megatron_fsdp:
        return ()
    release = parse_release(entry.megatron_version)
    flags = []
    if release < (0, 18):
        flags.append("--use-distributed-optimizer")
    if release < (0, 16) and not parallelism.sharding.shards_weights:
        flags.append("--overlap-grad-reduce")
    return tuple(flags)


def initial_checkpoint_flags(
    checkpoint: Path, parallelism: Parallelism, padded_to: int
) -> tuple[str, ...]:
    """Return the flags that start iteration 1 from the checkpoint's weights, resharded to this strategy.

    Megatron pads the vocabulary to a multiple of 128·TP, and padding rows take part in the softmax. Dividing
    the multiple by TP gives every strategy the same rows, and so the same loss.
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


def saving_flags(
    saving: Saving, parallelism: Parallelism, entry: MegatronEntry, saves_at_stop: bool = False
) -> tuple[str, ...]:
    """Return Megatron's flags that save checkpoints in its distributed format, without the flag of the folder.

    A checkpoint in this format can be loaded with any strategy. With `saves_at_stop` the ranks also save one when
    they are asked to stop.
    """
    flags = ["--save-interval", str(saving.every), "--ckpt-format", "torch_dist"]
    sharding = parallelism.sharding
    if sharding and not sharding.wraps_modules:
        # Without this flag only the strategy that saved an optimizer's shards can load them.
        flags.append("--dist-ckpt-optim-fully-reshardable")
    if saving.asynchronous:
        # `mcore` is Megatron's own writer. Its default writer needs a package that the wheel does not install.
        flags += ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    if saves_at_stop:
        flags.append(EXIT_SIGNAL_HANDLER)
    return drop_flags_newer_than(flags, entry.megatron_version)


def environment_for(
    device: DeviceKind, parallelism: Parallelism, initial_checkpoint: Path | None, options: Options
) -> dict[str, str]:
    """Return the environment variables that the kit sets for the ranks, besides the caller's environment."""
    environment = {variables.DEVICE: device.value, "HF_HUB_OFFLINE": "1"}
    if not parallelism.sharding.wraps_modules:
        # TP and SP need this on GPUs before Blackwell, and both FSDP implementations refuse it.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    elif initial_checkpoint:
        environment[variables.START_WEIGHTS] = relative_to_root(initial_checkpoint)
    if device is DeviceKind.GPU:
        # CUDA then numbers GPUs in NVML's order, so that device samples belong to the right ranks.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if device is DeviceKind.CPU:
        environment |= CPU_RANK_ENVIRONMENT
    if options.wandb:
        environment["WANDB_MODE"] = options.wandb.mode  # Read by W&B's client in the ranks.
    if options.share_gpu:
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return environment | _patch_variables(options)


def _patch_variables(options: Options) -> dict[str, str]:
    """Return the environment variables that tell the ranks which patches to apply to Megatron, without empty ones."""
    patch_file = options.patch_file
    texts = {
        variables.FUSED: ",".join(options.fused),
        variables.SHARE_GPU: "1" if options.share_gpu else "",
        variables.PATCH_FILE: patch_file.path if patch_file else "",
        variables.PATCH_FILE_SHA256: patch_file.sha256 if patch_file else "",
        variables.ALLOW_UNKNOWN_MEGATRON: "1" if options.allow_unknown_megatron else "",
    }
    return {name: text for name, text in texts.items() if text}


def optimizer_flags(name: OptimizerName, megatron_version: str) -> tuple[str, ...]:
    """Return the flags of an optimizer; empty for AdamW, which is Megatron's default under the name `adam`.

    Muon is configured as published with Blueberry: learning rate 0.01, and 0.001 for the parameters that AdamW
    updates.
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

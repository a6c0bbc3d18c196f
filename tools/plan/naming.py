"""How a configuration is asked for: its strategy's name, its flags, its make command."""

from __future__ import annotations

from tools.spec.model import Model
from tools.spec.run import Recompute, RunSpec
from tools.spec.strategy import Parallelism, batch_for

_RECOMPUTE_FLAGS = {
    Recompute.NONE: (),
    Recompute.SELECTIVE: ("--recompute-granularity", "selective"),
    Recompute.FULL: (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ),
}


def strategy_name(parallelism: Parallelism) -> str:
    """The strategy in the kit's grammar (`tp2pp2dp2-zero1`, `baseline`).

    The grammar's `vpp` means two virtual stages; other numbers need a flag as well.
    """
    tensor = "sp" if parallelism.sequence_parallel else "tp"
    pipeline = "vpp" if parallelism.virtual_stages == 2 else "pp"
    degrees = (
        (tensor, parallelism.tensor),
        ("cp", parallelism.context),
        (pipeline, parallelism.pipeline),
        ("ep", parallelism.expert),
        ("dp", parallelism.data // parallelism.expert),
    )
    product = "".join(f"{word}{degree}" for word, degree in degrees if degree > 1) or "baseline"
    return f"{product}-{parallelism.sharding}" if parallelism.sharding else product


def extra_flags(configuration: RunSpec) -> tuple[str, ...]:
    """Megatron flags beyond those of the strategy."""
    parallelism = configuration.parallelism
    flags = list(_RECOMPUTE_FLAGS[configuration.recompute])
    if parallelism.context > 1 and configuration.cp_comm_type != "p2p":
        flags += ["--cp-comm-type", configuration.cp_comm_type]
    if parallelism.virtual_stages > 2:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(parallelism.virtual_stages)]
    return tuple(flags)


def make_command(model: Model, configuration: RunSpec) -> str:
    """The command that trains this configuration."""
    parallelism, batch = configuration.parallelism, configuration.batch
    target = f"train-{strategy_name(parallelism)}-{model.name}-{parallelism.world_size}gpu"
    usual = batch_for(model.batch, parallelism)
    words = ["make", target]
    if batch.micro_batch_size != usual.micro_batch_size:
        words.append(f"MICRO_BATCH={batch.micro_batch_size}")
    if batch.global_batch_size != usual.global_batch_size:
        words.append(f"GLOBAL_BATCH={batch.global_batch_size}")
    flags = list(extra_flags(configuration))
    if configuration.dtype not in {model.dtype, "fp32"}:
        flags.append(f"--{configuration.dtype}")
    if configuration.shape.seq_length != model.shape.seq_length:
        flags += ["--seq-length", str(configuration.shape.seq_length)]
    if configuration.shape.positions != model.shape.positions:
        flags += ["--max-position-embeddings", str(configuration.shape.positions)]
    if flags:
        words.append(f'EXTRA="{" ".join(flags)}"')
    return " ".join(words)

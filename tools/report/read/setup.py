"""What a run was asked to do and where: from `run.json`, or from the arguments a log prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tools.records.run import DatasetIdentity, RunRecord
from tools.report.read.scraped import ScrapedLog
from tools.spec.flags import Flags
from tools.spec.model import ModelShape, load_model, model_names, shape_from_flags
from tools.spec.strategy import Batch, Parallelism, Sharding

_INVERTED = {"add_bias_linear": "--disable-bias-linear"}
_FSDP_STRATEGIES = {
    "optim": Sharding.ZERO1,
    "optim_grads": Sharding.ZERO2,
    "optim_grads_params": Sharding.ZERO3,
}


@dataclass(frozen=True)
class Setup:
    """A run's configuration; what is unknown is None or empty."""

    backend: str = ""
    strategy: str = ""
    model: str = ""
    device: str = ""
    """`cpu`, or the name of the GPU."""
    world_size: int | None = None
    parallelism: Parallelism | None = None
    batch: Batch | None = None
    seq_length: int | None = None
    dtype: str = ""
    dropout: float | None = None
    seed: int | None = None
    shape: ModelShape | None = None
    optimizer: str = ""
    recompute: str = ""
    dataset: DatasetIdentity | None = None
    start_checkpoint: str | None = None
    megatron: str = ""
    """Version and commit."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments: as it printed them, else as they were given."""

    @property
    def tokens_per_iteration(self) -> int | None:
        """Global batch times sequence length."""
        if self.batch is None or self.seq_length is None:
            return None
        return self.batch.global_batch_size * self.seq_length

    @property
    def padded_vocabulary(self) -> int | None:
        """Rows of the embedding as trained, padding for TP included."""
        if self.shape is None or self.parallelism is None:
            return None
        return self.shape.padded_vocabulary(self.parallelism.tensor)


def setup_of_record(record: RunRecord, log: ScrapedLog | None) -> Setup:
    """The setup that `run.json` tells; the log adds the arguments as Megatron resolved them."""
    flags = Flags(record.argv)
    printed = log.arguments if log else {}
    device = record.spec.device.value
    if device == "gpu" and record.host.devices:
        device = record.host.devices[0]
    entry = record.entry
    return Setup(
        backend=record.spec.backend,
        strategy=record.spec.name,
        model=record.spec.model,
        device=device,
        world_size=record.spec.parallelism.world_size,
        parallelism=record.spec.parallelism,
        batch=record.spec.batch,
        seq_length=record.spec.shape.seq_length,
        dtype=record.spec.dtype,
        dropout=record.spec.dropout,
        seed=record.spec.seed,
        shape=_shape(record.spec.model, flags),
        optimizer=flags.text("--optimizer", "adam"),
        recompute=_recompute(flags),
        dataset=record.dataset,
        start_checkpoint=record.start_checkpoint,
        megatron=" ".join(
            filter(None, (entry.megatron_version, (entry.megatron_commit or "")[:12]))
        ),
        arguments=printed or _given(record.argv),
    )


def setup_of_log(log: ScrapedLog) -> Setup:
    """The setup of a log that comes without `run.json`: only what its own lines say."""
    batch_size = next((i.global_batch_size for i in log.iterations if i.global_batch_size), None)
    if not log.arguments:
        return Setup(batch=Batch(0, batch_size) if batch_size else None)
    arguments = log.arguments
    flags = flags_of_printed(arguments)
    parallelism = _parallelism(arguments)
    shape = _shape("", flags)
    return Setup(
        backend="megatron",
        strategy=strategy_name(parallelism),
        model=_model_name(shape),
        device="",
        world_size=_integer(arguments, "world_size"),
        parallelism=parallelism,
        batch=Batch(
            _integer(arguments, "micro_batch_size") or 0,
            batch_size or _integer(arguments, "global_batch_size") or 0,
        ),
        seq_length=_integer(arguments, "seq_length"),
        dtype=next((t for t in ("fp16", "bf16") if arguments.get(t) == "True"), "fp32"),
        dropout=_dropout(arguments),
        seed=_integer(arguments, "seed"),
        shape=shape,
        optimizer=arguments.get("optimizer", ""),
        recompute=_recompute(flags),
        dataset=_dataset(arguments),
        # Weights that were loaded to start from; a resumed run's are its own.
        start_checkpoint=flags.text("--load") or None if flags.has("--finetune") else None,
        arguments=arguments,
    )


def flags_of_printed(arguments: Mapping[str, str]) -> Flags:
    """Printed arguments as the flags that give them."""
    words: list[str] = []
    for name, value in arguments.items():
        if name in _INVERTED:
            words += [_INVERTED[name]] if value == "False" else []
        elif name == "num_query_groups" and arguments.get("group_query_attention") != "True":
            continue
        elif value not in ("None", "False", ""):
            flag = "--" + name.replace("_", "-")
            words += [flag] if value == "True" else [flag, value]
    return Flags(words)


def strategy_name(parallelism: Parallelism) -> str:
    """The grammar's name for a parallelism."""
    degrees = (
        ("sp" if parallelism.sequence_parallel else "tp", parallelism.tensor),
        ("cp", parallelism.context),
        ("vpp" if parallelism.virtual_stages > 1 else "pp", parallelism.pipeline),
        ("ep", parallelism.expert),
        ("dp", parallelism.data // max(1, parallelism.expert)),
    )
    product = "".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    if not parallelism.sharding:
        return product or "baseline"
    only_data = product == f"dp{parallelism.world_size}" or not product
    return str(parallelism.sharding) if only_data else f"{product}-{parallelism.sharding}"


def _shape(model: str, flags: Flags) -> ModelShape | None:
    try:
        return shape_from_flags(model, flags)
    except (ValueError, ZeroDivisionError):
        return None


def _model_name(shape: ModelShape | None) -> str:
    if shape is None:
        return ""
    for name in model_names():
        known = load_model(name).shape
        same = replace(
            shape, vocabulary=known.vocabulary, vocabulary_multiple=known.vocabulary_multiple
        )
        if same == known:
            return name
    return f"{shape.layers}x{shape.hidden}"


def _parallelism(arguments: Mapping[str, str]) -> Parallelism:
    tensor = _integer(arguments, "tensor_model_parallel_size") or 1
    of_experts = _integer(arguments, "expert_tensor_parallel_size") or tensor
    return Parallelism(
        data=_integer(arguments, "data_parallel_size") or 1,
        tensor=tensor,
        pipeline=_integer(arguments, "pipeline_model_parallel_size") or 1,
        context=_integer(arguments, "context_parallel_size") or 1,
        expert=_integer(arguments, "expert_model_parallel_size") or 1,
        expert_tensor=0 if of_experts == tensor else of_experts,
        virtual_stages=_integer(arguments, "virtual_pipeline_model_parallel_size") or 1,
        sequence_parallel=arguments.get("sequence_parallel") == "True",
        sharding=_sharding(arguments),
    )


def _sharding(arguments: Mapping[str, str]) -> Sharding:
    if arguments.get("use_torch_fsdp2") == "True":
        return Sharding.FSDP2
    if "True" in (arguments.get("use_megatron_fsdp"), arguments.get("use_custom_fsdp")):
        strategy = arguments.get("data_parallel_sharding_strategy", "")
        return _FSDP_STRATEGIES.get(strategy, Sharding.NONE)
    zero1 = arguments.get("use_distributed_optimizer") == "True"
    return Sharding.ZERO1 if zero1 else Sharding.NONE


def _recompute(flags: Flags) -> str:
    if flags.has("--recompute-activations"):
        return "selective"
    return flags.text("--recompute-granularity")


def _dropout(arguments: Mapping[str, str]) -> float | None:
    values = [arguments.get(name) for name in ("hidden_dropout", "attention_dropout")]
    try:
        return max(float(value) for value in values if value is not None)
    except ValueError:
        return None


def _dataset(arguments: Mapping[str, str]) -> DatasetIdentity | None:
    path = arguments.get("data_path", "None")
    if path != "None":
        return DatasetIdentity(path)
    return DatasetIdentity("mock") if arguments.get("mock_data") == "True" else None


def _given(argv: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            values[name] = [value] if joined else []
        elif name:
            values[name].append(word)
    return {name: " ".join(words) or "True" for name, words in values.items()}


def _integer(arguments: Mapping[str, str], name: str) -> int | None:
    try:
        return int(arguments.get(name, ""))
    except ValueError:
        return None

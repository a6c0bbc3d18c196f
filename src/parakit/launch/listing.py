"""`make list`: models with their parameter counts, strategies, and what this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import psutil
from rich.console import Console

from parakit.config.batch import choose_batch
from parakit.config.model import (
    ALIASES,
    GPT2_VOCABULARY,
    PUBLISHED_SIZES,
    Model,
    load_model,
    model_names,
    replace_vocabulary,
)
from parakit.config.run import DeviceKind, adapt_to_cpu_ranks, spec_from_model
from parakit.config.strategy import (
    EXPERT_STRATEGIES,
    PUBLISHED_STRATEGIES,
    Parallelism,
    count_devices,
    parse_strategy,
)
from parakit.costs import (
    active_parameters,
    find_peak_rank,
    find_violations,
    rank_parameters,
    total_parameters,
)
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.units import count, gib
from parakit.launch.devices import Gpu, visible_gpus
from parakit.planner import Fit, judge_fit

_BATCH_SENTENCES = (
    "batch is micro/global. Every strategy trains this global batch, rounded up to a multiple of its ranks. "
    "MICRO_BATCH= and GLOBAL_BATCH= set others. "
    "The published runs of gpt2-large train their published batches."
)
"""Text below the table of models."""

MEANING = {
    "baseline": "one device",
    "dp2": "two replicas, gradients all-reduced",
    "tp2": "every matrix in two",
    "sp2": "TP 2, and norms and dropouts split along the sequence",
    "cp2": "the sequence in two, K and V communicated",
    "pp2": "the layers in two stages",
    "vpp2": "PP 2, two interleaved stages per rank",
    "gpipe2 …": "PP 2 of plain PyTorch, BACKEND=native: gpipe2, 1f1b2, interleaved2, "
    "pipedream-flush2, and without flushes pipedream2 and pipedream2bw",
    "ep2": "experts over two ranks (mixture of experts)",
    "ep2dp2": "two copies of the experts, each over two ranks",
    "tp2ep2": "experts over two ranks, each and all matrices in two (with sequence parallelism)",
    "pp2ep2": "layers in two stages, experts over two ranks in each",
    "ep8": "experts over eight ranks",
    "zero1": "optimizer state sharded over the replicas",
    "zero2": "gradients sharded too",
    "zero3": "weights sharded too",
    "tp2pp2dp2": "any product of degrees that multiplies to N",
    "dp2-zero1": "a product whose data-parallel part is sharded",
}


def print_list(console: Console) -> None:
    """Print the models, the strategies, and what this machine can run."""
    gpus = visible_gpus()
    available_bytes = psutil.virtual_memory().available
    machine = f"{len(gpus)} × {gpus[0].name}" if gpus else "no GPU"
    console.print(
        f"This machine: {psutil.cpu_count()} cores, {gib(available_bytes, 0)} GiB free, {machine}.",
        highlight=False,
    )
    models = sorted(map(load_model, model_names()), key=lambda model: total_parameters(model.shape))
    console.print(rich_table(_models_table(models, available_bytes, gpus), console.width))
    console.print(_describe_vocabulary_sizes(models), highlight=False)
    console.print(_BATCH_SENTENCES, highlight=False)
    for name, size in PUBLISHED_SIZES.items():
        console.print(_describe_published_size(load_model(name), size), highlight=False)
    console.print(
        "dense-1m to dense-64m and moe-1m to moe-64m are named by their parameters without embeddings.",
        highlight=False,
    )
    for label, name in ALIASES.items():
        console.print(f"{label} is another name of {name}.", highlight=False)
    mixtures = _experts_table([model for model in models if model.shape.experts])
    console.print(rich_table(mixtures.fitting(console.width)))
    console.print(rich_table(_strategies_table(), console.width))
    _print_example_targets(len(gpus), console)


def _print_example_targets(num_gpus: int, console: Console) -> None:
    """Print the grammar of training targets, and examples that this machine can run."""
    console.print("Targets: make train-<strategy>-<model>-<N>gpu or -<N>cpu, for example")
    for target in ("tp2-gpt2-tiny-2cpu", "ep2-moe-tiny-2cpu"):
        console.print(f"  make train-{target}", highlight=False)
    gpu_target = "make train-tp2-gpt2-large-2gpu"
    if num_gpus >= 2:
        console.print(f"  {gpu_target}", highlight=False)
    else:
        console.print(
            f"On a machine with 2 GPUs also {gpu_target}. Here DRY_RUN=1 shows its command.",
            highlight=False,
        )


def _describe_vocabulary_sizes(models: Sequence[Model]) -> str:
    """Return a sentence with the model sizes on the kit's data sets, for models with another vocabulary."""
    sizes = []
    for model in models:
        if model.shape.vocabulary != GPT2_VOCABULARY:
            trained_model = replace_vocabulary(model, GPT2_VOCABULARY)
            sizes.append(f"{model.name} {count(total_parameters(trained_model.shape))}")
    return (
        f"The kit's data sets hold GPT-2's {count(GPT2_VOCABULARY)} tokens; on them models of another "
        f"vocabulary have other sizes: {', '.join(sizes)}."
    )


def _describe_published_size(model: Model, size: str) -> str:
    """Return a sentence that says why a model's name states another size than its number of parameters."""
    shape = model.shape
    return (
        f"{model.name} was published as {size}; its published dimensions, {shape.layers} layers of width "
        f"{shape.hidden}, have {count(total_parameters(shape))} parameters."
    )


def list_cpu_strategies(model: Model, available_bytes: int) -> tuple[str, ...]:
    """Return the named strategies that fit into this machine's free memory on CPU ranks, with the model's batch."""
    return tuple(
        name for name in _named_strategies(model) if _fits_in_memory(model, name, available_bytes)
    )


def list_gpu_strategies(model: Model, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the named strategies that fit on these GPUs with one rank per GPU."""
    smallest_bytes = min((gpu.memory_bytes for gpu in gpus), default=0)
    strategies = []
    for name in _named_strategies(model):
        num_ranks = count_devices(name)
        has_gpus = num_ranks <= len(gpus)
        if has_gpus and _fits_in_memory(model, name, smallest_bytes * num_ranks, on_cpu=False):
            strategies.append(name)
    return tuple(strategies)


def _named_strategies(model: Model) -> tuple[str, ...]:
    """Return the strategies that have a name of their own, for models with or without experts."""
    return EXPERT_STRATEGIES if model.shape.experts else PUBLISHED_STRATEGIES


def _fits_in_memory(
    model: Model, strategy: str, available_bytes: int, *, on_cpu: bool = True
) -> bool:
    """Return True if Megatron accepts the strategy with the model's batch, and its ranks fit into memory.

    `available_bytes` is the memory of all ranks together.
    """
    devices = count_devices(strategy)
    parallelism = parse_strategy(strategy, devices)
    batch = choose_batch(model, parallelism, DeviceKind.CPU if on_cpu else DeviceKind.GPU)
    spec = spec_from_model(model, parallelism, batch)
    if on_cpu:
        spec = adapt_to_cpu_ranks(spec)
    if find_violations(spec):
        return False
    _, memory = find_peak_rank(spec)
    if on_cpu:
        return memory.total * devices <= available_bytes
    return judge_fit(spec, memory, available_bytes // devices) is not Fit.DOES_NOT_FIT


def _models_table(
    models: Sequence[Model], available_bytes: int, gpus: Sequence[Gpu]
) -> Table[Model]:
    """Return a table of models: their shape, and the strategies that this machine's CPU ranks and GPUs can run."""
    columns = [
        Column[Model]("model", lambda model: model.name, right=False),
        Column[Model]("parameters", lambda model: total_parameters(model.shape), count),
        Column[Model]("shape", lambda model: f"{model.shape.layers}×{model.shape.hidden}"),
        Column[Model]("heads", lambda model: model.shape.heads),
        Column[Model]("length", lambda model: model.shape.seq_length),
        Column[Model]("batch", lambda model: model.batch),
        _strategies_column(
            "CPU here", partial(list_cpu_strategies, available_bytes=available_bytes)
        ),
    ]
    if gpus:
        columns.append(_strategies_column("GPUs here", partial(list_gpu_strategies, gpus=gpus)))
    return Table(tuple(columns), tuple(models), "Models")


def _strategies_column(
    title: str, list_strategies: Callable[[Model], Sequence[str]]
) -> Column[Model]:
    """Return a column that names, per model, those of its strategies that `list_strategies` returns."""

    def name_strategies(model: Model) -> str:
        return _join_names(list_strategies(model), _named_strategies(model))

    return Column(title, name_strategies, right=False, wraps=True)


def _join_names(names: Sequence[str], known: Sequence[str]) -> str:
    """Return the names joined by commas; `all …` if nothing of `known` is missing, `none` if `names` is empty."""
    if not names:
        return "none"
    if len(names) < len(known):
        return ", ".join(names)
    return "all six" if len(known) == len(PUBLISHED_STRATEGIES) else f"all {len(known)}"


_SPLITS = {
    "ep2": parse_strategy("ep2", 2),
    "ep8": parse_strategy("ep8", 8),
    "tp2ep2": parse_strategy("tp2ep2", 4),
    "tp2ep2-etp1": parse_strategy("tp2ep2-etp1", 4),
    "pp2ep2": parse_strategy("pp2ep2", 4),
}


def _experts_table(models: Sequence[Model]) -> Table[Model]:
    """Return the table of mixture-of-experts models with their parameters, a row per model.

    The columns are all parameters, those that one token uses, and those of the peak rank per strategy. An expert
    is split over ETP ranks, by default over TP. A narrow terminal leaves out the last columns.
    """
    columns = [
        Column[Model]("model", lambda model: model.name, right=False),
        Column[Model]("all", lambda model: total_parameters(model.shape), count),
        Column[Model]("active", lambda model: active_parameters(model.shape), count),
    ]
    for name, split in _SPLITS.items():
        columns.append(Column(name, partial(_peak_rank_parameters, split=split), count))
    title = "Mixtures of experts: parameters, also of the peak rank per strategy"
    return Table(tuple(columns), tuple(models), title)


def _peak_rank_parameters(model: Model, split: Parallelism) -> int:
    """Return the parameters of the rank that has the most."""
    spec = spec_from_model(model, split, model.batch)
    return max(rank_parameters(spec, stage).total for stage in range(split.pipeline))


def _strategies_table() -> Table[tuple[str, str]]:
    """Return the table of strategies and what each splits."""
    columns = (
        Column[tuple[str, str]]("strategy", itemgetter(0), right=False),
        Column[tuple[str, str]]("what is split", itemgetter(1), right=False, wraps=True),
    )
    return Table(columns, tuple(MEANING.items()), "Strategies")

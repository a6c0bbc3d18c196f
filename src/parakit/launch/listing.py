"""`make list`: models with their parameter counts, strategies, and what this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import psutil
from rich.console import Console

from parakit.config.model import (
    ALIASES,
    GPT2_VOCABULARY,
    Model,
    load_model,
    model_names,
    replace_vocabulary,
)
from parakit.config.run import adapt_to_cpu_ranks, spec_from_model
from parakit.config.strategy import (
    BATCH_RULE,
    EXPERT_STRATEGIES,
    PUBLISHED_STRATEGIES,
    Parallelism,
    count_devices,
    parse_strategy,
    scale_batch,
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

MEANING = {
    "baseline": "one device",
    "dp2": "two replicas, gradients all-reduced",
    "tp2": "every matrix in two",
    "sp2": "TP 2, and norms and dropouts split along the sequence",
    "cp2": "the sequence in two, K and V exchanged",
    "pp2": "the layers in two stages",
    "vpp2": "PP 2, two interleaved stages a rank",
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
    """Print models, strategies and what runs here."""
    gpus = visible_gpus()
    memory = psutil.virtual_memory()
    console.print(
        f"This machine: {psutil.cpu_count()} cores, {gib(memory.available, 0)} GiB free, "
        f"{f'{len(gpus)} × {gpus[0].name}' if gpus else 'no GPU'}.",
        highlight=False,
    )
    models = sorted(map(load_model, model_names()), key=lambda model: total_parameters(model.shape))
    console.print(rich_table(_models(models, memory.available, gpus), console.width))
    console.print(_on_the_kits_data(models), highlight=False)
    console.print(_scaling(models[0]), highlight=False)
    for label, name in ALIASES.items():
        console.print(f"{label} is another name of {name}.", highlight=False)
    mixtures = _experts([model for model in models if model.shape.experts])
    console.print(rich_table(mixtures.fitting(console.width)))
    console.print(rich_table(_strategies(), console.width))
    console.print("Targets: make train-<strategy>-<model>-<N>gpu or -<N>cpu, for example")
    for target in ("tp2-gpt2-tiny-2cpu", "tp2-gpt2-large-2gpu", "ep2-moe-tiny-2cpu"):
        console.print(f"  make train-{target}", highlight=False)


def _on_the_kits_data(models: Sequence[Model]) -> str:
    """What models with another vocabulary become over the tokens of the kit's data."""
    others = [model for model in models if model.shape.vocabulary != GPT2_VOCABULARY]
    trained = (replace_vocabulary(model, GPT2_VOCABULARY) for model in others)
    sizes = (f"{model.name} {count(total_parameters(model.shape))}" for model in trained)
    return (
        f"The kit's data sets hold GPT-2's {count(GPT2_VOCABULARY)} tokens; on them models of another "
        f"vocabulary have other sizes: {', '.join(sizes)}."
    )


def _scaling(model: Model) -> str:
    """How strategies scale a model file's batch, with one as the example."""
    scaled = scale_batch(model.batch, parse_strategy("tp2", 2))
    return (
        f"batch is a baseline's, micro/global. A strategy scales it, {BATCH_RULE}: tp2 of "
        f"{model.name} trains {scaled}. MICRO_BATCH= and GLOBAL_BATCH= set others."
    )


def list_cpu_strategies(model: Model, available_bytes: int) -> tuple[str, ...]:
    """The named strategies that this machine's CPU ranks can run with the model's own batch."""
    return tuple(name for name in _names(model) if _fits(model, name, available_bytes))


def list_gpu_strategies(model: Model, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The named strategies whose ranks fit on these GPUs, one on each."""
    smallest = min((gpu.memory_bytes for gpu in gpus), default=0)
    return tuple(
        name
        for name in _names(model)
        if count_devices(name) <= len(gpus)
        and _fits(model, name, smallest * count_devices(name), on_cpu=False)
    )


def _names(model: Model) -> tuple[str, ...]:
    return EXPERT_STRATEGIES if model.shape.experts else PUBLISHED_STRATEGIES


def _fits(model: Model, strategy: str, available_bytes: int, *, on_cpu: bool = True) -> bool:
    devices = count_devices(strategy)
    parallelism = parse_strategy(strategy, devices)
    batch = scale_batch(model.batch, parallelism)
    spec = spec_from_model(model, parallelism, batch)
    if on_cpu:
        spec = adapt_to_cpu_ranks(spec)
    if find_violations(spec):
        return False
    memory = find_peak_rank(spec)[1]
    if on_cpu:
        return memory.total * devices <= available_bytes
    return judge_fit(spec, memory, available_bytes // devices) is not Fit.DOES_NOT_FIT


def _models(models: Sequence[Model], available_bytes: int, gpus: Sequence[Gpu]) -> Table[Model]:
    def fitting(name: str, found: Callable[[Model], Sequence[str]]) -> Column[Model]:
        return Column(name, lambda m: _choice(found(m), _names(m)), right=False, wraps=True)

    columns = (
        Column[Model]("model", lambda m: m.name, right=False),
        Column[Model]("parameters", lambda m: total_parameters(m.shape), count),
        Column[Model]("shape", lambda m: f"{m.shape.layers}×{m.shape.hidden}"),
        Column[Model]("heads", lambda m: m.shape.heads),
        Column[Model]("length", lambda m: m.shape.seq_length),
        Column[Model]("batch", lambda m: m.batch),
        fitting("CPU here", lambda m: list_cpu_strategies(m, available_bytes)),
        *([fitting("GPUs here", lambda m: list_gpu_strategies(m, gpus))] if gpus else []),
    )
    return Table(columns, tuple(models), "Models")


def _choice(names: Sequence[str], known: Sequence[str]) -> str:
    if len(names) == len(known):
        return "all six" if len(known) == len(PUBLISHED_STRATEGIES) else f"all {len(known)}"
    return ", ".join(names) or "none"


ExpertsRow = tuple[str, Callable[[Model], int]]

_SPLITS = {
    "ep2": parse_strategy("ep2", 2),
    "ep8": parse_strategy("ep8", 8),
    "tp2ep2": parse_strategy("tp2ep2", 4),
    "tp2ep2, ETP 1": parse_strategy("tp2ep2-etp1", 4),
    "pp2ep2": parse_strategy("pp2ep2", 4),
}


def _experts(models: Sequence[Model]) -> Table[ExpertsRow]:
    """All, those a token uses, those of the fullest rank; ETP, else TP, ranks share an expert.

    A narrow terminal leaves out first what differs from a smaller one in its width alone.
    """
    rows: list[ExpertsRow] = [
        ("all", lambda model: total_parameters(model.shape)),
        ("active", lambda model: active_parameters(model.shape)),
    ]
    rows += [(f"a rank: {name}", partial(_fullest, split=split)) for name, split in _SPLITS.items()]

    seen: set[tuple[int, int, int]] = set()

    def of_model(model: Model) -> Column[ExpertsRow]:
        kind = model.shape.layers, model.shape.experts, model.shape.seq_length
        rank = int(kind in seen)
        seen.add(kind)
        return Column(model.name, lambda row: row[1](model), count, rank=rank)

    columns = (Column[ExpertsRow]("", lambda row: row[0], right=False), *map(of_model, models))
    return Table(columns, tuple(rows), "Mixtures of experts: parameters")


def _fullest(model: Model, split: Parallelism) -> int:
    spec = spec_from_model(model, split, model.batch)
    return max(rank_parameters(spec, stage).total for stage in range(split.pipeline))


def _strategies() -> Table[tuple[str, str]]:
    columns = (
        Column[tuple[str, str]]("strategy", itemgetter(0), right=False),
        Column[tuple[str, str]]("what is split", itemgetter(1), right=False, wraps=True),
    )
    return Table(columns, tuple(MEANING.items()), "Strategies")

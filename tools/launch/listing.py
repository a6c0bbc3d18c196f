"""`make list`: the models with what they really are, the strategies, and what this machine can run."""

from __future__ import annotations

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.launch.devices import gpu_names
from tools.plan.legality import violations
from tools.plan.memory import estimate_peak_bytes
from tools.plan.parameters import parameters_total
from tools.recipe.model import ALIASES, Model, load_model, model_names
from tools.recipe.strategy import NAMED, batch_for, parse_strategy

MEANING = {
    "baseline": "one device",
    "dp2": "two replicas, gradients all-reduced",
    "tp2": "every matrix in two",
    "sp2": "TP 2, and norms and dropouts split along the sequence",
    "cp2": "the sequence in two, K and V exchanged",
    "pp2": "the layers in two stages",
    "vpp2": "PP 2, two interleaved stages a rank",
    "ep2": "experts over two ranks (mixture of experts)",
    "zero1": "optimizer state sharded over the replicas",
    "zero2": "gradients sharded too",
    "zero3": "weights sharded too",
    "tp2pp2dp2": "any product of degrees that multiplies to N",
    "dp2-zero1": "a product whose data-parallel part is sharded",
}


def show_list(console: Console) -> None:
    """Print models, strategies and what runs here."""
    gpus = gpu_names()
    memory = psutil.virtual_memory()
    console.print(
        f"This machine: {psutil.cpu_count()} cores, {memory.available / 2**30:.0f} GiB free, "
        f"{f'{len(gpus)} × {gpus[0]}' if gpus else 'no GPU'}.",
        highlight=False,
    )
    console.print(_models(memory.available))
    for label, name in ALIASES.items():
        console.print(f"{label} is another name of {name}.", highlight=False)
    console.print(_strategies())
    console.print("Targets: make train-<strategy>-<model>-<N>gpu or -<N>cpu, for example")
    console.print(
        "  make train-tp2-gpt2-tiny-2cpu    make train-tp2-gpt2-large-2gpu", highlight=False
    )


def runnable_here(model: Model, available_bytes: int) -> tuple[str, ...]:
    """The named strategies that this machine's CPU ranks can run with the model's own batch."""
    return tuple(name for name in NAMED if _fits(model, name, available_bytes))


def _fits(model: Model, strategy: str, available_bytes: int) -> bool:
    devices = 1 if strategy == "baseline" else 2
    parallelism = parse_strategy(strategy, devices)
    batch = batch_for(model.batch, parallelism)
    if violations(model.shape, parallelism, batch, model=model.name):
        return False
    return estimate_peak_bytes(model, parallelism, batch, "fp32") * devices <= available_bytes


def _models(available_bytes: int) -> Table:
    table = Table(title="Models", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for heading in ("shape", "heads", "length", "batch"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU here", min_width=9)
    models = sorted(map(load_model, model_names()), key=lambda model: parameters_total(model.shape))
    for model in models:
        shape, batch = model.shape, model.batch
        runs = runnable_here(model, available_bytes)
        table.add_row(
            model.name,
            f"{parameters_total(shape):,}",
            f"{shape.layers}×{shape.hidden}",
            str(shape.heads),
            str(shape.seq_length),
            f"{batch.micro_batch_size}/{batch.global_batch_size}",
            "all six" if len(runs) == len(NAMED) else ", ".join(runs) or "too large",
        )
    return table


def _strategies() -> Table:
    table = Table("strategy", "what is split", title="Strategies", box=SIMPLE_HEAD, pad_edge=False)
    for name, meaning in MEANING.items():
        table.add_row(name, meaning)
    return table

"""The page that draws strategies: those below as static SVG, any other by the planner in the browser."""

from __future__ import annotations

from pathlib import Path

from tools.plan.one_strategy import time_strategy
from tools.plan.options import PlanOptions
from tools.site.drawing.figure import figure
from tools.spec.hardware import load_hardware
from tools.spec.model import load_model, model_names
from tools.spec.run import RunSpec
from tools.spec.strategy import EXAMPLES, batch_for, devices_of, parse_strategy
from tools.text.html import environment

_DENSE, _EXPERTS = ("gpt2-tiny", "gpt2-large"), ("moe-tiny", "blueberry-79m")
"""Of CPU ranks, where ledgers count the same bytes, and of GPUs."""
DRAWN = {
    "dp2": ("Data parallel", 2, _DENSE),
    "tp2": ("Tensor parallel", 2, _DENSE),
    "sp2": ("Sequence parallel", 2, _DENSE),
    "cp2": ("Context parallel", 2, _DENSE),
    "pp2": ("Pipeline parallel", 2, _DENSE),
    "ep2": ("Expert parallel", 2, _EXPERTS),
    "zero1": ("ZeRO-1", 2, _DENSE),
    "zero3": ("ZeRO-3", 2, _DENSE),
    "tp2pp2dp2": ("Three at once", 8, _DENSE),
}
"""By strategy: heading, devices, models."""
GPU = "h200"


def asked(
    model: str,
    strategy: str,
    device: str,
    devices: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> RunSpec:
    """The run that `make train-STRATEGY-MODEL-N` would train; `device` is a GPU's key or `cpu`.

    Raises:
        ValueError: There is no such model, strategy or device, or Megatron refuses it; one sentence.
    """
    devices = devices or devices_of(strategy)
    batch = batch_for(load_model(model).batch, parse_strategy(strategy, devices))
    options = PlanOptions(
        model=model,
        gpu=device,
        gpus=devices,
        strategy=strategy,
        micro_batch=micro_batch or batch.micro_batch_size,
        global_batch=global_batch or batch.global_batch_size,
    )
    return time_strategy(options).candidate.spec


def page() -> str:
    """The page, with every drawing of `DRAWN` for both of its models."""
    sections = [
        (strategy, heading, _both(strategy, devices, models))
        for strategy, (heading, devices, models) in DRAWN.items()
    ]
    template = environment(Path(__file__).with_name("templates")).get_template("drawings.html.j2")
    return template.render(
        sections=sections,
        models=model_names(),
        strategies=EXAMPLES,
        devices=load_hardware().devices.values(),
        gpu=GPU,
    )


def _both(strategy: str, devices: int, models: tuple[str, str]) -> str:
    tiny, large = models
    small = figure(asked(tiny, strategy, "cpu", devices), f"{strategy}-{tiny}")
    predicted = figure(asked(large, strategy, GPU, devices), f"{strategy}-{large}")
    return f'<div class="exact">{small}</div><div class="predicted">{predicted}</div>'

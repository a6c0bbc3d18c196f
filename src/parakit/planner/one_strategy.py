"""One strategy of one's own, timed: its breakdown as a table, data or picture, another one beside it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.config import settings
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags
from parakit.config.hardware import device_by_key
from parakit.config.setting import SettingError, parse_setting, refuse_renamed
from parakit.config.stages import parse_stage_split
from parakit.config.strategy import Batch, StrategyError, count_devices, parse_strategy
from parakit.costs import find_violations, host_bytes
from parakit.formatting.presented import Presented
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.formatting.units import duration, gib, ms, percent
from parakit.planner.candidates import list_cp_comm_types
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.neighbours import Uncertainty, estimate_uncertainty
from parakit.planner.request import (
    EXPERT_TENSOR,
    build_request,
    list_ignored_flags,
    parse_stated_expert_tensor,
    refuse_imbalance,
)
from parakit.planner.search import Candidate, Request, evaluate_configuration
from parakit.planner.show import encode_candidate, encode_ignored_flags, plan_command, print_ignored
from parakit.planner.time.iteration import TIME_COMPONENTS
from parakit.planner.verdict import Fit, explain_close_fit

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = (
    *("#0072B2", "#56B4E9", "#7BC8A4", "#D55E00", "#CC79A7", "#E69F00", "#009E73"),
    *("#555555", "#8C6BB1", "#B8A13A", "#B00020", "#C9C9C9"),
)
"""Of `TIME_COMPONENTS`."""


@dataclass(frozen=True, repr=False)
class TimedStrategy(Presented):
    """A strategy as asked for, and what is predicted of it."""

    request: Request
    candidate: Candidate
    ignored: tuple[str, ...]
    """Flags that the prediction knows nothing of."""

    @property
    def label(self) -> str:
        """Strategy, devices and their kind, and what was stated of them."""
        cluster, load = self.request.cluster, self.candidate.spec.expert_load
        factors = {"imbalance": load.imbalance, "oversubscription": cluster.oversubscription}
        stated = "".join(f", {name} {factor:g}" for name, factor in factors.items() if factor > 1)
        return f"{self.candidate.strategy} on {cluster.devices:,} {cluster.device.name}{stated}"

    @property
    def uncertainty(self) -> Uncertainty:
        """The error to expect of its time."""
        return estimate_uncertainty(
            self.candidate.spec, self.request.cluster, self.request.own_runs
        )

    def show(self, console: Console) -> None:
        """Print sentences, the breakdown of the time and the command that trains the strategy."""
        print_timed_strategies([self], console)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit plan --strategy … --json` prints: bytes, seconds, tokens per second."""
        return encode_timed_strategy(self)


def time_strategy(options: PlanOptions) -> TimedStrategy:
    """Predict the strategy that the options name.

    Raises:
        RequestError: It does not multiply to the devices, or Megatron refuses it.
        ValueError: As `request_from_options`.
    """
    assert options.strategy is not None
    domain = device_by_key(options.gpu).domain
    named = options.gpus or (options.nodes and options.nodes * (options.gpus_per_node or domain))
    expert_tensor = parse_stated_expert_tensor(options)
    try:
        devices = count_devices(options.strategy, named or 1, expert_tensor)
        if named and devices != named:
            raise RequestError(
                f"The strategy {options.strategy} multiplies to {devices:,} devices, not {named:,}; "
                "leave GPUS= out, or give it another DP."
            )
        split = parse_strategy(options.strategy, devices, expert_tensor)
        if expert_tensor and split.effective_expert_tensor != expert_tensor:
            raise RequestError(
                f"The strategy {options.strategy} splits each expert over {split.effective_expert_tensor} "
                f"and {EXPERT_TENSOR} over {expert_tensor}; leave one of them out."
            )
    except StrategyError as error:
        raise RequestError(str(error)) from None
    request = build_request(replace(options, gpus=devices))
    template, flags = request.template, Flags(request.extra)
    micro = options.micro_batch or request.model.batch.micro_batch_size
    degree = ("--pipeline-model-parallel-size", str(split.pipeline))
    stages = parse_stage_split(Flags([*request.model.flags, *request.extra, *degree]))
    if split.virtual_stages == 1:
        split = replace(split, virtual_stages=stages.virtual_stages_in_layout(split.pipeline))
    said = any(map(flags.has, flags_with_role("recompute")))
    spec = replace(
        template,
        parallelism=split,
        batch=Batch(micro, request.global_batch),
        recompute=template.recompute if said else options.recompute or template.recompute,
        stages=stages,
        cp_comm_type=flags.text("--cp-comm-type", list_cp_comm_types(template, split)[0]),
    )
    if problems := find_violations(spec):
        raise RequestError(" ".join(problems))
    if options.imbalance:
        refuse_imbalance(options.imbalance, spec.shape, split.expert)
    return TimedStrategy(
        request, evaluate_configuration(request, spec), list_ignored_flags(request, laid=True)
    )


def apply_what_if(options: PlanOptions, text: str) -> PlanOptions:
    """The options with the variables of `WHAT_IF="GPU=b200 MICRO_BATCH=2"` instead of their own.

    Raises:
        RequestError: A word that sets no variable of `make plan`, with the near name.
    """
    known = {f.name.upper() for f in fields(PlanOptions)} - _NOT_COMPARED
    changed: dict[str, Any] = {}
    if "STRATEGY=" in text or "GPUS=" in text:
        changed["gpus"] = None
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        try:
            if name not in known:
                refuse_renamed(name)
            if not value or name not in known:
                near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}=?" if near else 'use WHAT_IF="GPU=b200".'
                raise RequestError(
                    f"WHAT_IF has {word}, which changes nothing of a strategy; {hint}"
                )
            as_it_is = name == "EXTRA"
            changed[name.lower()] = (
                value if as_it_is else parse_setting(getattr(settings, name), value)
            )
        except SettingError as error:
            raise RequestError(f"WHAT_IF: {error}") from None
    return replace(options, **changed)


_NOT_COMPARED = {"WHAT_IF", "SVG", "JSON", "TOKENS", "VERIFY", "ALPA", "LARGEST", "READINGS"}
"""Variables of `make plan` that are not of one strategy of two."""


def encode_timed_strategy(
    timed: TimedStrategy, other: TimedStrategy | None = None
) -> dict[str, Any]:
    """Both as data; bytes and seconds."""
    return {
        "model": timed.request.model.name,
        "gpu": timed.request.cluster.device.key,
        "gpus": timed.request.cluster.devices,
        "layout": encode_candidate(timed.request, timed.candidate),
        "uncertainty": timed.uncertainty.to_dict(),
        **encode_ignored_flags(timed.ignored),
        "what_if": encode_timed_strategy(other) if other else None,
    }


def print_timed_strategies(every: Sequence[TimedStrategy], console: Console) -> None:
    """Sentences, the breakdown, and the command that trains the first."""
    for each in every:
        if warning := each.uncertainty.warning:
            console.print(warning, style="bold yellow", highlight=False)
        console.print(_sentence(each), highlight=False)
        console.print(str(each.uncertainty), highlight=False)
    timed, *others = every
    for other in others:
        ratio = other.candidate.tokens_per_second / timed.candidate.tokens_per_second
        console.print(f"The second trains {ratio:.2f} times as fast.", highlight=False)
    print_ignored(timed.ignored, console)
    console.print(rich_table(_breakdown(every), console.width))
    say(console, plan_command(timed.request, timed.candidate.spec))


def draw_timed_strategies(every: Sequence[TimedStrategy], path: Path) -> None:
    """The breakdown as one SVG: a bar a strategy, a colour a component."""
    height = 1.8 + 0.8 * len(every)
    with svg_figure(path, "plan", 10, height, bbox_inches="tight") as figure:
        axes = figure.subplots()
        starts = [0.0] * len(every)
        for name, colour in zip(TIME_COMPONENTS, _COLOURS, strict=True):
            widths = [getattr(each.candidate.seconds, name) for each in every]
            if any(widths):
                axes.barh(range(len(every)), widths, 0.6, starts, color=colour, label=_called(name))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, total in enumerate(starts):
            axes.text(total, place, f" {duration(total)}", va="center")
        axes.set_yticks(range(len(every)), [each.label for each in every])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(starts))
        axes.set_xlabel("seconds an iteration; communication is what arithmetic does not hide")
        axes.set_title(f"{every[0].request.model.name}: where an iteration goes", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))


def _sentence(timed: TimedStrategy) -> str:
    found, request = timed.candidate, timed.request
    device_bytes = request.cluster.device.memory_bytes
    reason = explain_close_fit(found.spec, found.memory, device_bytes)
    fits = {
        Fit.FITS: "fits",
        Fit.CLOSE: f"is close: try it ({reason})",
        Fit.DOES_NOT_FIT: "does not fit",
    }[found.verdict]
    on_host = host_bytes(found.spec, found.memory_rank)
    beside = f"; {gib(on_host)} GiB on its host" if on_host else ""
    cluster = request.cluster
    nodes = f" ({cluster.nodes} nodes, {cluster.network})" if cluster.nodes > 1 else ""
    return (
        f"{request.model.name} as {timed.label}{nodes}, "
        f"micro batch {found.spec.batch.micro_batch_size}, "
        f"global batch {request.global_batch:,}: {duration(found.seconds.total)} an iteration, "
        f"{found.tokens_per_second:,.0f} tokens/s, {percent(found.mfu)} MFU; "
        f"{gib(found.memory.total)} GiB, {found.memory.total / device_bytes:.0%} of the device, on its "
        f"fullest rank, which "
        f"{fits}{beside}."
    )


def _breakdown(every: Sequence[TimedStrategy]) -> Table[str]:
    def cell(each: TimedStrategy, name: str) -> str:
        seconds = each.candidate.seconds
        value = getattr(seconds, name)
        return f"{ms(value)} ms ({value / seconds.total:.0%})"

    columns = [Column[str]("where", _called, right=False)]
    columns += [Column[str](each.label, partial(cell, each), wraps=True) for each in every]
    shown = [n for n in TIME_COMPONENTS if any(getattr(e.candidate.seconds, n) for e in every)]
    return Table(tuple(columns), (*shown, "total"), "Where an iteration goes")


_WORDS = {
    "matmul": "matrix products",
    "memory_bound": "memory-bound kernels and launches",
    "tensor_parallel": "exposed TP",
    "context_parallel": "exposed CP",
    "expert_parallel": "exposed EP",
    "pipeline_messages": "exposed PP",
    "bubble": "pipeline bubble",
    "gradient_sync": "exposed DP",
}


def _called(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))

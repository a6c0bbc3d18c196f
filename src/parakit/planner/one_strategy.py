"""Prediction of one strategy that the user names, as a table, as data or as a picture, beside another one."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.config.batch import choose_batch
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags
from parakit.config.hardware import device_by_key
from parakit.config.run import RunSpec
from parakit.config.setting import SettingError, parse_setting, refuse_renamed
from parakit.config.stages import parse_stage_split
from parakit.config.strategy import (
    Parallelism,
    StrategyError,
    count_devices,
    parse_strategy,
)
from parakit.config.variable_groups import PLAN
from parakit.costs import find_violations, host_bytes
from parakit.formatting.presented import Presented
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.formatting.units import duration, gib, ms, percent
from parakit.planner.advice import finetuning_sentences
from parakit.planner.candidates import list_cp_comm_types
from parakit.planner.expert_options import explain_refused_overlap
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
from parakit.planner.show import (
    encode_candidate,
    encode_finetuning,
    encode_ignored_flags,
    plan_command,
    print_ignored,
    print_missing_file,
)
from parakit.planner.time.iteration import TIME_COMPONENTS
from parakit.planner.training_command import (
    SLURM,
    describe_adapter_run,
    format_training_command,
    state_chosen_flags,
)
from parakit.planner.verdict import Fit, explain_close_fit

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = (
    *("#0072B2", "#56B4E9", "#7BC8A4", "#D55E00", "#CC79A7", "#E69F00", "#009E73", "#8C564B"),
    *("#555555", "#8C6BB1", "#B8A13A", "#B00020", "#C9C9C9"),
)
"""Colours of `TIME_COMPONENTS`, in their order."""


@dataclass(frozen=True, repr=False)
class TimedStrategy(Presented):
    """A strategy that the user named, and its prediction."""

    request: Request
    candidate: Candidate
    ignored_flags: tuple[str, ...]
    """Flags that the prediction does not count."""

    @property
    def label(self) -> str:
        """Strategy, number and kind of devices, and the stated imbalance and oversubscription."""
        cluster, load = self.request.cluster, self.candidate.spec.expert_load
        factors = {"imbalance": load.imbalance, "oversubscription": cluster.oversubscription}
        stated = "".join(f", {name} {factor:g}" for name, factor in factors.items() if factor > 1)
        return f"{self.candidate.strategy} on {cluster.devices:,} {cluster.device.name}{stated}"

    @property
    def uncertainty(self) -> Uncertainty:
        """Predicted time with the error to expect of it."""
        return estimate_uncertainty(
            self.candidate.spec, self.request.cluster, self.request.own_runs
        )

    def show(self, console: Console) -> None:
        """Print sentences, the breakdown of the time and the command that trains the strategy."""
        print_timed_strategies([self], console)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit plan --strategy … --json` prints: bytes, seconds, tokens per second."""
        return encode_timed_strategy(self)


def time_strategy(options: PlanOptions, *, copies_attention_mask: bool = False) -> TimedStrategy:
    """Predict time and memory of one strategy, which STRATEGY= names, on the model and cluster of the options.

    Args:
        options: The model, the strategy and the cluster.
        copies_attention_mask: True predicts a published run whose loader creates the attention mask. Commands of
            plans avoid a large mask.

    Raises:
        RequestError: The strategy does not multiply to the number of devices, or Megatron refuses it.
        ValueError: Other options are wrong, as for `build_request`.
    """
    parallelism = _parse_named_strategy(options)
    request = build_request(replace(options, gpus=parallelism.world_size))
    spec = _build_spec(options, request, parallelism)
    execution = replace(request.cluster.execution, copies_attention_mask=copies_attention_mask)
    request = replace(
        request,
        global_batch=spec.batch.global_batch_size,
        cluster=replace(request.cluster, execution=execution),
    )
    problems = list(find_violations(spec))
    if request.cluster.execution.overlap_experts:
        problems += filter(None, [explain_refused_overlap(spec)])
    if problems:
        raise RequestError(" ".join(problems))
    if options.imbalance:
        refuse_imbalance(options.imbalance, spec.shape, parallelism.expert)
    return TimedStrategy(
        request,
        evaluate_configuration(request, spec),
        list_ignored_flags(request, is_one_strategy=True),
    )


def _parse_named_strategy(options: PlanOptions) -> Parallelism:
    """Return the parallelism that STRATEGY= names. It must fit the number of devices, if the options state one.

    Raises:
        RequestError: The strategy is not in the grammar, or needs another number of devices than the options state.
            The error is also raised if it splits experts over another number of ranks than Megatron's flag.
    """
    assert options.strategy is not None
    stated_devices = _count_stated_devices(options)
    expert_tensor = parse_stated_expert_tensor(options)
    try:
        devices = count_devices(options.strategy, stated_devices or 1, expert_tensor)
        if stated_devices and devices != stated_devices:
            raise RequestError(
                f"The strategy {options.strategy} multiplies to {devices:,} devices, not {stated_devices:,}; "
                "leave GPUS= out, or give it another DP."
            )
        parallelism = parse_strategy(options.strategy, devices, expert_tensor)
    except StrategyError as error:
        raise RequestError(str(error)) from None
    if expert_tensor and parallelism.effective_expert_tensor != expert_tensor:
        raise RequestError(
            f"The strategy {options.strategy} splits each expert over {parallelism.effective_expert_tensor} "
            f"and {EXPERT_TENSOR} over {expert_tensor}; leave one of them out."
        )
    return parallelism


def _count_stated_devices(options: PlanOptions) -> int | None:
    """Return the number of devices that GPUS= or NODES= states; None if neither is given.

    A node has an NVLink domain's devices, unless `--gpus-per-node` says otherwise.
    """
    domain = device_by_key(options.gpu).domain
    if options.gpus:
        return options.gpus
    if options.nodes:
        return options.nodes * (options.gpus_per_node or domain)
    return None


def _build_spec(options: PlanOptions, request: Request, parallelism: Parallelism) -> RunSpec:
    """Return the run that the strategy trains, with the batch, recomputation and flags of the request.

    Recomputation flags in EXTRA= win over RECOMPUTE=. If the strategy names no virtual stages, their number follows
    from the layout of stages in the flags.
    """
    template, flags = request.template, Flags(request.extra)
    degree = ("--pipeline-model-parallel-size", str(parallelism.pipeline))
    stages = parse_stage_split(Flags([*request.model.flags, *request.extra, *degree]))
    if parallelism.virtual_stages == 1:
        virtual_stages = stages.virtual_stages_in_layout(parallelism.pipeline)
        parallelism = replace(parallelism, virtual_stages=virtual_stages)
    # A file with a single sample states no batch. The request then has an assumed one.
    states_batch = request.model.batch.global_batch_size > 1
    batch = choose_batch(
        request.model,
        parallelism,
        template.device,
        micro_batch_size=options.micro_batch,
        global_batch_size=options.global_batch if states_batch else request.global_batch,
    )
    has_recompute_flags = any(map(flags.has, flags_with_role("recompute")))
    recompute = template.recompute
    if options.recompute and not has_recompute_flags:
        recompute = options.recompute
    comm_type = flags.text("--cp-comm-type", list_cp_comm_types(template, parallelism)[0])
    return replace(
        template,
        parallelism=parallelism,
        batch=batch,
        recompute=recompute,
        stages=stages,
        cp_comm_type=comm_type,
    )


def apply_what_if(options: PlanOptions, text: str, variable: str = "WHAT_IF") -> PlanOptions:
    """Return the options with the variables replaced that a text such as `GPU=b200 MICRO_BATCH=2` sets.

    If the text sets STRATEGY= or GPUS=, the number of devices in the options is dropped.

    Args:
        options: The options.
        text: The text.
        variable: Variable of make that holds the text, for messages.

    Raises:
        RequestError: A word of the text sets no variable of `make plan`. The message suggests a similar name.
    """
    known = {setting.name: setting for setting in PLAN if setting.name not in _NOT_COMPARED}
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
                hint = f'did you mean "{near[0]}="?' if near else 'write it as "GPU=b200".'
                raise RequestError(
                    f'{variable} has "{word}", which changes nothing of a strategy; {hint}'
                )
            changed[name.lower()] = parse_setting(known[name], value)
        except SettingError as error:
            # Variables inside of WHAT_IF= are the user's own words, which quotes keep from being rewritten.
            raise RequestError(f"{variable}: {_ASSIGNMENT.sub(_QUOTED, str(error))}") from None
    return replace(options, **changed)


_ASSIGNMENT, _QUOTED = re.compile(r"\b[A-Z][A-Z_]*=(?:[^\s;]*[^\s;.])?"), r'"\g<0>"'
"""Pattern of a variable with its value in a sentence, and its replacement."""
_NOT_COMPARED = {"WHAT_IF", "SVG", "JSON", "TOKENS", "VERIFY", "ALPA", "LARGEST", "READINGS"}
"""Variables of `make plan` that WHAT_IF cannot change, because they are not of one strategy."""


def encode_timed_strategy(
    timed: TimedStrategy, other: TimedStrategy | None = None
) -> dict[str, Any]:
    """Return a prediction as a dictionary for JSON, in bytes and seconds.

    Args:
        timed: The strategy that STRATEGY= names.
        other: The strategy with the changes of WHAT_IF=, or None without WHAT_IF=. Its prediction is included.
    """
    return {
        "model": timed.request.model.name,
        "gpu": timed.request.cluster.device.key,
        "gpus": timed.request.cluster.devices,
        **encode_finetuning(timed.request),
        "layout": encode_candidate(timed.request, timed.candidate),
        "uncertainty": timed.uncertainty.to_dict(),
        **encode_ignored_flags(timed.ignored_flags),
        "what_if": encode_timed_strategy(other) if other else None,
    }


def print_timed_strategies(
    strategies: Sequence[TimedStrategy], console: Console, trainer: str = "", launcher: str = ""
) -> None:
    """Print sentences about each strategy, a table that breaks down their times, and the command that trains the
    first strategy.

    If a trainer or the launcher `slurm` is named, the command is that of `format_training_command`.
    """
    for strategy in strategies:
        if strategy.uncertainty.warning:
            console.print(strategy.uncertainty.warning, style="bold yellow", highlight=False)
        for sentence in [*finetuning_sentences(strategy.request), *_describe_prediction(strategy)]:
            console.print(sentence, highlight=False)
        console.print(str(strategy.uncertainty), highlight=False)
    first, *alternatives = strategies
    for alternative in alternatives:
        ratio = alternative.candidate.tokens_per_second / first.candidate.tokens_per_second
        console.print(f"The second trains {ratio:.2f} times as fast.", highlight=False)
    print_ignored(first.ignored_flags, console)
    console.print(rich_table(_build_breakdown(strategies), console.width))
    spec = first.candidate.spec
    if trainer or launcher == SLURM:
        request = state_chosen_flags(first.request, first.candidate)
        say(console, format_training_command(request, spec, trainer, launcher))
        return
    if spec.lora:
        say(console, describe_adapter_run(first.request, spec))
        return
    print_missing_file(first.request.model, console)
    say(console, plan_command(first.request, first.candidate))


def draw_timed_strategies(strategies: Sequence[TimedStrategy], path: Path) -> None:
    """Write the breakdown of times as an SVG picture: a bar per strategy, a colour per component."""
    height = 1.8 + 0.8 * len(strategies)
    with svg_figure(path, "plan", 10, height, bbox_inches="tight") as figure:
        axes = figure.subplots()
        ends = [0.0] * len(strategies)
        rows = range(len(strategies))
        for name, colour in zip(TIME_COMPONENTS, _COLOURS, strict=True):
            widths = [getattr(strategy.candidate.seconds, name) for strategy in strategies]
            if any(widths):
                label = _component_label(name)
                axes.barh(rows, widths, 0.6, ends, color=colour, label=label)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for row, total in enumerate(ends):
            axes.text(total, row, f" {duration(total)}", va="center")
        axes.set_yticks(rows, [strategy.label for strategy in strategies])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(ends))
        axes.set_xlabel("seconds per iteration; communication is the exposed part")
        model = strategies[0].request.model.name
        axes.set_title(f"{model}: the time of an iteration by component", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))


def _describe_prediction(timed: TimedStrategy) -> list[str]:
    """Return two sentences about a prediction. The first has the job, its time and its rates, the second the
    memory.
    """
    candidate, request = timed.candidate, timed.request
    cluster, batch = request.cluster, candidate.spec.batch
    nodes = f" ({cluster.nodes} nodes, {cluster.network})" if cluster.nodes > 1 else ""
    device_bytes = cluster.device.memory_bytes
    reason = explain_close_fit(candidate.spec, candidate.memory, device_bytes)
    verdict = {
        Fit.FITS: "fits",
        Fit.CLOSE: f"is close: try it ({reason})",
        Fit.DOES_NOT_FIT: "does not fit",
    }[candidate.verdict]
    on_host = host_bytes(candidate.spec, candidate.memory_rank)
    host = f"; its host holds {gib(on_host)} GiB" if on_host else ""
    return [
        f"{request.model.name} as {timed.label}{nodes} takes {duration(candidate.seconds.total)} per "
        f"iteration with micro batch {batch.micro_batch_size} and global batch "
        f"{request.global_batch:,}: {candidate.tokens_per_second:,.0f} tokens/s, "
        f"{percent(candidate.mfu)} MFU.",
        f"The rank with the peak memory holds {gib(candidate.memory.total)} GiB, "
        f"{candidate.memory.total / device_bytes:.0%} of the device, which {verdict}{host}.",
    ]


def _build_breakdown(strategies: Sequence[TimedStrategy]) -> Table[str]:
    """Return a table of iteration times with a row per component and a column per strategy."""

    def format_cell(strategy: TimedStrategy, name: str) -> str:
        """Return a component's milliseconds and its fraction of the iteration."""
        seconds = strategy.candidate.seconds
        value = getattr(seconds, name)
        return f"{ms(value)} ms ({value / seconds.total:.0%})"

    columns = [Column[str]("component", _component_label, right=False)]
    columns += [
        Column[str](strategy.label, partial(format_cell, strategy), wraps=True)
        for strategy in strategies
    ]
    shown = [
        name
        for name in TIME_COMPONENTS
        if any(getattr(strategy.candidate.seconds, name) for strategy in strategies)
    ]
    return Table(tuple(columns), (*shown, "total"), "The time of an iteration by component")


_COMPONENT_LABELS = {
    "matmul": "matrix products",
    "memory_bound": "memory-bound kernels",
    "tensor_parallel": "exposed TP",
    "context_parallel": "exposed CP",
    "expert_parallel": "exposed EP",
    "host_launches": "waiting for the host",
    "pipeline_messages": "exposed PP",
    "bubble": "pipeline bubble",
    "gradient_sync": "exposed DP",
}


def _component_label(name: str) -> str:
    """Return the label of an iteration's component in tables and pictures."""
    return _COMPONENT_LABELS.get(name, name.replace("_", " "))

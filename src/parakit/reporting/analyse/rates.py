"""Compute tokens/s, FLOPs and utilisation of a run, each with its formula and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parakit.config.hardware import find_device
from parakit.config.model import GATED_DELTA_NET
from parakit.config.run import Backend, RunSpec
from parakit.costs import UnevenSplitError, model_flops, rank_parameters, token_flops
from parakit.logs import PRINTED_TOKENS_PER_DEVICE, PRINTED_TOKENS_PER_SECOND, Run

DISAGREEMENT = 0.01
"""Relative difference to Megatron's own count of FLOPs from which on a note names it."""
_PRINTED_ROUNDING = 0.05
"""Largest rounding error of a printed throughput in TFLOP/s: Megatron prints one decimal."""
_MAX_ROUNDING = 0.0025
"""Relative rounding error up to which the ratio of both counts is given although they agree."""


@dataclass(frozen=True)
class Rates:
    """Rates of one run; a rate that does not follow from known numbers is None."""

    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    model_flops_per_iteration: int | None = None
    hardware_flops_per_iteration: float | None = None
    model_tflops_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_tflops: float | None = None
    peak_source: str = ""
    printed_tflops_per_device: float | None = None
    """Median of the TFLOP/s that Megatron printed."""
    printed_over_counted: float | None = None
    """FLOPs per iteration by Megatron's count over this count; None if Megatron's rounding hides it."""
    model_doubt: str = ""
    """Text that the log prints other parameters than the model has, so that FLOPs are doubtful; else empty."""
    formulas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compute_rates(run: Run, iteration_ms: float | None) -> Rates:
    """Return the rates of a run, such as tokens per second, at a given time per iteration.

    Args:
        run: The run.
        iteration_ms: Milliseconds per iteration; None leaves all rates but the printed ones empty.
    """
    spec = run.spec
    printed = _printed_throughput(run)
    # A token count of 0 means that the log does not name its batch.
    if not iteration_ms or spec is None or not spec.tokens_per_iteration:
        return _rates_without_spec(run, iteration_ms, printed)
    seconds, devices = iteration_ms / 1000, spec.parallelism.world_size
    samples, length = spec.batch.global_batch_size, spec.shape.seq_length
    tokens_per_second = spec.tokens_per_iteration / seconds
    formula = f"tokens/s = global batch {samples} × sequence {length} ÷ {seconds:.6g} s"
    rates = Rates(
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_device=tokens_per_second / devices,
        printed_tflops_per_device=printed.tflops_per_device,
        model_doubt=why_parameters_differ(run),
        formulas=(formula,),
    )
    if not spec.shape.vocabulary:
        note = "no FLOPs and no parameters in total: the log does not state the vocabulary"
        return replace(rates, notes=(note,))
    return _add_flops(rates, run, spec, seconds=seconds, printed=printed)


def _rates_without_spec(run: Run, iteration_ms: float | None, printed: _PrintedThroughput) -> Rates:
    """Return the token rates of a run whose configuration or time is unknown, without FLOPs.

    Rates that do not follow from the run's batch, sequence length and time are those that the log prints.
    """
    tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
    tokens_per_second = per_device = None
    if iteration_ms and tokens:
        tokens_per_second = 1000 * tokens / iteration_ms
        if run.num_devices:
            per_device = tokens_per_second / run.num_devices
    return Rates(
        tokens_per_second=tokens_per_second or _printed_median(run, PRINTED_TOKENS_PER_SECOND),
        tokens_per_second_per_device=(
            per_device or _printed_median(run, PRINTED_TOKENS_PER_DEVICE)
        ),
        printed_tflops_per_device=printed.tflops_per_device,
        model_doubt=why_parameters_differ(run),
    )


def _printed_median(run: Run, name: str) -> float | None:
    """Return the median of a throughput that a trainer prints, without the first line; None if it prints none."""
    lines = run.log.iterations
    values = lines.values(name)
    usable = (values > 0) & np.isfinite(values) & ~lines.known("first_of_start")
    return float(np.median(values[usable])) if usable.any() else None


def why_parameters_differ(run: Run) -> str:
    """Return a sentence if a rank printed another number of parameters than the arguments give; otherwise empty.

    Only a rank that holds all layers is checked. The text is empty for pipelines, for experts on several ranks
    and for unusual attention, where the numbers cannot be compared.
    """
    spec, printed = run.spec, {count.parameters for count in run.log.parameters}
    if spec is None or spec.backend != Backend.MEGATRON or len(printed) != 1:
        return ""
    has_all_layers = spec.parallelism.pipeline == spec.parallelism.expert == 1
    if not has_all_layers or not spec.shape.vocabulary or attention_variant(run):
        return ""
    try:
        counted = rank_parameters(spec).total
    except UnevenSplitError:
        return ""
    if counted in printed:
        return ""
    return f"a rank prints {printed.pop():,} and the model of the arguments has {counted:,}"


@dataclass(frozen=True)
class _PrintedThroughput:
    """Throughput that Megatron printed."""

    tflops_per_device: float | None
    flops_per_device_iteration: float | None = None
    """FLOPs per device and iteration: the printed rate times the printed time; None without times."""
    rounding: float = 0.0
    """Largest relative rounding error of the printed numbers."""


def _printed_throughput(run: Run) -> _PrintedThroughput:
    """Return the medians of the throughput that Megatron printed. Lines that average several steps are left out."""
    lines = run.log.iterations
    rates, times = lines.values("throughput_tflops_per_gpu"), lines.values("elapsed_ms")
    known = (rates > 0) & ~lines.known("averaged")
    if not known.any():
        return _PrintedThroughput(None)
    median_rate = float(np.median(rates[known]))
    timed = known & (times > 0)
    if not timed.any():
        return _PrintedThroughput(median_rate)
    return _PrintedThroughput(
        median_rate,
        flops_per_device_iteration=float(np.median(rates[timed] * times[timed] * 1e9)),
        rounding=_PRINTED_ROUNDING / median_rate,
    )


def _add_flops(
    rates: Rates, run: Run, spec: RunSpec, *, seconds: float, printed: _PrintedThroughput
) -> Rates:
    """Return the rates with FLOPs, utilisation, and a comparison with the FLOPs that Megatron counts."""
    devices = spec.parallelism.world_size
    flops = model_flops(spec.shape, spec.batch.global_batch_size, spec.shape.seq_length)
    hardware_flops = flops + _recompute_flops(spec)
    tflops_per_device = flops / seconds / devices / 1e12
    formulas = [
        *rates.formulas,
        f"model TFLOP/s/device = {flops:.5g} FLOPs ÷ {seconds:.6g} s ÷ {devices}"
        " (forward and backward, causal attention halved, recomputation not counted)",
    ]
    peak, source, peak_note = _find_peak(run.device, spec.dtype)
    mfu = hfu = None
    if peak:
        mfu = tflops_per_device / peak
        hfu = tflops_per_device * hardware_flops / flops / peak
        formulas.append(f"MFU = {tflops_per_device:.5g} ÷ {peak:g} TFLOP/s dense {spec.dtype}")
    megatron_flops = _count_printed_flops(printed, devices, flops)
    notes = (peak_note, _compare_with_megatron(run, megatron_flops, flops))
    return replace(
        rates,
        printed_over_counted=megatron_flops / flops if megatron_flops else None,
        model_flops_per_iteration=flops,
        hardware_flops_per_iteration=hardware_flops,
        model_tflops_per_device=tflops_per_device,
        mfu=mfu,
        hfu=hfu,
        peak_tflops=peak,
        peak_source=source,
        formulas=tuple(formulas),
        notes=tuple(note for note in notes if note),
    )


def _count_printed_flops(printed: _PrintedThroughput, devices: int, flops: float) -> float | None:
    """Return the FLOPs per iteration that Megatron's printed throughput means; None if they are unknown.

    They are also unknown if they agree with `flops`, and the printed digits are too few to say by how much the two
    counts differ.
    """
    if printed.flops_per_device_iteration is None:
        return None
    megatron_flops = printed.flops_per_device_iteration * devices
    differ = abs(flops / megatron_flops - 1) > DISAGREEMENT + printed.rounding
    if not differ and printed.rounding > _MAX_ROUNDING:
        return None
    return megatron_flops


def attention_variant(run: Run) -> str:
    """Return the variant of attention for which this count has no formula; empty if there is none."""
    arguments = {name.lstrip("-").replace("-", "_"): value for name, value in run.arguments.items()}
    variant = arguments.get("experimental_attention_variant") or ""
    return "" if variant in ("None", GATED_DELTA_NET) else variant


def _compare_with_megatron(run: Run, megatron_flops: float | None, flops: int) -> str:
    """Return a note on the FLOP count: by how much Megatron's own count differs, and what this count leaves out.

    The second part names a variant of attention that is counted as usual attention. The note has only this part if the
    two counts agree or Megatron's is unknown. It is empty if the attention is usual, too.

    Args:
        run: The run.
        megatron_flops: FLOPs per iteration by Megatron's printed throughput; None if unknown.
        flops: FLOPs per iteration by the kit's formulas.
    """
    variant = attention_variant(run)
    variant_note = f"{variant} is counted as attention" if variant else ""
    if megatron_flops is None:
        return variant_note
    difference = flops / megatron_flops - 1
    if abs(difference) <= DISAGREEMENT:
        return variant_note
    counts = f"{flops:.4g} here, {megatron_flops:.4g}"
    note = f"FLOPs differ from Megatron's own count by {difference:+.1%} ({counts})"
    return f"{note}: {variant_note}" if variant_note else note


def _find_peak(device: str, dtype: str) -> tuple[float | None, str, str]:
    """Return the peak TFLOP/s of a device in a precision, its source, and a note if it is unknown."""
    if not device:
        return (
            None,
            "",
            "no MFU: the log does not name the device; --device h100 (make: DEVICE=h100) names it",
        )
    if device == "cpu":
        return None, "", ""
    known = find_device(device)
    if known is None:
        return None, "", f"no MFU: no peak rate is recorded for '{device}'"
    peak = known.peak_flops(dtype)
    if peak is None:
        return None, "", f"no MFU: no {dtype} peak is recorded for '{device}'"
    doubt = "" if known.verified else f"peak of '{device}' is unverified"
    return peak / 1e12, known.source, doubt


def _recompute_flops(spec: RunSpec) -> float:
    """Return the FLOPs per iteration of recomputed forward passes; 0 without recomputation.

    Full recomputation counts the FLOPs of the recomputed layers. Selective recomputation counts attention scores,
    and MLPs or experts, if these modules are recomputed. Other recomputed modules count as 0.
    """
    forward = token_flops(spec.shape, spec.shape.seq_length)
    if spec.recompute.is_full:
        again = (
            sum(map(spec.num_recomputed_layers, range(spec.parallelism.pipeline)))
            / spec.shape.layers
        )
        return again * (forward.total - forward.logits) * spec.tokens_per_iteration
    inside = ("moe", forward.mlp + forward.router) if spec.shape.experts else ("mlp", forward.mlp)
    parts = ("core_attn", forward.attention_scores), inside
    flops = sum(flops for module, flops in parts if spec.recompute.recomputes(module))
    return float(flops * spec.tokens_per_iteration)

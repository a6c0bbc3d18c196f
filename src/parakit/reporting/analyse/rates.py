"""Compute tokens/s, FLOPs and utilisation of a run, each with its formula and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parakit.config.hardware import find_device
from parakit.config.model import GATED_DELTA_NET
from parakit.config.run import RunSpec
from parakit.costs import model_flops, token_flops
from parakit.logs import Run

DISAGREEMENT = 0.01
"""Relative difference to Megatron's own count of FLOPs from which on a note names it."""
_MIN_THROUGHPUT = 20.0
"""TFLOP/s below which Megatron's one printed decimal hides a difference of 1%."""


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
    formulas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compute_rates(run: Run, iteration_ms: float | None) -> Rates:
    """Return the rates of a run at a time per iteration.

    Args:
        run: The run.
        iteration_ms: Milliseconds per iteration; None leaves all rates but the printed ones empty.
    """
    spec = run.spec
    printed = _printed_throughput(run)
    # A token count of 0 means that the log does not name its batch.
    if not iteration_ms or spec is None or not spec.tokens_per_iteration:
        tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
        tokens_per_second = 1000 * tokens / iteration_ms if iteration_ms and tokens else None
        return Rates(
            tokens_per_second=tokens_per_second, printed_tflops_per_device=printed.tflops_per_device
        )
    seconds, devices = iteration_ms / 1000, spec.parallelism.world_size
    samples, length = spec.batch.global_batch_size, spec.shape.seq_length
    tokens_per_second = spec.tokens_per_iteration / seconds
    formula = f"tokens/s = global batch {samples} × sequence {length} ÷ {seconds:.6g} s"
    rates = Rates(
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_device=tokens_per_second / devices,
        printed_tflops_per_device=printed.tflops_per_device,
        formulas=(formula,),
    )
    if not spec.shape.vocabulary:
        note = "no FLOPs and no parameters in total: the log does not state the vocabulary"
        return replace(rates, notes=(note,))
    return _add_flops(rates, run, spec, seconds=seconds, printed=printed)


@dataclass(frozen=True)
class _PrintedThroughput:
    """Throughput that Megatron printed."""

    tflops_per_device: float | None
    flops_per_device_iteration: float | None
    """FLOPs per device and iteration from which it follows; None if rounding hides a difference of 1%."""


def _printed_throughput(run: Run) -> _PrintedThroughput:
    """Return the medians of the throughput that Megatron printed, without averaged lines."""
    lines = run.log.iterations
    rates, times = lines.values("throughput_tflops_per_gpu"), lines.values("elapsed_ms")
    known = (rates > 0) & ~lines.known("averaged")
    exact = known & (rates >= _MIN_THROUGHPUT) & (times > 0)
    return _PrintedThroughput(
        float(np.median(rates[known])) if known.any() else None,
        float(np.median(rates[exact] * times[exact] * 1e9)) if exact.any() else None,
    )


def _add_flops(
    rates: Rates, run: Run, spec: RunSpec, *, seconds: float, printed: _PrintedThroughput
) -> Rates:
    """Return the rates with FLOPs, utilisation and the comparison with Megatron's own count."""
    devices = spec.parallelism.world_size
    flops = model_flops(spec.shape, spec.batch.global_batch_size, spec.shape.seq_length)
    hardware_flops = flops + _recompute_flops(spec)
    tflops_per_device = flops / seconds / devices / 1e12
    formulas = [
        *rates.formulas,
        f"model TFLOP/s/device = {flops:.5g} FLOPs ÷ {seconds:.6g} s ÷ {devices}"
        " (forward and backward, causal attention halved, recomputation not counted)",
    ]
    peak, source, note = _find_peak(run.device, spec.dtype)
    if peak:
        formulas.append(f"MFU = {tflops_per_device:.5g} ÷ {peak:g} TFLOP/s dense {spec.dtype}")
    megatron_flops = None
    if printed.flops_per_device_iteration is not None:
        megatron_flops = printed.flops_per_device_iteration * devices
    return replace(
        rates,
        printed_over_counted=megatron_flops / flops if megatron_flops else None,
        model_flops_per_iteration=flops,
        hardware_flops_per_iteration=hardware_flops,
        model_tflops_per_device=tflops_per_device,
        mfu=tflops_per_device / peak if peak else None,
        hfu=tflops_per_device * hardware_flops / flops / peak if peak else None,
        peak_tflops=peak,
        peak_source=source,
        formulas=tuple(formulas),
        notes=tuple(filter(None, (note, _compare_with_megatron(run, megatron_flops, flops)))),
    )


def attention_variant(run: Run) -> str:
    """Return the variant of attention for which this count has no formula; empty if there is none."""
    arguments = {name.lstrip("-").replace("-", "_"): value for name, value in run.arguments.items()}
    variant = arguments.get("experimental_attention_variant") or ""
    return "" if variant in ("None", GATED_DELTA_NET) else variant


def _compare_with_megatron(run: Run, megatron_flops: float | None, flops: int) -> str:
    """Return by how much Megatron's count of FLOPs differs, and why; empty without a difference or cause."""
    variant = attention_variant(run)
    cause = variant and f"{variant} is counted as attention"
    if megatron_flops is None or abs(flops / megatron_flops - 1) <= DISAGREEMENT:
        return cause
    return (
        f"FLOPs differ from Megatron's own count by {flops / megatron_flops - 1:+.1%} ({flops:.4g} here,"
        f" {megatron_flops:.4g}){f': {cause}' if cause else ''}"
    )


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

    With full recomputation, the FLOPs of the recomputed layers count. Otherwise, the FLOPs of attention scores,
    MLPs and experts count, if these modules are recomputed. Other modules are taken to cost nothing.
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

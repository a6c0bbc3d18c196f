"""Tokens, FLOPs and utilisation of a run, each with the formula and the numbers that went in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parakit.config.hardware import find_device
from parakit.config.model import GATED_DELTA_NET
from parakit.config.run import RunSpec
from parakit.costs import model_flops, token_flops
from parakit.logs import Run

DISAGREEMENT = 0.01
_MIN_THROUGHPUT = 20.0
"""Megatron prints TFLOP/s with one decimal; below this its rounding hides 1%."""


@dataclass(frozen=True)
class Rates:
    """Speeds of one configuration."""

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
    """Megatron's own, the median of its lines."""
    printed_over_counted: float | None = None
    """FLOPs of an iteration by Megatron's count over ours; None where its one decimal hides it."""
    formulas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compute_rates(run: Run, iteration_ms: float | None) -> Rates:
    """Rates of a run whose median iteration takes `iteration_ms`."""
    spec, lines = run.spec, run.log.iterations
    # Megatron's own throughput, and the FLOPs of an iteration a device that it was computed from.
    rates, times = lines.values("throughput_tflops_per_gpu"), lines.values("elapsed_ms")
    known = (rates > 0) & ~lines.known("averaged")
    exact = known & (rates >= _MIN_THROUGHPUT) & (times > 0)
    printed = float(np.median(rates[known])) if known.any() else None
    theirs = float(np.median(rates[exact] * times[exact] * 1e9)) if exact.any() else None
    # Tokens of 0 are a batch that the log does not name.
    if not iteration_ms or spec is None or not spec.tokens_per_iteration:
        tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
        per_second = 1000 * tokens / iteration_ms if iteration_ms and tokens else None
        return Rates(tokens_per_second=per_second, printed_tflops_per_device=printed)
    seconds, devices = iteration_ms / 1000, spec.parallelism.world_size
    samples, length = spec.batch.global_batch_size, spec.shape.seq_length
    per_second = spec.tokens_per_iteration / seconds
    formulas = [f"tokens/s = global batch {samples} × sequence {length} ÷ {seconds:.6g} s"]
    found = Rates(per_second, per_second / devices, printed_tflops_per_device=printed)
    if not spec.shape.vocabulary:
        lacking = "no FLOPs and no parameters in total: the log does not say the vocabulary"
        return replace(found, formulas=tuple(formulas), notes=(lacking,))
    flops = model_flops(spec.shape, samples, length)
    done = flops + _recomputed(spec)
    per_device = flops / seconds / devices / 1e12
    formulas.append(
        f"model TFLOP/s/device = {flops:.5g} FLOPs ÷ {seconds:.6g} s ÷ {devices}"
        " (forward and backward, causal attention halved, recomputation not counted)"
    )
    peak, source, note = _peak(run.device, spec.dtype)
    if peak:
        formulas.append(f"MFU = {per_device:.5g} ÷ {peak:g} TFLOP/s dense {spec.dtype}")
    theirs = theirs and theirs * devices
    return replace(
        found,
        printed_over_counted=theirs / flops if theirs else None,
        model_flops_per_iteration=flops,
        hardware_flops_per_iteration=done,
        model_tflops_per_device=per_device,
        mfu=per_device / peak if peak else None,
        hfu=per_device * done / flops / peak if peak else None,
        peak_tflops=peak,
        peak_source=source,
        formulas=tuple(formulas),
        notes=tuple(filter(None, (note, _against_megatron(run, theirs, flops)))),
    )


def attention_variant(run: Run) -> str:
    """What stands in place of attention and has no formula here; empty of none."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in run.arguments.items()}
    variant = plain.get("experimental_attention_variant") or ""
    return "" if variant in ("None", GATED_DELTA_NET) else variant


def _against_megatron(run: Run, theirs: float | None, flops: int) -> str:
    """Of what the count has no formula, and whether Megatron's own count of FLOPs differs."""
    variant = attention_variant(run)
    cause = variant and f"{variant} is counted as attention"
    if theirs is None or abs(flops / theirs - 1) <= DISAGREEMENT:
        return cause
    return (
        f"FLOPs differ from Megatron's own count by {flops / theirs - 1:+.1%} ({flops:.4g} here,"
        f" {theirs:.4g}){f': {cause}' if cause else ''}"
    )


def _peak(device: str, dtype: str) -> tuple[float | None, str, str]:
    if not device:
        return None, "", "no MFU: the log does not name the device (DEVICE=h100 names it)"
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


def _recomputed(spec: RunSpec) -> float:
    """FLOPs that recomputation adds: forward passes of layers, or of their scores, MLPs and experts."""
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

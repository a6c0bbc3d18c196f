"""Tokens, FLOPs and utilisation of a run, each with the formula and the numbers that went in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.plan.time.flops import model_flops, token_flops
from tools.report.read.runs import Run
from tools.report.read.setup import flags_of_printed
from tools.spec.flags import Flags
from tools.spec.hardware import find_device
from tools.spec.model import ModelShape

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
    formulas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def rates_of(run: Run, iteration_ms: float | None) -> Rates:
    """Rates of a run whose median iteration takes `iteration_ms`."""
    setup = run.setup
    if iteration_ms is None or setup.tokens_per_iteration is None:
        return Rates()
    seconds = iteration_ms / 1000
    per_second = setup.tokens_per_iteration / seconds
    assert setup.batch is not None
    formulas = [
        f"tokens/s = global batch {setup.batch.global_batch_size} × sequence {setup.seq_length}"
        f" ÷ {seconds:.6g} s"
    ]
    if setup.world_size is None:
        return Rates(per_second, formulas=tuple(formulas))
    each = per_second / setup.world_size
    if setup.shape is None:
        return Rates(per_second, each, formulas=tuple(formulas))
    flops = model_flops(setup.shape, setup.batch.global_batch_size, setup.seq_length)
    done = flops + _recomputed(run, setup.shape, setup.tokens_per_iteration)
    per_device = flops / seconds / setup.world_size / 1e12
    formulas.append(
        f"model TFLOP/s/device = {flops:.5g} FLOPs ÷ {seconds:.6g} s ÷ {setup.world_size}"
        " (forward and backward, causal attention halved, recomputation not counted)"
    )
    peak, source, note = _peak(setup.device, setup.dtype)
    if peak:
        formulas.append(f"MFU = {per_device:.5g} ÷ {peak:g} TFLOP/s dense {setup.dtype}")
    return Rates(
        tokens_per_second=per_second,
        tokens_per_second_per_device=each,
        model_flops_per_iteration=flops,
        hardware_flops_per_iteration=done,
        model_tflops_per_device=per_device,
        mfu=per_device / peak if peak else None,
        hfu=per_device * done / flops / peak if peak else None,
        peak_tflops=peak,
        peak_source=source,
        formulas=tuple(formulas),
        notes=tuple(filter(None, (note, _against_megatron(run, flops)))),
    )


def _peak(device: str, dtype: str) -> tuple[float | None, str, str]:
    if not device:
        return None, "", "no MFU: the log does not name the device"
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


def _recomputed(run: Run, shape: ModelShape, tokens: int) -> float:
    """FLOPs that recomputation adds: forward passes of layers, or of their attention scores."""
    forward = token_flops(shape, run.setup.seq_length)
    if run.setup.recompute == "selective":
        return forward.attention_scores * tokens
    if run.setup.recompute != "full":
        return 0.0
    flags = _flags(run)
    layers = 1.0
    stages = run.setup.parallelism.pipeline if run.setup.parallelism else 1
    if flags.text("--recompute-method") == "block":
        layers = min(1.0, flags.integer("--recompute-num-layers", 1) * stages / shape.layers)
    return layers * (forward.total - forward.logits) * tokens


def _flags(run: Run) -> Flags:
    return Flags(run.record.argv) if run.record else flags_of_printed(run.setup.arguments)


def _against_megatron(run: Run, flops: int) -> str:
    """What Megatron's own throughput says of the FLOPs of an iteration, if it differs."""
    counted = [
        found.throughput_tflops_per_gpu * found.elapsed_ms * 1e9
        for found in run.log.iterations
        if found.throughput_tflops_per_gpu
        and found.throughput_tflops_per_gpu >= _MIN_THROUGHPUT
        and found.elapsed_ms
        and not found.averaged
    ]
    if not counted or not run.setup.world_size:
        return ""
    theirs = float(np.median(counted)) * run.setup.world_size
    off = flops / theirs - 1
    if abs(off) <= DISAGREEMENT:
        return ""
    return f"FLOPs differ from Megatron's own count by {off:+.1%} ({flops:.4g} here, {theirs:.4g})"

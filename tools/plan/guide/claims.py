"""The framework survey's claims, judged: figures of runs that it did not make.

A claim is judged by what is here: its own figures against each other, arithmetic, or the planner's
prediction of the layout that it is about. A prediction contradicts it only beyond the planner's error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tools.plan.candidates import base
from tools.plan.guide.predictions import request_of
from tools.plan.search import Candidate, evaluate
from tools.plan.tensors import parameters_total
from tools.spec.hardware import device_by_key
from tools.spec.model import load_model
from tools.spec.published import Claim, load_published
from tools.spec.recompute import Recompute
from tools.spec.strategy import devices_of, parse_strategy
from tools.text.table import Column, Table, markdown_table

SOURCE = "001"
GPUS, GPU, MODEL, SAMPLES, TOKENS = 1024, "a100", "gpt3-175b", 1536, 300e9
"""What the survey's claims are about; samples and tokens are arXiv:2104.04473's, which it leaves out."""
_ERROR = 0.15
"""Times and memory are not predicted better than this everywhere (README, held-out errors)."""
_ROUNDING = 0.02
_GB = 1e9
_SECONDS_A_DAY = 86400
_STATE = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Bytes a parameter in fp32, which the survey counts in."""
_COMMUNICATION = ("tensor_parallel", "pipeline_messages", "bubble", "gradient_sync")
"""What it adds up to an overhead in all."""


class ClaimVerdict(StrEnum):
    """What becomes of a claim."""

    CONFIRMED = "confirmed"
    CONTRADICTED = "contradicted"
    OPEN = "cannot be judged"


@dataclass(frozen=True)
class JudgedClaim:
    """One statement of a claim."""

    claim: str
    states: str
    verdict: ClaimVerdict
    evidence: str


def judge(claim: Claim) -> list[JudgedClaim]:
    """Each statement of a claim with its verdict and the evidence."""
    kinds = (_rates, _money, _time, _memory, _room, _degrees)
    found = (each for kind in kinds for each in kind(claim))
    return [JudgedClaim(claim.about, *each) for each in found]


_Said = tuple[str, ClaimVerdict, str]


def _rates(claim: Claim) -> Iterator[_Said]:
    peak = (device_by_key(GPU).peak_flops("bf16") or 0.0) / 1e12
    if claim.mfu is not None and claim.tflops_per_device is not None:
        share = claim.tflops_per_device / peak
        verdict = _if(abs(share - claim.mfu) < 0.01)
        states = f"{claim.tflops_per_device:g} TFLOP/s are {claim.mfu:.0%} of the peak"
        yield states, verdict, f"{claim.tflops_per_device:g} of {peak:g} are {share:.1%}"
    elif claim.mfu is not None and claim.layout:
        share = _planned(claim, Recompute.NONE).mfu
        said = f"predicted for {claim.layout} without recomputation, batch {SAMPLES:,}: {share:.0%}"
        yield f"{claim.mfu:.0%} MFU", _if(_near(share, claim.mfu)), said
    if claim.scaling_efficiency is not None:
        states = f"scales to 1,024 GPUs with {claim.scaling_efficiency:.0%}"
        yield states, ClaimVerdict.OPEN, "no smaller run is named that it would be relative to"


def _money(claim: Claim) -> Iterator[_Said]:
    if claim.price_dollars is not None and claim.saved_dollars is not None and claim.speedup:
        saved = claim.price_dollars * (1 - 1 / claim.speedup)
        yield (
            f"saves {claim.saved_dollars:,.0f} dollars",
            _if(_near(saved, claim.saved_dollars)),
            f"{claim.price_dollars:,.0f} · (1 − 1/{claim.speedup:g}) = {saved:,.0f}",
        )
    elif claim.speedup is not None:
        rates = [each.tflops_per_device for each in _claims() if each.tflops_per_device]
        ratio = rates[0] / rates[1]
        yield (
            f"{claim.speedup:.2f} times as fast",
            _if(abs(ratio - claim.speedup) < _ROUNDING),
            f"its own {rates[0]:g} over {rates[1]:g} TFLOP/s are {ratio:.2f}; measured by neither",
        )


def _time(claim: Claim) -> Iterator[_Said]:
    if claim.training_days is not None and not claim.layout:
        states = f"{claim.training_days:g} days"
        yield states, ClaimVerdict.OPEN, "no layout is named, and nobody measured it"
    elif claim.training_days is not None:
        found = _planned(claim, Recompute.FULL)
        days = TOKENS / found.tokens_per_second / _SECONDS_A_DAY
        yield (
            f"{claim.training_days:g} days",
            _if(_near(days, claim.training_days)),
            f"predicted for {claim.layout} with full recomputation, batch {SAMPLES:,} and 300 billion "
            f"tokens: {days:.0f} (8·N·D at 140 TFLOP/s: {_days_at(140e12):.0f})",
        )
    if claim.overhead is not None:
        low, high = claim.overhead
        found = _planned(claim, Recompute.NONE)
        parts = (claim.part,) if claim.part else _COMMUNICATION
        share = sum(getattr(found.seconds, part) for part in parts) / found.seconds.total
        inside = low * (1 - _ERROR) <= share <= high * (1 + _ERROR)
        batch = found.spec.batch.global_batch_size
        yield (
            f"{low:.0%} to {high:.0%} of an iteration",
            _if(inside),
            f"predicted for {found.strategy}, batch {batch:,}: {share:.1%}",
        )


def _memory(claim: Claim) -> Iterator[_Said]:
    if claim.memory_gb is not None:
        yield _predicted_bytes(claim, "", claim.memory_gb)
    if claim.total_gb is None:
        return
    if claim.gpus == 1:
        yield from _on_one_gpu(claim, claim.total_gb)
        return
    split = _planned(claim, Recompute.NONE).spec.parallelism
    ranks = split.world_size if split.sharding else split.tensor * split.pipeline
    whole = next(each for each in _claims() if each.gpus == 1)
    for name in _STATE:
        whole_gb, claimed = getattr(whole, f"{name}_gb"), getattr(claim, f"{name}_gb")
        if claimed is not None:
            share = whole_gb / ranks
            said = f"its own {whole_gb:,.0f} GB over {ranks:,} ranks are {share:.1f}"
            yield f"{claimed:,g} GB of {name}", _if(_near(share, claimed)), said
    if claim.activations_gb is not None:
        yield _predicted_bytes(claim, "activations", claim.activations_gb)
    yield _predicted_bytes(claim, "", claim.total_gb)


def _on_one_gpu(claim: Claim, total_gb: float) -> Iterator[_Said]:
    parameters = parameters_total(load_model(MODEL).shape)
    for name, each in _STATE.items():
        claimed, found = getattr(claim, f"{name}_gb"), each * parameters / _GB
        if claimed is not None:
            said = f"{each} bytes a parameter are {found:,.0f} GB"
            yield f"{claimed:,g} GB of {name}", _if(_near(found, claimed)), said
    if claim.activations_gb is not None:
        states = f"{claim.activations_gb:g} GB of activations"
        yield states, ClaimVerdict.OPEN, "no sequence length and no number of samples is named"
    activations = claim.activations_gb or 0
    state = sum(_STATE.values()) * parameters / _GB
    yield (
        f"{total_gb:,.0f} GB in all",
        _if(_near(state, total_gb - activations)),
        f"{sum(_STATE.values())} bytes a parameter are {state:,.0f} GB; its {activations:g} GB of "
        "activations come on top",
    )


def _predicted_bytes(claim: Claim, part: str, claimed_gb: float) -> _Said:
    """Of a GPU; right with or without recomputation is right, because the claim names neither."""
    plain, again = _both(claim)
    kept, less = (
        (getattr(each.memory, part) if part else each.memory.total) / _GB for each in (plain, again)
    )
    return (
        f"{claimed_gb:g} GB {f'of {part}' if part else 'in all'}",
        _if(_near(kept, claimed_gb) or _near(less, claimed_gb)),
        f"predicted for {plain.strategy}, micro batch 1: {kept:.1f} GB, with full recomputation "
        f"{less:.1f}, which {_fitting(again.fits)}",
    )


def _room(claim: Claim) -> Iterator[_Said]:
    if claim.fits is None:
        return
    plain, again = _both(claim)
    yield (
        f"{_fitting(claim.fits)} on {device_by_key(GPU).name}",
        _if((plain.fits or again.fits) == claim.fits),
        f"predicted for {plain.strategy}, micro batch 1: {_fitting(plain.fits)} without recomputation, "
        f"{_fitting(again.fits)} with it",
    )


def _fitting(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _both(claim: Claim) -> tuple[Candidate, Candidate]:
    return _planned(claim, Recompute.NONE), _planned(claim, Recompute.FULL)


def _degrees(claim: Claim) -> Iterator[_Said]:
    if claim.data_parallel is None or claim.gpus is None:
        return
    split = parse_strategy(claim.layout, 280)
    product = split.tensor * split.pipeline * claim.data_parallel
    states = f"DP {claim.data_parallel} on {claim.gpus:,} GPUs"
    said = f"{split.tensor} · {split.pipeline} · {claim.data_parallel} is {product:,}"
    yield states, _if(product == claim.gpus), said


def _near(found: float, claimed: float) -> bool:
    return abs(found / claimed - 1) <= _ERROR


def _if(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.CONTRADICTED


def _days_at(flops: float) -> float:
    """Of 300 billion tokens with full recomputation: 8 FLOPs a parameter and token."""
    operations = 8 * parameters_total(load_model(MODEL).shape) * TOKENS
    return operations / (GPUS * flops) / _SECONDS_A_DAY


@cache
def _claims() -> tuple[Claim, ...]:
    return tuple(claim for claim in load_published().claims if claim.source == SOURCE)


@cache
def _planned(claim: Claim, recompute: Recompute) -> Candidate:
    """The layout that a claim is about, of its model on its GPUs."""
    replicas = f"dp{claim.data_parallel}-zero1" if claim.data_parallel else ""
    layout, gpus = f"{claim.layout}{replicas}", GPUS
    if claim.data_parallel:  # As its degrees multiply, which need not be the GPUs that it names.
        gpus = devices_of(layout)
    model, samples = claim.model or MODEL, SAMPLES
    split = parse_strategy(layout, gpus)
    if samples % split.data:
        samples = 2 * gpus
    request = request_of(model, gpus, GPU, samples)
    return evaluate(request, base(request.template, split, 1, recompute))


def claims_table() -> str:
    """Markdown: every statement of the survey's claims, judged."""
    columns = (
        Column[JudgedClaim]("claim", lambda each: each.claim, right=False),
        Column[JudgedClaim]("states", lambda each: each.states, right=False),
        Column[JudgedClaim]("verdict", lambda each: each.verdict, right=False),
        Column[JudgedClaim]("evidence", lambda each: each.evidence, right=False),
    )
    return markdown_table(Table(columns, tuple(each for c in _claims() for each in judge(c))))

"""Judgement of the framework survey's claims: figures of runs that the survey did not make.

A claim is judged by what is here: its own figures against each other, arithmetic, or the planner's
prediction of the strategy that it is about. A prediction contradicts it only beyond the planner's error.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from parakit.config.files import read_yaml
from parakit.config.hardware import device_by_key
from parakit.config.model import load_model
from parakit.config.published import PUBLISHED_FILE
from parakit.config.recompute import Recompute
from parakit.config.strategy import count_devices, parse_strategy
from parakit.costs.tensors import total_parameters
from parakit.formatting.table import markdown_rows
from parakit.planner.candidates import build_unsharded_spec
from parakit.planner.search import Candidate, evaluate_configuration
from tests.docs.predictions import request_of

GPUS, GPU, MODEL, SAMPLES, TOKENS = 1024, "a100", "gpt3-175b", 1536, 300e9
"""Subject of the survey's claims. Samples and tokens are those of arXiv:2104.04473, because the survey omits them."""
_ERROR = 0.15
"""Times and memory are not predicted better than this everywhere (its README, held-out errors)."""
_DAY = 86400
_STATE = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Bytes per parameter in fp32, the precision that the survey assumes."""
_COMMUNICATION = ("tensor_parallel", "pipeline_messages", "bubble", "gradient_sync")
"""Parts of the time that the survey adds up to a total overhead."""
_VERDICTS = {True: "confirmed", False: "contradicted", None: "cannot be judged"}

Said = tuple[str, bool | None, str]
"""Statement, whether it is true (None if nothing here decides it), and the evidence."""


class Claim(dict):
    """Figures that the survey states, None if it does not. Keys are those of `claims:` in `published.yaml`."""

    __getattr__ = dict.get
    __hash__ = object.__hash__


def claims_table() -> str:
    """Markdown: every statement of the survey's claims, judged."""
    rows = [
        [claim.about, states, _VERDICTS[is_so], evidence]
        for claim in load_claims()
        for states, is_so, evidence in judge(claim)
    ]
    return markdown_rows(["claim", "states", "verdict", "evidence"], rows)


@cache
def load_claims() -> tuple[Claim, ...]:
    """Return the claims of `published.yaml`."""
    return tuple(map(Claim, read_yaml(PUBLISHED_FILE)["claims"]))


def judge(claim: Claim) -> list[Said]:
    """Return the judged statements of a claim."""
    return [
        statement
        for kind in (_rates, _money, _time, _memory, _room, _degrees)
        for statement in kind(claim)
    ]


def _rates(claim: Claim) -> Iterator[Said]:
    peak, rate = device_by_key(GPU).peak_flops("bf16") / 1e12, claim.tflops_per_device
    if claim.mfu and rate:
        states = f"{rate:g} TFLOP/s are {claim.mfu:.0%} of the peak"
        yield (
            states,
            abs(rate / peak - claim.mfu) < 0.01,
            f"{rate:g} of {peak:g} are {rate / peak:.1%}",
        )
    elif claim.mfu and claim.layout:
        share = _planned(claim, Recompute.NONE).mfu
        explanation = (
            f"predicted for {claim.layout} without recomputation, batch {SAMPLES:,}: {share:.0%}"
        )
        yield f"{claim.mfu:.0%} MFU", _near(share, claim.mfu), explanation
    if claim.scaling_efficiency:
        states = f"scales to 1,024 GPUs with {claim.scaling_efficiency:.0%}"
        yield states, None, "no smaller run is named that it would be relative to"


def _money(claim: Claim) -> Iterator[Said]:
    price, saved, speedup = claim.price_dollars, claim.saved_dollars, claim.speedup
    if price and saved and speedup:
        expected_saving = price * (1 - 1 / speedup)
        explanation = f"{price:,.0f} · (1 − 1/{speedup:g}) = {expected_saving:,.0f}"
        yield f"saves {saved:,.0f} dollars", _near(expected_saving, saved), explanation
    elif speedup:
        rates = [
            other_claim.tflops_per_device
            for other_claim in load_claims()
            if other_claim.tflops_per_device
        ]
        ratio = rates[0] / rates[1]
        explanation = (
            f"its own {rates[0]:g} over {rates[1]:g} TFLOP/s are {ratio:.2f}; measured by neither"
        )
        yield f"{speedup:.2f} times as fast", abs(ratio - speedup) < 0.02, explanation


def _time(claim: Claim) -> Iterator[Said]:
    states = f"{claim.training_days:g} days" if claim.training_days else ""
    if states and not claim.layout:
        yield states, None, "no strategy is named, and nobody measured it"
    elif states:
        days = TOKENS / _planned(claim, Recompute.FULL).tokens_per_second / _DAY
        # With full recomputation a token costs 8 FLOPs per parameter.
        counted = 8 * total_parameters(load_model(MODEL).shape) * TOKENS / (GPUS * 140e12) / _DAY
        explanation = (
            f"predicted for {claim.layout} with full recomputation, batch {SAMPLES:,} and 300 billion "
            f"tokens: {days:.0f} (8·N·D at 140 TFLOP/s: {counted:.0f})"
        )
        yield states, _near(days, claim.training_days), explanation
    if claim.overhead:
        low, high = claim.overhead
        candidate = _planned(claim, Recompute.NONE)
        parts = (claim.part,) if claim.part else _COMMUNICATION
        share = sum(getattr(candidate.seconds, part) for part in parts) / candidate.seconds.total
        batch = candidate.spec.batch.global_batch_size
        explanation = f"predicted for {candidate.strategy}, batch {batch:,}: {share:.1%}"
        is_so = low * (1 - _ERROR) <= share <= high * (1 + _ERROR)
        yield f"{low:.0%} to {high:.0%} of an iteration", is_so, explanation


def _memory(claim: Claim) -> Iterator[Said]:
    if claim.memory_gb:
        yield _predicted_bytes(claim, "", claim.memory_gb)
    if not claim.total_gb:
        return
    alone = claim.gpus == 1
    whole = next(other_claim for other_claim in load_claims() if other_claim.gpus == 1)
    parameters = total_parameters(load_model(MODEL).shape) / 1e9
    for name, bytes_per_parameter in _STATE.items():
        if alone:
            expected_gb = bytes_per_parameter * parameters
            explanation = f"{bytes_per_parameter} bytes a parameter are {expected_gb:,.0f} GB"
        else:
            split = _planned(claim, Recompute.NONE).spec.parallelism
            ranks = split.world_size if split.sharding else split.tensor * split.pipeline
            expected_gb = whole[f"{name}_gb"] / ranks
            explanation = (
                f"its own {whole[f'{name}_gb']:,.0f} GB over {ranks:,} ranks are {expected_gb:.1f}"
            )
        if claimed := claim.get(f"{name}_gb"):
            yield f"{claimed:,g} GB of {name}", _near(expected_gb, claimed), explanation
    activations = claim.activations_gb or 0
    if activations and alone:
        states = f"{activations:g} GB of activations"
        yield states, None, "no sequence length and no number of samples is named"
    elif activations:
        yield _predicted_bytes(claim, "activations", activations)
    if not alone:
        yield _predicted_bytes(claim, "", claim.total_gb)
        return
    state = sum(_STATE.values()) * parameters
    yield (
        f"{claim.total_gb:,.0f} GB in all",
        _near(state, claim.total_gb - activations),
        f"{sum(_STATE.values())} bytes a parameter are {state:,.0f} GB; its {activations:g} GB of "
        "activations come on top",
    )


def _predicted_bytes(claim: Claim, part: str, claimed_gb: float) -> Said:
    """Judge bytes per GPU. A claim is right if it holds with or without recomputation, because it names neither."""
    plain, again = _both(claim)
    kept, less = (
        (getattr(candidate.memory, part) if part else candidate.memory.total) / 1e9
        for candidate in (plain, again)
    )
    return (
        f"{claimed_gb:g} GB {f'of {part}' if part else 'in all'}",
        _near(kept, claimed_gb) or _near(less, claimed_gb),
        f"predicted for {plain.strategy}, micro batch 1: {kept:.1f} GB, with full recomputation "
        f"{less:.1f}, which {_fitting(again.fits)}",
    )


def _room(claim: Claim) -> Iterator[Said]:
    if claim.fits is None:
        return
    plain, again = _both(claim)
    yield (
        f"{_fitting(claim.fits)} on {device_by_key(GPU).name}",
        (plain.fits or again.fits) == claim.fits,
        f"predicted for {plain.strategy}, micro batch 1: {_fitting(plain.fits)} without recomputation, "
        f"{_fitting(again.fits)} with it",
    )


def _degrees(claim: Claim) -> Iterator[Said]:
    if not claim.data_parallel or not claim.gpus:
        return
    split = parse_strategy(claim.layout, 280)
    product = split.tensor * split.pipeline * claim.data_parallel
    states = f"DP {claim.data_parallel} on {claim.gpus:,} GPUs"
    explanation = f"{split.tensor} · {split.pipeline} · {claim.data_parallel} is {product:,}"
    yield states, product == claim.gpus, explanation


def _fitting(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _near(value: float, claimed: float) -> bool:
    return abs(value / claimed - 1) <= _ERROR


def _both(claim: Claim) -> tuple[Candidate, Candidate]:
    return _planned(claim, Recompute.NONE), _planned(claim, Recompute.FULL)


@cache
def _planned(claim: Claim, recompute: Recompute) -> Candidate:
    """Return the predicted candidate for the claim's strategy, model and GPUs."""
    replicas = f"dp{claim.data_parallel}-zero1" if claim.data_parallel else ""
    layout = f"{claim.layout}{replicas}"
    # Replicas follow from the degrees, whose product need not be the number of GPUs that the claim names.
    gpus = count_devices(layout) if claim.data_parallel else GPUS
    split = parse_strategy(layout, gpus)
    samples = 2 * gpus if SAMPLES % split.data else SAMPLES
    request = request_of(claim.model or MODEL, gpus, GPU, samples)
    return evaluate_configuration(
        request, build_unsharded_spec(request.template, split, 1, recompute)
    )

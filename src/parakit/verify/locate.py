"""Where a tensor is wrong: the module to blame, its source, the worst element; what else is wrong.

One bug hides another, as all that follows from it is wrong too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parakit.artifacts.capture import (
    BUCKETS,
    BUFFER,
    CALLED_BY,
    CLIPPING,
    COUNTED_ONCE,
    INITIAL,
    LOSS,
    MODEL,
    OF_EACH_TOKEN,
    RATE_SLOTS,
    RECOMPUTED,
    STARTS,
    UNOBSERVED,
    CapturedRank,
    Stage,
)
from parakit.artifacts.verdict import Verdict
from parakit.verify.captured import Capture
from parakit.verify.comparison import CaptureComparison, ComparedTensor, TensorComparison
from parakit.verify.kinds import MORE_GRADIENT, ErrorKind, classify_error

LOCAL = (Stage.OUTPUTS, Stage.LOSS, Stage.ACTIVATION_GRADIENTS)
"""Stages in which errors spread from module to module."""
_OUTPUT_LAYER = "output_layer"
"""The module whose output the loss takes."""
_LAYER, _NUMBER = re.compile(r"\.layers\.\d+$"), re.compile(r"\.\d+\b")
_TIED = ("embedding.", "output_layer.")
"""Parameters that may be used twice: what is wrong of the one use is in the gradient of both."""


def locate_error(
    base: Verdict, first: TensorComparison, compared: CaptureComparison, strategy: Capture
) -> Verdict:
    """The verdict with all that is known of the first wrong tensor."""
    stage, _, slot = first.key
    module, worst = _module(first, compared), first.worst
    pairs = first.copies or ([worst] if worst else [])
    if worst is not None and worst.micro_batch is not None:
        pairs = compared.pairs_of(first.key, worst.micro_batch)
    kind = classify_error(first, pairs, strategy.first, compared.like(first))
    return replace(
        base,
        stage=stage,
        module=module,
        tensor=slot,
        ranks=tuple(sorted({*first.wrong_ranks, *first.replicas_differ})),
        kind=kind.name,
        factor=kind.factor,
        error=first.error,
        tolerance=first.tolerance,
        worst=None if slot in STARTS or worst is None else _worst_element(worst),
        source=_source(first, module, kind, strategy),
        iteration=0 if slot == INITIAL else strategy.first.iteration - int(slot in STARTS),
    )


def _worst_element(pair: ComparedTensor) -> str | None:
    ours, reference = pair.ours, pair.reference
    if ours.shape != reference.shape or not ours.size:
        return None
    off = np.nan_to_num(np.abs(np.subtract(ours, reference, dtype=np.float64)), nan=np.inf)
    place = np.unravel_index(int(off.argmax()), off.shape)
    starts = [part.start for part in pair.region] or [0] * len(place)
    index = [int(number) + start for number, start in zip(place, starts, strict=True)]
    at = f" at {index}" if index else ""
    of = "" if pair.region else f" of rank {pair.rank}"
    return f"worst{at}{of}: {ours[place]:.6g}, not {reference[place]:.6g}"


def _module(first: TensorComparison, compared: CaptureComparison) -> str:
    """The module whose code is between what was right and what is wrong.

    A wrong input of a module, or gradient of its output, is the doing of the module that calls it, if
    what that one got was right; but for a layer's, which come from another stage or from nowhere else.
    The gradient of the logits is the loss' doing.
    """
    stage, name, slot = first.key
    if (stage, name) == (Stage.ACTIVATION_GRADIENTS, _OUTPUT_LAYER) and slot.startswith("output"):
        got = [one for one in compared.comparisons if one.key[:2] == (stage, LOSS)]
        return LOSS if got and not any(one.differs for one in got) else name
    side = "output" if stage is Stage.ACTIVATION_GRADIENTS else "input."
    if slot.startswith(RECOMPUTED):
        side = f"{RECOMPUTED}input."
    if stage not in LOCAL or not slot.startswith(side):
        return name
    for around, caller in _callers(name, slot):
        of = Stage.INPUTS if around == MODEL else stage
        got = [
            one
            for one in compared.comparisons
            if one.key[:2] == (of, around)
            and one.key[2].startswith(side)
            and one.key[2].partition(CALLED_BY)[2] == caller
        ]
        if got:
            return name if any(one.differs for one in got) else around
    return name


def _callers(name: str, slot: str) -> Iterator[tuple[str, str]]:
    """The modules around a module's call, the innermost first, each with what it is called by.

    Those that it is in, then the one that calls them, or the model.
    """
    _, _, caller = slot.partition(CALLED_BY)
    around = name
    while "." in around and not _LAYER.search(around):
        around = around.rpartition(".")[0]
        yield around, caller
    if caller or not _LAYER.search(around):
        yield caller or MODEL, ""


def _source(first: TensorComparison, name: str, kind: ErrorKind, strategy: Capture) -> str | None:
    """Where what computes the first wrong tensor stands: a function, or a module's forward pass."""
    functions, modules = strategy.first.functions, strategy.modules
    if source := functions.get(_function(first, name, kind, strategy.first)):
        return source
    while name:
        if name in modules:
            return modules[name].source or None
        name = name.rpartition(".")[0]
    return modules[MODEL].source if MODEL in modules else None


def _function(first: TensorComparison, name: str, kind: ErrorKind, rank: CapturedRank) -> str:
    """Which of `CapturedRank.functions` computes it; empty where a module does."""
    stage, of, slot = first.key
    if stage in LOCAL:
        of_token = stage is Stage.LOSS and slot == OF_EACH_TOKEN
        return stage if name == LOSS and (of == _OUTPUT_LAYER or of_token) else ""
    if slot in (*STARTS, UNOBSERVED) or stage is Stage.LOCAL_GRADIENTS:
        return ""
    if slot == BUFFER:  # What finalises gradients also updates experts' biases.
        return Stage.REDUCED_GRADIENTS
    shared = rank.data[1] * rank.context[1] > 1
    if stage is Stage.REDUCED_GRADIENTS and shared and "TP" not in kind.name:
        return BUCKETS
    return CLIPPING if kind.name == MORE_GRADIENT else slot if slot in rank.functions else stage


def list_independent_errors(
    verdict: Verdict, first: TensorComparison, compared: CaptureComparison, strategy: Capture
) -> tuple[str, ...]:
    """What is wrong by itself beside the first; of layers that are alike the first one."""
    found: dict[str, str] = {}
    alike = {_NUMBER.sub(".*", str(verdict.module)), _NUMBER.sub(".*", first.key[1])}
    for one in _independent(compared, first):
        name = _NUMBER.sub(".*", one.key[1])
        if name not in alike:
            source = _source(one, one.key[1], ErrorKind(""), strategy)
            found.setdefault(name, f"{one.key[0]}, {one.key[1]} ({source})")
    return tuple(found.values())


def _independent(
    compared: CaptureComparison, first: TensorComparison
) -> Iterator[TensorComparison]:
    """Tensors beside the first that are wrong although all that they are made of is right.

    Modules that are given what is right, not those that a wrong one is in; then, of each stage, what
    becomes of a gradient that is right before. What may follow from another is left out.
    """
    wrong = compared.wrong(*LOCAL)
    given: set[str] = set()
    for stage, name, slot in (one.key for one in wrong):
        if "input." in slot if stage is Stage.OUTPUTS else slot.startswith("output"):
            given.add(name)
    modules = {one.key[1] for one in wrong}
    seen = {first.key[1]}
    for one in wrong:
        name = one.key[1]
        inside = name == MODEL or any(other.startswith(f"{name}.") for other in modules | seen)
        if name not in seen | given and not inside:
            seen.add(name)
            yield one
    local = {one.key[1] for one in compared.wrong(Stage.LOCAL_GRADIENTS)}
    stages = {first.key[0]}
    for one in compared.wrong():
        stage, name, slot = one.key
        tied = name.startswith(_TIED) and bool(modules | local)
        own = stage is Stage.LOCAL_GRADIENTS and name.rpartition(".")[0] not in modules
        reduced = stage is Stage.REDUCED_GRADIENTS and name not in local
        exact = slot in (COUNTED_ONCE, INITIAL, *RATE_SLOTS)
        if stage not in stages and (exact or ((own or reduced) and not tied)):
            stages.add(stage)
            yield one

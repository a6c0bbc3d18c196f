"""The verdict on a strategy: held, or the first tensor that is wrong, where and how."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from tools.records.capture import (
    BUCKETS,
    BUFFER,
    CALLED_BY,
    CHOICE,
    CLIPPING,
    STARTS,
    UNOBSERVED,
    CapturedRank,
    CaptureWriter,
    Stage,
    TensorRecord,
)
from tools.records.io import write_record, written_whole
from tools.records.verdict import VERDICT_FILE, Outcome, Verdict
from tools.verify.align import RECOMPUTED, ActivationAligner
from tools.verify.captured import Array, Capture, VerifyError, as_stored
from tools.verify.compare import Drift, compare
from tools.verify.comparison import Compared, Comparison, Pair
from tools.verify.independent import independent
from tools.verify.kinds import MORE_GRADIENT, Kind, kind_of
from tools.verify.parameters import Part, Unit, assembled, units

TENSOR_FILE, JUNIT_FILE = "first.npz", "junit.xml"
MODEL = "model"
"""Name of the whole, whose inputs are a stage of their own."""
LOSS, OUTPUT_LAYER, OF_EACH_TOKEN = "loss", "output_layer", "of each token"
"""What gives a token's loss, the module whose output it takes, and its own output."""
_LOCAL = (Stage.OUTPUTS, Stage.LOSS, Stage.ACTIVATION_GRADIENTS)
"""Stages in which errors spread from module to module."""
_LAYER = re.compile(r"\.layers\.\d+$")
_NUMBER = re.compile(r"\.\d+\b")
_EDGE = 2.0
"""Errors over tolerance up to which modules' errors, each within its own tolerance, may add up."""
_FAR = 1e4
"""Errors over tolerance that rounding does not reach in a few dozen iterations."""
_MOST_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it rests on."""

    verdict: Verdict
    compared: Compared | None = None
    first: Comparison | None = None


def check_same_work(reference: Capture, strategy: Capture) -> None:
    """Refuse two runs of different work.

    Raises:
        VerifyError: With the field that differs.
    """
    ours, theirs = strategy.first, reference.first
    fields: dict[str, tuple[object, object]] = {
        "iteration": (ours.iteration, theirs.iteration),
        "sequence length": (ours.sequence_length, theirs.sequence_length),
        "global batch": (
            ours.micro_batches * ours.data[1] * ours.micro_batch_size,
            theirs.micro_batches * theirs.data[1] * theirs.micro_batch_size,
        ),
        "dtype": (ours.dtype, theirs.dtype),
        "loss per token": (ours.per_token_loss, theirs.per_token_loss),
        "gradient clipping": (ours.clip_gradient, theirs.clip_gradient),
    }
    for name, (mine, other) in fields.items():
        if mine != other:
            raise VerifyError(
                f"The two runs did different work: {name} is {mine} in {strategy.folder.name} and "
                f"{other} in {reference.folder.name}; compare runs of the same."
            )
    _check_same_masks(theirs, ours)
    if ours.micro_batch_size != theirs.micro_batch_size and not theirs.per_token_loss:
        _check_equal_weights(reference)
        _check_equal_weights(strategy)


def _check_equal_weights(capture: Capture) -> None:
    """Refuse other micro batches where each counts the same, whatever its number of tokens."""
    tokens = {
        float(one.values(record).sum())
        for one in capture.ranks
        for record in one.records
        if (record.site.stage, record.site.slot) == (Stage.LOSS, "tokens")
    }
    if len(tokens) > 1 and capture.first.context[1] == 1:
        raise VerifyError(
            f"The two runs did different work: micro batches have from {min(tokens):.0f} to "
            f"{max(tokens):.0f} tokens, and without --calculate-per-token-loss each of them counts "
            "the same whatever its size; add that flag, or compare the same micro batches."
        )


def _check_same_masks(theirs: CapturedRank, ours: CapturedRank) -> None:
    """Refuse dropout in runs that draw other masks: they share a random stream with all else."""
    batch = (theirs.micro_batch_size, theirs.micro_batches)
    alike = ours.degrees == theirs.degrees and batch == (ours.micro_batch_size, ours.micro_batches)
    if alike or not (ours.dropout or theirs.dropout):
        return
    for name in ("hidden", "attention"):
        shares = (getattr(ours, f"{name}_dropout"), getattr(theirs, f"{name}_dropout"))
        if any(shares):
            raise VerifyError(
                f"--{name}-dropout is {max(shares):g}, and another strategy draws other masks; verify "
                'with EXTRA="--hidden-dropout 0 --attention-dropout 0", or against the same strategy '
                "(REFERENCE=<its strategy>, EXTRA_B=<flags that it has alone>)."
            )


def judge(
    reference: Capture, strategy: Capture, drifted: Drift = MappingProxyType({})
) -> Judgement:
    """Compare two captures.

    Args:
        reference: With measured responses.
        strategy: The run in question.
        drifted: Of the reference, where that was measured.

    Raises:
        VerifyError: They are of different work, or none of the activations could be aligned.
    """
    check_same_work(reference, strategy)
    compared = compare(reference, strategy, drifted)
    _check_aligned(compared, strategy)
    return _judged(compared, strategy)


def _judged(compared: Compared, strategy: Capture) -> Judgement:
    wrong = compared.wrong()
    worst = max((one.ratio for one in compared.comparisons), default=0.0)
    base = Verdict(
        Outcome.DIFFERS if wrong else Outcome.HELD,
        worst_ratio=worst,
        compared=compared.compared,
        seen=compared.seen,
        iteration=strategy.first.iteration,
        routing_flips=compared.routing_flips,
        constant=compared.constant,
        not_aligned=compared.not_aligned,
    )
    if not wrong:
        return Judgement(base, compared)
    first = wrong[0]
    verdict = _located(base, first, compared, strategy)
    if first.key[0] not in (*_LOCAL, Stage.INPUTS) and first.key[2] not in (*STARTS, UNOBSERVED):
        verdict = replace(verdict, also=_also(verdict, first, compared, strategy))
    return Judgement(verdict, compared, first)


def _also(
    verdict: Verdict, first: Comparison, compared: Compared, strategy: Capture
) -> tuple[str, ...]:
    """What is wrong by itself beside the first; of layers that are alike the first one."""
    found: dict[str, str] = {}
    alike = {_NUMBER.sub(".*", str(verdict.module)), _NUMBER.sub(".*", first.key[1])}
    for one in independent(compared, first):
        name = _NUMBER.sub(".*", one.key[1])
        if name not in alike:
            source = _source(one, one.key[1], Kind(""), strategy)
            found.setdefault(name, f"{one.key[0]}, {one.key[1]} ({source})")
    return tuple(found.values())


def _check_aligned(compared: Compared, strategy: Capture) -> None:
    """Refuse to call a model right of which no module was compared.

    Raises:
        VerifyError: With the first that could not be aligned.
    """
    seen = any(one.site.stage is Stage.OUTPUTS for rank in strategy.ranks for one in rank.records)
    if seen and not any(one.key[0] is Stage.OUTPUTS for one in compared.comparisons):
        names, _, why = (compared.not_aligned or ("",))[-1].rpartition(": ")
        raise VerifyError(
            f"None of the modules' tensors could be aligned with the reference's ({names[:200]}: "
            f"{why}); compare with one rank (REFERENCE=baseline), by Megatrons that name modules alike."
        )


def may_have_spread(judgement: Judgement) -> bool:
    """Whether the first wrong tensor may only follow from another's error."""
    # A loss that is wrong with all outputs right is wrong by itself.
    spreading = (Stage.OUTPUTS, Stage.ACTIVATION_GRADIENTS)
    return judgement.first is not None and judgement.first.key[0] in spreading


def begins_before(judgement: Judgement) -> bool:
    """Whether the weights that the iteration begins with are already wrong."""
    return judgement.first is not None and judgement.first.key[2] in STARTS


def carries_earlier(judgement: Judgement) -> bool:
    """Whether the first wrong tensor carries what earlier iterations left."""
    first, carried = judgement.first, (Stage.OPTIMIZER_STATE, Stage.WEIGHTS)
    return first is not None and first.key[0] in carried and first.ratio < _FAR


def needs_same_start(judgement: Judgement) -> bool:
    """Whether a difference may follow from what rounding made of choices, or of earlier updates.

    A router that chose otherwise within rounding leaves nothing to compare. A weight whose gradient is
    all rounding moves as far as any other, and with it what is computed from it.
    """
    if judgement.first is not None and judgement.first.key[2] == UNOBSERVED:
        return False
    if judgement.verdict.routing_flips > 0:
        return True
    if judgement.first is None or judgement.compared is None or begins_before(judgement):
        return False
    return any(one.key[2] in STARTS and one.error > 0 for one in judgement.compared.comparisons)


def write_forced(
    reference: Capture, strategy: Capture, folder: Path, *, start_alone: bool = False
) -> None:
    """Write the reference's tensors as the strategy's ranks would have them, to take their place.

    Weights at the start, inputs of modules, gradients of their outputs, and what routers choose.

    Args:
        reference: Whose tensors are used.
        strategy: Whose ranks shall use them.
        folder: Takes them.
        start_alone: Write weights at the start and routers' choices, and no other tensor.
    """
    aligner, starts = ActivationAligner(reference, strategy), _Starts(reference)
    for one in strategy.ranks:
        with CaptureWriter(folder / one.folder.name) as writer:
            for record in one.by_site.values():
                if record.site.slot in STARTS:
                    values = starts.part(Part(one, record))
                elif record.site.slot.endswith(CHOICE) or (_is_forced(record) and not start_alone):
                    values = aligner.align(one, record).reference
                else:
                    continue
                if values is not None:
                    stored = memoryview(as_stored(values, record.dtype).view(np.uint8))
                    writer.add(record.site, record.dtype, record.shape, stored)
            writer.close(one.rank)


class _Starts:
    """What the reference's iteration begins with."""

    def __init__(self, reference: Capture) -> None:
        self._reference = reference
        self._pieces = units(reference, Stage.WEIGHTS)
        self._wholes: dict[Unit, Array] = {}

    def part(self, piece: Part) -> Array | None:
        """The reference's values of a part; None if it has no such parameter."""
        unit = piece.unit
        if unit not in self._pieces:
            return None
        if unit not in self._wholes:
            self._wholes[unit] = assembled(self._pieces[unit], self._reference)
        return self._wholes[unit][piece.region()]


def confirm(judgement: Judgement, reference: Capture, forced: Capture) -> Judgement:
    """Name the first module that is wrong by itself.

    Args:
        judgement: Of the strategy's own run.
        reference: What it was compared with.
        forced: The strategy's run with the reference's tensors in the place of its own.
    """
    compared = compare(reference, forced)
    own = compared.wrong(*_LOCAL)
    before = judgement.first
    if not own and before is not None and before.ratio <= _EDGE:
        # What follows from it is compared where it is not off.
        stage, name, slot = before.key
        found = _judged(compared, forced)
        added = f"{stage}, {name} {slot} at {before.ratio:.2f}"
        return replace(found, verdict=replace(found.verdict, added_up=added))
    if not own:
        return replace(judgement, verdict=replace(judgement.verdict, confirmed=False))
    first = own[0]
    located = _located(judgement.verdict, first, compared, forced)
    also = _also(located, first, compared, forced)
    return Judgement(replace(located, confirmed=True, also=also), judgement.compared, first)


def write_verdict(folder: Path, judgement: Judgement) -> None:
    """Write `verdict.json`, the same as JUnit's XML, and the first wrong tensor with the reference's."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = judgement.first.worst if judgement.first else None
    if pair is not None and pair.ours.nbytes + pair.reference.nbytes <= _MOST_KEPT_BYTES:
        with written_whole(folder / TENSOR_FILE) as file:
            np.savez_compressed(file, ours=pair.ours, reference=pair.reference)
    with written_whole(folder / JUNIT_FILE) as file:
        file.write(tostring(_junit(judgement.verdict, folder.name), xml_declaration=True))
    write_record(folder / VERDICT_FILE, judgement.verdict)


def _junit(verdict: Verdict, name: str) -> Element:
    """A suite of one test, as platforms of continuous integration show them."""
    suite = Element("testsuite", name="verify", tests="1")
    case = SubElement(suite, "testcase", classname="verify", name=name)
    if verdict.verdict is not Outcome.HELD:
        differs = verdict.verdict is Outcome.DIFFERS
        kind = "failure" if differs else "error"
        suite.set(f"{kind}s", "1")
        message = verdict.line if differs else str(verdict.reason)
        SubElement(case, kind, message=message).text = "\n".join(verdict.also)
    return suite


def _located(base: Verdict, first: Comparison, compared: Compared, strategy: Capture) -> Verdict:
    stage, _, slot = first.key
    module = _module(first, compared)
    kind = _kind(first, compared, strategy)
    ranks = set(first.wrong_ranks) | set(first.replicas_differ)
    return replace(
        base,
        stage=stage,
        module=module,
        tensor=slot,
        ranks=tuple(sorted(ranks)),
        kind=kind.name,
        factor=kind.factor,
        error=first.error,
        tolerance=first.tolerance,
        worst=None if slot in STARTS or first.worst is None else _worst_element(first.worst),
        source=_source(first, module, kind, strategy),
        iteration=strategy.first.iteration - int(slot in STARTS),
    )


def _worst_element(pair: Pair) -> str | None:
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


def _module(first: Comparison, compared: Compared) -> str:
    """The module whose code is between what was right and what is wrong.

    A wrong input of a module, or gradient of its output, is the doing of the module that calls it, if
    what that one got was right; but for a layer's, which come from another stage or from nowhere else.
    The gradient of the logits is the loss' doing.
    """
    stage, name, slot = first.key
    if (stage, name) == (Stage.ACTIVATION_GRADIENTS, OUTPUT_LAYER) and slot.startswith("output"):
        got = [one for one in compared.comparisons if one.key[:2] == (stage, LOSS)]
        return LOSS if got and not any(one.differs for one in got) else name
    side = "output" if stage is Stage.ACTIVATION_GRADIENTS else "input."
    if slot.startswith(RECOMPUTED):
        side = f"{RECOMPUTED}input."
    if stage not in _LOCAL or not slot.startswith(side):
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


def _kind(first: Comparison, compared: Compared, strategy: Capture) -> Kind:
    pairs = first.copies or ([first.worst] if first.worst else [])
    if first.worst is not None and first.worst.micro_batch is not None:
        pairs = compared.pairs_of(first.key, first.worst.micro_batch)
    return kind_of(first, pairs, strategy.first, compared.like(first))


def _source(first: Comparison, name: str, kind: Kind, strategy: Capture) -> str | None:
    """Where what computes the first wrong tensor stands: a function, or a module's forward pass."""
    functions, modules = strategy.first.functions, strategy.modules
    if source := functions.get(_function(first, name, kind, strategy.first)):
        return source
    while name:
        if name in modules:
            return modules[name].source or None
        name = name.rpartition(".")[0]
    return modules["model"].source if "model" in modules else None


def _function(first: Comparison, name: str, kind: Kind, rank: CapturedRank) -> str:
    """Which of `CapturedRank.functions` computes it; empty where a module does."""
    stage, of, slot = first.key
    if stage in _LOCAL:
        of_token = stage is Stage.LOSS and slot == OF_EACH_TOKEN
        return stage if name == LOSS and (of == OUTPUT_LAYER or of_token) else ""
    if slot in (*STARTS, UNOBSERVED) or stage is Stage.LOCAL_GRADIENTS:
        return ""
    if slot == BUFFER:  # What finalises gradients also updates experts' biases.
        return Stage.REDUCED_GRADIENTS
    shared = rank.data[1] * rank.context[1] > 1
    if stage is Stage.REDUCED_GRADIENTS and shared and "TP" not in kind.name:
        return BUCKETS
    return CLIPPING if kind.name == MORE_GRADIENT else slot if slot in rank.functions else stage


def _is_forced(record: TensorRecord) -> bool:
    site = record.site
    if site.stage is Stage.OUTPUTS:
        return site.slot.startswith("input.")
    return site.stage is Stage.ACTIVATION_GRADIENTS and site.slot.startswith("output")


def refused(reason: str) -> Judgement:
    """The verdict that nothing could be compared."""
    return Judgement(Verdict(Outcome.NOT_COMPARABLE, reason=reason))

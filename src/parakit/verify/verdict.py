"""The verdict on a strategy: held, or the first tensor that is wrong, where and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from parakit.artifacts.capture import (
    CHOICE,
    STARTS,
    UNOBSERVED,
    CapturedRank,
    CaptureWriter,
    Stage,
)
from parakit.artifacts.io import write_record, written_whole
from parakit.artifacts.verdict import VERDICT_FILE, Outcome, Verdict
from parakit.verify.align import ActivationAligner
from parakit.verify.captured import (
    Capture,
    ParameterPart,
    VerifyError,
    assemble_parameter,
    encode_tensor,
    group_parameter_parts,
)
from parakit.verify.compare import Drift, compare
from parakit.verify.comparison import CaptureComparison, TensorComparison
from parakit.verify.locate import LOCAL, list_independent_errors, locate_error

TENSOR_FILE, JUNIT_FILE = "first.npz", "junit.xml"
_LARGEST_FP16 = float(np.finfo(np.float16).max)
_EDGE = 2.0
"""Errors over tolerance up to which modules' errors, each within its own tolerance, may add up."""
_FAR = 1e4
"""Errors over tolerance that rounding does not reach in a few dozen iterations."""
_MOST_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it rests on."""

    verdict: Verdict
    compared: CaptureComparison | None = None
    first: TensorComparison | None = None

    @property
    def may_have_spread(self) -> bool:
        """Whether the first wrong tensor may only follow from another's error."""
        # A loss that is wrong with all outputs right is wrong by itself.
        spreading = (Stage.OUTPUTS, Stage.ACTIVATION_GRADIENTS)
        return self.first is not None and self.first.key[0] in spreading

    @property
    def begins_before(self) -> bool:
        """Whether the weights that the iteration begins with are already wrong."""
        return self.first is not None and self.first.key[2] in STARTS

    @property
    def carries_earlier(self) -> bool:
        """Whether the first wrong tensor carries what earlier iterations left."""
        first, carried = self.first, (Stage.OPTIMIZER_STATE, Stage.WEIGHTS)
        return first is not None and first.key[0] in carried and first.ratio < _FAR

    @property
    def needs_same_start(self) -> bool:
        """Whether a difference may follow from what rounding made of choices, or of earlier updates.

        A router that chose otherwise within rounding leaves nothing to compare. A weight whose gradient
        is all rounding moves as far as any other, and with it what is computed from it.
        """
        if self.first is not None and self.first.key[2] == UNOBSERVED:
            return False
        if self.verdict.routing_flips > 0:
            return True
        if self.first is None or self.compared is None or self.begins_before:
            return False
        return any(one.key[2] in STARTS and one.error > 0 for one in self.compared.comparisons)


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
        "the first loss scale": (ours.loss_scales[:1], theirs.loss_scales[:1]),
        "gradient clipping": (ours.clip_gradient, theirs.clip_gradient),
    }
    for name, (mine, other) in fields.items():
        if mine != other:
            raise VerifyError(
                f"The two runs did different work: {name} is {mine} in {strategy.folder.name} and "
                f"{other} in {reference.folder.name}; compare runs of the same."
            )
    _check_same_masks(theirs, ours)
    _check_same_scales(reference, strategy)
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


def _check_same_scales(reference: Capture, strategy: Capture) -> None:
    """Refuse fp16 where one run alone skips a step: of gradients near the largest number, parts or sums
    overflow in one layout and not in another."""
    runs = (strategy, reference)
    scales = [(1.0, 1.0), *zip(*(run.first.loss_scales for run in runs), strict=False)]
    found = (iteration for iteration, (ours, theirs) in enumerate(scales[1:]) if ours != theirs)
    skipped = next(found, None)
    if skipped is None and strategy.first.dtype == "float16":
        least, most = sorted(run.largest_gradient for run in runs)
        ranks = max(run.first.data[1] * run.first.context[1] for run in runs)
        if least < np.inf == most and max(2, ranks) * least > _LARGEST_FP16:
            skipped = strategy.first.iteration
    if skipped is not None:
        raise VerifyError(
            f"The two runs did different work: in iteration {skipped} gradients overflow in one of them "
            "alone, which skips that step; set a smaller loss scale, for example "
            f'EXTRA="--initial-loss-scale {max(1.0, min(scales[-1]) / 16):g}".'
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
    """Compare two captures, as `compare` does.

    Raises:
        VerifyError: They are of different work, or none of the activations could be aligned.
    """
    check_same_work(reference, strategy)
    compared = compare(reference, strategy, drifted)
    _check_aligned(compared, strategy)
    return _judged(compared, strategy)


def _judged(compared: CaptureComparison, strategy: Capture) -> Judgement:
    wrong = compared.wrong()
    base = Verdict(
        Outcome.DIFFERS if wrong else Outcome.HELD,
        worst_ratio=max((one.ratio for one in compared.comparisons), default=0.0),
        compared=compared.compared,
        seen=compared.seen,
        iteration=strategy.first.iteration,
        routing_flips=compared.routing_flips,
        constant=compared.constant,
        initialised=compared.initialised or None,
        not_aligned=compared.not_aligned,
    )
    if not wrong:
        return Judgement(base, compared)
    first = wrong[0]
    verdict = locate_error(base, first, compared, strategy)
    if first.key[0] not in (*LOCAL, Stage.INPUTS) and first.key[2] not in (*STARTS, UNOBSERVED):
        verdict = replace(verdict, also=list_independent_errors(verdict, first, compared, strategy))
    return Judgement(verdict, compared, first)


def _check_aligned(compared: CaptureComparison, strategy: Capture) -> None:
    """Refuse to call a model right of which no module was compared."""
    seen = any(one.site.stage is Stage.OUTPUTS for rank in strategy.ranks for one in rank.records)
    if seen and not any(one.key[0] is Stage.OUTPUTS for one in compared.comparisons):
        names, _, why = (compared.not_aligned or ("",))[-1].rpartition(": ")
        raise VerifyError(
            f"None of the modules' tensors could be aligned with the reference's ({names[:200]}: "
            f"{why}); compare with one rank (REFERENCE=baseline), by Megatrons that name modules alike."
        )


def write_forced(
    reference: Capture, strategy: Capture, folder: Path, *, start_alone: bool = False
) -> None:
    """Write the reference's tensors as the strategy's ranks would have them, to take their place.

    Weights at the start and what routers choose; unless `start_alone`, inputs of modules and gradients
    of their outputs, too.
    """
    aligner = ActivationAligner(reference, strategy)
    pieces = group_parameter_parts(reference, Stage.WEIGHTS)
    whole = cache(lambda unit: assemble_parameter(pieces[unit], reference))
    for one in strategy.ranks:
        with CaptureWriter(folder / one.folder.name) as writer:
            for record in one.by_site.values():
                site, values = record.site, None
                of_outputs = site.stage is Stage.OUTPUTS and site.slot.startswith("input.")
                backward = site.stage is Stage.ACTIVATION_GRADIENTS
                given = of_outputs or (backward and site.slot.startswith("output"))
                if site.slot in STARTS:
                    part = ParameterPart(one, record)
                    if part.unit in pieces:
                        values = whole(part.unit)[part.region()]
                elif site.slot.endswith(CHOICE) or (given and not start_alone):
                    values = aligner.align(one, record).reference
                if values is not None:
                    stored = encode_tensor(values, record.dtype)
                    writer.add(record.site, record.dtype, record.shape, stored)
            writer.close(one.rank)


def confirm(judgement: Judgement, reference: Capture, forced: Capture) -> Judgement:
    """Name the first module that is wrong by itself.

    It is so in `forced`, the strategy's run with the reference's tensors in the place of its own.
    """
    compared = compare(reference, forced)
    own = compared.wrong(*LOCAL)
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
    verdict = locate_error(judgement.verdict, first, compared, forced)
    also = list_independent_errors(verdict, first, compared, forced)
    return Judgement(replace(verdict, confirmed=True, also=also), judgement.compared, first)


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


def refuse_comparison(reason: str) -> Judgement:
    """The verdict that nothing could be compared."""
    return Judgement(Verdict(Outcome.NOT_COMPARABLE, reason=reason))

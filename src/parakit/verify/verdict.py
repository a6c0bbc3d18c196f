"""Judge a strategy by its captured tensors: it held, or its first wrong tensor is located.

The inputs are the captures of the reference and of the strategy. The result is a `Judgement`: the `Verdict`
that is written to `verdict.json`, with the comparisons that it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from parakit.artifacts.capture import (
    CHOICE,
    INITIAL_SLOTS,
    UNOBSERVED_GRADIENT,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    TensorKey,
)
from parakit.artifacts.io import atomic_write, write_record
from parakit.artifacts.verdict import VERDICT_FILE, VerifyOutcome, VerifyVerdict
from parakit.verify.align import ActivationAligner
from parakit.verify.captured import (
    Array,
    Capture,
    ParameterPart,
    VerifyError,
    assemble_parameter,
    encode_tensor,
    group_parameter_parts,
)
from parakit.verify.compare import Drift, compare
from parakit.verify.comparison import CaptureComparison, TensorComparison
from parakit.verify.kinds import OTHER
from parakit.verify.locate import LOCAL, list_independent_errors, locate_error

TENSOR_FILE, JUNIT_FILE = "first.npz", "junit.xml"
_LARGEST_FP16 = float(np.finfo(np.float16).max)
_MAX_ACCUMULATED_RATIO = 2.0
"""Largest error over tolerance that errors of several modules, each within its tolerance, may add up to."""
_MAX_ROUNDING_RATIO = 1e4
"""Error over tolerance that rounding does not reach within a few dozen iterations."""
_MAX_STORED_BYTES = 64 * 2**20
"""Largest size of the two tensors that are written to `first.npz`."""


@dataclass(frozen=True)
class Judgement:
    """A verdict with the comparisons that it rests on."""

    verdict: VerifyVerdict
    compared: CaptureComparison | None = None
    """Comparisons of all tensors; None if nothing could be compared."""
    first: TensorComparison | None = None
    """Comparison of the first wrong tensor; None if all tensors are right."""

    @property
    def may_have_spread(self) -> bool:
        """True if the first wrong tensor may be wrong only because another tensor is.

        A loss that is wrong although all outputs are right is wrong by itself.
        """
        spreading_stages = (CaptureStage.OUTPUTS, CaptureStage.ACTIVATION_GRADIENTS)
        return self.first is not None and self.first.key[0] in spreading_stages

    @property
    def begins_before(self) -> bool:
        """True if weights or buffers are already wrong at the start of the iteration."""
        return self.first is not None and self.first.key[2] in INITIAL_SLOTS

    @property
    def carries_earlier(self) -> bool:
        """True if the first wrong tensor may carry over rounding of earlier iterations.

        That is so for weights and optimizer states, unless the error is too large for rounding.
        """
        carried_stages = (CaptureStage.OPTIMIZER_STATE, CaptureStage.WEIGHTS)
        return (
            self.first is not None
            and self.first.key[0] in carried_stages
            and self.first.ratio < _MAX_ROUNDING_RATIO
        )

    @property
    def is_near_tolerance(self) -> bool:
        """True if the first wrong tensor is within twice its tolerance, and need not be equal bit for bit."""
        if self.first is None or self.first.tolerance == 0:
            return False
        is_exact = bool(self.first.replicas_differ or self.first.uncovered or self.first.fault)
        return not is_exact and self.first.ratio < _MAX_ACCUMULATED_RATIO

    @property
    def needs_same_start(self) -> bool:
        """True if the comparison must be repeated from the reference's weights and expert choices.

        That is so if a router chose other experts because of rounding, since all later tensors then differ.
        It is also so if a tensor is wrong and the weights at the start are not equal: a weight whose gradient
        is all rounding moves as far as any other, and a module can turn that into a larger error.
        """
        if self.first is not None and self.first.key[2] == UNOBSERVED_GRADIENT:
            return False
        if self.verdict.routing_flips > 0:
            return True
        if self.first is None or self.compared is None or self.begins_before:
            return False
        return any(
            comparison.key[2] in INITIAL_SLOTS and comparison.error > 0
            for comparison in self.compared.comparisons
        )


def check_same_work(reference: Capture, strategy: Capture) -> None:
    """Raise an error unless both runs do the same work: batches, losses, dropout and loss scales.

    Raises:
        VerifyError: The message names the setting that differs.
    """
    ours, expected = strategy.first, reference.first
    settings: dict[str, tuple[object, object]] = {
        "iteration": (ours.iteration, expected.iteration),
        "sequence length": (ours.sequence_length, expected.sequence_length),
        "global batch": (_global_batch_size(ours), _global_batch_size(expected)),
        "dtype": (ours.dtype, expected.dtype),
        "loss per token": (ours.per_token_loss, expected.per_token_loss),
        "the first loss scale": (ours.loss_scales[:1], expected.loss_scales[:1]),
        "gradient clipping": (ours.clip_gradient, expected.clip_gradient),
    }
    for name, (our_value, expected_value) in settings.items():
        if our_value != expected_value:
            raise VerifyError(
                f"The two runs did different work: {name} is {our_value} in {strategy.folder.name} "
                f"and {expected_value} in {reference.folder.name}; give both runs the same."
            )
    _check_same_dropout_masks(expected, ours)
    _check_same_loss_scales(reference, strategy)
    if ours.micro_batch_size != expected.micro_batch_size and not expected.per_token_loss:
        _check_equal_token_counts(reference)
        _check_equal_token_counts(strategy)


def _global_batch_size(rank: CapturedRank) -> int:
    """Return the number of samples per iteration over all data-parallel ranks."""
    return rank.micro_batches * rank.data[1] * rank.micro_batch_size


def _check_equal_token_counts(capture: Capture) -> None:
    """Raise an error if micro batches have different numbers of tokens.

    Without a loss per token, each micro batch counts the same whatever its number of tokens, so runs with
    micro batches of different sizes would train different losses.
    """
    token_counts = {
        float(rank_capture.values(record).sum())
        for rank_capture in capture.ranks
        for record in rank_capture.records
        if (record.tensor_key.stage, record.tensor_key.slot) == (CaptureStage.LOSS, "tokens")
    }
    if len(token_counts) > 1 and capture.first.context[1] == 1:
        raise VerifyError(
            "The two runs did different work: micro batches have from "
            f"{min(token_counts):.0f} to {max(token_counts):.0f} tokens, and without "
            "--calculate-per-token-loss each of them counts the same whatever its size; add that "
            "flag, or compare the same micro batches."
        )


def _check_same_loss_scales(reference: Capture, strategy: Capture) -> None:
    """Raise an error if in fp16 one of the runs alone skips a step because gradients overflow.

    With gradients near the largest fp16 number, the parts or sums of one layout overflow and those of the
    other do not.
    """
    scales = list(zip(strategy.first.loss_scales, reference.first.loss_scales, strict=False))
    skipped_iteration: int | None = None
    for iteration, (our_scale, expected_scale) in enumerate(scales):
        if our_scale != expected_scale:
            # The loss scale changes in the iteration after a skipped step.
            skipped_iteration = iteration
            break
    if skipped_iteration is None and strategy.first.dtype == "float16":
        smaller, larger = sorted((strategy.largest_gradient, reference.largest_gradient))
        num_summed_ranks = max(
            capture.first.data[1] * capture.first.context[1] for capture in (strategy, reference)
        )
        overflows_in_one_run = smaller < np.inf == larger
        if overflows_in_one_run and max(2, num_summed_ranks) * smaller > _LARGEST_FP16:
            skipped_iteration = strategy.first.iteration
    if skipped_iteration is not None:
        last_scale = min(scales[-1]) if scales else 1.0
        raise VerifyError(
            f"The two runs did different work: in iteration {skipped_iteration} gradients overflow in "
            "one of them alone, which skips that step; set a smaller loss scale, for example "
            f'EXTRA="--initial-loss-scale {max(1.0, last_scale / 16):g}".'
        )


def _check_same_dropout_masks(reference: CapturedRank, strategy: CapturedRank) -> None:
    """Raise an error if dropout is used and the two layouts draw different masks.

    Megatron draws masks from random streams that depend on the layout, so layouts must be identical.
    """
    reference_batch = (reference.micro_batch_size, reference.micro_batches)
    strategy_batch = (strategy.micro_batch_size, strategy.micro_batches)
    has_same_masks = strategy.degrees == reference.degrees and reference_batch == strategy_batch
    if has_same_masks or not (strategy.has_dropout or reference.has_dropout):
        return
    rates_by_name = {
        "hidden": (strategy.hidden_dropout, reference.hidden_dropout),
        "attention": (strategy.attention_dropout, reference.attention_dropout),
    }
    for name, rates in rates_by_name.items():
        if any(rates):
            raise VerifyError(
                f"--{name}-dropout is {max(rates):g}, and another strategy draws other masks; verify "
                'with EXTRA="--hidden-dropout 0 --attention-dropout 0", or against the same strategy '
                "(REFERENCE=<its strategy>, EXTRA_B=<flags that it has alone>)."
            )


def judge(
    reference: Capture, strategy: Capture, drifted: Drift = MappingProxyType({})
) -> Judgement:
    """Compare two captures and return the verdict: held, or the first wrong tensor.

    Args:
        reference: Capture with measured responses.
        strategy: Capture to judge.
        drifted: Errors that rounding in earlier iterations may cause; empty if it was not measured.

    Raises:
        VerifyError: The runs did different work, or no module's tensors could be aligned.
    """
    check_same_work(reference, strategy)
    compared = compare(reference, strategy, drifted)
    _check_outputs_compared(compared, strategy)
    return _judge_comparison(compared, strategy)


def _judge_comparison(compared: CaptureComparison, strategy: Capture) -> Judgement:
    """Return the verdict on compared captures, with the error located if there is one."""
    wrong = compared.wrong()
    base = VerifyVerdict(
        VerifyOutcome.DIFFERS if wrong else VerifyOutcome.HELD,
        worst_ratio=max((comparison.ratio for comparison in compared.comparisons), default=0.0),
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
    stage, _, slot = first.key
    verdict = locate_error(base, first, compared, strategy)
    # An error in these stages spreads to nearly all others, so independent errors are listed only after
    # the strategy has run with the reference's inputs (`confirm`).
    if stage not in (*LOCAL, CaptureStage.INPUTS) and slot not in (
        *INITIAL_SLOTS,
        UNOBSERVED_GRADIENT,
    ):
        also = list_independent_errors(verdict, first, compared, strategy)
        verdict = replace(verdict, also=also)
    return Judgement(verdict, compared, first)


def _check_outputs_compared(compared: CaptureComparison, strategy: Capture) -> None:
    """Raise an error if outputs of modules were captured and none of them was compared.

    Otherwise a strategy would be called right although no module of it was checked.
    """
    has_outputs = any(
        record.tensor_key.stage is CaptureStage.OUTPUTS
        for rank_capture in strategy.ranks
        for record in rank_capture.records
    )
    is_output_compared = any(
        comparison.key[0] is CaptureStage.OUTPUTS for comparison in compared.comparisons
    )
    if has_outputs and not is_output_compared:
        names, _, reason = (compared.not_aligned or ("",))[-1].rpartition(": ")
        raise VerifyError(
            f"None of the modules' tensors could be aligned with the reference's ({names[:200]}: "
            f"{reason}); compare with one rank (REFERENCE=baseline), and use Megatron versions that name "
            "modules in the same way."
        )


def write_forced(
    reference: Capture, strategy: Capture, folder: Path, *, start_alone: bool = False
) -> None:
    """Write the reference's tensors as the strategy's ranks would hold them, to replace the ranks' own.

    Args:
        reference: Capture that gives the values.
        strategy: Capture that gives the ranks and the split of each tensor.
        folder: Folder for the ranks' folders.
        start_alone: True writes weights and buffers at the start, and the experts that routers choose.
            False also writes the inputs of modules and the gradients of their outputs.
    """
    aligner = ActivationAligner(reference, strategy)
    parts_by_key = group_parameter_parts(reference, CaptureStage.WEIGHTS)
    full_parameter = cache(lambda key: assemble_parameter(parts_by_key[key], reference))
    for rank_capture in strategy.ranks:
        with CaptureWriter(folder / rank_capture.folder.name) as writer:
            for record in rank_capture.first_records.values():
                tensor_key = record.tensor_key
                values: Array | None = None
                if tensor_key.slot in INITIAL_SLOTS:
                    part = ParameterPart(rank_capture, record)
                    if part.key in parts_by_key:
                        values = full_parameter(part.key)[part.region()]
                elif tensor_key.slot.endswith(CHOICE) or (
                    _is_module_input(tensor_key) and not start_alone
                ):
                    values = aligner.align(rank_capture, record).reference
                if values is not None:
                    encoded = encode_tensor(values, record.dtype)
                    writer.add(tensor_key, record.dtype, shape=record.shape, values=encoded)
            writer.close(rank_capture.rank)


def _is_module_input(tensor_key: TensorKey) -> bool:
    """Return True for an input of a module in the forward pass, or in the backward pass."""
    if tensor_key.stage is CaptureStage.OUTPUTS:
        return tensor_key.slot.startswith("input.")
    return tensor_key.stage is CaptureStage.ACTIVATION_GRADIENTS and tensor_key.slot.startswith(
        "output"
    )


def confirm(judgement: Judgement, reference: Capture, forced: Capture) -> Judgement:
    """Find the module that causes an error, by a run in which all modules get the reference's tensors as inputs.

    In that run no error spreads from one module to another. There are three results:

    - A module is wrong in that run: the judgement is confirmed and names the first such module.
    - No module is wrong, and the first error of `judgement` is at most _MAX_ACCUMULATED_RATIO times its
      tolerance: errors of several modules have added up. The judgement of `forced` is returned, with a note on
      that first error.
    - No module is wrong, and that first error is larger: `judgement` is returned as not confirmed.

    Args:
        judgement: Judgement on the strategy's run with its own inputs.
        reference: Capture of the reference.
        forced: Capture of the strategy's run with the reference's tensors as inputs of all modules.
    """
    compared = compare(reference, forced)
    wrong_by_itself = compared.wrong(*LOCAL)
    if wrong_by_itself:
        first = wrong_by_itself[0]
        verdict = locate_error(judgement.verdict, first, compared, forced)
        also = list_independent_errors(verdict, first, compared, forced)
        return Judgement(replace(verdict, confirmed=True, also=also), judgement.compared, first)
    accumulated = judgement.first
    if accumulated is None or accumulated.ratio > _MAX_ACCUMULATED_RATIO:
        return replace(judgement, verdict=replace(judgement.verdict, confirmed=False))
    stage, name, slot = accumulated.key
    forced_judgement = _judge_comparison(compared, forced)
    added_up = f"{stage}, {name} {slot} at {accumulated.ratio:.2f}"
    verdict = replace(forced_judgement.verdict, added_up=added_up)
    return replace(forced_judgement, verdict=verdict)


def count_seeds(judgement: Judgement, num_wrong: int, num_seeds: int) -> Judgement:
    """Return a judgement near the tolerance whose kind states the ratio and how many seeds are wrong.

    The kind of the error stays in front if every seed is wrong. If only some seeds are, the error may be
    rounding, in which a test can find any kind by chance.
    """
    if judgement.first is None:
        return judgement
    near = (
        f"just above tolerance ({judgement.first.ratio:.2f}), in {num_wrong} of {num_seeds} seeds"
    )
    kind = judgement.verdict.kind
    is_explained = num_wrong == num_seeds and kind not in (None, OTHER)
    text = f"{kind}; {near}" if is_explained else near
    return replace(judgement, verdict=replace(judgement.verdict, kind=text))


def write_verdict(folder: Path, judgement: Judgement) -> None:
    """Write `verdict.json`, `junit.xml` with the same verdict, and `first.npz` into a folder.

    `first.npz` holds the first wrong tensor and the reference's. It is left out if there is no such tensor,
    or if the two are larger than 64 MiB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    worst = judgement.first.worst if judgement.first else None
    if worst is not None and worst.ours.nbytes + worst.reference.nbytes <= _MAX_STORED_BYTES:
        with atomic_write(folder / TENSOR_FILE) as file:
            np.savez_compressed(file, ours=worst.ours, reference=worst.reference)
    with atomic_write(folder / JUNIT_FILE) as file:
        file.write(tostring(_build_junit(judgement.verdict, folder.name), xml_declaration=True))
    write_record(folder / VERDICT_FILE, judgement.verdict)


def _build_junit(verdict: VerifyVerdict, name: str) -> Element:
    """Return a JUnit suite with one test, which fails if the strategy differs and else errs or passes."""
    suite = Element("testsuite", name="verify", tests="1")
    case = SubElement(suite, "testcase", classname="verify", name=name)
    if verdict.verdict is not VerifyOutcome.HELD:
        differs = verdict.verdict is VerifyOutcome.DIFFERS
        kind = "failure" if differs else "error"
        suite.set(f"{kind}s", "1")
        message = verdict.line if differs else str(verdict.reason)
        SubElement(case, kind, message=message).text = "\n".join(verdict.also)
    return suite


def refuse_comparison(reason: str) -> Judgement:
    """Return the judgement that the captures are not comparable, for a reason."""
    return Judgement(VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=reason))

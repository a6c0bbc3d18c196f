"""Judge a strategy by its captured tensors: all agree with the reference's, or the first wrong one is located.

The inputs are the captures of the reference and of the strategy. The result is a `Judgement`: the `Verdict`
that is written to `verdict.json`, with the comparisons that it rests on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    TensorRecord,
)
from parakit.artifacts.io import atomic_write, write_record
from parakit.artifacts.verdict import VERDICT_FILE, VerifyOutcome, VerifyVerdict
from parakit.verify.align import ActivationAligner
from parakit.verify.captured import (
    Array,
    Capture,
    ParameterPart,
    RankCapture,
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
_MAX_NAMES_LENGTH = 200
"""Most characters of tensor names in an error message."""
_MAX_STORED_BYTES = 64 * 2**20
"""Largest size of the two tensors that are written to `first.npz`."""


@dataclass(frozen=True)
class Judgement:
    """A verdict together with the comparisons from which it was drawn."""

    verdict: VerifyVerdict
    compared: CaptureComparison | None = None
    """Comparisons of all tensors; None if nothing could be compared."""
    first: TensorComparison | None = None
    """Comparison of the first wrong tensor; None if all tensors are right."""

    @property
    def may_have_spread(self) -> bool:
        """True if the first wrong tensor is an output of a module or an activation gradient.

        Such a tensor may be wrong only because an error in another tensor has spread to it. All other tensors,
        such as a loss after right outputs, are wrong by themselves.
        """
        spreading_stages = (CaptureStage.OUTPUTS, CaptureStage.ACTIVATION_GRADIENTS)
        return self.first is not None and self.first.key[0] in spreading_stages

    @property
    def begins_before(self) -> bool:
        """True if weights or buffers are already wrong at the start of the iteration."""
        return self.first is not None and self.first.key[2] in INITIAL_SLOTS

    @property
    def carries_earlier(self) -> bool:
        """True if rounding in earlier iterations may explain the error of the first wrong tensor.

        Weights and optimizer states can carry errors, unless their error is too large for rounding.
        """
        carried_stages = (CaptureStage.OPTIMIZER_STATE, CaptureStage.WEIGHTS)
        return (
            self.first is not None
            and self.first.key[0] in carried_stages
            and self.first.ratio < _MAX_ROUNDING_RATIO
        )

    @property
    def is_near_tolerance(self) -> bool:
        """True if the error of the first wrong tensor is below twice its tolerance.

        The result is False if all tensors are right, and for faults without a tolerance, such as missing
        elements.
        """
        if self.first is None or self.first.tolerance == 0:
            return False
        is_exact = bool(self.first.replicas_differ or self.first.uncovered or self.first.fault)
        return not is_exact and self.first.ratio < _MAX_ACCUMULATED_RATIO

    @property
    def needs_same_start(self) -> bool:
        """True if the strategy must be trained once more, with the reference's initial weights and expert choices.

        The second training removes two differences that are no errors of the strategy. A router may have chosen
        other experts because of rounding, so that all later tensors differ. Or the weights at the start of the
        iteration differ by rounding, which a module can turn into a larger error.
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
    """Raise an error if two runs did different work, so that their tensors could not be compared.

    Compared are the settings of the iteration, the dropout masks and the fp16 loss scales. If the micro batch sizes
    differ and each micro batch averages its own loss, all micro batches of a run must have equally many tokens.

    Raises:
        VerifyError: The runs differ, or a run has micro batches of different lengths. The message says in what.
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
    """Raise an error if the micro batches of a run have different numbers of tokens.

    Without `--calculate-per-token-loss`, every micro batch has the same weight in the loss, whatever its number
    of tokens. Two runs with different micro batches would then train different losses. With context parallelism
    nothing is checked.

    Raises:
        VerifyError: The numbers differ.
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
    """Raise an error if only one of the two runs skips an fp16 step because gradients overflow.

    If gradients are near the largest fp16 number, the sums of one layout may overflow while the sums of the
    other layout do not.

    Raises:
        VerifyError: One run skips a step; the message names the iteration and a smaller loss scale.
    """
    scales = list(zip(strategy.first.loss_scales, reference.first.loss_scales, strict=False))
    skipped_iteration = _find_first_difference(scales)
    if skipped_iteration is None and _overflows_in_one_run(reference, strategy):
        skipped_iteration = strategy.first.iteration
    if skipped_iteration is None:
        return
    last_scale = min(scales[-1]) if scales else 1.0
    raise VerifyError(
        f"The two runs did different work: in iteration {skipped_iteration} gradients overflow in "
        "one of them alone, which skips that step; set a smaller loss scale, for example "
        f'EXTRA="--initial-loss-scale {max(1.0, last_scale / 16):g}".'
    )


def _find_first_difference(scales: Sequence[tuple[float, float]]) -> int | None:
    """Return the iteration whose skipped step made the loss scales of the two runs differ; None if they are equal.

    Each pair has the loss scale of both runs in one iteration, from iteration 1 on. A skipped step changes the
    scale of the iteration after it, so the index of the first unequal pair is the number of the skipped iteration.
    """
    for index, (our_scale, expected_scale) in enumerate(scales):
        if our_scale != expected_scale:
            return index
    return None


def _overflows_in_one_run(reference: Capture, strategy: Capture) -> bool:
    """Return True if the captured fp16 gradients are infinite in one run, and near the largest number in the other."""
    if strategy.first.dtype != "float16":
        return False
    smaller, larger = sorted((strategy.largest_gradient, reference.largest_gradient))
    if not smaller < np.inf == larger:
        return False
    num_summed_ranks = 2
    for capture in (strategy, reference):
        _, data_size = capture.first.data
        _, context_size = capture.first.context
        num_summed_ranks = max(num_summed_ranks, data_size * context_size)
    return num_summed_ranks * smaller > _LARGEST_FP16


def _check_same_dropout_masks(reference: CapturedRank, strategy: CapturedRank) -> None:
    """Raise an error if a run uses dropout and the two runs draw different masks.

    Megatron draws masks from random streams that depend on the parallel sizes and the micro batches, so these
    must be equal in both runs.

    Raises:
        VerifyError: Dropout is used and they differ.
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


def find_unstable_iteration(captures: Sequence[Capture]) -> int | None:
    """Return the first iteration after which several runs of one program have different weights.

    Runs that begin with the same weights and train the same batches have the same bits, unless a race or a random
    state changes one of them. The runs may have been captured in different iterations.

    Returns:
        The iteration; 0 if the initial weights differ, and None if all weights that two runs have are equal.
    """
    first_difference: int | None = None
    for capture, other in itertools.combinations(captures, 2):
        for rank, other_rank in zip(capture.ranks, other.ranks, strict=True):
            hashes = zip(rank.rank.weight_hashes, other_rank.rank.weight_hashes, strict=False)
            # Index 0 holds the hash of the initial weights.
            for iteration, (value, other_value) in enumerate(hashes):
                is_earlier = first_difference is None or iteration < first_difference
                if value != other_value and is_earlier:
                    first_difference = iteration
    return first_difference


def report_unstable_runs(judgement: Judgement, iteration: int) -> Judgement:
    """Return a judgement on wrong weights whose kind is that two runs of the strategy differ.

    Args:
        judgement: Judgement on weights that are wrong at the start of an iteration.
        iteration: First iteration after which the weights of two runs differ (`find_unstable_iteration`).
    """
    kind = f"not the same twice: weights after iteration {iteration} differ between two runs, as after a race"
    verdict = replace(judgement.verdict, kind=kind, factor=None, iteration=iteration)
    return replace(judgement, verdict=verdict)


def judge(
    reference: Capture, strategy: Capture, drifted: Drift = MappingProxyType({})
) -> Judgement:
    """Compare two captures and return the verdict: the strategy held, or which tensor is the first wrong one.

    Args:
        reference: Capture of the reference, with measured responses (`Capture.responses`).
        strategy: Capture to judge.
        drifted: Relative error that rounding in earlier iterations may cause, by tensor (`measure_drift`);
            empty if it was not measured.

    Raises:
        VerifyError: The runs did different work, or no module's tensors could be aligned.
    """
    check_same_work(reference, strategy)
    compared = compare(reference, strategy, drifted)
    _check_outputs_compared(compared, strategy)
    return _judge_comparison(compared, strategy)


def _judge_comparison(compared: CaptureComparison, strategy: Capture) -> Judgement:
    """Return the judgement that follows from a comparison. The first wrong tensor, if any, is located in the model.

    `strategy` is the capture that was compared.
    """
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
    # An error in these stages and slots spreads to nearly all other tensors, so independent errors are listed
    # only after the strategy has run with the reference's inputs (`confirm`).
    is_in_spreading_stage = stage in (*LOCAL, CaptureStage.INPUTS)
    is_in_spreading_slot = slot in (*INITIAL_SLOTS, UNOBSERVED_GRADIENT)
    if not is_in_spreading_stage and not is_in_spreading_slot:
        also = list_independent_errors(verdict, first, compared, strategy)
        verdict = replace(verdict, also=also)
    return Judgement(verdict, compared, first)


def _check_outputs_compared(compared: CaptureComparison, strategy: Capture) -> None:
    """Raise an error if outputs of modules were captured and none of them was compared.

    Otherwise a strategy would be called right although none of its modules was checked.

    Raises:
        VerifyError: No output was compared; the message names outputs and the reason.
    """
    has_outputs = any(
        record.tensor_key.stage is CaptureStage.OUTPUTS
        for rank_capture in strategy.ranks
        for record in rank_capture.records
    )
    is_output_compared = any(
        comparison.key[0] is CaptureStage.OUTPUTS for comparison in compared.comparisons
    )
    if is_output_compared or not has_outputs:
        return
    example = ""
    skipped_outputs = [skipped for skipped in compared.skipped if skipped.has_outputs]
    if skipped_outputs:
        last_skipped = skipped_outputs[-1]
        names = " ".join(last_skipped.names)[:_MAX_NAMES_LENGTH]
        example = f" ({names}: {last_skipped.reason})"
    raise VerifyError(
        f"None of the modules' tensors could be aligned with the reference's{example}; "
        "compare with one rank (REFERENCE=baseline), and use Megatron versions that name "
        "modules in the same way."
    )


def write_forced(
    reference: Capture, strategy: Capture, folder: Path, *, start_alone: bool = False
) -> None:
    """Write the reference's tensors into files, so that the strategy can run with them in place of its own tensors.

    Each rank gets a folder with its part of the reference's tensors, split as the strategy splits tensors.

    Args:
        reference: Capture that gives the values.
        strategy: Capture that gives the ranks and the split of each tensor.
        folder: Folder in which the ranks' folders are made.
        start_alone: True writes only the weights and buffers at the start of the iteration, and the experts
            that routers choose. False also writes the inputs of modules and the gradients of their outputs.
    """
    aligner = ActivationAligner(reference, strategy)
    parts_by_key = group_parameter_parts(reference, CaptureStage.WEIGHTS)
    full_parameter = cache(lambda key: assemble_parameter(parts_by_key[key], reference))

    def find_values(rank_capture: RankCapture, record: TensorRecord) -> Array | None:
        """Return the reference's values of a tensor; None if the tensor is not written or not aligned."""
        tensor_key = record.tensor_key
        if tensor_key.slot in INITIAL_SLOTS:
            part = ParameterPart(rank_capture, record)
            if part.key not in parts_by_key:
                return None
            return full_parameter(part.key)[part.region()]
        is_choice = tensor_key.slot.endswith(CHOICE)
        is_forced_input = _is_module_input(tensor_key) and not start_alone
        if is_choice or is_forced_input:
            return aligner.align(rank_capture, record).reference
        return None

    for rank_capture in strategy.ranks:
        with CaptureWriter(folder / rank_capture.folder.name) as writer:
            for record in rank_capture.first_records.values():
                values = find_values(rank_capture, record)
                if values is None:
                    continue
                encoded = encode_tensor(values, record.dtype)
                writer.add(record.tensor_key, record.dtype, shape=record.shape, values=encoded)
            writer.close(rank_capture.rank)


def _is_module_input(tensor_key: TensorKey) -> bool:
    """Return True for a module's input in the forward pass, and for the gradient of its output.

    The gradient of the output is what a module gets as input in the backward pass.
    """
    if tensor_key.stage is CaptureStage.OUTPUTS:
        return tensor_key.slot.startswith("input.")
    return tensor_key.stage is CaptureStage.ACTIVATION_GRADIENTS and tensor_key.slot.startswith(
        "output"
    )


def confirm(judgement: Judgement, reference: Capture, forced: Capture) -> Judgement:
    """Find out whether a module is wrong although its inputs are right, and return the new judgement.

    There are three results. If such a module exists, the first one is located and the judgement is confirmed.
    Without such a module, a first error of at most twice its tolerance means that the errors of several modules
    have added up. The judgement of `forced` is then returned, with the first error as a note. If the first
    error is larger, the judgement is returned as not confirmed.

    Args:
        judgement: Judgement of the strategy with its computed tensors.
        reference: Capture of the reference.
        forced: Capture of the strategy with the reference's tensors as inputs of all modules.
    """
    compared = compare(reference, forced)
    wrong_by_itself = compared.wrong(*LOCAL)
    if wrong_by_itself:
        first = wrong_by_itself[0]
        verdict = locate_error(judgement.verdict, first, compared, forced)
        also = list_independent_errors(verdict, first, compared, forced)
        return Judgement(replace(verdict, confirmed=True, also=also), judgement.compared, first)
    spread = judgement.first
    if spread is None or spread.ratio > _MAX_ACCUMULATED_RATIO:
        return replace(judgement, verdict=replace(judgement.verdict, confirmed=False))
    stage, name, slot = spread.key
    forced_judgement = _judge_comparison(compared, forced)
    added_up = f"{stage}, {name} {slot} at {spread.ratio:.2f}"
    verdict = replace(forced_judgement.verdict, added_up=added_up)
    return replace(forced_judgement, verdict=verdict)


def count_seeds(judgement: Judgement, num_wrong: int, num_seeds: int) -> Judgement:
    """Return the judgement with a new `kind` text that states the error over tolerance and the number of wrong seeds.

    If every seed is wrong, the new text follows the old kind ('factor 2; just above tolerance …'). If only some
    seeds are wrong, the error may be rounding, to which any kind can fit by chance, so the new text replaces
    the old kind. It also replaces the kind `OTHER`. A judgement without a wrong tensor is returned unchanged.
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

    `first.npz` holds the first wrong tensor and the reference's tensor. The file is not written if no tensor is
    wrong, or if both tensors together exceed 64 MiB. The folder is made if it does not exist.
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
    """Return the verdict as a JUnit suite with one test.

    The test passes if the strategy held, fails if it differs, and has an error if it cannot be compared.
    """
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
    """Return the judgement `not comparable` with a sentence that says why."""
    return Judgement(VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=reason))

"""Locate an error: the module that causes it, its source, the worst element, and independent errors.

An error spreads: every tensor that is computed from a wrong tensor is wrong too. This module finds the
module between the last right and the first wrong tensor, and the errors that do not follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parakit.artifacts.capture import (
    BUCKETS,
    BUFFER,
    CALLER_SEPARATOR,
    CLIPPING,
    COUNTED_ONCE,
    INITIAL,
    INITIAL_SLOTS,
    LOSS,
    MASTER_CAST,
    MODEL,
    PER_TOKEN_LOSS,
    RATE_SLOTS,
    RECOMPUTED_PREFIX,
    UNOBSERVED_GRADIENT,
    CapturedRank,
    CaptureStage,
)
from parakit.artifacts.verdict import VerifyVerdict
from parakit.verify.captured import Capture
from parakit.verify.comparison import CaptureComparison, ComparedTensor, TensorComparison
from parakit.verify.kinds import MORE_GRADIENT, classify_error
from parakit.verify.patterns import ErrorKind

LOCAL = (CaptureStage.OUTPUTS, CaptureStage.LOSS, CaptureStage.ACTIVATION_GRADIENTS)
"""Stages in which errors spread from module to module."""
_OUTPUT_LAYER = "output_layer"
"""Name of the module whose output, the logits, is the input of the loss."""
_LAYER_SUFFIX = re.compile(r"\.layers\.\d+$")
_NUMBER = re.compile(r"\.\d+\b")
_TIED_PREFIXES = ("embedding.", "output_layer.")
"""Parameters that may be used twice. An error of one use is then in the gradient of both."""
_SELF_CONTAINED_CHECKS = (COUNTED_ONCE, INITIAL, MASTER_CAST, *RATE_SLOTS)
"""Slots of checks that use no other tensor of the strategy, so an error does not follow from another one."""


def locate_error(
    base: VerifyVerdict, first: TensorComparison, compared: CaptureComparison, strategy: Capture
) -> VerifyVerdict:
    """Return the verdict completed with stage, module, kind, ranks, element and source of the error.

    Args:
        base: Verdict to complete.
        first: Comparison of the first wrong tensor.
        compared: All comparisons.
        strategy: Capture in which the tensor is wrong.
    """
    stage, _, slot = first.key
    module, worst = _find_module(first, compared), first.worst
    tensors = first.copies or ([worst] if worst else [])
    if worst is not None and worst.micro_batch is not None:
        tensors = compared.pairs_of(first.key, worst.micro_batch)
    kind = classify_error(first, tensors, strategy.first, compared.similar_tensors(first))
    is_from_start = slot in INITIAL_SLOTS
    iteration = strategy.first.iteration
    if slot == INITIAL:
        iteration = 0
    elif is_from_start:
        # Tensors at the start of an iteration were computed in the iteration before.
        iteration -= 1
    worst_text = None
    if worst is not None and not is_from_start:
        worst_text = _describe_worst_element(worst)
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
        worst=worst_text,
        source=_find_source(first, module, kind, strategy),
        iteration=iteration,
    )


def _describe_worst_element(tensor: ComparedTensor) -> str | None:
    """Return index and values of the element with the largest error; None for empty tensors.

    If the region of the rank's part is known, the index counts in the full parameter. Otherwise it counts in the
    rank's tensor, and the rank is named. Tensors of two shapes also give None.
    """
    ours, reference = tensor.ours, tensor.reference
    if ours.shape != reference.shape or not ours.size:
        return None
    errors = np.abs(np.subtract(ours, reference, dtype=np.float64))
    # NaN would hide from the search for the largest error.
    errors = np.nan_to_num(errors, nan=np.inf)
    local_index = np.unravel_index(int(errors.argmax()), errors.shape)
    values = f"{ours[local_index]:.6g}, not {reference[local_index]:.6g}"
    index = [int(number) for number in local_index]
    owner = f" of rank {tensor.rank}"
    if tensor.region:
        index = [number + part.start for number, part in zip(index, tensor.region, strict=True)]
        owner = ""
    position = f" at {index}" if index else ""
    return f"worst{position}{owner}: {values}"


def _find_module(first: TensorComparison, compared: CaptureComparison) -> str:
    """Return the module with the code between the last right tensor and the first wrong tensor.

    A module receives its inputs, and in the backward pass the gradient of its output, from the module that
    calls it. If such a received tensor is wrong, the result is the calling module, provided that the calling
    module itself received right tensors. Layers are an exception, because they receive tensors from another
    pipeline stage or directly from the layer before. If the gradient of the logits is wrong and all gradients
    of the loss are right, the result is the loss.
    """
    stage, name, slot = first.key
    is_gradient = stage is CaptureStage.ACTIVATION_GRADIENTS
    if is_gradient and name == _OUTPUT_LAYER and slot.startswith("output"):
        return LOSS if _are_loss_gradients_right(compared) else name
    received_prefix = "output" if is_gradient else "input."
    if slot.startswith(RECOMPUTED_PREFIX):
        received_prefix = f"{RECOMPUTED_PREFIX}input."
    if stage not in LOCAL or not slot.startswith(received_prefix):
        return name
    # The nearest module around this one that was compared decides.
    for module, caller in _list_callers(name, slot):
        stage_of_module = CaptureStage.INPUTS if module == MODEL else stage
        received = _list_received_tensors(
            compared, stage_of_module, module, caller=caller, prefix=received_prefix
        )
        if not received:
            continue
        has_wrong_input = any(comparison.differs for comparison in received)
        return name if has_wrong_input else module
    return name


def _are_loss_gradients_right(compared: CaptureComparison) -> bool:
    """Return True if the gradients of the loss's tensors were compared and are all right."""
    key_of_loss = (CaptureStage.ACTIVATION_GRADIENTS, LOSS)
    loss_gradients = [
        comparison for comparison in compared.comparisons if comparison.key[:2] == key_of_loss
    ]
    return bool(loss_gradients) and not any(comparison.differs for comparison in loss_gradients)


def _list_received_tensors(
    compared: CaptureComparison, stage: CaptureStage, module: str, *, caller: str, prefix: str
) -> list[TensorComparison]:
    """Return the comparisons of the tensors that a module received in a stage.

    Args:
        compared: All comparisons.
        stage: Stage of the tensors.
        module: Name of the module.
        caller: Module that called it, as the slot names it after `CALLER_SEPARATOR`; empty if the slot names none.
        prefix: Beginning of the slots of received tensors.
    """
    received = []
    for comparison in compared.comparisons:
        comparison_stage, name, slot = comparison.key
        if (comparison_stage, name) != (stage, module) or not slot.startswith(prefix):
            continue
        if slot.partition(CALLER_SEPARATOR)[2] == caller:
            received.append(comparison)
    return received


def _list_callers(name: str, slot: str) -> Iterator[tuple[str, str]]:
    """Yield the modules around a module up to its layer, innermost first, each with its calling module.

    The calling module is the second name. It is empty if a module is called by the module that contains it. At
    the end comes the calling module that `slot` names. If `slot` names none, the model comes at the end, unless
    the last module is a layer.
    """
    _, _, caller = slot.partition(CALLER_SEPARATOR)
    module = name
    while "." in module and not _LAYER_SUFFIX.search(module):
        module = module.rpartition(".")[0]
        yield module, caller
    if caller or not _LAYER_SUFFIX.search(module):
        yield caller or MODEL, ""


def _find_source(
    first: TensorComparison, name: str, kind: ErrorKind, strategy: Capture
) -> str | None:
    """Return file and line of the function, or of the forward pass, that computes the wrong tensor.

    If the module `name` was not recorded, the closest recorded module around it is taken, at last the model.
    None means that no source is known.
    """
    function = _find_function(first, name, kind, strategy.first)
    source = strategy.first.functions.get(function)
    if source:
        return source
    modules = strategy.modules
    while name:
        if name in modules:
            return modules[name].source or None
        name = name.rpartition(".")[0]
    return modules[MODEL].source if MODEL in modules else None


def _find_function(first: TensorComparison, name: str, kind: ErrorKind, rank: CapturedRank) -> str:
    """Return the key in `CapturedRank.functions` of the function that computes the wrong tensor.

    An empty key means that a module computes it.
    """
    stage, wrong_name, slot = first.key
    if stage in LOCAL:
        is_token_loss = stage is CaptureStage.LOSS and slot == PER_TOKEN_LOSS
        is_of_loss = name == LOSS and (wrong_name == _OUTPUT_LAYER or is_token_loss)
        return stage if is_of_loss else ""
    if stage is CaptureStage.LOCAL_GRADIENTS or slot in (*INITIAL_SLOTS, UNOBSERVED_GRADIENT):
        return ""
    # The function that finalizes gradients also updates the experts' biases.
    if slot == BUFFER:
        return CaptureStage.REDUCED_GRADIENTS
    if stage is CaptureStage.REDUCED_GRADIENTS:
        _, data_size = rank.data
        _, context_size = rank.context
        is_reduced_over_data = data_size * context_size > 1
        is_tensor_parallel_error = "TP" in kind.name
        if is_reduced_over_data and not is_tensor_parallel_error:
            return BUCKETS
    if kind.name == MORE_GRADIENT:
        return CLIPPING
    return slot if slot in rank.functions else stage


def list_independent_errors(
    verdict: VerifyVerdict, first: TensorComparison, compared: CaptureComparison, strategy: Capture
) -> tuple[str, ...]:
    """Return one line per error that does not follow from the first error. A line has stage, module and source.

    Names that differ only in the number of a layer or expert count as one. Of such modules only the first is
    listed, and none is listed if the first error `first` is in one of them.
    """
    lines: dict[str, str] = {}
    known_names = {_NUMBER.sub(".*", str(verdict.module)), _NUMBER.sub(".*", first.key[1])}
    for comparison in _find_independent_errors(compared, first):
        stage, module, _ = comparison.key
        name = _NUMBER.sub(".*", module)
        if name not in known_names:
            source = _find_source(comparison, module, ErrorKind(""), strategy)
            lines.setdefault(name, f"{stage}, {module} ({source})")
    return tuple(lines.values())


def _find_independent_errors(
    compared: CaptureComparison, first: TensorComparison
) -> Iterator[TensorComparison]:
    """Yield wrong tensors that do not follow from another wrong tensor.

    The first wrong tensors of the modules that `_find_independent_modules` finds come first. They are followed by
    at most one tensor of each stage other than the stage of `first`. Such a tensor is a gradient that was still
    right in the stage before, or the result of a check that uses no other tensor.
    """
    yield from _find_independent_modules(compared, first)
    wrong_modules = {comparison.key[1] for comparison in compared.wrong(*LOCAL)}
    wrong_local_gradients = {
        comparison.key[1] for comparison in compared.wrong(CaptureStage.LOCAL_GRADIENTS)
    }
    stages_done = {first.key[0]}
    for comparison in compared.wrong():
        stage, name, slot = comparison.key
        if stage in stages_done:
            continue
        was_right_before = False
        if stage is CaptureStage.LOCAL_GRADIENTS:
            module = name.rpartition(".")[0]
            was_right_before = module not in wrong_modules
        elif stage is CaptureStage.REDUCED_GRADIENTS:
            was_right_before = name not in wrong_local_gradients
        # An error of one use of a tied parameter is in the gradient of the other use as well.
        has_wrong_tensors_before = bool(wrong_modules or wrong_local_gradients)
        if name.startswith(_TIED_PREFIXES) and has_wrong_tensors_before:
            was_right_before = False
        if was_right_before or slot in _SELF_CONTAINED_CHECKS:
            stages_done.add(stage)
            yield comparison


def _find_independent_modules(
    compared: CaptureComparison, first: TensorComparison
) -> Iterator[TensorComparison]:
    """Yield the first wrong tensor of each wrong module whose inputs are right.

    A module with a wrong module inside it is left out, because the inner module may be the cause. The module of
    `first` is left out as well.
    """
    wrong = compared.wrong(*LOCAL)
    modules_with_wrong_input: set[str] = set()
    for comparison in wrong:
        stage, name, slot = comparison.key
        is_input = "input." in slot if stage is CaptureStage.OUTPUTS else slot.startswith("output")
        if is_input:
            modules_with_wrong_input.add(name)
    # The whole model contains every wrong module.
    modules_around_wrong_ones = {MODEL}
    first_name = first.key[1]
    for name in (first_name, *(comparison.key[1] for comparison in wrong)):
        modules_around_wrong_ones.update(_list_enclosing_modules(name))
    modules_left_out = {first_name} | modules_with_wrong_input | modules_around_wrong_ones
    for comparison in wrong:
        name = comparison.key[1]
        if name not in modules_left_out:
            modules_left_out.add(name)
            yield comparison


def _list_enclosing_modules(name: str) -> list[str]:
    """Return the names of the modules around a module: `a.b.c` gives `a` and `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]

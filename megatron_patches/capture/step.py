"""Capture one iteration around Megatron's own `train_step`.

Targets: `train_step`, which is wrapped, and `load_checkpoint`, before which the initial weights are
described. Megatron writes no tensors that could be compared with those of another strategy; without the
patch, `make verify-…` would have nothing to compare.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from megatron_patches.capture.data import replay_data, unwrap_chunk
from megatron_patches.capture.norm import NormMembership
from megatron_patches.capture.parameters import ParameterMap
from megatron_patches.capture.probes import Probes, list_modules
from megatron_patches.capture.rank import describe_rank, gather_module_names
from megatron_patches.capture.reported import preserve_reported_losses
from megatron_patches.capture.routing import capture_routing
from megatron_patches.capture.start import (
    InitialState,
    Snapshot,
    describe_initial_weights,
    gather_weights,
    perturb_weights,
)
from megatron_patches.registry import Patch, Replacement, wrap_original
from parakit.accounting import is_megatron_fsdp
from parakit.artifacts.capture import (
    BUFFER,
    COUNTS,
    EARLIER_ITERATION_PREFIX,
    GRADIENT_PART_PREFIX,
    INDEX_FILE,
    INITIAL_FILE,
    LOSS,
    MODEL,
    NORM_RANKS_PREFIX,
    RATE_SLOTS,
    RESPONSES_FILE,
    UNOBSERVED_FILE,
    UPDATE_SUFFIX,
    CaptureStage,
    CaptureWriter,
    InitialPiece,
    TensorKey,
)
from parakit.capturing import (
    Recording,
    RoundingProbe,
    Sink,
    StoredTensors,
    fp64_scalar,
    norm_without_nan,
)
from parakit.config import variables

SCHEDULE = "schedule"
"""Name of the learning rate's schedule among the captured modules."""
_RATES = dict(zip(("lr", "weight_decay"), RATE_SLOTS, strict=True))
"""Slots of the two rates, by their keys in a parameter group."""


_WATCHES: list[_Watch] = []
"""The watch of this process; empty before the first iteration."""


@wrap_original
def _capture_step(
    original: Callable[..., Any],
    forward_step: Any,
    data: Any,
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `train_step`, and capture it if it is the requested iteration.

    In earlier iterations, only update magnitudes, loss scales and the choices of routers are recorded. If the
    environment variable `variables.CAPTURE_DRIFT` is set, each earlier iteration begins with perturbed
    weights. Later iterations run without recording.
    """
    from megatron.training import get_args

    def call(step: Callable[..., Any]) -> Any:
        return original(step, data, model, *args, **kwargs)

    captured_iteration = int(os.environ.get(variables.CAPTURE_ITERATION, "1"))
    iteration = get_args().curr_iteration + 1
    if iteration > captured_iteration:
        return call(forward_step)
    if not _WATCHES:
        _WATCHES.append(_Watch(model, *args[:2]))
    watch = _WATCHES[0]
    if watch.chunks[0].config.fp16:
        watch.scales += (float(watch.optimizer.get_loss_scale()),)
    watch.hash_weights()
    if watch.seeds:
        # Only a reference run measures update magnitudes.
        watch.start.follow(watch.optimizer)
    if iteration == captured_iteration:
        return watch.capture(call, forward_step, data)
    drift = os.environ.get(variables.CAPTURE_DRIFT)
    if drift:
        perturb_weights(watch.parameters, f"{drift} {iteration}")
    # Another choice of a router in an earlier iteration has changed the optimizer's state, so choices are
    # captured in all iterations.
    earlier = f"{EARLIER_ITERATION_PREFIX}{iteration} "
    with capture_routing(watch.chunks, watch.names, watch.recording, earlier):
        return call(forward_step)


_INITIAL: list[InitialPiece] = []
"""Description of the weights before a checkpoint was loaded; empty if it is not known."""


@wrap_original
def _record_initial_weights(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Record a description of the model's own initial weights, then call `load_checkpoint`, which replaces
    them.

    Nothing is recorded under Megatron-FSDP, or if Megatron does not initialise the weights.
    """
    is_fsdp = any(map(is_megatron_fsdp, model))
    chunks = [unwrap_chunk(chunk) for chunk in model]
    # Without initialization the weights are what the memory held before.
    is_initialised = chunks[0].config.perform_initialization
    if is_initialised and not (_INITIAL or is_fsdp):
        _INITIAL.extend(describe_initial_weights(ParameterMap(chunks, gather_module_names(chunks))))
    return original(model, *args, **kwargs)


class _Watch:
    """The model and optimizer of a rank, and the folder that its captured tensors are written to."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = list(model), optimizer, scheduler
        self.seeds = int(os.environ.get(variables.CAPTURE_SEEDS, "0"))
        self.folder = Path(os.environ[variables.CAPTURE]) / f"rank-{torch.distributed.get_rank()}"
        self.chunks = [unwrap_chunk(chunk) for chunk in model]
        self.names = gather_module_names(self.chunks)
        self.writer = CaptureWriter(self.folder)
        self.recording = Recording(self.writer, _open_forced_tensors(self.folder.name))
        self.parameters = ParameterMap(self.chunks, self.names)
        self.start = InitialState(self.model, self.parameters)
        self.scales: tuple[float, ...] = ()
        """Loss scale of each iteration so far; empty without fp16."""
        self.weight_hashes: tuple[str, ...] = ()
        """Hash of the initial weights, and of those after each iteration so far; empty if none is taken."""
        self.num_begun: int | None = None
        """Number of micro batches that have begun; None if the parts of gradients are not captured."""
        self.last_gradients: dict[int, torch.Tensor] = {}
        """Copy of each gradient before the current micro batch, by the parameter's id."""

    def hash_weights(self) -> None:
        """Store the hash of the weights at the start of an iteration, or at the end of the captured one.

        Two runs of one program have equal hashes, unless a race or a random state changes a run. Nothing is stored
        while weights may be incomplete: under Megatron-FSDP, and with `--overlap-param-gather`, where other threads
        still write them.
        """
        from megatron.training import get_args

        is_fsdp = any(map(is_megatron_fsdp, self.model))
        if not is_fsdp and not get_args().overlap_param_gather:
            self.weight_hashes += (self.parameters.hash_values(),)

    def capture(self, call: Callable[..., Any], forward_step: Any, data: Any) -> Any:
        """Run the iteration and write its tensors, then repeat it, and return what the first run returned.

        The reference of a comparison (`seeds` above 0) is repeated with perturbed weights, to measure how its
        tensors respond to rounding. Any other run is repeated once without probes: probes copy tensors that a
        later call may overwrite, and so might hide a fault. The iteration is not repeated if it runs on the
        tensors of another run. It is not repeated under Megatron-FSDP either, because its flat buffers cannot
        be restored.

        Args:
            call: Runs Megatron's `train_step` with a forward step.
            forward_step: Megatron's forward step.
            data: Megatron's data iterator, a list of them, or None.
        """
        gather_weights(self.model)
        self.start.write(self.recording, self.optimizer)
        if _INITIAL:
            (self.folder / INITIAL_FILE).write_bytes(msgspec.json.encode(_INITIAL))
        if os.environ.get(variables.CAPTURE_PARTS):
            slot = f"{GRADIENT_PART_PREFIX}the iteration before"
            for parameter in self.parameters.parameters:
                self._write_gradient(self.recording, slot, parameter)
            self.num_begun = 0
        snapshot = None
        if self._is_repeated():
            snapshot = Snapshot(self.chunks, self.optimizer, self.scheduler)
        state_norms = list(self._measure_states()) if self.seeds else []
        self._write_schedule()
        with replay_data(data) as rewind:
            result, groups = self._run(call, forward_step, self.recording)
            self.hash_weights()
            self.writer.flush()
            if snapshot is not None:
                self._repeat(call, forward_step, snapshot, rewind, state_norms)
        rank = describe_rank(
            self.chunks,
            self.names,
            self.parameters,
            norm_groups=groups,
            optimizer=self.optimizer,
            loss_scales=self.scales,
            weight_hashes=self.weight_hashes,
        )
        self.writer.close(rank)
        return result

    def _repeat(
        self,
        call: Callable[..., Any],
        forward_step: Any,
        snapshot: Snapshot,
        rewind: Callable[[], None],
        state_norms: Iterable[tuple[TensorKey, float]],
    ) -> None:
        """Repeat the captured iteration, and write how far each tensor differs from the captured one.

        Args:
            call: Runs Megatron's `train_step` with a forward step.
            forward_step: Megatron's forward step.
            snapshot: State of model and optimizer before the iteration.
            rewind: Function that lets the iterator of data begin with the same micro batches again.
            state_norms: Norms of the optimizer's states before the iteration.
        """
        probe = RoundingProbe(StoredTensors(self.folder, self.writer.records))
        for seed in range(1 + self.seeds):
            snapshot.restore()
            if self.seeds:
                perturb_weights(self.parameters, str(seed))
                is_last = seed == self.seeds
                if is_last:
                    probe.round_otherwise(seed)
            rewind()
            with preserve_reported_losses():
                self._run(call, forward_step, probe, has_probes=self.seeds > 0)
        probe.carry(state_norms)
        file = RESPONSES_FILE if self.seeds else UNOBSERVED_FILE
        (self.folder / file).write_text(json.dumps(probe.responses))

    def _is_repeated(self) -> bool:
        """Return True if the iteration is run again after its capture."""
        if self.seeds:
            return True
        excluding = (variables.CAPTURE_FORCED, variables.CAPTURE_DRIFT, variables.CAPTURE_PARTS)
        is_fsdp = any(map(is_megatron_fsdp, self.model))
        return not is_fsdp and not any(os.environ.get(name) for name in excluding)

    def _run(
        self, call: Callable[..., Any], forward_step: Any, sink: Sink, has_probes: bool = True
    ) -> tuple[Any, tuple[tuple[int, ...], ...]]:
        """Run the iteration, and pass its tensors to the sink.

        Without probes, activations and their gradients are not captured. Megatron's functions are replaced
        here, and not with the patches, so that a function that PATCH_FILE= has wrapped is seen with the
        wrapper.

        Returns:
            What `call` returns, and the groups of ranks over which gradient norms were summed.
        """
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
        from megatron.core.optimizer import clip_grads

        probes = Probes(self.chunks, self.names, sink) if has_probes else None
        clipping_norms: list[Any] = []
        membership = NormMembership(self.parameters, self.optimizer)
        weights_before = self._copy_weights()
        config = self.chunks[0].config
        start_reduction = self._wrap_reduction(_ParamAndGradBucketGroup.start_grad_sync, sink)
        finalize = self._wrap_finalization(config.finalize_model_grads_func, sink)
        step = self._wrap_update(self.optimizer.step, sink, membership, clipping_norms)

        @wrap_original
        def clip_and_note(
            clip: Any, parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
        ) -> Any:
            clipping_norms.append(total_norm)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        with (
            patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_reduction),
            wrap_in_importers(clip_grads, "clip_grad_by_total_norm_fp32", clip_and_note),
            wrap_in_importers(clip_grads, "get_grad_norm_fp32", wrap_original(membership.note)),
            patch.object(config, "finalize_model_grads_func", finalize),
            patch.object(self.optimizer, "step", step),
            capture_routing(self.chunks, self.names, sink),
        ):
            try:
                if probes:
                    forward_step = self._wrap_forward_step(sink, probes, forward_step)
                result = call(forward_step)
            finally:
                if probes:
                    probes.remove()
        gather_weights(self.model)
        self._write_states(sink, weights_before)
        return result, membership.groups

    def _wrap_finalization(self, original: Callable[..., Any], sink: Sink) -> Callable[..., Any]:
        """Return a `finalize_model_grads_func` that first writes the counts of tokens per expert."""

        @functools.wraps(original)
        def write_counts_and_finalize(*args: Any, **kwargs: Any) -> Any:
            self._write_counts(sink)
            return original(*args, **kwargs)

        return write_counts_and_finalize

    def _wrap_update(
        self,
        original: Callable[..., Any],
        sink: Sink,
        membership: NormMembership,
        clipping_norms: Sequence[Any],
    ) -> Callable[..., Any]:
        """Return an optimizer's `step` that writes the gradients before the update, and the norms after it.

        Args:
            original: The optimizer's own `step`.
            sink: Receiver of gradients and norms.
            membership: The elements that the step counts in norms.
            clipping_norms: Norm of each call that clipped gradients, filled during the step.
        """

        def write_and_step(*args: Any, **kwargs: Any) -> Any:
            self._write_parts()
            self._write_reduced_gradients(sink)
            step_result = original(*args, **kwargs)
            _, returned_norm, *_ = step_result
            _write_norms(sink, returned_norm, clipping_norms)
            for ranks, piece in membership.pieces():
                module = NORM_RANKS_PREFIX + " ".join(map(str, ranks))
                sink.write_piece(CaptureStage.NORM, module, piece)
            return step_result

        return write_and_step

    def _write_reduced_gradients(self, sink: Sink) -> None:
        """Pass the gradients that the optimizer of this rank gets to a sink."""
        for parameter, part in self.parameters.parts(self.optimizer):
            if part.gradient is not None:
                stage, values = CaptureStage.REDUCED_GRADIENTS, part.gradient
                self._write(sink, stage, "gradient", parameter, values, part.start)

    def _wrap_forward_step(
        self, sink: Sink, probes: Probes, forward_step: Any
    ) -> Callable[..., Any]:
        """Return a forward step that also reports to the sink and the probes.

        It reports that a micro batch begins, and writes the micro batch's loss masks and losses.
        """

        @functools.wraps(forward_step)
        def forward_and_report(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            sink.begin_micro_batch()
            self._write_parts()
            micro_batch = probes.begin_micro_batch(self.chunks.index(unwrap_chunk(model)))
            output, loss_function = forward_step(data, model, *args, **kwargs)
            _write_loss_masks(sink, loss_function, micro_batch)
            return output, _wrap_loss(sink, loss_function, micro_batch)

        return forward_and_report

    def _wrap_reduction(self, original: Callable[..., Any], sink: Sink) -> Callable[..., Any]:
        """Return a `start_grad_sync` that first writes the local gradients of its bucket group.

        Each gradient is written once, also if Megatron reduces it again.
        """
        written_ids: set[int] = set()

        @functools.wraps(original)
        def write_and_start(group: Any, *args: Any, **kwargs: Any) -> Any:
            for bucket in group.buckets:
                for parameter in bucket.params_list:
                    if self.parameters.places(parameter) and id(parameter) not in written_ids:
                        written_ids.add(id(parameter))
                        self._write_gradient(sink, "gradient", parameter)
            return original(group, *args, **kwargs)

        return write_and_start

    def _write_gradient(self, sink: Sink, slot: str, parameter: Any) -> None:
        """Write a parameter's local gradient (`main_grad`), if it has one."""
        if getattr(parameter, "main_grad", None) is not None:
            self._write(sink, CaptureStage.LOCAL_GRADIENTS, slot, parameter, parameter.main_grad)

    def _write_parts(self) -> None:
        """Write the part of each gradient that the last micro batch added, and count the micro batch that begins.

        If the run does not capture parts of gradients, do nothing.
        """
        if self.num_begun is None:
            return
        stage = CaptureStage.LOCAL_GRADIENTS
        slot = f"{GRADIENT_PART_PREFIX}micro batch {self.num_begun - 1}"
        for parameter in self.parameters.parameters:
            gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            before = self.last_gradients.get(id(parameter))
            if before is not None:
                self._write(self.recording, stage, slot, parameter, gradient - before)
            self.last_gradients[id(parameter)] = gradient.detach().clone()
        self.num_begun += 1

    def _write(
        self,
        sink: Sink,
        stage: CaptureStage,
        slot: str,
        parameter: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
    ) -> None:
        """Write values of a parameter to the sink, with their position in the full parameter.

        `start` is the index of the first value in the flattened parameter; None if every element has a value.
        """
        for piece in self.parameters.pieces(parameter, values, start):
            sink.write_piece(stage, slot, piece)

    def _write_counts(self, sink: Sink) -> None:
        """Write how many tokens each router gave each expert; Megatron resets the counts after that."""
        for name, module in list_modules(self.chunks, self.names):
            counts = getattr(module, "local_tokens_per_expert", None)
            if isinstance(counts, torch.Tensor):
                sink.write(TensorKey(CaptureStage.OUTPUTS, name, COUNTS), counts)

    def _write_states(self, sink: Sink, before: dict[tuple[int, str], torch.Tensor]) -> None:
        """Write the optimizer's states, weights and buffers, and how the update changed weights.

        `before` has the copies of `_copy_weights`.
        """
        for parameter, part in self.parameters.parts(self.optimizer):
            for name, values in part.states.items():
                self._write_state(sink, name, parameter, values, part.start)
                old_values = before.get((id(parameter), name))
                if old_values is not None:
                    update = values.detach().float() - old_values.float()
                    slot = f"{name} {UPDATE_SUFFIX}"
                    stage = CaptureStage.OPTIMIZER_STATE
                    self._write(sink, stage, slot, parameter, update, part.start)
        for parameter in self.parameters.parameters:
            update = parameter.detach().float() - before[id(parameter), "weight"].float()
            self._write(sink, CaptureStage.WEIGHTS, UPDATE_SUFFIX, parameter, update)
            self._write(sink, CaptureStage.WEIGHTS, "weight", parameter, parameter.data)
        for buffer in self.parameters.buffers:
            self._write(sink, CaptureStage.WEIGHTS, BUFFER, buffer, buffer)

    def _write_state(
        self,
        sink: Sink,
        name: str,
        parameter: torch.Tensor,
        values: torch.Tensor,
        start: int | None,
    ) -> None:
        """Write one optimizer state of a parameter; `start` is that of `_write`."""
        stage = CaptureStage.OPTIMIZER_STATE
        # A single number for many elements is the count of steps.
        is_step_count = values.numel() <= 1 and parameter.numel() != 1
        if is_step_count:
            tensor_key = TensorKey(stage, self.parameters.name(parameter), name)
            sink.write(tensor_key, fp64_scalar(values))
        else:
            self._write(sink, stage, name, parameter, values, start)

    def _write_schedule(self) -> None:
        """Write the scheduler's number of steps, and each parameter's learning rate and weight decay.

        The values must be equal on every rank, and a resumed run must have the same values as an
        uninterrupted run.
        """
        stage = CaptureStage.OPTIMIZER_STATE
        steps = torch.tensor([self.scheduler.num_steps])
        self.recording.write(TensorKey(stage, SCHEDULE, "steps"), steps)
        for parameter, part in self.parameters.parts(self.optimizer):
            name = self.parameters.name(parameter)
            for group_key, slot in _RATES.items():
                rate = fp64_scalar(float(part.group[group_key]))
                self.recording.write(TensorKey(stage, name, slot), rate)

    def _measure_states(self) -> Iterator[tuple[TensorKey, float]]:
        """Yield the norm of each optimizer state before the captured update, with the key of its tensor.

        Master copies of weights and states of one element are left out.
        """
        for parameter, part in self.parameters.parts(self.optimizer):
            for name, values in part.states.items():
                if name != "param" and values.numel() > 1:
                    for piece in self.parameters.pieces(parameter, values, part.start):
                        tensor_key = TensorKey(CaptureStage.OPTIMIZER_STATE, piece.name, name)
                        yield tensor_key, norm_without_nan(piece.values)

    def _copy_weights(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return copies of all weights (`weight`) and master copies (`param`), by parameter id and name."""
        copies = {
            (id(parameter), "weight"): parameter.detach().clone()
            for parameter in self.parameters.parameters
        }
        for parameter, part in self.parameters.parts(self.optimizer):
            if "param" in part.states:
                copies[id(parameter), "param"] = part.states["param"].detach().clone()
        return copies


@contextmanager
def wrap_in_importers(
    owner: ModuleType, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a function, during a `with` block, in all modules of its package that import it.

    `make` gets the function that a module has under `name` and returns the replacement. Each module's function is
    wrapped separately, because a patch file may have replaced it in one of them. The function stays as it is in
    `owner`, the module that defines it. Otherwise a replacement that calls it would be recorded twice.
    """
    package = owner.__name__.rpartition(".")[0]
    with ExitStack() as replacements:
        for module_name, module in tuple(sys.modules.items()):
            is_in_package = module_name.rpartition(".")[0] == package
            if not is_in_package or module is owner:
                continue
            function = getattr(module, name, None)
            if callable(function):
                replacements.enter_context(patch.object(module, name, make(function)))
        yield


def _open_forced_tensors(rank_folder: str) -> StoredTensors | None:
    """Return the tensors of another run on which this run computes; None if this rank gets none.

    The folder of the other run's capture is in the environment variable `variables.CAPTURE_FORCED`, and
    `rank_folder` is the name of this rank's folder in it.
    """
    capture_folder = os.environ.get(variables.CAPTURE_FORCED)
    if not capture_folder:
        return None
    folder = Path(capture_folder, rank_folder)
    return StoredTensors(folder) if (folder / INDEX_FILE).is_file() else None


def _write_loss_masks(sink: Sink, loss_function: Any, micro_batch: int) -> None:
    """Write the loss masks of a micro batch, which are bound as arguments to its loss function."""
    # The loss function is a partial. A loss function of another kind has no bound arguments.
    bound_arguments = getattr(loss_function, "args", ())
    masks = [argument for argument in bound_arguments if isinstance(argument, torch.Tensor)]
    for index, mask in enumerate(masks):
        tensor_key = TensorKey(CaptureStage.INPUTS, MODEL, f"loss_mask.{index}", micro_batch)
        sink.write(tensor_key, mask)


def _wrap_loss(
    sink: Sink, loss_function: Callable[..., Any], micro_batch: int
) -> Callable[..., Any]:
    """Return a loss function that also writes the loss of its micro batch, and the number of tokens if it has one."""

    @functools.wraps(loss_function)
    def compute_loss_and_report(*tensors: Any, **options: Any) -> Any:
        result = loss_function(*tensors, **options)
        # Three values are the loss, the number of tokens and what is logged; two lack the tokens.
        reported = {"sum": result[0]}
        if len(result) == 3:
            reported["tokens"] = result[1]
        for slot, value in reported.items():
            tensor_key = TensorKey(CaptureStage.LOSS, LOSS, slot, micro_batch)
            sink.write(tensor_key, value.detach().clone())
        return result

    return compute_loss_and_report


def _write_norms(sink: Sink, returned_norm: Any, clipping_norms: Sequence[Any]) -> None:
    """Pass the gradient norms of one optimizer step to a sink.

    Args:
        sink: Receiver of the norms.
        returned_norm: Norm that the step returned, which Megatron logs. If nothing is clipped, some of Megatron's
            optimizers compute no norm and return 0 or None, which is not written.
        clipping_norms: Norm of each call that clipped gradients.
    """
    norms_by_slot = {"returned": returned_norm}
    for call, norm in enumerate(clipping_norms, start=1):
        norms_by_slot[f"used for clipping, call {call}"] = norm
    for slot, norm in norms_by_slot.items():
        if norm is not None and (clipping_norms or float(norm) > 0):
            key = TensorKey(CaptureStage.NORM, "grad_norm", slot)
            sink.write(key, fp64_scalar(float(norm)))


PATCH = Patch(
    name="capture",
    reason="Megatron writes no tensors that could be compared with those of another layout",
    needed=lambda context: variables.CAPTURE in os.environ,
    replacements=(
        Replacement("megatron.training.training:train_step", _capture_step),
        Replacement("megatron.training.training:load_checkpoint", _record_initial_weights),
    ),
)

"""One captured iteration, around Megatron's own `train_step`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from megatron_patches.capture.norm import NormMembership
from megatron_patches.capture.parameters import ParameterMap
from megatron_patches.capture.probes import Probes, modules_of
from megatron_patches.capture.rank import captured_rank, module_names
from megatron_patches.capture.reported import reported_losses_kept
from megatron_patches.capture.routing import watched_routing
from megatron_patches.capture.start import (
    Snapshot,
    Start,
    gather_weights,
    initial_pieces,
    perturb_weights,
)
from megatron_patches.registry import Patch, Replacement, around
from parakit.accounting import is_megatron_fsdp
from parakit.artifacts.capture import (
    BUFFER,
    COUNTED,
    COUNTS,
    EARLIER,
    INDEX_FILE,
    INITIAL_FILE,
    LOSS,
    MODEL,
    PART,
    RATE_SLOTS,
    RESPONSES_FILE,
    UNOBSERVED_FILE,
    UPDATE,
    CaptureWriter,
    InitialPiece,
    Site,
    Stage,
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
"""Name of the learning rate's schedule among the modules."""
_RATES = dict(zip(("lr", "weight_decay"), RATE_SLOTS, strict=True))
"""Keys of a parameter group, and their slots."""


_WATCHES: list[_Watch] = []


@around
def _capturing(
    original: Callable[..., Any],
    forward_step: Any,
    data: Any,
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`train_step`."""
    from megatron.training import get_args

    def call(step: Callable[..., Any]) -> Any:
        return original(step, data, model, *args, **kwargs)

    wanted = int(os.environ.get(variables.CAPTURE_ITERATION, "1"))
    iteration = get_args().curr_iteration + 1
    if iteration > wanted:
        return call(forward_step)
    if not _WATCHES:
        _WATCHES.append(_Watch(model, *args[:2]))
    watch = _WATCHES[0]
    if watch.chunks[0].config.fp16:
        watch.scales += (float(watch.optimizer.get_loss_scale()),)
    if watch.seeds:  # A reference; of it alone it is asked how far updates reach.
        watch.start.follow(watch.optimizer)
    if iteration == wanted:
        return watch.capture(call, forward_step, data)
    if drift := os.environ.get(variables.CAPTURE_DRIFT):
        perturb_weights(watch.parameters, f"{drift} {iteration}")
    # What a router chose otherwise is in the optimizer's state.
    earlier = f"{EARLIER}{iteration} "
    with watched_routing(watch.chunks, watch.names, watch.recording, earlier):
        return call(forward_step)


_INITIAL: list[InitialPiece] = []


@around
def _noting_initial(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`load_checkpoint`, before which it is noted what the layout begins with by itself."""
    flat = any(map(is_megatron_fsdp, model))
    chunks = [_unwrapped(chunk) for chunk in model]
    initialised = chunks[0].config.perform_initialization  # Else it is whatever memory held.
    if initialised and not (_INITIAL or flat):
        _INITIAL.extend(initial_pieces(ParameterMap(chunks, module_names(chunks))))
    return original(model, *args, **kwargs)


class _Watch:
    """A rank's model and optimizer, and the folder that takes an iteration's tensors."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = list(model), optimizer, scheduler
        self.seeds = int(os.environ.get(variables.CAPTURE_SEEDS, "0"))
        self.folder = Path(os.environ[variables.CAPTURE]) / f"rank-{torch.distributed.get_rank()}"
        self.chunks = [_unwrapped(chunk) for chunk in model]
        self.names = module_names(self.chunks)
        self.writer = CaptureWriter(self.folder)
        forced = os.environ.get(variables.CAPTURE_FORCED)
        given = Path(forced, self.folder.name) if forced else None
        stored = StoredTensors(given) if given and (given / INDEX_FILE).is_file() else None
        self.recording = Recording(self.writer, stored)
        self.parameters = ParameterMap(self.chunks, self.names)
        self.start = Start(self.model, self.parameters)
        self.scales: tuple[float, ...] = ()
        """Of losses, in fp16, of each iteration."""
        self.begun: int | None = None
        """Micro batches, where the parts of gradients are asked for."""
        self.so_far: dict[int, torch.Tensor] = {}
        """The gradient of each parameter (by id) before the last of them."""

    def capture(self, call: Callable[..., Any], forward_step: Any, data: Any) -> Any:
        """Run the iteration, writing its tensors; then again, with changed weights or without probes.

        Probes copy what a later call may overwrite. It is not repeated without them under another run's
        tensors, nor under Megatron-FSDP, whose flat buffers cannot be put back.
        """
        gather_weights(self.model)
        self.start.write(self.recording, self.optimizer)
        if _INITIAL:
            (self.folder / INITIAL_FILE).write_bytes(msgspec.json.encode(_INITIAL))
        if os.environ.get(variables.CAPTURE_PARTS):
            for parameter in self.parameters.parameters:
                slot = f"{PART}the iteration before"
                self._write_gradient(self.recording, slot, parameter)
            self.begun = 0
        other = (variables.CAPTURE_FORCED, variables.CAPTURE_DRIFT, variables.CAPTURE_PARTS)
        flat = any(map(is_megatron_fsdp, self.model))
        again = self.seeds or not (flat or any(os.environ.get(name) for name in other))
        snapshot = Snapshot(self.chunks, self.optimizer, self.scheduler) if again else None
        carried = list(self._carried()) if self.seeds else []
        self._write_schedule()
        with _replayed(data) as rewind:
            answer, groups = self._run(call, forward_step, self.recording)
            self.writer.flush()
            if snapshot is not None:
                responding = RoundingProbe(StoredTensors(self.folder, self.writer.records))
                for seed in range(1 + self.seeds):
                    snapshot.restore()
                    if self.seeds:
                        perturb_weights(self.parameters, str(seed))
                        if seed == self.seeds:  # The last.
                            responding.round_otherwise(seed)
                    rewind()
                    with reported_losses_kept():
                        self._run(call, forward_step, responding, observed=self.seeds > 0)
                responding.carry(carried)
                file = RESPONSES_FILE if self.seeds else UNOBSERVED_FILE
                (self.folder / file).write_text(json.dumps(responding.responses))
        described = captured_rank(
            self.chunks, self.names, self.parameters, groups, self.optimizer, self.scales
        )
        self.writer.close(described)
        return answer

    def _run(
        self, call: Callable[..., Any], forward_step: Any, sink: Sink, observed: bool = True
    ) -> tuple[Any, tuple[tuple[int, ...], ...]]:
        """What the iteration returns, and the groups of ranks over which norms were summed.

        What PATCH_FILE= puts around Megatron's functions must come after the report, so they are
        replaced now, not with the patches.
        """
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
        from megatron.core.optimizer import optimizer as of_norms

        probes = Probes(self.chunks, self.names, sink) if observed else None
        norms: list[Any] = []
        membership = NormMembership(self.parameters, self.optimizer)
        before = self._before_update()
        reduce, clip = (
            _ParamAndGradBucketGroup.start_grad_sync,
            of_norms.clip_grad_by_total_norm_fp32,
        )
        counted = around(membership.note)(of_norms.get_grad_norm_fp32)
        config = self.chunks[0].config
        step, finalize = self.optimizer.step, config.finalize_model_grads_func

        @functools.wraps(clip)
        def clipping(
            parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
        ) -> Any:
            norms.append(total_norm)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        @functools.wraps(finalize)
        def finalizing(*args: Any, **kwargs: Any) -> Any:
            self._write_counts(sink)
            return finalize(*args, **kwargs)

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._write_parts()
            for parameter, part in self.parameters.parts(self.optimizer):
                if part.gradient is not None:
                    stage, values = Stage.REDUCED_GRADIENTS, part.gradient
                    self._write(sink, stage, "gradient", parameter, values, part.start)
            stepped = step(*args, **kwargs)
            for clip_call, norm in enumerate((stepped[1], *norms)):
                slot = f"used for clipping, call {clip_call}" if clip_call else "returned"
                # Where nothing is clipped some of Megatron's optimizers compute no norm, and return 0.
                if norm is not None and (norms or float(norm) > 0):
                    sink.write(Site(Stage.NORM, "grad_norm", slot), fp64_scalar(float(norm)))
            for ranks, piece in membership.pieces():
                sink.write_piece(Stage.NORM, COUNTED + " ".join(map(str, ranks)), piece)
            return stepped

        with (
            patch.object(_ParamAndGradBucketGroup, "start_grad_sync", self._reducing(reduce, sink)),
            patch.object(of_norms, "clip_grad_by_total_norm_fp32", clipping),
            patch.object(of_norms, "get_grad_norm_fp32", counted),
            patch.object(config, "finalize_model_grads_func", finalizing),
            patch.object(self.optimizer, "step", stepping),
            watched_routing(self.chunks, self.names, sink),
        ):
            try:
                answer = call(self._watched(sink, probes, forward_step) if probes else forward_step)
            finally:
                if probes:
                    probes.remove()
        gather_weights(self.model)
        self._write_states(sink, before)
        return answer, membership.groups

    def _watched(self, sink: Sink, probes: Probes, forward_step: Any) -> Callable[..., Any]:
        """Megatron's forward step, which says when a micro batch begins and what its loss is."""

        @functools.wraps(forward_step)
        def watched(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            sink.begin_micro_batch()
            self._write_parts()
            micro_batch = probes.begin_micro_batch(self.chunks.index(_unwrapped(model)))
            output, loss = forward_step(data, model, *args, **kwargs)

            @functools.wraps(loss)
            def loss_of(*tensors: Any, **named: Any) -> Any:
                answer = loss(*tensors, **named)
                for index, value in enumerate(answer[:2] if len(answer) == 3 else answer[:1]):
                    site = Site(Stage.LOSS, LOSS, "tokens" if index else "sum", micro_batch)
                    sink.write(site, value.detach().clone())
                return answer

            masks = (one for one in getattr(loss, "args", ()) if isinstance(one, torch.Tensor))
            for index, mask in enumerate(masks):
                sink.write(Site(Stage.INPUTS, MODEL, f"loss_mask.{index}", micro_batch), mask)
            return output, loss_of

        return watched

    def _reducing(self, original: Callable[..., Any], sink: Sink) -> Callable[..., Any]:
        """`start_grad_sync` of a bucket group: what each rank has before anything is reduced."""
        written: set[int] = set()

        @functools.wraps(original)
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            for parameter in (one for bucket in group.buckets for one in bucket.params_list):
                if self.parameters.places(parameter) and id(parameter) not in written:
                    written.add(id(parameter))
                    self._write_gradient(sink, "gradient", parameter)
            return original(group, *args, **kwargs)

        return start

    def _write_gradient(self, sink: Sink, slot: str, parameter: Any) -> None:
        if getattr(parameter, "main_grad", None) is not None:
            self._write(sink, Stage.LOCAL_GRADIENTS, slot, parameter, parameter.main_grad)

    def _write_parts(self) -> None:
        """What gradients have gained by the last micro batch."""
        if self.begun is None:
            return
        for parameter in self.parameters.parameters:
            now: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            before = self.so_far.get(id(parameter))
            if before is not None:
                slot = f"{PART}micro batch {self.begun - 1}"
                self._write(self.recording, Stage.LOCAL_GRADIENTS, slot, parameter, now - before)
            self.so_far[id(parameter)] = now.detach().clone()
        self.begun += 1

    def _write(
        self,
        sink: Sink,
        stage: Stage,
        slot: str,
        parameter: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
    ) -> None:
        for piece in self.parameters.pieces(parameter, values, start):
            sink.write_piece(stage, slot, piece)

    def _write_counts(self, sink: Sink) -> None:
        """How many tokens routers gave each expert, before Megatron's last reduction resets it."""
        for name, module in modules_of(self.chunks, self.names):
            counts = getattr(module, "local_tokens_per_expert", None)
            if isinstance(counts, torch.Tensor):
                sink.write(Site(Stage.OUTPUTS, name, COUNTS), counts)

    def _write_states(self, sink: Sink, before: dict[tuple[int, str], torch.Tensor]) -> None:
        stage = Stage.OPTIMIZER_STATE
        for parameter, part in self.parameters.parts(self.optimizer):
            for name, values in part.states.items():
                if values.numel() > 1 or parameter.numel() == 1:
                    self._write(sink, stage, name, parameter, values, part.start)
                else:  # The number of steps.
                    site = Site(stage, self.parameters.name(parameter), name)
                    sink.write(site, fp64_scalar(values))
                old = before.get((id(parameter), name))
                if old is not None:
                    moved = values.detach().float() - old.float()
                    self._write(sink, stage, f"{name} {UPDATE}", parameter, moved, part.start)
        for parameter in self.parameters.parameters:
            moved = parameter.detach().float() - before[id(parameter), "weight"].float()
            self._write(sink, Stage.WEIGHTS, UPDATE, parameter, moved)
            self._write(sink, Stage.WEIGHTS, "weight", parameter, parameter.data)
        for buffer in self.parameters.buffers:
            self._write(sink, Stage.WEIGHTS, BUFFER, buffer, buffer)

    def _write_schedule(self) -> None:
        """What the update is made with: a resumed run must have it again, and every rank."""
        steps = Site(Stage.OPTIMIZER_STATE, SCHEDULE, "steps")
        self.recording.write(steps, torch.tensor([self.scheduler.num_steps]))
        for parameter, part in self.parameters.parts(self.optimizer):
            for key, slot in _RATES.items():
                site = Site(Stage.OPTIMIZER_STATE, self.parameters.name(parameter), slot)
                self.recording.write(site, fp64_scalar(float(part.group[key])))

    def _carried(self) -> Iterator[tuple[Site, float]]:
        """States that earlier iterations left, with their norms."""
        for parameter, part in self.parameters.parts(self.optimizer):
            for name, values in part.states.items():
                if name != "param" and values.numel() > 1:
                    for piece in self.parameters.pieces(parameter, values, part.start):
                        site = Site(Stage.OPTIMIZER_STATE, piece.name, name)
                        yield site, norm_without_nan(piece.values)

    def _before_update(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of what an update changes: weights and master copies of them."""
        copies = {
            (id(parameter), "weight"): parameter.detach().clone()
            for parameter in self.parameters.parameters
        }
        for parameter, part in self.parameters.parts(self.optimizer):
            if "param" in part.states:
                copies[id(parameter), "param"] = part.states["param"].detach().clone()
        return copies


def _unwrapped(chunk: Any) -> Any:
    """A model chunk without what is around it, Megatron-FSDP's inner wrapper included."""
    from megatron.training.checkpointing import unwrap_model  # Its name in every version.

    chunk = unwrap_model(chunk)
    while is_megatron_fsdp(chunk):
        chunk = unwrap_model(chunk.module)
    return chunk


def _again(source: Iterator[Any], taken: list[Any]) -> Iterator[Any]:
    """The micro batches that were taken, then further ones, which are taken too; each a copy."""
    for batch in tuple(taken):
        yield copy(batch)
    for batch in source:
        taken.append(batch)
        yield copy(batch)


@contextmanager
def _replayed(data: Any) -> Iterator[Callable[[], None]]:
    """Let data iterators give the same micro batches again, once what is yielded is called."""
    iterators = [one for one in (data if isinstance(data, list) else [data]) if one is not None]
    sources: list[tuple[Any, Any, list[Any]]] = [(one, one.iterable, []) for one in iterators]

    def rewind() -> None:
        for one, source, taken in sources:
            one.iterable = _again(source, taken)

    rewind()
    try:
        yield rewind
    finally:
        for one, source, _ in sources:
            one.iterable = source


PATCH = Patch(
    name="capture",
    reason="Megatron writes no tensors that could be compared with those of another layout",
    needed=lambda context: variables.CAPTURE in os.environ,
    replacements=(
        Replacement("megatron.training.training:train_step", _capturing),
        Replacement("megatron.training.training:load_checkpoint", _noting_initial),
    ),
)

"""One captured iteration, around Megatron's own `train_step`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_patches.capture.norm import NormMembership
from megatron_patches.capture.parameters import ParameterMap, optimizer_part
from megatron_patches.capture.perturb import Snapshot, perturb
from megatron_patches.capture.probes import LOSS, MODEL, Probes
from megatron_patches.capture.rank import captured_rank, module_names
from megatron_patches.capture.routing import watched_routing
from megatron_patches.capture.start import Start, gather_weights
from megatron_patches.registry import Patch, Replacement
from tools.capture.sinks import Recording, Responding, Sink, StoredTensors, forced_tensors
from tools.records.capture import (
    BUFFER,
    COUNTED,
    COUNTS,
    EARLIER,
    RATE_SLOTS,
    RESPONSES_FILE,
    UNOBSERVED_FILE,
    UPDATE,
    CaptureWriter,
    Site,
    Stage,
)
from tools.spec import variables

SCHEDULE = "schedule"
"""Name of the learning rate's schedule among the modules."""
_RATES = dict(zip(("lr", "weight_decay"), RATE_SLOTS, strict=True))
"""Keys of a parameter group, and their slots."""


class _Batches:
    """The micro batches that an iteration takes, and the same again."""

    def __init__(self, iterator: Any) -> None:
        self.source, self._position = iterator, 0
        self._taken: list[Any] = []

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._taken):
            self._taken.append(next(self.source))
        batch = self._taken[self._position]
        self._position += 1
        return dict(batch) if isinstance(batch, dict) else batch

    def rewind(self) -> None:
        self._position = 0


def _capturing(original: Callable[..., Any]) -> Callable[..., Any]:
    wanted = int(os.environ.get(variables.CAPTURE_ITERATION, "1"))
    watch: list[_StepWatch] = []

    @functools.wraps(original)
    def train_step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        iteration = get_args().curr_iteration + 1
        if iteration > wanted:
            return original(forward_step, data, model, *args, **kwargs)
        if not watch:
            watch.append(_StepWatch(model))
        if _seeds() > 0:  # A reference; of it alone it is asked how far updates reach.
            watch[0].start.follow(args[0])
        if iteration < wanted:
            if drift := os.environ.get(variables.CAPTURE_DRIFT):
                perturb(watch[0].parameters, f"{drift} {iteration}")
            # What a router chose otherwise is in the optimizer's state.
            with watch[0].routing(watch[0].recording, f"{EARLIER}{iteration} "):
                return original(forward_step, data, model, *args, **kwargs)
        call = functools.partial(_call, original, forward_step, data, model, args, kwargs)
        return _capture(watch[0], call, data, args[0], args[1])

    return train_step


def _seeds() -> int:
    return int(os.environ.get(variables.CAPTURE_SEEDS, "0"))


class _StepWatch:
    """A rank's model and the folder that takes its tensors."""

    def __init__(self, model: Any) -> None:
        self.model = list(model)
        self.folder = Path(os.environ[variables.CAPTURE]) / f"rank-{torch.distributed.get_rank()}"
        self.chunks = [_unwrapped(chunk) for chunk in model]
        self.names = module_names(self.chunks)
        self.writer = CaptureWriter(self.folder)
        forced = os.environ.get(variables.CAPTURE_FORCED)
        given = forced_tensors(Path(forced) / self.folder.name) if forced else None
        self.recording = Recording(self.writer, given)
        self.parameters = ParameterMap(self.chunks, self.names)
        self.start = Start(self.parameters)

    def routing(self, sink: Sink, earlier: str = "") -> AbstractContextManager[None]:
        """Hand what routers choose in one iteration to the sink."""
        return watched_routing(self.chunks, self.names, sink, earlier)


def _unwrapped(chunk: Any) -> Any:
    """A model chunk without what is around it, Megatron-FSDP's inner wrapper included."""
    from megatron.core.utils import unwrap_model

    chunk = unwrap_model(chunk)
    while hasattr(chunk, "param_and_grad_buffer"):
        chunk = unwrap_model(chunk.module)
    return chunk


def _call(
    original: Callable[..., Any],
    forward_step: Any,
    data: Any,
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrapped: Callable[[Any], Any],
) -> Any:
    return original(wrapped(forward_step), data, model, *args, **kwargs)


def _capture(watch: _StepWatch, call: Any, data: Any, optimizer: Any, scheduler: Any) -> Any:
    """Run the iteration, writing its tensors; then again with changed weights, if that is asked for."""
    seeds = _seeds()
    parameters = watch.parameters
    gather_weights(watch.model)
    watch.start.write(watch.recording, optimizer)
    again = seeds > 0 or _has_twin(watch)
    snapshot = Snapshot(watch.chunks, optimizer, scheduler) if again else None
    carried = list(_carried(parameters, optimizer)) if seeds else []
    _write_schedule(watch.recording, parameters, optimizer, scheduler)
    with _replayed(data) as batches:
        answer, groups = _run(watch, call, watch.recording, optimizer)
        watch.writer.flush()
        if snapshot is not None:
            responding = Responding(StoredTensors(watch.folder, watch.writer.records))
            for seed in range(max(seeds, 1)):
                snapshot.restore()
                if seeds:
                    perturb(parameters, str(seed))
                for one in batches:
                    one.rewind()
                _run(watch, call, responding, optimizer, observed=seeds > 0)
            responding.carry(carried)
            file = RESPONSES_FILE if seeds else UNOBSERVED_FILE
            (watch.folder / file).write_text(json.dumps(responding.responses))
    watch.writer.close(captured_rank(watch.chunks, watch.names, parameters, groups, optimizer))
    return answer


def _has_twin(watch: _StepWatch) -> bool:
    """Whether the iteration is repeated without probes, which copy what a later call may overwrite.

    Not with another run's tensors, nor under Megatron-FSDP, whose flat buffers cannot be put back.
    """
    other = (variables.CAPTURE_FORCED, variables.CAPTURE_DRIFT)
    flat = any(hasattr(chunk, "param_and_grad_buffer") for chunk in watch.model)
    return not flat and not any(os.environ.get(name) for name in other)


def _run(
    watch: _StepWatch, call: Any, sink: Sink, optimizer: Any, observed: bool = True
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """What the iteration returns, and the groups of ranks over which norms were summed."""
    parameters = watch.parameters
    probes = Probes(watch.chunks, watch.names, sink) if observed else None
    norms: list[Any] = []
    membership = NormMembership(parameters, optimizer)
    step = optimizer.step
    before = _before_update(parameters, optimizer)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        _write_gradients(sink, parameters, optimizer)
        stepped = step(*args, **kwargs)
        for number, norm in enumerate((stepped[1], *norms)):
            slot = f"used for clipping, call {number}" if number else "returned"
            # Where nothing is clipped some of Megatron's optimizers compute no norm, and return 0.
            computed = norm is not None and (bool(norms) or float(norm) > 0)
            if computed:
                sink.write(
                    Site(Stage.NORM, "grad_norm", slot), torch.tensor([float(norm)]).double()
                )
        for ranks, piece in membership.pieces():
            slot = COUNTED + " ".join(map(str, ranks))
            sink.write_piece(Site(Stage.NORM, piece.name, slot), piece)
        return stepped

    optimizer.step = stepping
    try:
        with (
            _reporting(sink, parameters, norms, membership),
            _counting(watch, sink),
            watch.routing(sink),
        ):
            watched = (
                functools.partial(_watched, sink, probes, watch.chunks) if probes else _as_it_is
            )
            answer = call(watched)
    finally:
        optimizer.step = step
        if probes:
            probes.remove()
    gather_weights(watch.model)
    _write_states(sink, parameters, optimizer, before)
    return answer, membership.groups


@contextmanager
def _reporting(
    sink: Sink, parameters: ParameterMap, norms: list[Any], membership: NormMembership
) -> Iterator[None]:
    """Let Megatron's reduction report to the sink, its norm to `membership`, its clipping to `norms`.

    Only now, not with the patches: what PATCH_FILE= puts around these functions must come after the
    report.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import optimizer

    start, clip = _ParamAndGradBucketGroup.start_grad_sync, optimizer.clip_grad_by_total_norm_fp32
    norm = optimizer.get_grad_norm_fp32
    _ParamAndGradBucketGroup.start_grad_sync = _local_gradients(start, sink, parameters)
    optimizer.clip_grad_by_total_norm_fp32 = _noting_norms(clip, norms)
    optimizer.get_grad_norm_fp32 = membership.noting(norm)
    try:
        yield
    finally:
        _ParamAndGradBucketGroup.start_grad_sync = start
        optimizer.clip_grad_by_total_norm_fp32 = clip
        optimizer.get_grad_norm_fp32 = norm


@contextmanager
def _counting(watch: _StepWatch, sink: Sink) -> Iterator[None]:
    """Write how many tokens routers gave each expert, before Megatron's last reduction resets it."""
    config = watch.chunks[0].config
    original = config.finalize_model_grads_func

    @functools.wraps(original)
    def finalize(*args: Any, **kwargs: Any) -> Any:
        for chunk, names in zip(watch.chunks, watch.names, strict=True):
            for own, module in chunk.named_modules():
                counts = getattr(module, "local_tokens_per_expert", None)
                if isinstance(counts, torch.Tensor):
                    sink.write(Site(Stage.OUTPUTS, names[own], COUNTS), counts)
        return original(*args, **kwargs)

    config.finalize_model_grads_func = finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = original


def _as_it_is(forward_step: Any) -> Any:
    return forward_step


def _watched(
    sink: Sink, probes: Probes, chunks: list[torch.nn.Module], forward_step: Callable[..., Any]
) -> Callable[..., Any]:
    """Megatron's forward step, which says when a micro batch begins and what its loss is."""

    @functools.wraps(forward_step)
    def watched(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        sink.begin_micro_batch()
        micro_batch = probes.begin_micro_batch(chunks.index(_unwrapped(model)))
        output, loss = forward_step(data, model, *args, **kwargs)

        @functools.wraps(loss)
        def loss_of(*tensors: Any, **named: Any) -> Any:
            answer = loss(*tensors, **named)
            for index, value in enumerate(answer[:2] if len(answer) == 3 else answer[:1]):
                slot = "tokens" if index else "sum"
                site = Site(Stage.LOSS, LOSS, slot, micro_batch)
                sink.write(site, value.detach().clone())
            return answer

        masks = getattr(loss, "args", ())
        for index, mask in enumerate(one for one in masks if isinstance(one, torch.Tensor)):
            sink.write(Site(Stage.INPUTS, MODEL, f"loss_mask.{index}", micro_batch), mask)
        return output, loss_of

    return watched


def _local_gradients(
    original: Callable[..., Any], sink: Sink, parameters: ParameterMap
) -> Callable[..., Any]:
    """`start_grad_sync` of a bucket group: what each rank has before anything is reduced."""
    written: set[int] = set()

    @functools.wraps(original)
    def start(group: Any, *args: Any, **kwargs: Any) -> Any:
        for bucket in group.buckets:
            for parameter in bucket.params_list:
                if parameters.places(parameter) and id(parameter) not in written:
                    written.add(id(parameter))
                    _write(sink, parameters, Stage.LOCAL_GRADIENTS, parameter, "gradient")
        return original(group, *args, **kwargs)

    return start


def _write(
    sink: Sink,
    parameters: ParameterMap,
    stage: Stage,
    parameter: torch.Tensor,
    slot: str,
    values: torch.Tensor | None = None,
    start: int | None = None,
) -> None:
    values = getattr(parameter, "main_grad", None) if values is None else values
    if values is None:
        return
    for piece in parameters.pieces(parameter, values, start):
        sink.write_piece(Site(stage, piece.name, slot), piece)


def _write_gradients(sink: Sink, parameters: ParameterMap, optimizer: Any) -> None:
    for parameter in parameters.parameters:
        part = optimizer_part(optimizer, parameter)
        if part is not None and part.gradient is not None:
            values, start = part.gradient, part.start
            _write(sink, parameters, Stage.REDUCED_GRADIENTS, parameter, "gradient", values, start)


def _write_states(
    sink: Sink, parameters: ParameterMap, optimizer: Any, before: dict[tuple[int, str], Any]
) -> None:
    for parameter in parameters.parameters:
        part = optimizer_part(optimizer, parameter)
        for name, values in (part.states if part else {}).items():
            start = part.start if part else None
            if values.numel() > 1 or parameter.numel() == 1:
                _write(sink, parameters, Stage.OPTIMIZER_STATE, parameter, name, values, start)
            else:  # The number of steps.
                site = Site(Stage.OPTIMIZER_STATE, parameters.name(parameter), name)
                sink.write(site, values.detach().reshape(1).double())
            old = before.get((id(parameter), name))
            if old is not None:
                slot, moved = f"{name} {UPDATE}", values.detach().float() - old.float()
                _write(sink, parameters, Stage.OPTIMIZER_STATE, parameter, slot, moved, start)
    for parameter in parameters.parameters:
        moved = parameter.detach().float() - before[id(parameter), "weight"].float()
        _write(sink, parameters, Stage.WEIGHTS, parameter, UPDATE, moved)
        _write(sink, parameters, Stage.WEIGHTS, parameter, "weight", parameter.data)
    for buffer in parameters.buffers:
        _write(sink, parameters, Stage.WEIGHTS, buffer, BUFFER, buffer)


def _write_schedule(
    sink: Recording, parameters: ParameterMap, optimizer: Any, scheduler: Any
) -> None:
    """What this iteration's update is made with: a resumed run must have it again, and every rank."""
    steps = Site(Stage.OPTIMIZER_STATE, SCHEDULE, "steps")
    sink.write(steps, torch.tensor([scheduler.num_steps]))
    for parameter in parameters.parameters:
        part = optimizer_part(optimizer, parameter)
        if part is None:
            continue
        for key, slot in _RATES.items():
            site = Site(Stage.OPTIMIZER_STATE, parameters.name(parameter), slot)
            sink.write(site, torch.tensor([float(part.group[key])]).double())


def _carried(parameters: ParameterMap, optimizer: Any) -> Iterator[tuple[Site, float]]:
    """States that earlier iterations left, with their norms."""
    for parameter in parameters.parameters:
        part = optimizer_part(optimizer, parameter)
        for name, values in (part.states if part else {}).items():
            if part and name != "param" and values.numel() > 1:
                for piece in parameters.pieces(parameter, values, part.start):
                    size = torch.linalg.vector_norm(piece.values.double().nan_to_num())
                    yield Site(Stage.OPTIMIZER_STATE, piece.name, name), float(size)


def _before_update(parameters: ParameterMap, optimizer: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Copies of what an update changes: weights and master copies of them."""
    copies = {}
    for parameter in parameters.parameters:
        copies[id(parameter), "weight"] = parameter.detach().clone()
        part = optimizer_part(optimizer, parameter)
        master = part.states.get("param") if part else None
        if master is not None:
            copies[id(parameter), "param"] = master.detach().clone()
    return copies


def _noting_norms(original: Callable[..., Any], norms: list[Any]) -> Callable[..., Any]:
    """`clip_grad_by_total_norm_fp32`: which norm each group of parameters is clipped by."""

    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        norms.append(total_norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


@contextmanager
def _replayed(data: Any) -> Iterator[list[_Batches]]:
    """Let the iteration's data iterators give the same micro batches again."""
    iterators = [one for one in (data if isinstance(data, list) else [data]) if one is not None]
    batches = [_Batches(one.iterable) for one in iterators]
    for one, batch in zip(iterators, batches, strict=True):
        one.iterable = batch
    try:
        yield batches
    finally:
        for one, batch in zip(iterators, batches, strict=True):
            one.iterable = batch.source


PATCH = Patch(
    name="capture",
    reason="Megatron writes no tensors that could be compared with those of another layout",
    needed=lambda context: variables.CAPTURE in os.environ,
    replacements=(Replacement("megatron.training.training:train_step", _capturing),),
)

"""Pipelines: PyTorch's own schedules, and PipeDream's, which PyTorch does not have.

`ScheduledPipeline` runs GPipe, 1F1B and interleaved 1F1B of `torch.distributed.pipelining`.
`StashingPipeline` runs 1F1B without flushes: each batch takes one version of the weights through a
stage, forward and backward, while updates make newer ones (PipeDream, arXiv:1806.03377 section 3.3;
with two versions PipeDream-2BW, with flushes PipeDream-Flush, arXiv:2006.09503 section 3). A stage is
one rank; only the last one knows the loss.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from parakit.config.strategy import PipelineSchedule
from parakit.native.batches import MicroBatch
from parakit.native.engines import Engine, Update, install_recorder
from parakit.native.model import GPT, mean_loss
from parakit.native.optimizer import build_adamw, clip_gradients, learning_rate
from parakit.native.parallel import COPIES_ATTRIBUTE, RankLayout
from parakit.native.settings import Settings

_SENDS_LEFT_OPEN = 2
"""A neighbour is at most two micro batches behind, so waiting for older messages never blocks."""


class StageModules(nn.ModuleList):
    """A rank's stages, first to last."""

    weight_versions: Sequence[Sequence[Tensor]] = ()
    """Buffers of all versions of the weights that are kept, where the ledger finds them."""


def cut_into_stages(model: GPT, settings: Settings, ranks: RankLayout) -> StageModules:
    """This rank's stages of a whole model, first to last; `model` is not usable after.

    Parameters know how many ranks hold them, so that a gradient's norm counts each once.
    """
    virtual = settings.num_virtual_stages_per_pipeline_rank
    count = ranks.pipeline_size * virtual
    chunks = [deepcopy(model) for _ in range(virtual - 1)] + [model]
    for place, chunk in enumerate(chunks):
        chunk.keep_stage(place * ranks.pipeline_size + ranks.pipeline_rank, count)
    stages = StageModules(chunks)
    for parameter in stages.parameters():
        setattr(parameter, COPIES_ATTRIBUTE, 1)
    if (tied := find_tied_matrix(stages)) is not None:
        setattr(tied, COPIES_ATTRIBUTE, 2)
    return stages


def build_pipeline_engine(stages: StageModules, settings: Settings, ranks: RankLayout) -> Engine:
    """The engine of `--pipeline-schedule`; every rank must call it."""
    schedule = PipelineSchedule(settings.pipeline_schedule)
    if schedule.is_asynchronous or schedule is PipelineSchedule.PIPEDREAM_FLUSH:
        return StashingPipeline(stages, settings, ranks)
    return ScheduledPipeline(stages, settings, ranks)


def find_tied_matrix(stages: StageModules) -> nn.Parameter | None:
    """This rank's copy of a tied embedding; None where it has none."""
    for stage in stages:
        assert isinstance(stage, GPT)
        for end in (stage.word_embeddings, stage.output_layer):
            if stage.is_tied and end is not None:
                assert isinstance(end.weight, nn.Parameter)
                return end.weight
    return None


class _Pipeline:
    """What both kinds share: the optimizer, the tied matrix, and forward passes alone."""

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        self._stages, self._settings, self._ranks = stages, settings, ranks
        # The first and the last stage, which hold a tied matrix; None on the others.
        ends = [0, ranks.world_size - 1]
        group = dist.new_group(ends, group_desc="EMBEDDING_GROUP")
        self._ends = group if isinstance(group, dist.ProcessGroup) else None
        self._ledger = install_recorder()
        self.optimizer: torch.optim.Optimizer = build_adamw(stages.parameters(), settings)
        self._first = ranks.pipeline_rank == 0
        self._last = ranks.pipeline_rank == ranks.pipeline_size - 1

    def logits(self, tokens: Tensor) -> Tensor:
        """All of the vocabulary, on every rank."""
        shape = (*tokens.shape, self._settings.padded_vocabulary)
        x = tokens
        self._stages.eval()
        with torch.no_grad(), self._autocast():
            for place, stage in enumerate(self._stages):
                if place > 0 or not self._first:
                    x = _hidden(tokens, self._settings)
                    dist.recv(x, self._neighbour(-1))
                x = stage(x)
                if place < len(self._stages) - 1 or not self._last:
                    dist.send(x, self._neighbour(1))
        self._stages.train()
        found = x.float() if self._last else torch.empty(shape, device=tokens.device)
        dist.broadcast(found, self._ranks.world_size - 1)
        return found

    def _step(self, batch: int) -> Update:
        """Average a tied matrix's gradients, clip if that is wanted, and make update `batch`."""
        norm = None
        if self._ends is not None and (tied := find_tied_matrix(self._stages)) is not None:
            assert tied.grad is not None
            with self._ledger.span("embedding-grads-all-reduce"):
                dist.all_reduce(tied.grad, group=self._ends)
        with self._ledger.span("optimizer"):
            if self._settings.clip_grad > 0:
                norm = clip_gradients(self._stages.parameters(), self._settings.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._settings, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Update(norm)

    def _neighbour(self, step: int) -> int:
        return (self._ranks.pipeline_rank + step) % self._ranks.pipeline_size

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if not self._settings.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self._ranks.device.type, torch.bfloat16)


class ScheduledPipeline(_Pipeline):
    """PyTorch's schedules, which flush: every gradient is of the weights that it changes."""

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        super().__init__(stages, settings, ranks)
        # Not at the top: it loads a compiler, which other layouts need not wait for.
        from torch.distributed import pipelining

        span = self._ledger.span

        class TimedStage(pipelining.PipelineStage):
            """Reports its passes to the ledger."""

            def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
                with span("forward-compute"):
                    return super().forward_one_chunk(*args, **options)

            def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
                with span("backward-compute"):
                    return super().backward_one_chunk(*args, **options)

        count, group = len(stages) * ranks.pipeline_size, _group()
        places = range(ranks.pipeline_rank, count, ranks.pipeline_size)
        own: Any = [
            TimedStage(stage, place, count, ranks.device, group=group)
            for place, stage in zip(places, stages, strict=True)
        ]
        micro_batches = settings.global_batch_size // settings.micro_batch_size
        schedule = PipelineSchedule(settings.pipeline_schedule)
        self._schedule: Any
        if schedule is PipelineSchedule.INTERLEAVED:
            self._schedule = pipelining.ScheduleInterleaved1F1B(own, micro_batches, mean_loss)
        else:
            is_gpipe = schedule is PipelineSchedule.GPIPE
            make = pipelining.ScheduleGPipe if is_gpipe else pipelining.Schedule1F1B
            self._schedule = make(own[0], micro_batches, mean_loss)
        self._updates = 0

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients are means over the micro batches (`scale_grads`)."""
        self._ledger.begin_iteration([self._stages], self.optimizer)
        losses: list[Tensor] = []
        tokens, labels = (torch.cat(part) for part in zip(*batches, strict=True))
        with self._ledger.span("stages-send-recv"), self._autocast():
            self._schedule.step(
                *([tokens] if self._first else []),
                target=labels if self._last else None,
                losses=losses,
                return_outputs=False,
            )
        return torch.stack(losses).mean().detach().reshape(1) if losses else _no_loss(tokens)

    def update(self, learning_rate: float) -> Update:  # noqa: ARG002 - known from the number
        """One update an iteration."""
        done = self._step(self._updates)
        self._updates += 1
        self._ledger.end_step()
        return done


@dataclass
class _Flight:
    """A micro batch between its forward and its backward pass."""

    batch: int
    is_last: bool
    """Of its batch."""
    received: Tensor
    result: Tensor
    """What the stage sent on; the loss on the last one."""


class StashingPipeline(_Pipeline):
    """1F1B in which a batch keeps the weights that it began with.

    The gradient of batch n is taken at version n − staleness of the weights (0 before the pipeline is
    full) and makes version n + 1. A stage has a buffer for each version between the two.
    """

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        super().__init__(stages, settings, ranks)
        schedule = PipelineSchedule(settings.pipeline_schedule)
        stage, count = ranks.pipeline_rank, ranks.pipeline_size
        self._stage = stages[0]
        self._flushes = not schedule.is_asynchronous
        self._staleness = schedule.staleness(count, stage)
        self._lead = count - stage - 1
        """Micro batches that are begun before the first one comes back."""
        self._parameters = dict(self._stage.named_parameters())
        self._versions = [
            [p.data if not place else torch.empty_like(p.data) for p in self._parameters.values()]
            for place in range(self._staleness + 1)
        ]
        stages.weight_versions = self._versions
        self._forwards, self._backwards = _group(), _group()
        """Messages of one direction are in order; NCCL would let two directions of a pair block."""
        self._sends: dict[int, deque[tuple[dist.Work, Tensor]]] = {1: deque(), -1: deque()}
        self._weights: dict[int, dict[str, Tensor]] = {}
        """By batch in flight: its version, with the batch's gradients."""
        self._in_flight: deque[_Flight] = deque()
        self._begun = self._updates = 0
        self._update = Update()

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The losses are those of `batches`; the gradients, without flushes, of earlier ones too."""
        self._ledger.begin_iteration([self._stages], self.optimizer)
        loss = _no_loss(batches[0][0])
        for number, micro_batch in enumerate(batches, start=1):
            self._forward(micro_batch, len(batches), is_last=number == len(batches))
            if self._last:
                loss += self._in_flight[-1].result.detach()
            if len(self._in_flight) > self._lead:
                self._backward()
        self._begun += 1
        if self._flushes or self._begun == self._settings.exit_interval:
            while self._in_flight:
                self._backward()
            self._wait_for_sends(0)
        return loss

    def update(self, learning_rate: float) -> Update:  # noqa: ARG002 - known from the batch
        """The newest update; it was made as soon as its batch had come back."""
        self._ledger.end_step()
        return self._update

    def _forward(self, micro_batch: MicroBatch, count: int, *, is_last: bool) -> None:
        tokens, labels = micro_batch
        x = tokens
        if not self._first:
            x = _hidden(tokens, self._settings)
            with self._ledger.span("forward-recv"):
                dist.recv(x, self._neighbour(-1), group=self._forwards)
            x.requires_grad_()
        if self._begun not in self._weights:
            # A version of the weights, with gradients of its own. `.data` has its own version counter,
            # so that autograd does not take an update of the parameter, which has another buffer by
            # then, for a change of this one.
            number = max(0, self._begun - self._staleness)
            assert self._updates - len(self._versions) < number <= self._updates
            held = self._versions[number % len(self._versions)]
            self._weights[self._begun] = {
                name: data.data.requires_grad_()
                for name, data in zip(self._parameters, held, strict=True)
            }
        with self._ledger.span("forward-compute"), self._autocast():
            result = functional_call(self._stage, self._weights[self._begun], (x,))
            if self._last:
                result = mean_loss(result, labels) / count
        if not self._last:
            self._send(result.detach(), 1)
        self._in_flight.append(_Flight(self._begun, is_last, x, result))

    def _backward(self) -> None:
        flight = self._in_flight.popleft()
        gradient = None
        if not self._last:
            gradient = torch.empty_like(flight.result)
            with self._ledger.span("backward-recv"):
                dist.recv(gradient, self._neighbour(1), group=self._backwards)
        with self._ledger.span("backward-compute"):
            torch.autograd.backward(flight.result, gradient)
        if not self._first:
            assert flight.received.grad is not None
            self._send(flight.received.grad, -1)
        if flight.is_last:
            # Make the version after the newest from the gradients of `batch`.
            assert flight.batch == self._updates
            for name, weight in self._weights.pop(flight.batch).items():
                self._parameters[name].grad = weight.grad
            if self._staleness:
                # The oldest version's buffer: `batch` was the last that needed it.
                newest = self._versions[(self._updates + 1) % len(self._versions)]
                for parameter, buffer in zip(self._parameters.values(), newest, strict=True):
                    parameter.data = buffer.copy_(parameter.data)
            self._updates += 1
            self._update = self._step(flight.batch)

    def _send(self, tensor: Tensor, step: int) -> None:
        group = self._forwards if step > 0 else self._backwards
        with self._ledger.span("forward-send" if step > 0 else "backward-send"):
            work = dist.isend(tensor, self._neighbour(step), group=group)
            assert work is not None
            self._sends[step].append((work, tensor))
            self._wait_for_sends(_SENDS_LEFT_OPEN)

    def _wait_for_sends(self, left_open: int) -> None:
        for sends in self._sends.values():
            while len(sends) > left_open:
                sends.popleft()[0].wait()


def _hidden(tokens: Tensor, settings: Settings) -> Tensor:
    """Room for the hidden states of a micro batch; the residual stream is fp32 under autocast too."""
    return torch.empty((*tokens.shape, settings.hidden_size), device=tokens.device)


def _no_loss(like: Tensor) -> Tensor:
    return torch.zeros(1, device=like.device)


def _group() -> dist.ProcessGroup:
    """All stages, under Megatron's name for them, which the ledger knows."""
    group = dist.new_group(group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    assert isinstance(group, dist.ProcessGroup)
    return group

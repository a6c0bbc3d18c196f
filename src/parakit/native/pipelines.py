"""Run pipeline parallelism by PyTorch's schedules, and by PipeDream's, which PyTorch does not have.

`ScheduledPipeline` runs GPipe, 1F1B and interleaved 1F1B of `torch.distributed.pipelining`. `StashingPipeline` runs
1F1B without flushes (PipeDream, arXiv:1806.03377 section 3.3). Forward and backward of a batch use one version of a
stage's weights, while updates make newer versions. With two versions this is PipeDream-2BW, and with flushes
PipeDream-Flush (arXiv:2006.09503 section 3). Every rank is one position in the pipeline, and only the last rank knows
the loss.
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

PREVIOUS_STAGE, NEXT_STAGE = -1, +1
_MAX_OPEN_SENDS = 2
"""Number of sends per direction that may be unfinished.

A neighbour is at most two micro batches behind, so waiting for an older send never blocks.
"""


class StageModules(nn.ModuleList):
    """Stages of one rank, from the first to the last."""

    weight_versions: Sequence[Sequence[Tensor]] = ()
    """Buffers of all versions of the weights, for the memory accounting; empty with one version."""


def cut_into_stages(model: GPT, settings: Settings, ranks: RankLayout) -> StageModules:
    """Return this rank's stages of a full model, from the first to the last.

    `model` becomes one of the stages and must not be used any more. The parameters get the attribute
    COPIES_ATTRIBUTE, the number of ranks that hold copies, so that the gradient norm counts each parameter
    once.
    """
    stages_per_rank = settings.num_virtual_stages_per_pipeline_rank
    num_stages = ranks.pipeline_size * stages_per_rank
    chunks = [deepcopy(model) for _ in range(stages_per_rank - 1)] + [model]
    for index, chunk in enumerate(chunks):
        # The stages are dealt to the ranks in turn.
        stage = index * ranks.pipeline_size + ranks.pipeline_rank
        chunk.keep_stage(stage, num_stages)
    stages = StageModules(chunks)
    for parameter in stages.parameters():
        setattr(parameter, COPIES_ATTRIBUTE, 1)
    tied_matrix = find_tied_matrix(stages)
    if tied_matrix is not None:
        # The first and the last rank hold the tied matrix.
        setattr(tied_matrix, COPIES_ATTRIBUTE, 2)
    return stages


def build_pipeline_engine(stages: StageModules, settings: Settings, ranks: RankLayout) -> Engine:
    """Return the engine of `--pipeline-schedule`; every rank must call this function."""
    schedule = PipelineSchedule(settings.pipeline_schedule)
    if schedule.is_asynchronous or schedule is PipelineSchedule.PIPEDREAM_FLUSH:
        return StashingPipeline(stages, settings, ranks)
    return ScheduledPipeline(stages, settings, ranks)


def find_tied_matrix(stages: StageModules) -> nn.Parameter | None:
    """Return this rank's copy of the tied embedding matrix.

    None means that the matrix is not tied, or that this rank has neither the first nor the last stage.
    """
    for stage in stages:
        assert isinstance(stage, GPT)
        for module in (stage.word_embeddings, stage.output_layer):
            if stage.is_tied and module is not None:
                assert isinstance(module.weight, nn.Parameter)
                return module.weight
    return None


class _Pipeline:
    """Base class of both pipeline engines. It has the optimizer, the tied matrix, and forward passes for evaluation."""

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        self._stages, self._settings, self._ranks = stages, settings, ranks
        # Group of the first and the last rank, which both hold a tied matrix; None on other ranks.
        end_ranks = [0, ranks.world_size - 1]
        group = dist.new_group(end_ranks, group_desc="EMBEDDING_GROUP")
        self._embedding_group = group if isinstance(group, dist.ProcessGroup) else None
        self._recorder = install_recorder()
        self.optimizer: torch.optim.Optimizer = build_adamw(stages.parameters(), settings)
        self._is_first = ranks.pipeline_rank == 0
        self._is_last = ranks.pipeline_rank == ranks.pipeline_size - 1

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, sequence, padded vocabulary] in fp32, on every rank."""
        hidden = tokens
        last_index = len(self._stages) - 1
        self._stages.eval()
        with torch.no_grad(), self._autocast():
            for index, stage in enumerate(self._stages):
                is_first_of_model = self._is_first and index == 0
                is_last_of_model = self._is_last and index == last_index
                if not is_first_of_model:
                    hidden = _empty_hidden_states(tokens, self._settings)
                    dist.recv(hidden, self._neighbour(PREVIOUS_STAGE))
                hidden = stage(hidden)
                if not is_last_of_model:
                    dist.send(hidden, self._neighbour(NEXT_STAGE))
        self._stages.train()
        if self._is_last:
            logits = hidden.float()
        else:
            shape = (*tokens.shape, self._settings.padded_vocabulary)
            logits = torch.empty(shape, device=tokens.device)
        last_rank = self._ranks.world_size - 1
        dist.broadcast(logits, last_rank)
        return logits

    def _run_optimizer(self, batch: int) -> Update:
        """Make the update of batch number `batch`.

        Before it, the gradient of a tied matrix is summed over the first and the last rank, and gradients are
        clipped.
        """
        norm = None
        tied_matrix = find_tied_matrix(self._stages)
        if self._embedding_group is not None and tied_matrix is not None:
            assert tied_matrix.grad is not None
            with self._recorder.span("embedding-grads-all-reduce"):
                dist.all_reduce(tied_matrix.grad, group=self._embedding_group)
        with self._recorder.span("optimizer"):
            if self._settings.clip_grad > 0:
                norm = clip_gradients(self._stages.parameters(), self._settings.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._settings, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Update(norm)

    def _neighbour(self, step: int) -> int:
        """Return the rank of the previous or the next stage; the last stage's next is the first."""
        return (self._ranks.pipeline_rank + step) % self._ranks.pipeline_size

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for products in bf16; fp32 needs none."""
        if not self._settings.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self._ranks.device.type, torch.bfloat16)


class ScheduledPipeline(_Pipeline):
    """Engine with PyTorch's pipeline schedules. They flush, so each gradient is computed at the weights that it
    updates.
    """

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        super().__init__(stages, settings, ranks)
        # This import loads a compiler, so it is not at the top: runs without a pipeline need not wait.
        from torch.distributed import pipelining

        span = self._recorder.span

        class TimedStage(pipelining.PipelineStage):
            """Stage that reports its passes to the recorder."""

            def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
                with span("forward-compute"):
                    return super().forward_one_chunk(*args, **options)

            def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
                with span("backward-compute"):
                    return super().backward_one_chunk(*args, **options)

        num_stages = len(stages) * ranks.pipeline_size
        group = _make_pipeline_group()
        # A rank has every n-th stage, where n is the number of ranks.
        stage_indices = range(ranks.pipeline_rank, num_stages, ranks.pipeline_size)
        timed_stages: list[Any] = []
        for index, stage in zip(stage_indices, stages, strict=True):
            timed_stages.append(TimedStage(stage, index, num_stages, ranks.device, group=group))
        self._schedule = _build_schedule(settings, timed_stages)
        self._updates = 0

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run the schedule on all micro batches. Return the mean loss, [1], on the last rank, and 0 on other ranks.

        The schedule divides the gradients by the number of micro batches (`scale_grads`).
        """
        self._recorder.begin_iteration([self._stages], self.optimizer)
        tokens, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        # Only the first rank has an input, and only the last rank compares the output with the labels.
        inputs = (tokens,) if self._is_first else ()
        target = labels if self._is_last else None
        losses: list[Tensor] = []  # The schedule fills the list on the last rank.
        with self._recorder.span("stages-send-recv"), self._autocast():
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if not losses:
            return _zero_loss(tokens)
        return torch.stack(losses).mean().detach().reshape(1)

    def update(self, learning_rate: float) -> Update:  # noqa: ARG002 - known from the number
        """Run the optimizer's step; the learning rate follows from the number of updates."""
        update = self._run_optimizer(self._updates)
        self._updates += 1
        self._recorder.end_step()
        return update


def _build_schedule(settings: Settings, stages: list[Any]) -> Any:
    """Return PyTorch's schedule of the run. Only under interleaved 1F1B does a rank have several stages."""
    from torch.distributed import pipelining

    micro_batches = settings.global_batch_size // settings.micro_batch_size
    match PipelineSchedule(settings.pipeline_schedule):
        case PipelineSchedule.INTERLEAVED:
            return pipelining.ScheduleInterleaved1F1B(stages, micro_batches, mean_loss)
        case PipelineSchedule.GPIPE:
            return pipelining.ScheduleGPipe(stages[0], micro_batches, mean_loss)
        case _:
            return pipelining.Schedule1F1B(stages[0], micro_batches, mean_loss)


@dataclass
class _MicroBatchInFlight:
    """Micro batch between its forward and its backward pass on this stage."""

    batch: int
    """Number of the batch from 0."""
    is_last: bool
    """True for the last micro batch of its batch."""
    received: Tensor
    """Input of the stage: hidden states, or tokens on the first stage."""
    result: Tensor
    """Output that the stage has sent on; the loss on the last stage."""


class StashingPipeline(_Pipeline):
    """Engine with 1F1B in which a batch keeps the version of the weights with which it started.

    The gradient of batch n is computed at version max(0, n − staleness) of the weights, and its update makes
    version n + 1. A stage has one buffer per version, from the oldest version that is still used to the newest.
    """

    def __init__(self, stages: StageModules, settings: Settings, ranks: RankLayout) -> None:
        super().__init__(stages, settings, ranks)
        schedule = PipelineSchedule(settings.pipeline_schedule)
        stage_index, num_stages = ranks.pipeline_rank, ranks.pipeline_size
        self._stage = stages[0]
        self._has_flushes = not schedule.is_asynchronous
        self._staleness = schedule.staleness(num_stages, stage_index)
        self._warmup_micro_batches = num_stages - stage_index - 1
        """Micro batches that start before the first backward pass."""
        self._parameters = dict(self._stage.named_parameters())
        # The first version uses the parameters' own memory.
        self._versions = [[parameter.data for parameter in self._parameters.values()]]
        for _ in range(self._staleness):
            self._versions.append([torch.empty_like(data) for data in self._versions[0]])
        stages.weight_versions = self._versions
        # Each direction has its own group. In one group NCCL runs all messages of two ranks in order, so the
        # two directions could block each other.
        self._forward_group, self._backward_group = _make_pipeline_group(), _make_pipeline_group()
        self._sends: dict[int, deque[tuple[dist.Work, Tensor]]] = {
            NEXT_STAGE: deque(),
            PREVIOUS_STAGE: deque(),
        }
        """Unfinished sends by direction, each with its tensor, which must stay alive."""
        self._weights_by_batch: dict[int, dict[str, Tensor]] = {}
        """Weights of each batch in flight; their `grad` accumulates the batch's gradients."""
        self._in_flight: deque[_MicroBatchInFlight] = deque()
        self._started_batches = 0
        self._updates = 0
        self._last_update = Update()

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run the forward passes of one batch and the backward passes that are due. Return the loss of the batch, [1].

        The loss is 0 on all ranks except the last. Without flushes, some of the backward passes belong to
        earlier batches. In the last iteration of the run, all remaining backward passes are run as well.
        """
        self._recorder.begin_iteration([self._stages], self.optimizer)
        loss = _zero_loss(batches[0][0])
        for number, micro_batch in enumerate(batches, start=1):
            self._run_forward(micro_batch, len(batches), is_last=number == len(batches))
            if self._is_last:
                loss += self._in_flight[-1].result.detach()
            if len(self._in_flight) > self._warmup_micro_batches:
                self._run_backward()
        self._started_batches += 1
        if self._has_flushes or self._started_batches == self._settings.exit_interval:
            while self._in_flight:
                self._run_backward()
            self._wait_for_sends(max_open=0)
        return loss

    def update(self, learning_rate: float) -> Update:  # noqa: ARG002 - known from the batch
        """Return the newest update, which was made as soon as its batch had finished."""
        self._recorder.end_step()
        return self._last_update

    def _run_forward(self, micro_batch: MicroBatch, count: int, *, is_last: bool) -> None:
        """Run the forward pass of a micro batch, and send its output to the next stage.

        `count` is the number of micro batches of the batch, by which the last stage divides the loss. `is_last`
        is True for the last of them.
        """
        tokens, labels = micro_batch
        received = tokens
        if not self._is_first:
            received = _empty_hidden_states(tokens, self._settings)
            with self._recorder.span("forward-recv"):
                dist.recv(received, self._neighbour(PREVIOUS_STAGE), group=self._forward_group)
            received.requires_grad_()
        if self._started_batches not in self._weights_by_batch:
            self._weights_by_batch[self._started_batches] = self._take_weights()
        weights = self._weights_by_batch[self._started_batches]
        with self._recorder.span("forward-compute"), self._autocast():
            result = functional_call(self._stage, weights, (received,))
            if self._is_last:
                result = mean_loss(result, labels) / count
        if not self._is_last:
            self._send(result.detach(), NEXT_STAGE)
        self._in_flight.append(
            _MicroBatchInFlight(self._started_batches, is_last, received=received, result=result)
        )

    def _take_weights(self) -> dict[str, Tensor]:
        """Return the weights, by name, that the batch which starts now must use. Their gradients are separate."""
        version = max(0, self._started_batches - self._staleness)
        assert self._updates - len(self._versions) < version <= self._updates
        buffers = self._versions[version % len(self._versions)]
        # Autograd counts in-place changes of a tensor. An update writes to the parameter, which has another
        # buffer by then, but the count would be shared. `.data` makes a tensor with a count of its own.
        return {
            name: buffer.data.requires_grad_()
            for name, buffer in zip(self._parameters, buffers, strict=True)
        }

    def _run_backward(self) -> None:
        """Run the backward pass of the oldest micro batch in flight.

        The gradient of the stage's input is sent to the previous stage. After the last micro batch of a batch,
        the weights are updated.
        """
        micro_batch = self._in_flight.popleft()
        gradient = None
        if not self._is_last:
            gradient = torch.empty_like(micro_batch.result)
            with self._recorder.span("backward-recv"):
                dist.recv(gradient, self._neighbour(NEXT_STAGE), group=self._backward_group)
        with self._recorder.span("backward-compute"):
            torch.autograd.backward(micro_batch.result, gradient)
        if not self._is_first:
            assert micro_batch.received.grad is not None
            self._send(micro_batch.received.grad, PREVIOUS_STAGE)
        if micro_batch.is_last:
            self._make_new_version(micro_batch.batch)

    def _make_new_version(self, batch: int) -> None:
        """Make the next version of the weights from the gradients of a finished batch."""
        assert batch == self._updates
        for name, weight in self._weights_by_batch.pop(batch).items():
            self._parameters[name].grad = weight.grad
        if self._staleness:
            # The buffer of the oldest version is free now, because no later batch uses this version.
            free_buffers = self._versions[(self._updates + 1) % len(self._versions)]
            for parameter, buffer in zip(self._parameters.values(), free_buffers, strict=True):
                parameter.data = buffer.copy_(parameter.data)
        self._updates += 1
        self._last_update = self._run_optimizer(batch)

    def _send(self, tensor: Tensor, step: int) -> None:
        """Start to send a tensor, and wait for older sends if too many are open.

        `step` is NEXT_STAGE or PREVIOUS_STAGE.
        """
        is_forward = step == NEXT_STAGE
        group = self._forward_group if is_forward else self._backward_group
        with self._recorder.span("forward-send" if is_forward else "backward-send"):
            work = dist.isend(tensor, self._neighbour(step), group=group)
            assert work is not None
            self._sends[step].append((work, tensor))
            self._wait_for_sends(max_open=_MAX_OPEN_SENDS)

    def _wait_for_sends(self, *, max_open: int) -> None:
        """Wait for the oldest sends until each direction has at most `max_open` unfinished sends."""
        for sends in self._sends.values():
            while len(sends) > max_open:
                work, _ = sends.popleft()
                work.wait()


def _empty_hidden_states(tokens: Tensor, settings: Settings) -> Tensor:
    """Return an empty tensor [batch, sequence, hidden] for the hidden states of a micro batch.

    It is fp32, because the residual stream stays in fp32 under autocast.
    """
    return torch.empty((*tokens.shape, settings.hidden_size), device=tokens.device)


def _zero_loss(like: Tensor) -> Tensor:
    """Return a loss of 0, [1], on the device of `like`."""
    return torch.zeros(1, device=like.device)


def _make_pipeline_group() -> dist.ProcessGroup:
    """Return a new group of all stages with Megatron's name for it, which the recorder knows."""
    group = dist.new_group(group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    assert isinstance(group, dist.ProcessGroup)
    return group

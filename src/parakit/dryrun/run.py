"""One rank's training iteration on fake tensors: the kit's entry and Megatron's `pretrain` from start to end.

Everything between the arguments and the log line is Megatron's own: process groups, GPTModel, DDP and its buffers, the
optimizer, the schedule, finalize_model_grads, the optimizer's step.
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_patches.catalogue import PATCHES
from megatron_patches.context import find_context
from megatron_patches.ledger import wrap_timers
from megatron_patches.registry import Patch, Replacement, apply_patches
from megatron_patches.warm import read_help_once
from parakit.accounting import CallWatcher, CommunicationLog, MemoryAccounting, Span, Timeline
from parakit.artifacts.dry_run import RankJob, RankReport
from parakit.config.files import ROOT
from parakit.dryrun.patches import FAKE_PATCHES, AnswerForContents

ENTRY = ROOT / "examples" / "gpt3" / "pretrain_gpt.py"


def prepare() -> ModuleType:
    """Patch torch and Megatron, import everything that a job needs, and return the module of the training script.

    Processes that are forked later need no further imports.
    """
    context = find_context(ENTRY, "cpu")
    apply_patches((*PATCHES, *FAKE_PATCHES), context)
    # Fake tensors load this module at their first use. Loaded here, every fork has it.
    importlib.import_module("torch._dynamo")
    # The entry is imported by name, because packages of parakit import no examples.
    entry = importlib.import_module("examples.gpt3.pretrain_gpt")
    read_help_once()
    return entry


def run_rank(entry: ModuleType, job: RankJob) -> RankReport:
    """Run one training iteration as the job's rank, on fake tensors, and return the rank's report.

    The environment and `sys.argv` of this process become those of the rank, and more patches are applied.
    """
    started = time.monotonic()
    os.environ |= {
        "WORLD_SIZE": str(job.world_size),
        "RANK": str(job.rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    sys.argv = [str(ENTRY), *job.flags]
    watch = IterationWatch(job.rank)
    apply_patches((watch.patch(),), find_context(ENTRY, "cpu"))
    entry.build_datasets = _fake_data  # type: ignore[attr-defined]
    with FakeTensorMode(), AnswerForContents():  # type: ignore[no-untyped-call]
        entry.main()
    return watch.report(time.monotonic() - started)


def _fake_data(
    _: Any,
    vp_stage: int | None = None,  # noqa: ARG001 - Megatron asks for it by name
) -> tuple[Iterator[dict[str, torch.Tensor]], None, None]:
    """Return endless training data without contents, and no validation and test data.

    This function replaces `build_datasets` of the training script. It also sets Megatron's `do_train`, which rank 0
    would broadcast in a real run.
    """
    from megatron.training import get_args

    arguments = get_args()
    arguments.do_train = True
    batch, length = arguments.micro_batch_size, arguments.seq_length

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        """Yield micro batches without end, with the tensors, shapes and types of Megatron's GPTDataset."""
        while True:
            yield {
                "tokens": torch.zeros(batch, length, dtype=torch.int64),
                "labels": torch.zeros(batch, length, dtype=torch.int64),
                "loss_mask": torch.ones(batch, length),
                "position_ids": torch.zeros(batch, length, dtype=torch.int64),
                "attention_mask": torch.zeros(batch, 1, length, length, dtype=torch.bool),
            }

    return batches(), None, None


_fake_data.is_distributed = True  # type: ignore[attr-defined]


class IterationWatch:
    """Counter of the calls and live bytes of the only iteration."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._timeline = Timeline()
        self._calls = CommunicationLog()
        self._memory = MemoryAccounting(self._timeline)
        self._watcher = CallWatcher(self._calls, self._timeline, self._memory.note_received)
        self._spans: tuple[Span, ...] = ()
        self._parameters = 0

    def report(self, seconds: float) -> RankReport:
        """Return the report of the iteration, which took `seconds`.

        The report has the collective calls from `train_step` to the end of logging, as a real run counts them. It
        has the live bytes at the peak, and the largest number of micro batches in flight.
        """
        steps = {"forward-compute": 1, "backward-compute": -1}
        assert self._memory.result is not None
        return RankReport(
            rank=self._rank,
            parameters=self._parameters,
            communication=self._calls.steady_communication(self._rank),
            memory=self._memory.result,
            in_flight=max(accumulate(steps.get(span.name, 0) for span in self._spans), default=0),
            seconds=seconds,
            process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def patch(self) -> Patch:
        """Start to count collective calls, and return a patch of Megatron.

        With the patch, Megatron reports each phase and the end of the iteration to this watch.
        """
        self._watcher.install()
        training = "megatron.training.training"
        replaced = (
            Replacement(
                "megatron.core.timers:Timers.__call__",
                lambda original: wrap_timers(original, self._timeline),
            ),
            Replacement(f"{training}:train_step", self._watch_step),
            Replacement(f"{training}:checkpoint_and_decide_exit", self._end_iteration),
        )
        reason = "one iteration is all there is"
        return Patch("dry_run_ledger", reason, lambda context: True, replaced)

    def _watch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of Megatron's `train_step`, which measures each call of `original`.

        The collective calls and the bytes of live tensors are recorded during the call. Before it, the optimizer makes
        one step.
        """

        @functools.wraps(original)
        def train_step(
            forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # A first step on empty gradients creates Adam's state, which every iteration but the first has.
            optimizer.step()
            self._parameters = sum(p.numel() for chunk in model for p in chunk.parameters())
            self._calls.drop_calls()
            self._timeline.start_keeping_spans()
            self._memory.start(self._rank, 1, model, optimizer)
            try:
                return original(forward, data, model, optimizer, *args, **kwargs)
            finally:
                self._memory.stop()

        return train_step

    def _end_iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `checkpoint_and_decide_exit` that ends the counting before it calls `original`."""

        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            phases = self._timeline.take_phase_nanoseconds()
            self._calls.end_iteration(phases, self._timeline.clock)
            self._spans = self._timeline.take_spans()
            return original(*args, **kwargs)

        return checkpoint_and_decide_exit

"""One rank's iteration: the kit's entry and Megatron's `pretrain`, start to end, on fake tensors.

Everything between the arguments and the log line is Megatron's own: process groups, GPTModel, DDP and
its buffers, the optimizer, the schedule, finalize_model_grads, the optimizer's step.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_patches.catalogue import PATCHES
from megatron_patches.context import find_context
from megatron_patches.registry import apply_patches
from tools.plan.dryrun.job import Job, RankReport
from tools.plan.dryrun.rank.contents import AnswerForContents
from tools.plan.dryrun.rank.experts import EVEN_ROUTING
from tools.plan.dryrun.rank.patches import FAKE_PATCHES
from tools.plan.dryrun.rank.watch import IterationWatch
from tools.spec.files import ROOT

ENTRY = ROOT / "examples" / "gpt3" / "pretrain_gpt.py"


def prepare() -> ModuleType:
    """Patch and import everything once; return the entry."""
    context = find_context(ENTRY, "cpu")
    apply_patches((*PATCHES, *FAKE_PATCHES, EVEN_ROUTING), context)
    spec = importlib.util.spec_from_file_location("kit_entry", ENTRY)
    assert spec is not None
    assert spec.loader is not None
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    return entry


def run_rank(entry: ModuleType, job: Job) -> RankReport:
    """Be one rank of the job's world for one iteration."""
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
    with FakeTensorMode(), AnswerForContents():
        entry.main()
    return RankReport(
        rank=job.rank,
        parameters=watch.parameters,
        communication=watch.communication,
        memory=watch.held,
        in_flight=watch.in_flight,
        seconds=time.monotonic() - started,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _fake_data(
    _: Any,
    vp_stage: int | None = None,  # noqa: ARG001 - Megatron asks for it by name
) -> tuple[Iterator[dict[str, torch.Tensor]], None, None]:
    """Instead of the entry's data sets; Megatron broadcasts who trains, which nobody hears here."""
    from megatron.training import get_args

    arguments = get_args()
    arguments.do_train = True
    return _batches(arguments), None, None


_fake_data.is_distributed = True  # type: ignore[attr-defined]


def _batches(arguments: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Micro batches as GPTDataset's collated ones: tensors of [micro batch, sequence]."""
    batch, length = arguments.micro_batch_size, arguments.seq_length
    while True:
        yield {
            "tokens": torch.zeros(batch, length, dtype=torch.int64),
            "labels": torch.zeros(batch, length, dtype=torch.int64),
            "loss_mask": torch.ones(batch, length),
            "position_ids": torch.zeros(batch, length, dtype=torch.int64),
            "attention_mask": torch.zeros(batch, 1, length, length, dtype=torch.bool),
        }

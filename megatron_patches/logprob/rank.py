"""Score tokens with the trainer's own model and data, in place of the first training step.

Target: `train_step`. Megatron trains and does not report the log probability of each token; without the patch,
`make verify-logprob` would have no log probabilities of the training side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_patches.logprob.capture import capture_forward
from megatron_patches.logprob.explain import explain_gap
from megatron_patches.logprob.generate import score_generated
from megatron_patches.logprob.scorer import Scorer
from megatron_patches.registry import Patch, Replacement, wrap_original
from parakit.config import variables
from parakit.logprob import Task, read_request


@wrap_original
def _score_and_exit(
    original: Callable[..., Any],  # noqa: ARG001 - nothing is trained
    forward_step: Any,
    data: Any,
    model: Any,
    optimizer: Any,
    *args: Any,  # noqa: ARG001
    **kwargs: Any,  # noqa: ARG001
) -> None:
    """Do what the request asks for, and end the process with exit code 0."""
    request = read_request(Path(os.environ[variables.LOGPROB]))
    scorer = Scorer(forward_step, data, list(model), optimizer)
    if request.sequences and request.task is not Task.GENERATE:
        scorer.use_sequences(np.load(request.sequences))
    match request.task:
        case Task.CAPTURE:
            capture_forward(scorer, Path(request.folder), request.num_probes)
        case Task.EXPLAIN:
            explain_gap(scorer, request)
        case Task.GENERATE:
            score_generated(scorer, request)
    torch.distributed.barrier()
    sys.exit(0)


PATCH = Patch(
    name="logprob",
    reason="Megatron does not report the log probability of each token",
    needed=lambda _: variables.LOGPROB in os.environ,
    replacements=(Replacement("megatron.training.training:train_step", _score_and_exit),),
)
"""Score tokens in place of training, as the file that `KIT_LOGPROB` names asks for."""

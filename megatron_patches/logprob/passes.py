"""One forward pass on one rank, with edits of the model's inputs, logits and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_patches.logprob.scorer import Scorer

Inputs = dict[str, Any]
"""Arguments of the model by name: input_ids, position_ids, attention_mask, labels, …"""
_ARGUMENTS = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")
"""Names of the model's positional arguments. A patch file may have replaced `forward` by a function without names."""
Scores = NDArray[np.float64]
"""Log probability of each label, [sequences, positions]."""


@dataclass
class PassEdits:
    """Edits of a forward pass, which are applied in their order."""

    inputs: list[Callable[[Inputs], Inputs]] = field(default_factory=list)
    logits: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    """Functions of the logits [positions, batch, vocabulary]."""
    scores: list[Callable[[Scores], Scores]] = field(default_factory=list)


def score_tokens(scorer: Scorer, rewind: Callable[[], None], edits: PassEdits) -> Scores:
    """Run the trainer's forward passes on one rank, and return the log probability of each label.

    Args:
        scorer: The trainer's model and data, on one rank.
        rewind: Lets the data begin again.
        edits: Edits of the pass.
    """
    losses: list[Tensor] = []
    rewind()
    with _hook_model(scorer.chunks[0], edits, losses):
        scorer.run()
    scores = -torch.cat(losses).double().numpy()
    for edit in edits.scores:
        scores = edit(scores)
    return scores


@contextmanager
def _hook_model(model: Any, edits: PassEdits, losses: list[Tensor]) -> Iterator[None]:
    """Apply the edits of inputs and logits within the context, and append the loss per token of each micro batch."""

    def edit_inputs(_: Any, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[()], Inputs]:
        inputs = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        for edit in edits.inputs:
            inputs = edit(inputs)
        return (), inputs

    def edit_logits(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        for edit in edits.logits:
            logits = edit(logits)
        return logits, bias

    def keep_losses(_: Any, __: Any, output: Tensor) -> None:
        losses.append(output.detach().float().clone())

    handles = (
        model.register_forward_pre_hook(edit_inputs, with_kwargs=True),
        model.output_layer.register_forward_hook(edit_logits),
        model.register_forward_hook(keep_losses),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

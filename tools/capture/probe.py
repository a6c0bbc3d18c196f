"""A tensor of a model, and its gradient, on the way to a sink.

A probe is an autograd function that copies its input: the copy's gradient is what this module alone
contributes, while the original's may be a sum over several users. A copy, not a view, because
Megatron's pipeline schedule frees a stage's output and refuses to do that with views.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tools.records.capture import Site


class Sink(Protocol):
    """What becomes of the tensors."""

    def forward(self, site: Site, tensor: torch.Tensor) -> torch.Tensor | None:
        """Take a tensor of the forward pass; return what shall stand in its place, if anything."""

    def backward(self, site: Site, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take a gradient; return what shall stand in its place, if anything."""


def probed(
    tensor: torch.Tensor, value: torch.Tensor | None, sink: Sink, gradient: Site
) -> torch.Tensor:
    """A copy of a tensor, or of `value` in its place, whose gradient goes to the sink as `gradient`."""
    copied: torch.Tensor = _Probe.apply(tensor, value, sink, gradient)
    return copied


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, value: torch.Tensor | None, sink: Sink, site: Site
    ) -> torch.Tensor:
        context.sink, context.site = sink, site
        return (tensor if value is None else value).clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        replaced = context.sink.backward(context.site, gradient)
        return (gradient if replaced is None else replaced), None, None, None

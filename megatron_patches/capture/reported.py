"""Keep the sums of auxiliary losses that Megatron prints unchanged while an iteration is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch


@contextmanager
def preserve_reported_losses() -> Iterator[None]:
    """Restore Megatron's sums of auxiliary, z and MTP losses at the end of the `with` block.

    Every forward pass adds to these sums, and the log prints them at the end of the iteration. Passes inside
    the block repeat an iteration for the capture, so their losses must not be printed.
    """
    saved_sums = [(values, values.clone()) for values in _list_sums()]
    yield
    for values, saved in saved_sums:
        values.copy_(saved)


def _list_sums() -> Iterator[torch.Tensor]:
    """Yield the tensors that routers and MTP layers add their losses to."""
    for entry in (*_list_entries_of_routers(), *_list_entries_of_mtp()):
        fields = entry if isinstance(entry, dict) else vars(entry)
        yield from (value for value in fields.values() if isinstance(value, torch.Tensor))


def _list_entries_of_routers() -> list[Any]:
    """Return an entry for each loss that routers have reported so far."""
    # From 0.19 on Megatron has a tracker for these losses. Before, it had a dictionary, which commits before 3b85d982d5
    # (core 0.13) return from parallel_state and later ones from moe_utils.
    with suppress(ImportError):
        logging = import_module("megatron.core.transformer.moe.moe_logging")
        return list(logging.get_moe_metrics_tracker().metrics.values())
    experts = import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(experts, "get_moe_layer_wise_logging_tracker"):
        return list(experts.get_moe_layer_wise_logging_tracker().values())
    state = import_module("megatron.core.parallel_state")
    return list(state.get_moe_layer_wise_logging_tracker().values())


def _list_entries_of_mtp() -> list[Any]:
    """Return the dictionary of the losses that MTP layers have reported so far, if Megatron has MTP."""
    with suppress(ImportError):
        prediction = import_module("megatron.core.transformer.multi_token_prediction")
        return [prediction.MTPLossLoggingHelper.tracker]
    return []

import sys
from importlib import import_module

import pytest
import torch

from megatron_patches.capture.reported import preserve_reported_losses


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_losses_of_repeated_passes_are_not_reported() -> None:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = get_moe_metrics_tracker()
    ahead = torch.tensor([3.0])
    try:
        MTPLossLoggingHelper.tracker["loss_values"] = ahead
        tracker.record("load_balancing_loss", torch.tensor(2.0), layer_number=1, num_layers=2)
        with preserve_reported_losses():
            tracker.record("load_balancing_loss", torch.tensor(2.5), layer_number=1, num_layers=2)
            ahead += 4
        assert tracker.metrics["load_balancing_loss"].values.tolist() == [2.0, 0.0]
        assert ahead.item() == 3.0
    finally:
        tracker.metrics.clear()
        MTPLossLoggingHelper.tracker.clear()


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
@pytest.mark.parametrize("module", ["transformer.moe.moe_utils", "parallel_state"])
def test_losses_of_repeated_passes_are_not_reported_by_a_megatron_before_0_19(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    # Commits before core 0.13 keep the dictionary in parallel_state.
    holder = import_module(f"megatron.core.{module}")
    moe_utils = import_module("megatron.core.transformer.moe.moe_utils")
    monkeypatch.delattr(moe_utils, "get_moe_layer_wise_logging_tracker", raising=False)
    reported = {"load_balancing_loss": {"values": torch.tensor([2.0]), "reduce_group": None}}
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.moe_logging", None)
    monkeypatch.setattr(
        holder, "get_moe_layer_wise_logging_tracker", lambda: reported, raising=False
    )
    with preserve_reported_losses():
        reported["load_balancing_loss"]["values"] += 2.5
    assert reported["load_balancing_loss"]["values"].tolist() == [2.0]

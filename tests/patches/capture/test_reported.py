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

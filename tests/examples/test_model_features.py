"""What of a GPT's newer parts trains on CPU ranks, alike in every strategy."""

import pytest

from parakit.config.strategy import UNTIED
from tests.examples.runs import Trainer

ONE = "train-baseline-gpt2-tiny-1cpu"
TP2, DP2 = "train-tp2-gpt2-tiny-2cpu", "train-dp2-gpt2-tiny-2cpu"
PP2 = "train-pp2-gpt2-tiny-2cpu"
LATENT = (
    *("--multi-latent-attention", "--position-embedding-type", "rope", "--q-lora-rank", "32"),
    *("--kv-lora-rank", "16", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"),
    *("--v-head-dim", "24"),
)
SINK = ("--softmax-type", "learnable")
TOKENS_AHEAD = (
    *("--mtp-num-layers", "1", "--calculate-per-token-loss", "--position-embedding-type", "rope"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "extra"),
    [
        pytest.param(TP2, LATENT, id="latent attention"),
        pytest.param(TP2, SINK, id="attention sink"),
        pytest.param(DP2, TOKENS_AHEAD, id="tokens ahead dp2"),
        pytest.param(TP2, TOKENS_AHEAD, id="tokens ahead tp2"),
        # Tied, Megatron cannot save it (docs/upstream/ahead-with-a-second-output.md).
        pytest.param(PP2, (*TOKENS_AHEAD, UNTIED), id="tokens ahead pp2"),
    ],
)
def test_a_models_feature_trains_alike(train: Trainer, other: str, extra: tuple[str, ...]) -> None:
    # Without clipping: the norm of a sink's gradient lacks a shard under TP (Megatron-LM #7452).
    given = {"extra": (*extra, "--clip-grad", "0"), "iterations": 3}
    one, many = train(ONE, **given), train(other, **given)
    assert len(one.losses) == 3, one.status.reason
    assert many.losses == pytest.approx(one.losses, abs=1.1e-5), many.status.reason

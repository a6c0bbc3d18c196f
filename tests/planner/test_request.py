import pytest

from parakit.planner.advice import request_sentence
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.request import build_request, usual_batch


@pytest.mark.parametrize(
    ("options", "batch", "origin"),
    [
        (PlanOptions(model="llama2-7b", gpus=8, gpu="h100"), 1024, "which is assumed"),
        (PlanOptions(model="llama2-7b", gpus=8, gpu="h100", seq=8192), 512, "which is assumed"),
        (PlanOptions(model="gpt3-175b", gpus=1024, gpu="a100"), 2048, "which is assumed"),
        (PlanOptions(model="gpt2-large", gpus=2, gpu="h200"), 32, "the batch of the model's file"),
        (PlanOptions(model="gpt2-tiny", gpus=2, gpu="cpu"), 4, "the batch of the model's file"),
        (PlanOptions(model="llama2-7b", gpus=8, gpu="h100", global_batch=256), 256, ""),
    ],
    ids=lambda value: value.model if isinstance(value, PlanOptions) else str(value),
)
def test_global_batch_is_stated_by_the_user_or_the_model_or_has_four_million_tokens(
    options: PlanOptions, batch: int, origin: str
) -> None:
    request = build_request(options)
    assert request.global_batch == batch
    assert origin in request.batch_origin
    assert bool(origin) is bool(request.batch_origin)


def test_assumed_batch_is_a_multiple_of_the_devices_so_that_all_can_hold_replicas() -> None:
    assert usual_batch(4096, 768) == 768
    assert usual_batch(4096, 12) == 1020
    # With more devices than sequences, replicas have several devices.
    assert usual_batch(8192, 16384) == 512


def test_plan_says_that_the_batch_is_assumed() -> None:
    request = build_request(PlanOptions(model="llama2-7b", gpus=8, gpu="h100"))
    sentence = request_sentence(request)
    assert "1,024 sequences of 4,096 tokens (about 4 million tokens, which is assumed)" in sentence


def test_global_batch_of_zero_is_refused() -> None:
    with pytest.raises(RequestError, match="The global batch is 0; use 1 or more"):
        build_request(PlanOptions(model="llama2-7b", gpus=8, gpu="h100", global_batch=0))

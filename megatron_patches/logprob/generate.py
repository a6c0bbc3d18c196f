"""Score given sequences with Megatron's own inference: its static engine's loop with a KV cache.

The loop is `TextGenerationController.generate_all_output_tokens_static_batch`. It samples a token per step; here each
sampled token is replaced by that of the sequence. The log probabilities are those that the loop itself reports.
Megatron's dynamic engine does not run without CUDA: it appends to its paged cache with a Triton kernel, and it asks
`torch.cuda.mem_get_info` for the size of the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_patches.logprob.scorer import Scorer
from parakit.logprob import SCORES_FILE, ScoreRequest, TokenLogProbabilities


def score_generated(scorer: Scorer, request: ScoreRequest) -> None:
    """Write the log probabilities of the request's sequences, as generation reports them.

    Every rank runs the loop, and rank 0 writes. All ranks of the last pipeline stage have the logits, and the loop
    sends them to the other stages.
    """
    sequences = np.load(request.sequences)
    controller = _make_controller(scorer, torch.from_numpy(sequences), request.prompt_tokens)
    requests = _make_requests(sequences, request.prompt_tokens)
    with _allow_stages_on_cpu():
        finished = controller.generate_all_output_tokens_static_batch(requests)
    nats = np.zeros((len(sequences), sequences.shape[1] - 1))
    is_scored = np.zeros(nats.shape, bool)
    is_scored[:, request.prompt_tokens - 1 :] = True
    for row, result in enumerate(finished.values()):
        nats[row, request.prompt_tokens - 1 :] = result.generated_log_probs
    if torch.distributed.get_rank() == 0:
        TokenLogProbabilities(nats, is_scored).write(Path(request.folder) / SCORES_FILE)


def _allow_stages_on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which pipeline stages send logits from CPUs.

    The loop asserts that the logits of the last stage are on a GPU. gloo broadcasts them from CPUs as well.
    """
    from megatron.core.inference import communication_utils

    return patch.object(communication_utils, "_is_cuda", lambda _: None)


def _make_requests(sequences: Any, prompt_tokens: int) -> OrderedDict[int, Any]:
    """Return one request per sequence, which asks for all tokens after the prompt."""
    from megatron.core.inference.inference_request import InferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    sampling = SamplingParams(
        return_log_probs=True, num_tokens_to_generate=sequences.shape[1] - prompt_tokens
    )
    # The token that ends a document must not end the sequence.
    sampling.no_early_termination = True
    requests = OrderedDict()
    for row, tokens in enumerate(sequences):
        requests[row] = InferenceRequest(
            request_id=row,
            prompt="",
            prompt_tokens=[int(token) for token in tokens[:prompt_tokens]],
            sampling_params=sampling,
        )
    return requests


def _make_controller(scorer: Scorer, sequences: torch.Tensor, prompt_tokens: int) -> Any:
    """Return Megatron's controller of generation, which samples the tokens of the given sequences."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )
    from megatron.training import get_tokenizer

    class ForcedController(TextGenerationController):  # type: ignore[misc]
        """Controller that takes the next token from the sequences."""

        num_sampled = 0

        def sample_from_logits(self, *_: Any, **__: Any) -> torch.Tensor:
            """Return the next token of each sequence."""
            position = prompt_tokens + self.num_sampled
            self.num_sampled += 1
            return sequences[:, position]

        def detokenize_generations(self, *_: Any) -> tuple[str, None]:
            """Return an empty text and no segments."""
            return "", None

    context = StaticInferenceContext(*sequences.shape)
    model = getattr(scorer.model[0], "module", scorer.model[0])
    wrapped = GPTInferenceWrapper(model, context)
    # The controller makes a generator of random numbers on a GPU. Nothing is sampled here.
    with patch.object(torch, "Generator", _make_cpu_generator):
        return ForcedController(wrapped, get_tokenizer())


_CpuGenerator = torch.Generator


def _make_cpu_generator(device: Any = None) -> torch.Generator:  # noqa: ARG001 - torch's signature
    """Return a generator of the CPU."""
    return _CpuGenerator()

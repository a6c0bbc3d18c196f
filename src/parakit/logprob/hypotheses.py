"""The changes that may explain a gap: what each means, and what to do if it is the cause.

A rank of Megatron applies a change (`megatron_patches.logprob.interventions`), scores the tokens again, and measures
whether the gap becomes smaller. A change that explains nothing is no cause, however plausible it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CauseKind(StrEnum):
    """Kinds of causes of a gap."""

    LAYOUT = "layout"
    PRECISION = "precision"
    BATCH_SHAPE = "batch shape"
    ROUTER = "router"
    SEMANTICS = "semantics"


@dataclass(frozen=True)
class HypothesisFamily:
    """Hypotheses that change the same thing to different values. At most one of them is a cause."""

    kind: CauseKind
    statement: str
    """Clause after 'because' that says what differs; `{value}` is the value with which the gap becomes smaller."""
    advice: str


FAMILIES = {
    "layout": HypothesisFamily(
        CauseKind.LAYOUT,
        "the training layout computes something else than one rank",
        "Run `make verify-…` with this strategy: it names the wrong tensor and its kind of error.",
    ),
    "weights": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the engines have different weights: {value}",
        "Send the named weights to the serving engine again, after the optimizer step.",
    ),
    "labels": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine reports the log probability of another position's token ({value})",
        "Shift the log probabilities so that position t holds the token t + 1 in both engines.",
    ),
    "temperature": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine reports log probabilities after the temperature {value}",
        "Report raw log probabilities (vLLM: logprobs_mode=raw_logprobs), or divide the trainer's logits by the "
        "temperature.",
    ),
    "top-k": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine reports log probabilities after top-k with k = {value}",
        "Report raw log probabilities (vLLM: logprobs_mode=raw_logprobs), or sample without top-k.",
    ),
    "top-p": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine reports log probabilities after top-p with p = {value}",
        "Report raw log probabilities (vLLM: logprobs_mode=raw_logprobs), or sample without top-p.",
    ),
    "norm-epsilon": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the norms of one engine have the epsilon {value}",
        "Set --norm-epsilon of the trainer and rms_norm_eps of the served config to the same value.",
    ),
    "rope-base": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the rotary embedding of one engine has the base {value}",
        "Set --rotary-base and rope_theta to the same value.",
    ),
    "rope-scaling": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the rotary embedding of one engine has the scaling {value}",
        "Set --use-rope-scaling, or the interpolation factor, as rope_scaling of the served config has it.",
    ),
    "cache-positions": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the positions of generated tokens are off by {value} in one engine",
        "Pass the positions of generated tokens explicitly: the first one is the length of the prompt.",
    ),
    "positions": HypothesisFamily(
        CauseKind.SEMANTICS,
        "all positions are off by {value} in one engine",
        "Let positions begin with 0 at the first token that is no padding.",
    ),
    "documents": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine attends across the documents of a packed sequence ({value})",
        "Set --reset-attention-mask and --reset-position-ids, or pass the lengths of the documents.",
    ),
    "first-token-doubled": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine has the first token of each sequence twice",
        "Tokenize without special tokens if the chat template has added them already.",
    ),
    "vocabulary-padding": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the trainer's softmax counts {value} of padding of the vocabulary",
        "Mask the padding rows of the trainer's logits, or set --make-vocab-size-divisible-by 1.",
    ),
    "dropout": HypothesisFamily(
        CauseKind.SEMANTICS,
        "dropout is on in the trainer",
        "Call eval() before log probabilities are computed, or set both dropout probabilities to 0.",
    ),
    "activation": HypothesisFamily(
        CauseKind.SEMANTICS,
        "the activation of one engine is {value}",
        "Choose the same activation in both engines (gelu_new is GELU with tanh).",
    ),
    "qk-norm": HypothesisFamily(
        CauseKind.SEMANTICS,
        "one engine leaves the norm of queries and keys out",
        "Set --qk-layernorm, and serve a config that has the norm.",
    ),
    "router-bias": HypothesisFamily(
        CauseKind.ROUTER,
        "one engine leaves the bias of the routers out",
        "Send the routers' expert_bias to the serving engine with the weights.",
    ),
    "router-order": HypothesisFamily(
        CauseKind.ROUTER,
        "one engine takes the softmax of the router {value} it chooses experts",
        "Set --moe-router-pre-softmax as norm_topk_prob of the served config is not.",
    ),
    "router-scale": HypothesisFamily(
        CauseKind.ROUTER,
        "one engine scales the weights of experts by {value}",
        "Set --moe-router-topk-scaling-factor and routed_scaling_factor to the same value.",
    ),
    "router-choices": HypothesisFamily(
        CauseKind.ROUTER,
        "routers send {value} of the choices to other experts",
        "Replay the serving engine's routing in the trainer (--moe-enable-routing-replay).",
    ),
    "router-precision": HypothesisFamily(
        CauseKind.PRECISION,
        "the routers of one engine compute in {value}",
        "Set --moe-router-dtype fp32, and the router of the serving engine to fp32.",
    ),
    "norm-precision": HypothesisFamily(
        CauseKind.PRECISION,
        "the norms of one engine compute in {value}",
        "Let the norms of both engines compute in fp32.",
    ),
    "logits-precision": HypothesisFamily(
        CauseKind.PRECISION,
        "the output layer of one engine computes in {value}",
        "Compute logits in fp32 in both engines.",
    ),
    "whole-sequences": HypothesisFamily(
        CauseKind.BATCH_SHAPE,
        "generation with a KV cache computes something else than a forward pass of the same engine",
        "Compare the serving engine with itself: prefill of the whole sequence against generation.",
    ),
}
"""Families by name. A hypothesis is the name of its family, or `family=value`."""


def split_hypothesis(hypothesis: str) -> tuple[str, str]:
    """Return the name of a hypothesis's family and its value; the value may be empty."""
    name, _, value = hypothesis.partition("=")
    return name, value


def state_cause(hypothesis: str, evidence: str = "") -> str:
    """Return the clause that says what differs if the hypothesis is a cause.

    Args:
        hypothesis: Name of the hypothesis, `family` or `family=value`.
        evidence: Value to state if the name has no value.
    """
    name, value = split_hypothesis(hypothesis)
    return FAMILIES[name].statement.format(value=value or evidence)

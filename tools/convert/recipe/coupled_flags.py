"""What several flags of Megatron, or several fields of a container, say together."""

from __future__ import annotations

from collections.abc import Mapping

from tools.convert.recipe.table import Symbol, Value
from tools.spec.flag_table import FLAGS
from tools.spec.flags import Flags

type Fields = Mapping[str, Value]
"""By `section.field`."""


class RecipeError(ValueError):
    """A run that no recipe can express, or a recipe that expresses no run; one sentence."""


ACTIVATIONS: dict[tuple[bool, str], str] = {
    (False, "torch.nn.functional.gelu"): "",
    (True, "torch.nn.functional.silu"): "--swiglu",
    (False, "megatron.core.activations.squared_relu"): "--squared-relu",
    (True, "megatron.core.fusions.fused_bias_geglu.quick_gelu"): "--quick-geglu",
}
"""The flag for an MLP that is gated or not, with this function."""

LOCAL = Symbol("megatron.bridge.models.gpt_provider.local_layer_spec")
HALVES = {"--fp16": Symbol("torch.float16"), "--bf16": Symbol("torch.bfloat16")}
IN_FP32, IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
GROUPED, POSITIONS = "--group-query-attention", "--max-position-embeddings"
NULL = "NullTokenizer"
TOKENIZER = {
    flag.name: flag.recipe[0] for flag in FLAGS.values() if flag.role == "tokenizer" and flag.recipe
}

_UNCHECKED, _SHARDED = "--no-check-for-nan-in-loss-and-grad", "--use-distributed-optimizer"


def implied(flags: Flags) -> tuple[str, ...]:
    """Switches that Megatron's `validate_args` sets because of others; Bridge does not."""
    # With a dynamic loss scale an overflow skips a step, and is no error.
    scaled = flags.has("--fp16") and not flags.has("--loss-scale")
    sharded = flags.has("--use-megatron-fsdp")
    return (*([_UNCHECKED] if scaled else []), *([_SHARDED] if sharded else []))


def shown(value: Value) -> str:
    """A value as Python writes it."""
    if isinstance(value, Symbol):
        return value.path
    if isinstance(value, list):
        return f"[{', '.join(shown(each) for each in value)}]"
    return repr(value)

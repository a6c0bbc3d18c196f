"""Dialect of GPT-NeoX: Megatron's line as before 0.7, and its own names of arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parakit.logs.dialects import Dialect
from parakit.logs.dialects.megatron import BarLine, add_present_names

_ARGUMENTS_OF_GPT_NEOX = ("train_micro_batch_size_per_gpu", "pipe_parallel_size")
_NAMES = {
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "global_num_gpus": "world_size",
    "no_weight_tying": "untie_embeddings_and_output_weights",
    "pos_emb": "position_embedding_type",
    "norm": "normalization",
}
_VALUES = {
    ("position_embedding_type", "rotary"): "rope",
    ("position_embedding_type", "learned"): "learned_absolute",
    ("normalization", "rmsnorm"): "RMSNorm",
    ("normalization", "layernorm"): "LayerNorm",
    # GPT-NeoX prints 0 without pipeline parallelism.
    ("pipeline_model_parallel_size", "0"): "1",
}
_PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16"}
# After a value GPT-NeoX prints where the value comes from.
_ORIGIN = re.compile(r"\.{0,80}(?:default|updated)\Z")


def _convert_arguments(printed: Mapping[str, str]) -> Mapping[str, str]:
    """Return GPT-NeoX's arguments under Megatron's names, with Megatron's values.

    Arguments of another trainer are returned unchanged.
    """
    if not all(name in printed for name in _ARGUMENTS_OF_GPT_NEOX):
        return printed
    plain = {name: _ORIGIN.sub("", value.strip()) for name, value in printed.items()}
    named = add_present_names(plain, _NAMES)
    converted = {name: _VALUES.get((name, value), value) for name, value in named.items()}
    precision = _PRECISIONS.get(converted.get("precision", ""))
    return converted | {dtype: str(dtype == precision) for dtype in _PRECISIONS.values()}


DIALECT = Dialect(
    name="GPT-NeoX",
    line=BarLine,
    names={"approx flops per GPU": ("throughput_tflops_per_gpu", 0)},
    arguments=_convert_arguments,
)

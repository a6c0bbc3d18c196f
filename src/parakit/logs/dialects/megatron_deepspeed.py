"""Megatron-DeepSpeed and BigScience: Megatron's line, also in seconds; DeepSpeed's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parakit.logs.dialects import Dialect, EventReader, read_first_match
from parakit.logs.dialects.megatron import BarLine
from parakit.logs.scraped import MoreArgument

_STAGE = "zero_optimization_stage"
_ZERO_STAGE = rf"{_STAGE} \.{{1,40}} ([0-3])\b"
"""In DeepSpeed's list of its configuration, which is none of arguments."""
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _arguments(printed: Mapping[str, str]) -> Mapping[str, str]:
    """Experts are a list there, a single 1 in it is a dense model; heads of keys have their own name."""
    experts = re.fullmatch(r"\[(\d{1,9})\]", printed.get("num_experts", ""))
    if not experts and not {"num_key_value_heads", "deepspeed"} & printed.keys():
        return printed
    found = dict(printed)
    if experts:
        found["num_experts"] = "None" if experts[1] == "1" else experts[1]
    norm = found.get("normalization", "")
    found["normalization"] = _NORMS.get(norm, norm)
    heads = found.get("num_key_value_heads")
    if heads and heads != "None" and "group_query_attention" not in found:
        grouped = heads != found.get("num_attention_heads")
        found |= {"group_query_attention": str(grouped), "num_query_groups": heads}
    # As it was given; its default, of which DeepSpeed's configuration knows nothing, is printed as 1.0.
    if found.get("deepspeed") == "True" and found.get("zero_stage") in {"0", "1", "2", "3"}:
        found.setdefault(_STAGE, found["zero_stage"])
    if found.get("use_rotary_position_embeddings") == "True":
        found.setdefault("position_embedding_type", "rope")
    return found


DIALECT = Dialect(
    name="Megatron-DeepSpeed",
    line=BarLine,
    names={
        "elapsed time per iteration (s)": ("elapsed_ms", 3),
        "TFLOPs": ("throughput_tflops_per_gpu", 0),
    },
    events=(
        EventReader(_STAGE, read_first_match(_ZERO_STAGE, lambda m: MoreArgument(_STAGE, m[1]))),
    ),
    arguments=_arguments,
)

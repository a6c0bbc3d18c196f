"""Dialect of Megatron-DeepSpeed and BigScience: Megatron's line, also with seconds, and DeepSpeed's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping

from parakit.logs.dialects import Dialect, EventReader, read_first_match
from parakit.logs.dialects.megatron import BarLine
from parakit.logs.iterations import PRINTED_TOKENS_PER_DEVICE
from parakit.logs.scraped import MoreArgument

_STAGE = "zero_optimization_stage"
_ZERO_STAGE = rf"{_STAGE} \.{{1,40}} ([0-3])\b"
"""Line of DeepSpeed's configuration, which is printed outside of the list of arguments."""
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _convert_arguments(printed: Mapping[str, str]) -> Mapping[str, str]:
    """Return the arguments under Megatron's names, with Megatron's values.

    Arguments of another trainer are returned unchanged. The number of experts is printed as a list, in which a
    single 1 stands for a dense model.
    """
    experts = re.fullmatch(r"\[(\d{1,9})\]", printed.get("num_experts", ""))
    if not experts and not {"num_key_value_heads", "deepspeed"} & printed.keys():
        return printed
    converted = dict(printed)
    if experts:
        converted["num_experts"] = "None" if experts[1] == "1" else experts[1]
    norm = converted.get("normalization", "")
    converted["normalization"] = _NORMS.get(norm, norm)
    heads = converted.get("num_key_value_heads")
    if heads and heads != "None" and "group_query_attention" not in converted:
        is_grouped = heads != converted.get("num_attention_heads")
        converted |= {"group_query_attention": str(is_grouped), "num_query_groups": heads}
    # A stage on the command line is printed as a digit. The default, which DeepSpeed's configuration does
    # not use, is printed as 1.0.
    if converted.get("deepspeed") == "True" and converted.get("zero_stage") in {"0", "1", "2", "3"}:
        converted.setdefault(_STAGE, converted["zero_stage"])
    if converted.get("use_rotary_position_embeddings") == "True":
        converted.setdefault("position_embedding_type", "rope")
    return converted


DIALECT = Dialect(
    name="Megatron-DeepSpeed",
    line=BarLine,
    names={
        "elapsed time per iteration (s)": ("elapsed_ms", 3),
        "TFLOPs": ("throughput_tflops_per_gpu", 0),
        # ALCF's fork counts FLOPs in two ways, of which this is Megatron's.
        "[LM]TFLOPs": ("throughput_tflops_per_gpu", 0),
        "[LM]-TFLOPs": ("throughput_tflops_per_gpu", 0),
        "elapsed_time_per_iteration_ms": ("elapsed_ms", 0),
        "tokens_per_gpu_per_second_tgs": (PRINTED_TOKENS_PER_DEVICE, 0),
    },
    events=(
        EventReader(_STAGE, read_first_match(_ZERO_STAGE, lambda m: MoreArgument(_STAGE, m[1]))),
    ),
    arguments=_convert_arguments,
)

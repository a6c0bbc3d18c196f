"""Configs of newer models, with the published sizes: the planner reads them, and counts the published parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parakit.config.huggingface import list_unplanned_parts
from parakit.config.model import find_model
from parakit.costs import total_parameters
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.request import build_request

KIMI_K2 = {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
}
GLM_4_5_AIR = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "use_mtp": True,
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "rope_theta": 5000000,
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152},
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
}
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
}
NEMOTRON_3_NANO = {
    **NEMOTRON_H_8B,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (KIMI_K2, 1026.4),
        # The hub counts 110.5, with a second copy of embedding and output layer for multi-token prediction.
        (GLM_4_5_AIR, 109.2),
        (MINIMAX_M2, 228.7),
        (GEMMA_3_4B, 3.88),
        (GEMMA_3_1B, 1.0),
        (NEMOTRON_H_8B, 8.1),
        (NEMOTRON_3_NANO, 31.58),
        (QWEN3_NEXT, 79.7),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_config_has_the_published_number_of_parameters(
    config: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    shape = find_model(str(write_config(tmp_path, config))).shape
    assert total_parameters(shape) / 1e9 == pytest.approx(billions, rel=0.01)


def test_gemma_has_full_attention_in_every_sixth_layer(tmp_path: Path) -> None:
    shape = find_model(str(write_config(tmp_path, GEMMA_3_4B))).shape
    assert (shape.window, shape.windowed_fraction) == (1024, 29 / 34)
    assert shape.tied_embeddings


@pytest.mark.parametrize(
    ("config", "part"), [(GEMMA_3_4B, "the vision tower"), (MINIMAX_M2, "multi-token prediction")]
)
def test_parts_that_the_flags_leave_out_are_named(
    config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    assert part in list_unplanned_parts(write_config(tmp_path, config))
    assert list_unplanned_parts(write_config(tmp_path, KIMI_K2)) == ()


def test_linear_attention_is_refused_with_what_is_known_of_the_model(tmp_path: Path) -> None:
    path = write_config(tmp_path, QWEN3_NEXT)
    with pytest.raises(RequestError, match=r"36 of 48 layers have linear attention.*billion"):
        build_request(PlanOptions(str(path), "h100", gpus=64))

"""Conversion of a Hugging Face config to Megatron's flags and back, and configs that no flag expresses."""

import json
from pathlib import Path
from typing import Any

import pytest

from parakit.config.experts import ExpertLoad, parse_expert_load
from parakit.config.flag_table import flags_planned_as
from parakit.config.flags import Flags, drop_flags, merge_flags
from parakit.config.huggingface import build_config, read_config_flags, read_exact_config_flags
from parakit.config.model import find_model
from parakit.costs.tensors import total_parameters
from tests.convert.hf.folders import FAMILIES, GPT2, LLAMA, LLAMA3_SCALING, YARN


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def flags(folder: Path, config: dict[str, Any]) -> Flags:
    return Flags(read_exact_config_flags(written(folder, config)))


@pytest.mark.parametrize(
    "config",
    [
        {**GPT2, "n_inner": 20, "activation_function": "gelu", "layer_norm_epsilon": 1e-6},
        {**GPT2, "activation_function": "gelu_new", "tie_word_embeddings": False},
        {**LLAMA, "head_dim": 6, "rms_norm_eps": 1e-6, "rope_scaling": LLAMA3_SCALING},
        {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {**LLAMA, "rope_scaling": {**YARN, "beta_fast": 24.0, "truncate": False}},
        *(
            config
            for config in FAMILIES.values()
            if config["model_type"] not in ("mistral", "phi3")
        ),
    ],
)
def test_flags_of_a_config_convert_back_to_the_config(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    flag_list = read_exact_config_flags(written(tmp_path, config))
    built = build_config(flag_list, "float32")
    # Fields without an effect: no window is used, no loss balances the experts, and nothing is padded.
    unstated = ("use_sliding_window", "router_aux_loss_coef", "pad_token_id")
    expected = {name: value for name, value in config.items() if name not in unstated}
    assert {name: built.get(name) for name in expected} == expected


def test_a_router_has_the_loss_and_the_probabilities_of_transformers(tmp_path: Path) -> None:
    """By default transformers balances no experts, and Qwen's routers do not scale probabilities to 1."""
    mixture = FAMILIES["qwen3_moe"]
    assert flags(tmp_path, mixture).number("--moe-aux-loss-coeff") == 0
    assert not flags(tmp_path, mixture).has("--moe-router-pre-softmax")
    other = flags(tmp_path, {**mixture, "output_router_logits": True, "norm_topk_prob": False})
    assert other.number("--moe-aux-loss-coeff") == 0.001
    assert other.has("--moe-router-pre-softmax")
    assert not flags(tmp_path, FAMILIES["mixtral"]).has("--moe-router-pre-softmax")


def test_rope_parameters_of_transformers_5_equal_theta_and_scaling_of_4(tmp_path: Path) -> None:
    before = flags(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_SCALING})
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    parameters = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    now = flags(tmp_path, {**config, "rope_parameters": parameters})
    for parsed in (before, now):
        assert parsed.has("--use-rope-scaling")
        assert parsed.text("--rope-scaling-factor") == "8.0"
        assert parsed.text("--rotary-base") == "500000"


def test_flags_contain_a_non_default_epsilon_and_the_kind_of_gelu(tmp_path: Path) -> None:
    assert not flags(tmp_path, GPT2).has("--norm-epsilon")
    assert flags(tmp_path, GPT2).has("--openai-gelu")
    assert flags(tmp_path, {**LLAMA, "rms_norm_eps": 1e-6}).number("--norm-epsilon", 0) == 1e-6
    exact = flags(tmp_path, {**GPT2, "activation_function": "gelu"})
    assert exact.has("--no-bias-gelu-fusion")
    assert not exact.has("--openai-gelu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 8}}, "high_freq_factor"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.5}}, "factor = 2.5"),
        ({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor"),
        ({**LLAMA, "model_type": "qwen3"}, "head_dim = null"),
        ({**FAMILIES["glm"], "head_dim": None}, "head_dim = null"),
        ({**FAMILIES["glm"], "num_key_value_heads": None}, "num_key_value_heads = null"),
        ({**FAMILIES["glm"], "attention_bias": False}, "attention_bias"),
        ({**FAMILIES["glm"], "rope_scaling": YARN}, 'rope_type = "yarn"'),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**FAMILIES["mixtral"], "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({**LLAMA, "rope_theta": 10000.5}, "rope_theta"),
        ({**LLAMA, "attention_bias": True}, "attention_bias"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"),
        ({**GPT2, "activation_function": "relu"}, "activation_function"),
        ({**GPT2, "activation_function": {"name": "gelu"}}, "activation_function"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "embd_pdrop": 0.2}, "embd_pdrop"),
        *(
            (
                {**LLAMA, "model_type": name},
                f"model_type '{name}', whose weights.*Megatron-Bridge may",
            )
            for name in ("gemma2", "gemma3_text", "olmoe", "gpt_oss", "deepseek_v3")
        ),
        ({**LLAMA, "model_type": "bert"}, "model_type 'bert', whose weights"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config; convert"),
    ],
)
def test_config_field_without_a_flag_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_exact_config_flags(written(tmp_path, config))


def test_planner_accepts_configs_that_cannot_be_converted(tmp_path: Path) -> None:
    linear = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert Flags(read_config_flags(written(tmp_path, linear))).has("--swiglu")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--num-experts", "8", "--moe-shared-expert-gate"),
            "--moe-shared-expert-gate, which Mixtral",
        ),
        (("--qk-layernorm", "--add-qkv-bias"), "--qk-layernorm with --add-qkv-bias"),
        (("--multi-latent-attention",), "--multi-latent-attention .*Megatron-Bridge may"),
        (("--rotary-percent", "0.5"), "--rotary-percent turns a part of each head alone"),
        (("--rotary-interleaved",), "--rotary-interleaved is converted for GLM alone"),
        (
            ("--rotary-interleaved", "--add-qkv-bias", "--qk-layernorm"),
            "--rotary-interleaved is converted for GLM alone",
        ),
        (
            ("--num-experts", "8", "--moe-router-pre-softmax"),
            "--moe-router-pre-softmax, which Mixtral",
        ),
        (("--normalization", "LayerNorm"), "--normalization LayerNorm with rotary"),
    ],
)
def test_flags_of_another_architecture_have_no_config(
    tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    flag_list = read_exact_config_flags(written(tmp_path, LLAMA))
    with pytest.raises(ValueError, match=message):
        build_config(merge_flags(flag_list, more), "float32")


def test_glm_turns_half_of_each_head_and_pairs_of_neighbours(tmp_path: Path) -> None:
    """The fraction stands in the config, or among the rotary parameters of transformers 5; 0.5 is the default."""
    config = {name: FAMILIES["glm"][name] for name in FAMILIES["glm"] if name != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    fractions = {
        0.5: FAMILIES["glm"],
        0.25: {name: value for name, value in config.items() if name != "partial_rotary_factor"},
    }
    for fraction, stated in fractions.items():
        parsed = flags(tmp_path, stated)
        assert parsed.number("--rotary-percent") == fraction
        assert parsed.has("--rotary-interleaved")
        assert parsed.has("--add-qkv-bias")
    unstated = {
        name: value for name, value in FAMILIES["glm"].items() if name != "partial_rotary_factor"
    }
    assert flags(tmp_path, unstated).number("--rotary-percent") == 0.5


GLM_4_9B = {
    "model_type": "glm",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1.5625e-07,
}


def test_glm_has_the_parameters_of_its_checkpoint(tmp_path: Path) -> None:
    assert parameters(tmp_path, GLM_4_9B) == 9_399_951_360


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "n_group": 8,
    "topk_group": 4,
}


GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150000,
    "quantization_config": {"quant_method": "mxfp4"},
}


def parameters(folder: Path, config: dict[str, Any]) -> int:
    model = find_model(str(written(folder, config)))
    return total_parameters(model.shape)


def test_mixtures_of_qwen3_and_deepseek_have_the_parameters_of_their_checkpoints(
    tmp_path: Path,
) -> None:
    assert parameters(tmp_path, QWEN3_MOE) == 30_532_122_624
    # The biases of routers are not counted, because Megatron keeps them in buffers.
    alone = {**DEEPSEEK_V3, "num_nextn_predict_layers": 0}
    assert parameters(tmp_path, alone) == 671_026_419_200 - 58 * 256
    flags = Flags(read_config_flags(written(tmp_path, DEEPSEEK_V3)))
    assert flags.text("--moe-layer-freq") == "([0]*3+[1]*58)"
    assert flags.text("--mtp-num-layers") == "1"
    assert parse_expert_load(flags) == ExpertLoad(groups=8, groups_per_token=4)


def test_gpt_oss_has_the_parameters_of_its_model_card(tmp_path: Path) -> None:
    assert parameters(tmp_path, GPT_OSS_20B) == 20_914_757_184
    larger = {**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}
    assert parameters(tmp_path, larger) == 116_829_156_672


def test_every_flag_of_gpt_oss_is_part_of_a_prediction(tmp_path: Path) -> None:
    flag_list = read_config_flags(written(tmp_path, GPT_OSS_20B))
    of_a_run = flags_planned_as("MICRO_BATCH=")
    unplanned = drop_flags(
        flag_list, flags_planned_as("counted", "neither", "parameters") | of_a_run
    )
    assert unplanned == ()
    shape = find_model(str(tmp_path / "config.json")).shape
    assert (shape.window, shape.windowed_fraction, shape.clamps_activations) == (128, 0.5, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "dense layers between layers with experts"),
        ({**QWEN3_MOE, "num_experts": 0}, "num_experts = 0; use a whole number of 1 or more"),
        ({**DEEPSEEK_V3, "n_shared_experts": "one"}, 'n_shared_experts = "one"; use a whole'),
        (
            {k: v for k, v in DEEPSEEK_V3.items() if k != "kv_lora_rank"},
            "lacks the field 'kv_lora_rank'",
        ),
    ],
)
def test_a_mixture_that_cannot_be_planned_is_refused_by_its_field(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config_flags(written(tmp_path, config))

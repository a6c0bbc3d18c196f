"""Faults in mixtures of experts, norms, latent attention, MTP layers and foreign formats; each is named.

The list was written before `parakit.checkpoint.checks` was read, so that it holds what users meet and not what the
code looks for. The models have the tensors of Megatron 0.19 (`megatron_tensors.json`).
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parakit.checkpoint.checks import describe_coverage, find_problems
from parakit.checkpoint.contents import read_contents
from parakit.checkpoint.locate import UnknownFormatError
from parakit.convert.hf.random_model import write_model
from parakit.convert.hf.tensor_files import SHARD_BYTES
from tests.checkpoint.test_faults import SHAPES, Extra, as_legacy, made, truncate
from tests.checkpoint.test_inspect import States, written
from tests.checkpoint.test_locate import save_torchtitan
from tests.checkpoint.test_model_tensors import stored
from tests.convert.hf.folders import FAMILIES, LLAMA

PLAIN: Extra = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "vocab_size": 128,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "tensor_model_parallel_size": 1,
    "world_size": 1,
}
EXPERTS: Extra = {**PLAIN, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
ARGUMENTS: dict[str, Extra] = {
    "mixtral": EXPERTS,
    "qwen3": {
        **PLAIN,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "kv_channels": 16,
    },
    "mtp": {**PLAIN, "mtp_num_layers": 2},
    "deepseek_v3": {
        **EXPERTS,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "mtp_num_layers": 1,
    },
}
Change = Callable[[States], object]
FC2 = "experts.experts.linear_fc2.weight"
ROUTER = "decoder.layers.mlp.router.weight"
DENSE_V3, MIXED_V3 = "decoder.layers.0.", "decoder.layers.1."


def states(model: str) -> States:
    """Weights, and the moments of all but the buffers."""
    generator = torch.Generator().manual_seed(1)
    held = {name: torch.randn(size, generator=generator) for name, size in stored(model).items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        held |= {
            f"optimizer.state.{moment}.{name}": torch.rand(size, generator=generator)
            for name, size in stored(model).items()
            if "expert_bias" not in name
        }
    return held


def saved(folder: Path, model: str, change: Change = lambda _: None, **extra: Any) -> Path:
    held = states(model)
    change(held)
    return written(folder, held, **{**ARGUMENTS[model], **extra})


def problems(folder: Path) -> str:
    return " ".join(find_problems(read_contents(folder), reads_pieces=True))


def without(*parts: str) -> Change:
    """Leave out all tensors whose name has one of the parts, and their moments."""

    def change(held: States) -> None:
        left_out = [name for name in held if any(part in name for part in parts)]
        assert left_out
        for name in left_out:
            del held[name]

    return change


def changed(part: str, function: Callable[[Tensor], Tensor], moments: bool = False) -> Change:
    """Change the weights whose name has the part; with `moments` their moments too."""

    def change(held: States) -> None:
        names = [name for name in held if part in name and (moments or "optimizer" not in name)]
        assert names
        for name in names:
            held[name] = function(held[name]).contiguous()

    return change


def filled(index: Any, value: float) -> Callable[[Tensor], Tensor]:
    def fill(values: Tensor) -> Tensor:
        values[index] = value
        return values

    return fill


def chained(*changes: Change) -> Change:
    return lambda held: [change(held) for change in changes]


class Fault(NamedTuple):
    """What is done to a model, and what is reported of it."""

    model: str
    change: Change
    sentence: str
    extra: Mapping[str, Any] = MappingProxyType({})


in_bf16 = changed("", Tensor.bfloat16)
FAULTS = {
    "half of the experts": Fault(
        "mixtral",
        changed(".experts.", lambda values: values[:, :2], moments=True),
        f"{FC2} has the shape [2, 2, 32, 24], and by the checkpoint's arguments it is [2, 4, 32, 24]",
    ),
    "no router": Fault("mixtral", without("router"), f"{ROUTER} is missing"),
    "no shared expert": Fault(
        "deepseek_v3",
        without(f"{MIXED_V3}mlp.shared_experts"),
        f"{MIXED_V3}mlp.shared_experts.linear_fc1.weight is missing",
    ),
    "transposed experts": Fault(
        "mixtral",
        changed(FC2, lambda values: values.transpose(-1, -2), moments=True),
        f"{FC2} has the shape [2, 4, 24, 32]",
    ),
    "experts of another type": Fault(
        "mixtral",
        chained(in_bf16, changed(FC2, Tensor.float)),
        f"{FC2} of type float32, beside 3 other linear layers of type bfloat16",
        {"bf16": True},
    ),
    "router that is not finite in one layer": Fault(
        "mixtral", changed("router", filled((1, 2), torch.nan)), f"{ROUTER} is not finite"
    ),
    "expert of zeros": Fault(
        "mixtral",
        changed(FC2, filled((1, 2), 0.0)),
        f"{FC2} is 0 in all elements of layer 1, expert 2: it was never written",
    ),
    "no bias that balances experts": Fault(
        "deepseek_v3",
        without(f"{MIXED_V3}mlp.router.expert_bias"),
        f"{MIXED_V3}mlp.router.expert_bias is missing",
    ),
    "final norm of zeros": Fault(
        "mixtral",
        changed("final_layernorm", torch.zeros_like),
        "decoder.final_layernorm.weight is 0 in the whole piece at [0]: it was never written",
    ),
    "norm of zeros in one layer": Fault(
        "qwen3",
        changed("linear_qkv.layer_norm_weight", filled(1, 0.0)),
        "linear_qkv.layer_norm_weight is 0 in all elements of layer 1: it was never written",
    ),
    "no norm of queries": Fault(
        "qwen3",
        without("q_layernorm"),
        "decoder.layers.self_attention.q_layernorm.weight is missing",
    ),
    "norm of half the width": Fault(
        "mixtral",
        changed("final_layernorm", lambda values: values[:16], moments=True),
        "decoder.final_layernorm.weight has the shape [16]",
    ),
    "latent attention without the keys' projection": Fault(
        "deepseek_v3",
        without(f"{DENSE_V3}self_attention.linear_kv_up_proj"),
        f"{DENSE_V3}self_attention.linear_kv_up_proj.weight is missing",
    ),
    "latent attention without the keys' norm": Fault(
        "deepseek_v3",
        without(f"{MIXED_V3}self_attention.kv_layernorm"),
        f"{MIXED_V3}self_attention.kv_layernorm.weight is missing",
    ),
    "MTP layer without its projection": Fault(
        "deepseek_v3", without("eh_proj"), "mtp.layers.0.eh_proj.weight is missing"
    ),
    "one of two MTP layers": Fault(
        "mtp", without("mtp.layers.1"), "mtp.layers.1.eh_proj.weight is missing"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_mixture_a_norm_or_an_mtp_layer_is_named(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    assert fault.sentence in problems(saved(tmp_path, fault.model, fault.change, **fault.extra))


HEALTHY: dict[str, Fault] = {
    **{model: Fault(model, lambda _: None, "") for model in ARGUMENTS},
    "bf16 with a router in fp32": Fault(
        "mixtral", chained(in_bf16, changed("router", Tensor.float)), "", {"bf16": True}
    ),
    "norms that multiply with 1 plus their weight": Fault(
        "qwen3", changed("norm", torch.zeros_like), "", {"apply_layernorm_1p": True}
    ),
    "padding rows of zeros": Fault(
        "mixtral",
        changed("word_embeddings", filled(slice(100, None), 0.0)),
        "",
        {"vocab_size": 100},
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_no_fault(tmp_path: Path, name: str) -> None:
    healthy = HEALTHY[name]
    assert problems(saved(tmp_path, healthy.model, healthy.change, **healthy.extra)) == ""


def test_biases_of_zeros_are_healthy(tmp_path: Path) -> None:
    """Megatron and transformers begin with them; with stacked layers they have two dimensions."""
    held = {name: torch.ones(size) for name, size in stored("gpt2").items()}
    held |= {name: torch.zeros_like(held[name]) for name in held if name.endswith("bias")}
    gpt2 = {"vocab_size": 128, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    folder = written(tmp_path, held, **gpt2, kv_channels=8, ffn_hidden_size=128)
    assert problems(folder) == ""


def on_weights(change: Change) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)

    return damage


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def with_config(**entries: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return damage


def keep_pickle_index_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')


DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"
HUGGING_FACE: dict[str, tuple[str, int, Callable[[Path], None], str]] = {
    "missing shard": (
        "qwen3_moe",
        4000,
        lambda folder: second_shard(folder).unlink(),
        "lacks model-00002-of-00005.safetensors, which model.safetensors.index.json names",
    ),
    "truncated shard": (
        "qwen3_moe",
        4000,
        lambda folder: truncate(second_shard(folder)),
        "model-00002-of-00005.safetensors cannot be read",
    ),
    "expert without a matrix": ("qwen3_moe", 0, on_weights(without(DOWN)), f"lacks {DOWN}"),
    "expert of zeros": (
        "qwen3_moe",
        0,
        on_weights(changed(DOWN, torch.zeros_like)),
        f"{DOWN} is 0 in all elements: it was never written",
    ),
    "router that is not finite": (
        "qwen3_moe",
        0,
        on_weights(changed("layers.1.mlp.gate.weight", filled((0, 0), torch.nan))),
        "model.layers.1.mlp.gate.weight is not finite",
    ),
    "norm of zeros": (
        "mistral",
        0,
        on_weights(changed("layers.0.input_layernorm", torch.zeros_like)),
        "model.layers.0.input_layernorm.weight is 0 in all elements",
    ),
    "another number of layers": (
        "mistral",
        0,
        with_config(num_hidden_layers=3),
        "lacks model.layers.2.input_layernorm.weight and 8 more",
    ),
    "pickled weights": (
        "mistral",
        0,
        keep_pickle_index_alone,
        "pytorch_model.bin.index.json names pickles: save it with save_pretrained first",
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_fault_in_a_folder_of_hugging_face_is_named(tmp_path: Path, name: str) -> None:
    family, shard_bytes, damage, sentence = HUGGING_FACE[name]
    folder = write_model(
        tmp_path / "model", FAMILIES[family], shard_bytes=shard_bytes or SHARD_BYTES
    )
    assert problems(folder) == ""
    damage(folder)
    assert sentence in problems(folder)


def test_values_of_hugging_face_are_not_claimed_without_reading_them(tmp_path: Path) -> None:
    contents = read_contents(write_model(tmp_path / "model", LLAMA))
    assert describe_coverage(contents).unchecked == ("values, because only VERIFY=1 reads them",)
    assert "the values of weights" in describe_coverage(contents, reads_pieces=True).checked


def test_norms_of_zeros_are_no_fault_in_a_family_that_is_not_known(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", LLAMA)
    with_config(model_type="gemma2")(folder)
    on_weights(changed("norm", torch.zeros_like))(folder)
    assert problems(folder) == ""
    on_weights(changed("model.norm", filled(0, torch.inf)))(folder)
    assert problems(folder) == "model.norm.weight is not finite."


def test_an_adapter_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(
        {"base_model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors"
    )
    assert "it is an adapter of PEFT: join it to its model" in problems(tmp_path)


def double_qkv(folder: Path) -> None:
    path = folder / "mp_rank_01/model_optim_rng.pt"
    saved_state = torch.load(path, weights_only=False)
    for name, values in saved_state["model"].items():
        if "linear_qkv.weight" in name:
            saved_state["model"][name] = torch.cat([values, values])
    torch.save(saved_state, path)


def test_a_rank_with_the_shape_of_another_tp_is_named(tmp_path: Path) -> None:
    folder = as_legacy(tmp_path, made(SHAPES), {})
    double_qkv(folder)
    qkv = "decoder.layers.self_attention.linear_qkv.weight"
    assert f"The pieces of {qkv} reach beyond its shape" in problems(folder)


def test_one_rank_of_tp_2_alone_is_named(tmp_path: Path) -> None:
    folder = as_legacy(tmp_path, made(SHAPES), {})
    shutil.rmtree(folder / "mp_rank_01")
    assert "mp_rank_01 is missing: the checkpoint's arguments imply it" in problems(folder)


@pytest.mark.filterwarnings("ignore")
def test_a_missing_file_of_torchtitan_is_named(tmp_path: Path) -> None:
    save_torchtitan(tmp_path / "step-10")
    next((tmp_path / "step-10").glob("*.distcp")).unlink()
    assert "__0_0.distcp is missing, with 23 pieces" in problems(tmp_path)


def test_a_tracker_that_names_an_unfinished_save_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixtral")
    (folder / "iter_0000012").mkdir()
    (folder / "iter_0000012/__0_0.distcp").write_bytes(b"")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(
        UnknownFormatError, match=r"names iter_0000012, which holds no \.metadata"
    ) as refusal:
        read_contents(folder)
    assert "the newest folder there is iter_0000008: name it" in str(refusal.value)
    shutil.rmtree(folder / "iter_0000008")
    with pytest.raises(
        UnknownFormatError, match=r"no other iter_… folder there holds a checkpoint"
    ):
        read_contents(folder)


def test_megatron_deepspeed_is_refused_by_name_in_spite_of_its_tracker(tmp_path: Path) -> None:
    rank_file = tmp_path / "global_step10/mp_rank_00_model_states.pt"
    rank_file.parent.mkdir()
    rank_file.write_bytes(b"PK")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(UnknownFormatError, match="is a checkpoint of DeepSpeed"):
        read_contents(tmp_path)

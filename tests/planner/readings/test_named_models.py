"""Models that are planned by name have as many parameters as their publishers state."""

from __future__ import annotations

import csv
import os
from dataclasses import astuple
from pathlib import Path

import pytest

from parakit.config.files import ROOT, read_yaml
from parakit.config.model import ModelShape, UnknownModelError
from parakit.costs import total_parameters
from parakit.planner.options import PlanOptions
from parakit.planner.readings.facts import hub_names, model_facts
from parakit.planner.readings.models import (
    build_published_model,
    find_planned_model,
    published_model_names,
    unplanned_parts,
)
from parakit.planner.request import build_request

CARD = "parameters of the safetensors on the hub"
PUBLISHED_BILLIONS = {
    "deepseek-v2": (235.741, CARD),
    "deepseek-v2-lite": (15.706, CARD),
    "deepseek-v3": (671.0, "arXiv:2412.19437, without multi-token prediction"),
    "gemma-3-12b": (11.771, "arXiv:2503.19786 table 1, embedding and non-embedding"),
    "gemma-3-1b": (1.000, "arXiv:2503.19786 table 1, embedding and non-embedding"),
    "gemma-3-27b": (27.016, "arXiv:2503.19786 table 1, embedding and non-embedding"),
    "gemma-3-4b": (3.884, "arXiv:2503.19786 table 1, embedding and non-embedding"),
    "glm-4.5": (355.0, "arXiv:2508.06471 table 1"),
    "glm-4.5-air": (106.0, "arXiv:2508.06471 table 1"),
    "gpt-oss-120b": (116.83, "arXiv:2508.10925 table 1"),
    "gpt-oss-20b": (20.91, "arXiv:2508.10925 table 1"),
    "grok1": (314.0, "x.ai/news/grok-os"),
    "kimi-k2": (1026.4, CARD),
    "llama2-13b": (13.016, CARD),
    "llama2-34b": (33.744, CARD + " (CodeLlama 34B)"),
    "llama2-70b": (68.977, CARD),
    "llama2-7b": (6.738, CARD),
    "llama3-70b": (70.554, CARD),
    "llama3-8b": (8.030, CARD),
    "llama3.1-405b": (405.854, CARD),
    "llama3.1-70b": (70.554, CARD),
    "llama3.1-8b": (8.030, CARD),
    "llama3.2-1b": (1.236, CARD),
    "llama3.2-3b": (3.213, CARD),
    "llama3.3-70b": (70.554, CARD),
    "minimax-m2": (228.7, CARD),
    "mistral-7b": (7.242, CARD),
    "mistral-small-24b": (23.572, CARD),
    "mixtral-8x22b": (140.63, CARD),
    "mixtral-8x7b": (46.703, CARD),
    "nemotron-3-nano": (31.578, CARD),
    "nemotron4-15b": (15.6, "arXiv:2402.16819"),
    "nemotron4-340b": (341.0, "arXiv:2406.11704 table 1, embedding and non-embedding"),
    "nemotronh-8b": (8.101, CARD),
    "phi-4": (14.660, CARD),
    "qwen2.5-1.5b": (1.544, CARD),
    "qwen2.5-14b": (14.770, CARD),
    "qwen2.5-32b": (32.764, CARD),
    "qwen2.5-72b": (72.706, CARD),
    "qwen2.5-7b": (7.616, CARD),
    "qwen3-14b": (14.768, CARD),
    "qwen3-235b-a22b": (235.094, CARD),
    "qwen3-30b-a3b": (30.532, CARD),
    "qwen3-32b": (32.762, CARD),
    "qwen3-4b": (4.022, CARD),
    "qwen3-8b": (8.191, CARD),
    "tinyllama-1.1b": (1.100, CARD),
}
"""Published parameters in billions, and who states them."""

FACTS = read_yaml(ROOT / "src/parakit/planner/readings/models.yaml")
STATED_SHAPES = {
    row.pop("name"): row
    for row in csv.DictReader(
        Path(__file__).with_name("stated_shapes.csv").read_text().splitlines()
    )
}
"""Sizes of each model as the public file in `stated_by` of `models.yaml` states them; empty if it does not."""


def describe_sizes(shape: ModelShape) -> dict[str, str]:
    """Return the sizes of a shape in the form of `stated_shapes.csv`.

    Blocks of a hybrid count as layers, without those of multi-token prediction.
    """
    sizes = {
        name: getattr(shape, name)
        for name in STATED_SHAPES["llama2-7b"]
        if name not in ("layers", "dense_layers", "latent")
    }
    blocks = shape.blocks.partition("/")[0]
    sizes["layers"] = len(blocks) or shape.layers
    sizes["dense_layers"] = len(shape.dense_layers)
    latent = shape.latent
    sizes["latent"] = " ".join(map(str, astuple(latent)[:5])) if latent else ""
    has_dense_mlp = not shape.experts or shape.dense_layers
    sizes["ffn_hidden"] = shape.ffn_hidden if has_dense_mlp else 0
    if not shape.experts:
        sizes["expert_ffn_hidden"] = 0  # Megatron's default means nothing.
    return {name: value if name == "latent" else str(int(value)) for name, value in sizes.items()}


@pytest.mark.parametrize("name", STATED_SHAPES)
def test_named_model_has_the_sizes_that_a_public_file_states(name: str) -> None:
    stated = STATED_SHAPES[name]
    planned = describe_sizes(build_published_model(name).shape)
    unstated = {size for size, value in stated.items() if not value and size != "latent"}
    assert {size: planned[size] for size in stated if size not in unstated} == {
        size: value for size, value in stated.items() if size not in unstated
    }


def test_every_named_model_has_a_public_file_or_a_reason_why_none_was_found() -> None:
    sourced = [name for names in FACTS["stated_by"].values() for name in names]
    planned = [name for name in published_model_names() if "refused" not in model_facts(name)]
    assert sorted([*sourced, *FACTS["unstated"]]) == sorted(planned)
    assert set(STATED_SHAPES) <= set(sourced)
    assert set(PUBLISHED_BILLIONS) <= set(STATED_SHAPES), (
        "models for users are compared size by size"
    )
    for source in FACTS["stated_by"]:
        repository, _, path = source.partition(": ")
        assert path
        assert "/" in repository
        assert "@" in repository, "the commit is stated"


def test_window_on_every_layer_has_no_skipped_layers() -> None:
    flags = build_published_model("mistral-7b").flags
    assert flags[flags.index("--window-size") + 1] == "4095,0"
    assert "--window-attn-skip-freq" not in flags


def test_hybrid_has_no_position_embeddings_and_a_sink_is_a_flag() -> None:
    flags = build_published_model("nemotronh-8b").flags
    assert flags[flags.index("--position-embedding-type") + 1] == "none"
    flags = build_published_model("gpt-oss-20b").flags
    assert flags[flags.index("--softmax-type") + 1] == "learnable"


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_named_model_has_the_published_number_of_parameters(name: str) -> None:
    billions, _ = PUBLISHED_BILLIONS[name]
    parameters = total_parameters(build_published_model(name).shape) / 1e9
    assert parameters == pytest.approx(billions, rel=0.01)


def test_at_least_thirty_models_with_a_published_size_are_planned_by_name() -> None:
    assert len(PUBLISHED_BILLIONS) >= 30
    assert set(PUBLISHED_BILLIONS) <= set(published_model_names())


def test_ids_of_the_hub_name_planned_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", os.devnull)
    for hub_id, name in hub_names().items():
        assert find_planned_model(hub_id) == find_planned_model(name)
    assert find_planned_model("qwen/qwen3-8b").name == "qwen3-8b"


def test_cached_config_of_an_id_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128,'
        ' "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512}'
    )
    model = find_planned_model("Qwen/Qwen3-8B")
    assert (model.name, model.shape.layers) == ("qwen3-8b", 3)


def test_unknown_id_is_refused_with_the_way_to_its_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", os.devnull)
    with pytest.raises(UnknownModelError, match=r"hf download nobody/model config\.json"):
        find_planned_model("nobody/model")


def test_parts_that_no_formula_has_are_named() -> None:
    assert "the vision tower" in unplanned_parts(find_planned_model("gemma-3-27b"))
    assert unplanned_parts(find_planned_model("llama3-8b")) == ()


def test_published_model_plans_its_own_vocabulary() -> None:
    request = build_request(PlanOptions("qwen3-8b", "h100", gpus=8))
    assert request.template.shape.vocabulary == 151936


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gpt-oss-20b", "--quick-geglu"),
        ("nemotron4-15b", "--squared-relu"),
        ("nemotronh-8b", "--squared-relu"),
        ("llama3-70b", "--swiglu"),
        ("gpt-7.5b", None),
    ],
)
def test_flags_of_a_model_have_its_activation(name: str, activation: str | None) -> None:
    activations = {"--quick-geglu", "--squared-relu", "--swiglu"}
    stated = activations & set(build_published_model(name).flags)
    assert stated == ({activation} if activation else set())

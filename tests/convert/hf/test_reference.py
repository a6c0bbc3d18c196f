"""The reference by transformers: its tensors under Megatron's names, and what it loads of ours."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parakit.artifacts.capture import CaptureStage, TensorKey
from parakit.artifacts.torch_dist import OUTPUT, VOCABULARY
from parakit.config import variables
from parakit.config.model import find_model
from parakit.convert.hf.families import list_tensor_pairs
from parakit.convert.hf.from_megatron import export_model
from parakit.convert.hf.into_megatron import import_model, read_source
from parakit.convert.hf.progress import ConversionProgress
from parakit.convert.hf.random_model import CONFIGS, write_model
from parakit.native.capture import Counterpart, wrap_for_capture
from parakit.native.engines import TorchEngine
from parakit.native.parallel import RankLayout
from parakit.verify.captured import Capture, read_capture
from tests.convert.hf.folders import FAMILIES, GPT2, LLAMA, LLAMA3_SCALING
from tests.native.small_model import settings

pytest.importorskip("transformers")

DENSE = settings("--attention-dropout", "0", "--hidden-dropout", "0")
TOKENS = torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(1))


def counterpart(folder: Path, rows: int = 0) -> Counterpart:
    from parakit.convert.hf.reference import build_counterpart, load_reference

    source = read_source(folder)
    rows = rows or source.shape.vocabulary
    model = load_reference(source, DENSE, rows)
    shape = replace(source.shape, vocabulary=rows)
    return build_counterpart(model, list_tensor_pairs(source.model_type, shape), shape.layers)


def captured(folder: Path, at: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    from parakit.convert.hf.reference import CausalModel

    for name, value in (
        (variables.CAPTURE, str(at)),
        (variables.CAPTURE_ITERATION, "2"),
        (variables.CAPTURE_SEEDS, "1"),
    ):
        monkeypatch.setenv(name, value)
    other = counterpart(folder)
    assert isinstance(other.model, CausalModel)
    alone = RankLayout(0, 1, 1, torch.device("cpu"))
    engine = wrap_for_capture(TorchEngine(other.model, DENSE, alone), other, DENSE)
    for _ in range(2):
        engine.forward_backward([(TOKENS, TOKENS)])
        engine.update(1e-2)
    return read_capture(at)


@pytest.mark.parametrize("config", [GPT2, {**LLAMA, "rope_scaling": LLAMA3_SCALING}])
def test_reference_has_the_imported_parameters(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "m", config)
    source = read_source(folder)
    by_name = {pair.parameter: source.values(pair) for pair in source.pairs}
    wholes = counterpart(folder).parameters
    assert [whole.name for whole in wholes] == [pair.parameter for pair in source.pairs]
    for whole in wholes:
        piece = whole.piece(lambda parameter: parameter.data)
        assert torch.equal(piece.values, by_name[whole.name]), whole.name


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_of_each_family_has_every_parameter_of_megatron_once(
    tmp_path: Path, family: str
) -> None:
    """Experts are one parameter each in Megatron, and one tensor of all experts in transformers."""
    folder = write_model(tmp_path / "m", FAMILIES[family])
    source = read_source(folder)
    values_by_key: dict[tuple[str, int], torch.Tensor] = {
        (pair.key, pair.layer or 0): source.values(pair) for pair in source.pairs
    }
    num_elements = 0
    for parameter in counterpart(folder).parameters:
        piece = parameter.piece(lambda tensor: tensor.data)
        layer = parameter.placement.global_offset[0] if "decoder.layers." in parameter.name else 0
        values = values_by_key[parameter.placement.key, layer]
        if ".local_experts." in parameter.name:
            values = values[parameter.placement.global_offset[1]]
        assert torch.equal(piece.values, values), parameter.name
        num_elements += values.numel()
    assert num_elements == sum(values.numel() for values in values_by_key.values())


def test_padding_rows_of_a_strategy_are_copies_of_the_last_row_and_change_no_other_logit(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "m", {**GPT2, "tie_word_embeddings": False})
    plain, padded = counterpart(folder), counterpart(folder, rows=134)
    with torch.no_grad():
        ours, reference = padded.model(TOKENS), plain.model(TOKENS)
    assert torch.equal(ours[..., :131], reference)
    assert torch.equal(ours[..., 131:], reference[..., 130:].expand(-1, -1, 3))
    for whole in padded.parameters:
        if whole.placement.key in VOCABULARY:
            assert whole.placement.global_shape == (134, 8)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_captured_iteration_has_megatrons_names_positions_and_order(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", config)
    (rank,) = captured(folder, tmp_path / "c", monkeypatch).ranks
    source = read_source(folder)
    for pair in source.pairs:
        for stage, slot in (
            (CaptureStage.LOCAL_GRADIENTS, "gradient"),
            (CaptureStage.REDUCED_GRADIENTS, "gradient"),
            (CaptureStage.OPTIMIZER_STATE, "exp_avg_sq"),
            (CaptureStage.WEIGHTS, "update"),
        ):
            record = rank.first_records[TensorKey(stage, pair.parameter, slot)]
            assert record.shape == pair.shape
            assert record.placement is not None
            assert record.placement.key == pair.key
    logits = rank.first_records[TensorKey(CaptureStage.OUTPUTS, "output_layer", "output.0", 0)]
    assert logits.shape == (8, 2, config["vocab_size"])
    layer = rank.first_records[
        TensorKey(CaptureStage.ACTIVATION_GRADIENTS, "decoder.layers.1", "output.0", 0)
    ]
    assert layer.shape == (8, 2, 8)
    assert {record.tensor_key.name for record in rank.records} >= {
        *("decoder", "decoder.final_layernorm", "decoder.layers.0.pre_mlp_layernorm", "loss"),
    }


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_an_exported_model_without_missing_and_unexpected_tensors(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    source = write_model(tmp_path / "source", CONFIGS[family], dtype)
    import_model(read_source(source), "mine", ConversionProgress(), tmp_path / "hub")
    folder = tmp_path / "hub" / "mine"
    model = find_model(str(folder / "mine.args"))
    for imported in (folder, None):  # With its own config, and with one of Megatron's flags.
        checkpoint = folder / "checkpoint" / "iter_0000001"
        target = tmp_path / f"back-{imported is None}"
        export_model(checkpoint, model.flags, model.shape, imported, target, ConversionProgress())
        (target / "config.json").write_text(
            json.dumps({**json.loads((target / "config.json").read_text()), "bos_token_id": 0})
        )
        ours, loading = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        assert_same_logits(ours, reference)


def assert_same_logits(*models: Any) -> None:
    with torch.no_grad():
        first, other = (model.eval()(input_ids=TOKENS).logits for model in models)
    assert torch.equal(first, other)


def test_an_untied_output_layer_is_compared_too(tmp_path: Path) -> None:
    names: Sequence[str] = [
        w.name for w in counterpart(write_model(tmp_path / "m", LLAMA)).parameters
    ]
    assert OUTPUT in names

"""`make verify-logprob`: what it refuses, and a pair of engines with and without a difference on real ranks."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parakit.config.errors import LaunchError
from parakit.convert import CONFIGS, ConversionProgress, import_model, read_source, write_model
from parakit.experiments.logprob.command import _add_gated_experts, _make_request
from parakit.experiments.logprob.sides import SidesRequest
from parakit.launch import Options
from parakit.launch.data import SMALL_SAMPLE
from parakit.logprob import record_tokens
from tests.convert.hf.checkpoints import state_arguments
from tests.convert.hf.folders import GPT2, LLAMA
from tests.given import run
from tests.logprob.healthy import LATENT
from tests.verify.bench import SMALL


def test_unknown_engine_is_refused_with_the_engines_that_exist(tmp_path: Path) -> None:
    request = SidesRequest("tp2", "nonsense", "gpt2-tiny", Options(runs=tmp_path))
    with pytest.raises(LaunchError, match="SERVE=nonsense is neither hf, megatron nor a file"):
        request.compose_serving()


def test_megatron_serves_on_one_rank_and_a_strategy_in_its_layout(tmp_path: Path) -> None:
    def count_ranks(serve: str) -> int:
        request = SidesRequest("tp2", serve, "gpt2-tiny", Options(runs=tmp_path))
        return request.compose_serving().devices

    assert [count_ranks(serve) for serve in ("megatron", "pp2", "tp2pp2")] == [1, 2, 4]


def test_flags_of_the_serving_side_and_the_trainers_patch_are_not_shared(tmp_path: Path) -> None:
    flags = ("--norm-epsilon", "1e-6")
    request = SidesRequest(
        "tp2", "megatron", "gpt2-tiny", Options(runs=tmp_path), serve_flags=flags
    )
    assert "1e-6" in request.compose_serving().flags
    assert "1e-6" not in request.verification.strategy.flags
    assert "1e-6" not in request.verification.reference.flags


def test_recorded_tokens_set_the_length_and_the_number_of_sequences(tmp_path: Path) -> None:
    record_tokens(tmp_path / "tokens.npz", [[1], [2]], [[3, 4], [5]], [[-1.0, -1.0], [-1.0]])
    request = SidesRequest("tp2", str(tmp_path / "tokens.npz"), "gpt2-tiny", Options(runs=tmp_path))
    flags = request.verification.strategy.flags
    assert flags[flags.index("--seq-length") + 1] == "3"
    assert request.verification.strategy.spec.batch.global_batch_size == 2


def test_experts_get_swiglu_if_only_that_lacks_for_transformers(tmp_path: Path) -> None:
    assert _add_gated_experts(Options(runs=tmp_path, model="moe-tiny")) == ("--swiglu",)
    assert _add_gated_experts(Options(runs=tmp_path, model="gpt2-tiny")) == ()


def make_checkpoint(tmp_path: Path, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return a random model's folder of Hugging Face, and a checkpoint of its weights as Megatron saves it."""
    source = write_model(tmp_path / "source", config)
    import_model(read_source(source), "mine", ConversionProgress(), tmp_path / "hub")
    state_arguments(tmp_path / "hub" / "mine")
    return source, tmp_path / "hub" / "mine" / "checkpoint"


def read_embedding(folder: Path) -> Any:
    source = read_source(folder)
    (pair,) = [pair for pair in source.pairs if pair.key == "embedding.word_embeddings.weight"]
    return source.values(pair).numpy()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_checkpoint_is_imported_for_the_trainer_and_exported_for_the_engine(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    source, checkpoint = make_checkpoint(tmp_path, config)
    options, folder = Options(runs=tmp_path), tmp_path / "run"
    request = _make_request("tp2", "hf", options, folder, hf=None, ckpt=str(checkpoint))
    assert request.served_model == folder / "sides" / "exported"
    assert np.array_equal(read_embedding(request.served_model), read_embedding(source))
    flags = request.verification.strategy.flags
    assert flags[flags.index("--seq-length") + 1] == "16"
    tokens = np.fromfile(f"{request.options.data}.bin", np.uint16)
    assert tokens.max() == config["vocab_size"] - 1


def test_served_model_of_hugging_face_stays_apart_from_the_checkpoint(tmp_path: Path) -> None:
    _, checkpoint = make_checkpoint(tmp_path, {**LLAMA, "rms_norm_eps": 1e-6})
    served = write_model(tmp_path / "served", LLAMA)
    options, folder = Options(runs=tmp_path), tmp_path / "run"
    request = _make_request("tp2", "hf", options, folder, hf=str(served), ckpt=str(checkpoint))
    assert request.served_model == served
    flags = request.verification.strategy.flags
    assert float(flags[flags.index("--norm-epsilon") + 1]) == 1e-6


@pytest.mark.parametrize(
    ("serve", "model", "refusal"),
    [
        ("hf", "gpt2-tiny", "MODEL=gpt2-tiny would not be loaded, because CKPT= names the model"),
        ("megatron", None, "HF=served would not be loaded: with CKPT=, SERVE=megatron serves"),
    ],
)
def test_model_that_no_side_would_load_is_refused(
    tmp_path: Path, serve: str, model: str | None, refusal: str
) -> None:
    options = Options(runs=tmp_path, model=model)
    with pytest.raises(LaunchError, match=refusal):
        _make_request("tp2", serve, options, tmp_path / "run", hf="served", ckpt="checkpoints")


def test_missing_model_is_refused_before_anything_is_kept(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="verify-logprob needs a model"):
        run("verify-logprob", {"TRAIN": "tp2", "SERVE": "megatron", "RUNS": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_missing_transformers_is_refused_with_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="make setup-hf"):
        run("verify-logprob", {"TRAIN": "tp2", "SERVE": "hf", "RUNS": str(tmp_path)})


def verify(tmp_path: Path, **variables: str) -> tuple[int, Mapping[str, Any], Path]:
    """Return the exit code, the verdict and the folder of a verification of a random model."""
    source = tmp_path / "source"
    if not source.is_dir():
        write_model(source, CONFIGS["llama"])
    runs = tmp_path / f"runs{len(list(tmp_path.iterdir()))}"
    make_variables = {"HF": str(source), "RUNS": str(runs), "SERVE": "megatron", **variables}
    code = run("verify-logprob", make_variables)
    (folder,) = runs.glob("*-verify-logprob")
    return code, json.loads((folder / "logprob.json").read_text()), folder


@pytest.mark.ranks
def test_megatron_in_tensor_parallel_agrees_with_its_static_engine(tmp_path: Path) -> None:
    code, verdict, folder = verify(tmp_path, TRAIN="tp2")
    assert (code, verdict["outcome"]) == (0, "held")
    assert verdict["gap"]["num_tokens"] == 4 * 48
    assert sorted(path.name for path in folder.iterdir()) == [
        *("differences.svg", "logprob.html", "logprob.json")
    ]


@pytest.mark.ranks
def test_stages_of_a_pipeline_generate_what_latent_attention_in_tensor_parallel_scores(
    tmp_path: Path,
) -> None:
    make_variables = {
        **{"TRAIN": "tp2", "SERVE": "pp2", "MODEL": "gpt2-tiny", "RUNS": str(tmp_path)},
        **{"EXTRA": " ".join((LATENT, *SMALL)), "DATA": SMALL_SAMPLE},
    }
    assert run("verify-logprob", make_variables) == 0
    (folder,) = tmp_path.glob("*-verify-logprob")
    verdict = json.loads((folder / "logprob.json").read_text())
    assert (verdict["outcome"], verdict["not_compared"]) == ("held", "")


@pytest.mark.ranks
def test_another_epsilon_of_the_serving_side_is_the_only_cause(tmp_path: Path) -> None:
    code, verdict, _ = verify(tmp_path, TRAIN="baseline", EXTRA_B="--norm-epsilon 1e-5")
    assert (code, verdict["outcome"]) == (1, "differs")
    assert [cause["hypothesis"] for cause in verdict["causes"]] == ["norm-epsilon=1e-05"]
    assert verdict["causes"][0]["fraction_of_kl"] == pytest.approx(1, abs=1e-3)
    first = verdict["first_module"]
    assert (first["side"], first["module"]) == ("serving", "decoder.layers.0.input_layernorm")


@pytest.mark.ranks
def test_tokens_that_an_engine_recorded_are_scored_by_the_trainer(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(0, 512, (2, 16)).tolist()
    path = tmp_path / "tokens.npz"
    halves = [row[:8] for row in tokens], [row[8:] for row in tokens]
    record_tokens(path, *halves, [[-6.0] * 8, [-6.0] * 8])
    code, verdict, _ = verify(tmp_path, TRAIN="tp2", SERVE=str(path))
    assert code == 1
    assert verdict["gap"]["num_tokens"] == 16
    assert verdict["first_module"] is None

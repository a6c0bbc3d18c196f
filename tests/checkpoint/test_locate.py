"""Checkpoints where other trainers put them: each is read, or refused by its name."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from parakit.checkpoint.checks import describe_coverage, find_problems, judge_loading
from parakit.checkpoint.contents import TORCHTITAN, read_contents
from parakit.checkpoint.locate import UnknownFormatError, locate_checkpoint
from tests.checkpoint.test_inspect import ARGUMENTS, states, written

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = "iter_0000008"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("healthy"), states())


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "copy"))


def test_a_released_checkpoint_is_read(copy: Path) -> None:
    (copy / ITERATION).rename(copy / "release")
    (copy / TRACKER).write_text("release\n")
    contents = read_contents(copy)
    assert contents.folder == copy / "release"
    assert find_problems(contents) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("12", "names iter_0000012, and there is no such folder"),
        ("", "is empty, and not the number"),
        ("\n", "is empty, and not the number"),
        ("last", "holds 'last', and not the number"),
        ("-8", "holds '-8', and not the number"),
        ("\x00\x00", "and not the number"),
    ],
)
def test_a_tracker_without_a_checkpoint_is_named(copy: Path, text: str, sentence: str) -> None:
    (copy / TRACKER).write_text(text)
    with pytest.raises(UnknownFormatError, match=sentence) as refusal:
        read_contents(copy)
    assert f"the newest folder there is {ITERATION}: name it" in str(refusal.value)
    shutil.rmtree(copy / ITERATION)
    with pytest.raises(UnknownFormatError, match=r"holds no iter_… folder either"):
        read_contents(copy)


def drop_arguments(folder: Path) -> None:
    torch.save({"iteration": 8, "content_metadata": {}}, folder / "common.pt")


BRIDGE_CONFIG = """
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 3
  hidden_size: 8
  num_attention_heads: 2
  num_query_groups: 2
  kv_channels: 4
  ffn_hidden_size: 16
  seq_length: 16
  max_position_embeddings: 16
  add_bias_linear: true
  gated_linear_unit: false
  activation_func:
    _target_: torch.nn.functional.gelu
    _call_: false
  position_embedding_type: learned_absolute
  normalization: LayerNorm
  share_embeddings_and_output_weights: true
  tensor_model_parallel_size: 2
  vocab_size: 100
train:
  global_batch_size: 4
  micro_batch_size: 1
"""


def test_arguments_of_megatron_bridge_are_read_from_its_config(copy: Path) -> None:
    drop_arguments(copy / ITERATION)
    (copy / ITERATION / "run_config.yaml").write_text(BRIDGE_CONFIG)
    (copy / "latest_train_state.pt").write_bytes(b"")
    contents = read_contents(copy)
    assert contents.spec is not None
    assert contents.spec.parallelism.tensor == 2
    assert find_problems(contents) == ()
    assert "16 tensors against the model" in describe_coverage(contents).sentences
    verdict = judge_loading(contents, "tp2")
    assert verdict.verdict == "not judged"
    assert "a checkpoint of Megatron-Bridge" in verdict.reasons[0]
    untied = BRIDGE_CONFIG.replace("output_weights: true", "output_weights: false")
    (copy / ITERATION / "run_config.yaml").write_text(untied)
    assert "output_layer.weight is missing" in " ".join(find_problems(read_contents(copy)))


def test_a_damaged_config_of_megatron_bridge_claims_no_model(copy: Path) -> None:
    drop_arguments(copy / ITERATION)
    for text in ("{", "model: [1", "- 1", "", "model: !!python/object/apply:os.abort []"):
        (copy / ITERATION / "run_config.yaml").write_text(text)
        contents = read_contents(copy)
        assert contents.spec is None
        assert find_problems(contents) == ()


def test_weights_of_nemo_2_are_read_below_its_folder(tmp_path: Path) -> None:
    held = {name.replace("decoder.", "module.decoder."): value for name, value in states().items()}
    held = {name.replace("embedding.", "module.embedding."): held[name] for name in held}
    folder = written(tmp_path / "saved", held)
    nemo = tmp_path / "gpt--step=8-last"
    (nemo / "context").mkdir(parents=True)
    (folder / ITERATION).rename(nemo / "weights")
    contents = read_contents(nemo)
    assert contents.folder == nemo / "weights"
    assert set(contents.weights) == {name for name in states() if "optimizer" not in name}
    assert find_problems(contents) == ()


def save_torchtitan(folder: Path) -> None:
    weights = {
        "tok_embeddings.weight": torch.ones(16, 4),
        "layers.0.attention.wq.weight": torch.ones(4, 4),
        "layers.1.attention.wq.weight": torch.ones(4, 4),
        "norm.weight": torch.ones(4),
        "output.weight": torch.ones(16, 4),
    }
    optimizer = {
        f"optimizer.state.{name}.{kind}": torch.ones_like(value)
        for name, value in weights.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"optimizer.state.{name}.step": torch.tensor(10.0) for name in weights}
    other_states = {
        "train_state.step": torch.tensor(10),
        "lr_scheduler.last_epoch": torch.tensor(10),
        "dataloader.dp_rank_0": b"state",
    }
    checkpoint.save(
        {**weights, **optimizer, **steps, **other_states},
        storage_writer=checkpoint.FileSystemWriter(folder),
        no_dist=True,
    )


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_torchtitan_is_read_and_has_no_false_fault(tmp_path: Path) -> None:
    save_torchtitan(tmp_path / "step-10")
    (tmp_path / "step-20").mkdir()  # Unfinished.
    for folder in (tmp_path, tmp_path / "step-10"):
        contents = read_contents(folder)
        assert (contents.format, contents.iteration) == (TORCHTITAN, 10)
        assert find_problems(contents) == ()
        assert set(contents.weights) == {
            "tok_embeddings.weight",
            "layers.attention.wq.weight",
            "norm.weight",
            "output.weight",
        }
    assert judge_loading(contents, "tp2").verdict == "not judged"


@pytest.mark.parametrize(
    "file",
    [
        "global_step10/mp_rank_00_model_states.pt",
        "mp_rank_00_model_states.pt",
        "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt",
    ],
)
def test_a_checkpoint_of_deepspeed_is_refused_by_name(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"PK")
    (tmp_path / "latest").write_text("global_step10")
    with pytest.raises(UnknownFormatError, match=r"is a checkpoint of DeepSpeed .*zero_to_fp32"):
        read_contents(tmp_path)


def test_rank_files_with_separate_optimizer_files_are_refused_by_name(tmp_path: Path) -> None:
    rank = tmp_path / ITERATION / "mp_rank_00"
    rank.mkdir(parents=True)
    (rank / "model_rng.pt").write_bytes(b"PK")
    with pytest.raises(UnknownFormatError, match=r"holds model_rng\.pt and the optimizer's"):
        read_contents(tmp_path / ITERATION)


LEGACY_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_{norm}.",
    "mlp.linear_fc1.layer_norm_": "post_attention_{norm}.",
    "self_attention.linear_qkv.": "{attention}.query_key_value.",
    "self_attention.linear_proj.": "{attention}.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}


@pytest.mark.parametrize(
    ("block", "attention", "norm"),
    [
        ("transformer", "attention", "layernorm"),
        ("encoder", "self_attention", "layernorm"),
        ("encoder", "self_attention", "norm"),
    ],
)
def test_names_of_megatrons_models_before_megatron_core_are_read(
    tmp_path: Path, block: str, attention: str, norm: str
) -> None:
    language_model: dict[str, dict[str, object]] = {"embedding": {}, block: {}}
    for name, values in states().items():
        if name.startswith("embedding."):
            _, module, parameter = name.split(".")
            language_model["embedding"][module] = {parameter: values}
        elif name.startswith("decoder.final"):
            parameter = name.rpartition(".")[2]
            language_model[block][f"final_{norm}.{parameter}"] = values
        elif name.startswith("decoder.layers."):
            old_name = name.removeprefix("decoder.layers.")
            for today, legacy in LEGACY_NAMES.items():
                old_name = old_name.replace(today, legacy.format(attention=attention, norm=norm))
            for layer, of_layer in enumerate(values):
                language_model[block][f"layers.{layer}.{old_name}"] = of_layer.clone()
    rank = tmp_path / ITERATION / "mp_rank_00"
    rank.mkdir(parents=True)
    arguments = Namespace(**{**ARGUMENTS, "tensor_model_parallel_size": 1, "world_size": 1})
    saved = {"args": arguments, "iteration": 8, "model": {"language_model": language_model}}
    torch.save(saved, rank / "model_optim_rng.pt")
    contents = read_contents(tmp_path / ITERATION)
    assert find_problems(contents, reads_pieces=True) == ()
    verdict = judge_loading(contents, "baseline")
    assert verdict.verdict == "refuses"
    assert "before Megatron-Core (language_model)" in verdict.reasons[0]
    assert contents.shapes == {
        name: tuple(values.shape) for name, values in states().items() if "optimizer" not in name
    }


def test_an_imported_model_is_inspected_with_the_flags_beside_its_weights(copy: Path) -> None:
    hub = copy.parent / "mine"
    hub.mkdir()
    drop_arguments(copy / ITERATION)
    copy.rename(hub / "checkpoint")
    (hub / "import.json").write_text("{}")
    (hub / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    flags = (
        "--num-layers 3\n--hidden-size 8\n--num-attention-heads 2\n--seq-length 16\n"
        "--max-position-embeddings 16\n--ffn-hidden-size 16\n--vocab-size 100\n"
    )
    (hub / "mine.args").write_text(flags)
    assert locate_checkpoint(hub).arguments["num_layers"] == "3"
    contents = read_contents(hub)
    assert find_problems(contents) == ()
    assert "16 tensors against the model" in describe_coverage(contents).sentences
    (hub / "mine.args").write_text(flags.replace("--num-layers 3", "--num-layers 4"))
    assert "by the checkpoint's arguments it is [4, 24, 8]" in " ".join(
        find_problems(read_contents(hub))
    )

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.checkpoint.checks import describe_model_mismatch
from parakit.config.errors import LaunchError
from parakit.config.model import load_model
from parakit.launch import preflight
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job

TINY = load_model("gpt2-tiny")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of gpt2-tiny that are looked at, stacked over its layers, as Megatron saves them."""
    import torch
    from torch.distributed import checkpoint

    folder = tmp_path_factory.mktemp("load")
    weights = {
        "embedding.word_embeddings.weight": torch.zeros(128, 64),
        "embedding.position_embeddings.weight": torch.zeros(64, 64),
        "decoder.layers.self_attention.linear_qkv.weight": torch.zeros(4, 192, 64),
        "decoder.layers.mlp.linear_fc1.weight": torch.zeros(4, 256, 64),
    }
    writer = checkpoint.FileSystemWriter(folder / "iter_0000007")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a single process.
        checkpoint.save(weights, storage_writer=writer, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def test_a_checkpoint_of_the_model_passes_and_no_checkpoint_does_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert describe_model_mismatch(checkpoint, TINY.shape, "gpt2-tiny") is None
    assert describe_model_mismatch(tmp_path, TINY.shape, "gpt2-tiny") is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"layers": 2}, r"linear_qkv.weight is \[4, 192, 64\].* has \[2, 192, 64\]"),
        ({"ffn_hidden": 128}, r"linear_fc1.weight is \[4, 256, 64\]"),
        ({"positions": 32}, r"position_embeddings.weight is \[64, 64\]"),
        ({"hidden": 32, "positions": 0, "heads": 0, "query_groups": 0}, "another model"),
    ],
)
def test_another_models_checkpoint_is_refused_with_both_shapes(
    checkpoint: Path, changes: dict[str, int], found: str
) -> None:
    problem = describe_model_mismatch(checkpoint, replace(TINY.shape, **changes), "gpt2-tiny")
    assert problem is not None

    assert re.search(found, problem)
    assert problem.endswith("; name another checkpoint, or the model that was saved.")


def test_a_checkpoint_named_in_extra_is_refused_before_anything_is_written(
    checkpoint: Path, sample_prefix: Path, tmp_path: Path
) -> None:
    extra = ("--num-layers", "2", "--load", str(checkpoint))
    options = Options(data=str(sample_prefix), runs=tmp_path / "runs", extra=extra)
    target = parse_target("train-pp2-gpt2-tiny-2cpu")
    launch = compose_job(target.with_options(options))
    with pytest.raises(LaunchError, match="is a checkpoint of another model"):
        preflight.check_launch(launch)
    assert not options.runs.exists()

"""A small mixture of experts as one layout after another would have saved it, and what is refused."""

import os
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed import checkpoint

from parakit.artifacts.torch_dist import PieceReader, StoredMetadata, StoredTensor, read_metadata
from parakit.artifacts.torch_dist_writer import add_piece, write_metadata
from parakit.checkpoint import reshard as resharding
from parakit.checkpoint import reshard_command as reshard
from parakit.config.files import ROOT
from tests.checkpoint.test_inspect import EMBEDDING, data, flip, make_pipe, truncate
from tests.checkpoint.test_inspect import states as dense_states
from tests.checkpoint.test_inspect import written as dense_written
from tests.patience import until

ITERATION = "iter_0000008"
LAYERS, HIDDEN, FFN, EXPERTS, ROWS = 4, 8, 4, 2, 32
LAYOUTS = ("baseline", "dp2-zero1", "sp2", "pp2", "vpp2", "ep2", "sp2pp2dp2-zero1")
ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "ffn_hidden_size": FFN,
    "moe_ffn_hidden_size": FFN,
    "num_experts": EXPERTS,
    "moe_router_topk": 1,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "padded_vocab_size": ROWS,
    "vocab_size": 30,
    "make_vocab_size_divisible_by": 16,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "world_size": 1,
    "data_parallel_size": 1,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "consumed_train_samples": 64,
    "params_dtype": torch.float32,
}
SHAPES = {
    "embedding.word_embeddings.weight": (ROWS, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 24, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, FFN),
}
MOMENTS = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
GROUP = {"lr": 0.1, "weight_decay": 0.1, "wd_mult": 1.0, "maximize": False}


def states() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        prefix + name: torch.randn(shape, generator=generator)
        for prefix in ("", *MOMENTS)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As torch writes it, every tensor in one piece."""
    folder = tmp_path_factory.mktemp("base")
    target = folder / ITERATION
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a single process.
        checkpoint.save(states(), storage_writer=checkpoint.FileSystemWriter(target), no_dist=True)
    common = {
        "args": Namespace(**ARGUMENTS),
        "iteration": 8,
        "content_metadata": {"singleton_local_shards": False},
        "optimizer": {
            "state": {"common_step": torch.tensor(8.0)},
            "param_groups": [
                {**GROUP, "is_expert_parallel": False},
                {**GROUP, "is_expert_parallel": False, "weight_decay": 0.0, "wd_mult": 0.0},
            ],
        },
    }
    torch.save(common, target / "common.pt")
    (target / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def moved(source: Path, strategy: str, target: Path) -> Path:
    assert reshard(str(source), strategy, str(target), Console(quiet=True)) == 0
    return target


@pytest.fixture(scope="module")
def laid(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("laid")
    return {layout: moved(base / ITERATION, layout, folder / layout) for layout in LAYOUTS}


def held(folder: Path) -> dict[str, tuple[Any, Tensor]]:
    """Every tensor, and where its pieces lie."""
    path = folder / ITERATION
    tensors = read_metadata(path).tensors
    with PieceReader(path) as reader:
        return {
            name: (dict(tensor.sizes), reader.read_tensor(tensor))
            for name, tensor in tensors.items()
        }


def common(folder: Path) -> dict[str, Any]:
    common_state: dict[str, Any] = torch.load(folder / ITERATION / "common.pt", weights_only=False)
    arguments = vars(common_state.pop("args"))
    arguments.pop("no_save_rng", None)
    return common_state | {"args": arguments}


def assert_the_same(first: Path, other: Path) -> None:
    ours, second_tensors = held(first), held(other)
    assert ours.keys() == second_tensors.keys()
    for name, (sizes, values) in ours.items():
        assert sizes == second_tensors[name][0], name
        assert torch.equal(values, second_tensors[name][1]), name
    assert common(first) == common(other)


def check_there_and_back(laid: dict[str, Path], first: str, second: str, folder: Path) -> None:
    there = moved(laid[first], second, folder / "there")
    assert_the_same(there, laid[second])  # Whatever it came from.
    assert_the_same(moved(there, first, folder / "back"), laid[first])


PAIRS = list(permutations(LAYOUTS, 2))
QUICK_PAIRS = [("baseline", "dp2-zero1"), ("pp2", "vpp2"), ("ep2", "baseline")]
"""Pairs that change the optimizer's form, the placement of layers, and the parameter groups of experts."""


@pytest.mark.parametrize(("first", "second"), QUICK_PAIRS)
def test_reshard_and_back_is_bit_identical(
    laid: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    check_there_and_back(laid, first, second, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_reshard_and_back_is_bit_identical(
    laid: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    check_there_and_back(laid, first, second, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_moments_are_those_that_were_saved(laid: dict[str, Path], layout: str) -> None:
    tensors = {name: values for name, (_, values) in held(laid[layout]).items()}
    for name, values in states().items():
        assert torch.equal(tensors.pop(name), values)
    main = {f"optimizer.state.param.{name}": states()[name] for name in SHAPES}
    assert tensors.keys() == (main.keys() if "zero1" in layout else set())
    assert all(torch.equal(values, main[name]) for name, values in tensors.items())


def test_ranks_of_the_new_strategy_read_full_pieces(laid: dict[str, Path]) -> None:
    tensors = held(laid["sp2"])
    fc1, _ = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    # Gate and value are cut apart: a rank has a part of each.
    assert [begin for begin in fc1 if begin[:2] == (3, 1)] == [(3, 1, at, 0) for at in (0, 2, 4, 6)]
    proj, _ = tensors["decoder.layers.self_attention.linear_proj.weight"]
    assert proj[2, 0, 4] == (1, HIDDEN, 4)
    assert tensors["embedding.word_embeddings.weight"][0] == {(0, 0): (16, 8), (16, 0): (16, 8)}


def test_common_state_has_the_new_strategy_and_the_same_data_position(
    laid: dict[str, Path],
) -> None:
    common_state = common(laid["sp2pp2dp2-zero1"])
    arguments, optimizer = common_state["args"], common_state["optimizer"]
    assert arguments["tensor_model_parallel_size"] == 2
    assert arguments["make_vocab_size_divisible_by"] == 8  # 16 rows of two ranks, as before.
    assert (arguments["world_size"], arguments["consumed_train_samples"]) == (8, 64)
    assert common_state["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [group["step"] for group in optimizer["optimizer"]["param_groups"]] == [8, 8]
    experts = common(laid["ep2"])["optimizer"]
    assert [group["is_expert_parallel"] for group in experts[1]["param_groups"]] == [True]
    assert torch.equal(experts[1]["state"]["common_step"], torch.tensor(8.0))
    assert experts[0]["state"] is not experts[1]["state"]  # Megatron merges into both.


def test_killed_reshard_continues_after_the_last_verified_file(
    base: Path, laid: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding, "MIN_FILE_BYTES", 2000)
    asked: list[str] = []
    original = resharding.add_piece

    def counted(file: Any, name: str, values: object) -> Any:
        asked.append(name)
        if len(asked) == 40:
            raise KeyboardInterrupt
        return original(file, name, values)

    monkeypatch.setattr(resharding, "add_piece", counted)
    with pytest.raises(KeyboardInterrupt):
        moved(base / ITERATION, "sp2", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    finished = set(asked) - {asked[-1]}
    assert finished
    with pytest.raises(ValueError, match="left over from another reshard; remove it"):
        moved(base / ITERATION, "pp2", tmp_path / "to")
    asked.clear()
    asked += ["counted before"] * 40
    tensors = moved(base / ITERATION, "sp2", tmp_path / "to")
    assert not finished & set(asked)
    assert_the_same(tensors, laid["sp2"])
    assert not list(tensors.rglob("*.distcp.json"))


def test_reshard_fails_if_a_file_is_not_read_as_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = resharding.read_piece
    monkeypatch.setattr(resharding, "read_piece", lambda *where: original(*where) + 1)
    with pytest.raises(ValueError, match="is not read as it was written"):
        moved(base / ITERATION, "sp2", tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("tp3x", "tp3x"),
        ("tp3", "3"),
        ("zero3", "no checkpoints in Megatron's torch_dist format"),
        ("pp8", "8"),
    ],
)
def test_strategy_without_torch_dist_checkpoints_is_refused(
    base: Path, tmp_path: Path, strategy: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        moved(base / ITERATION, strategy, tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_there_and_a_full_disk_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="exists already; remove it"):
        moved(base / ITERATION, "sp2", tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"needs 64\.\d+ MiB, and .* has 1 MiB free"):
        moved(base / ITERATION, "sp2", tmp_path / "to")


def test_a_checkpoint_that_is_damaged_or_of_another_format_is_refused(tmp_path: Path) -> None:
    whole = dense_written(tmp_path / "whole", dense_states())
    truncate(whole)
    with pytest.raises(ValueError, match=r"is not complete: .* is truncated"):
        moved(whole, "baseline", tmp_path / "to")
    legacy = tmp_path / "legacy" / "mp_rank_00"
    legacy.mkdir(parents=True)
    torch.save({"model": {}}, legacy / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="of the format torch, whose values are not read"):
        moved(legacy.parent, "baseline", tmp_path / "to")


def test_a_flipped_byte_is_named_with_its_file_and_the_way_out(tmp_path: Path) -> None:
    """Of a value, which torch.load reads without a word, and of the pickle that says its shape."""
    way_out = (
        "copy the file again from where the checkpoint was saved, or reshard an older checkpoint"
    )
    whole = dense_written(tmp_path / "whole", dense_states())
    saved = data(whole).read_bytes()
    flip(data(whole), dense_states()[EMBEDDING])
    with pytest.raises(
        ValueError, match=rf"\.distcp is damaged at byte .*; {way_out}\.$"
    ) as raised:
        moved(whole, "baseline", tmp_path / "to")
    assert str(data(whole)) in str(raised.value)
    at = saved.find(b"_rebuild_tensor_v2")
    data(whole).write_bytes(saved[:at] + b"\xff" + saved[at + 1 :])
    with pytest.raises(
        ValueError, match=rf"\.distcp is damaged at byte .*; {way_out}\.$"
    ) as raised:
        moved(whole, "baseline", tmp_path / "to")
    assert "weights_only" not in str(raised.value)


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_a_pipe_is_not_opened_and_is_named(tmp_path: Path, name: str) -> None:
    folder = dense_written(tmp_path / "whole", dense_states())
    make_pipe(folder / ITERATION / name)
    with pytest.raises(ValueError, match=rf"is not complete: .*{name} .*is no regular file"):
        moved(folder, "baseline", tmp_path / "to")


def test_states_in_gradient_buffer_order_are_resharded_to_another_dp_only(tmp_path: Path) -> None:
    buckets = {"optimizer.distributed.dp_group_idx_0.bucket_idx_0.exp_avg": torch.arange(70.0)}
    weights = {name: tensor for name, tensor in dense_states().items() if "optimizer" not in name}
    folder = dense_written(tmp_path / "a", weights | buckets, use_distributed_optimizer=True)
    path = folder / ITERATION / "common.pt"
    saved = torch.load(path, weights_only=False)
    saved["content_metadata"] = {"distrib_optim_sharding_type": "dp_reshardable"}
    saved["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    torch.save(saved, path)
    with pytest.raises(ValueError, match="dp_reshardable: in the order of the ranks' gradient buf"):
        moved(folder, "baseline", tmp_path / "to")
    there = moved(folder, "tp2dp2-zero1", tmp_path / "b")
    (name,) = buckets
    assert torch.equal(held(there)[name][1], buckets[name])


def test_nothing_in_a_common_state_is_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (target,))

    folder = dense_written(tmp_path / "a", dense_states(), trap=Touch())
    target.unlink(missing_ok=True)
    with pytest.raises(
        ValueError, match=r"common\.pt calls pathlib\.Path\.touch when it is loaded"
    ):
        moved(folder, "pp3", tmp_path / "b")
    assert not target.exists()


_MEASURED = """
import resource, sys
from pathlib import Path
from rich.console import Console
from parakit.checkpoint import reshard_command as reshard
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
reshard(sys.argv[1], "baseline", sys.argv[3] + "/small", Console(quiet=True))
before = peak()
reshard(sys.argv[2], "pp2", sys.argv[3] + "/large", Console(quiet=True))
print(peak() - before)
"""


def large(folder: Path) -> tuple[Path, int]:
    """A checkpoint of 24 layers, one piece each, and the bytes of its largest piece."""
    rows, hidden, layers = 16384, 256, 24
    shapes = {
        "self_attention.linear_qkv.weight": (3 * hidden, hidden),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "mlp.linear_fc1.weight": (16 * hidden, hidden),
        "mlp.linear_fc2.weight": (hidden, 16 * hidden),
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.layer_norm_bias": (hidden,),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.layer_norm_bias": (hidden,),
    }
    arguments = {
        **{"hidden_size": hidden, "num_layers": layers, "kv_channels": hidden // 2},
        **{"ffn_hidden_size": 16 * hidden, "padded_vocab_size": rows, "add_bias_linear": False},
        **{"position_embedding_type": "rope", "max_position_embeddings": 16},
    }
    embedding = torch.randn(rows, hidden)
    outside_layers = {
        EMBEDDING: embedding,
        "decoder.final_layernorm.weight": torch.randn(hidden),
        "decoder.final_layernorm.bias": torch.randn(hidden),
    }
    path = dense_written(folder, outside_layers, **arguments) / ITERATION
    tensors = dict(read_metadata(path).tensors)
    with (path / "layers").open("wb") as file:
        for name, shape in shapes.items():
            ends = tuple(0 for _ in shape)
            parts = {
                (at, *ends): add_piece(file, "layers", torch.randn(1, *shape))
                for at in range(layers)
            }
            whole = StoredTensor(
                (layers, *shape), "float32", dict.fromkeys(parts, (1, *shape)), parts
            )
            tensors[f"decoder.layers.{name}"] = whole
    write_metadata(path, StoredMetadata(tensors, (), {}))
    return folder, embedding.nbytes


@pytest.mark.slow
def test_reshard_memory_is_below_eight_of_the_largest_piece(tmp_path: Path) -> None:
    small = dense_written(tmp_path / "a", dense_states())
    source, largest = large(tmp_path / "b")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(small), str(source), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum(file.stat().st_size for file in (source / ITERATION).iterdir()) > 10 * largest
    assert int(done.stdout.split()[-1]) < 8 * largest


_IN_SMALL_FILES = """
import sys
from rich.console import Console
from parakit.checkpoint import reshard, reshard_command
reshard.FILE_BYTES = 1 << 20
reshard_command(sys.argv[1], "pp2", sys.argv[2], Console(quiet=True))
"""


@pytest.mark.slow
def test_reshard_killed_at_any_moment_is_finished_by_the_next_command(tmp_path: Path) -> None:
    source, _ = large(tmp_path / "a")
    whole = moved(source, "pp2", tmp_path / "whole")
    to, unfinished = tmp_path / "to", tmp_path / ".to.resharding"
    total = sum(file.stat().st_size for file in (source / ITERATION).iterdir())
    command = [sys.executable, "-c", _IN_SMALL_FILES, str(source), str(to)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for part in sorted(Random(5).uniform(0, 0.9) for _ in range(6)):
        process = subprocess.Popen(command, env=environment)
        until(lambda least=part * total: written_bytes(unfinished) > least, "what is written")
        process.kill()
        process.wait()
        assert not to.exists()
        assert written_bytes(unfinished) > 0
    subprocess.run(command, env=environment, check=True)
    assert not unfinished.exists()
    for name, (sizes, values) in held(whole).items():
        assert (sizes, True) == (held(to)[name][0], torch.equal(values, held(to)[name][1])), name
    assert common(to) == common(whole)


def written_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))

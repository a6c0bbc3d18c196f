"""A tiny GPT in Megatron's distributed format, written by torch, with each fault that is injected."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint

from parakit.artifacts.torch_dist import StoredMetadata, StoredPart, StoredTensor
from parakit.artifacts.torch_dist_writer import write_metadata
from parakit.checkpoint.checks import find_problems, judge_loading
from parakit.checkpoint.command import inspect_command
from parakit.checkpoint.compare import compare_weights
from parakit.checkpoint.contents import UnknownFormatError, read_contents
from parakit.config.files import ROOT

LAYERS, HIDDEN, FFN, ROWS, PADDED = 3, 8, 16, 24, 128
QKV, FC1 = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
States = dict[str, Tensor]
ARGUMENTS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "ffn_hidden_size": FFN,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "padded_vocab_size": PADDED,
    "vocab_size": 100,
    "make_vocab_size_divisible_by": 128,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "world_size": 2,
    "data_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "add_bias_linear": True,
}


FOUR_LAYERS: dict[str, object] = {"num_layers": LAYERS + 1}
"""What a pipeline of two stages divides."""


def states() -> States:
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    norms = {
        f"{module}.layer_norm_{parameter}": (HIDDEN,)
        for module in ("self_attention.linear_qkv", "mlp.linear_fc1")
        for parameter in ("weight", "bias")
    }
    inside = {
        **norms,
        "self_attention.linear_qkv.weight": (ROWS, HIDDEN),
        "self_attention.linear_qkv.bias": (ROWS,),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "self_attention.linear_proj.bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (FFN, HIDDEN),
        "mlp.linear_fc1.bias": (FFN,),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
        "mlp.linear_fc2.bias": (HIDDEN,),
    }
    weights = {EMBEDDING: made(PADDED, HIDDEN), POSITIONS: made(16, HIDDEN)}
    weights |= {f"decoder.layers.{name}": made(LAYERS, *size) for name, size in inside.items()}
    weights |= {f"decoder.final_layernorm.{name}": made(HIDDEN) for name in ("weight", "bias")}
    moments = {
        f"optimizer.state.{moment}.{name}": made(*weight.shape)
        for moment in ("exp_avg", "exp_avg_sq")
        for name, weight in weights.items()
    }
    return weights | moments


def written(folder: Path, held: States, iteration: int = 8, **arguments: object) -> Path:
    target = folder / f"iter_{8:07d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a single process.
        checkpoint.save(held, storage_writer=checkpoint.FileSystemWriter(target), no_dist=True)
    common = {"args": Namespace(**{**ARGUMENTS, **arguments}), "iteration": iteration}
    torch.save(common | {"opt_param_scheduler": {"num_steps": 8}}, target / "common.pt")
    (target / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text("8")
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("healthy"), states())


def test_a_healthy_checkpoint_is_described_as_the_issue_has_it(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_command(str(healthy), None, None, verify=True, json=True) == 0
    description = json.loads(capsys.readouterr().out)
    assert (description["format"], description["iteration"], description["layout"]) == (
        "torch_dist",
        8,
        "tp2",
    )
    weights = [tensor for tensor in states().items() if not tensor[0].startswith("optimizer")]
    assert description["parameters"] == sum(weight.numel() for _, weight in weights)
    assert description["problems"] == []
    assert {
        "name": QKV,
        "shape": [LAYERS, ROWS, HIDDEN],
        "dtype": "float32",
        "kind": "weight",
    } in description["tensors"]
    assert sum(tensor["kind"] == "optimizer" for tensor in description["tensors"]) == 2 * len(
        weights
    )


def test_a_run_s_folder_is_described_by_its_newest_checkpoint(
    healthy: Path, tmp_path: Path
) -> None:
    shutil.copytree(healthy, tmp_path / "checkpoints")
    (tmp_path / "run.json").write_text("{}")
    assert read_contents(tmp_path).folder == tmp_path / "checkpoints" / "iter_0000008"


def closing_lines(folder: Path, capsys: pytest.CaptureFixture[str], verify: bool = False) -> str:
    """What `make inspect` prints last of a checkpoint in which it finds no fault."""
    assert inspect_command(str(folder), None, None, verify=verify) == 0
    return capsys.readouterr().out.partition("Checked: ")[2]


def test_the_last_lines_say_what_was_checked_and_what_was_not(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = closing_lines(healthy, capsys)
    parts = "(attention, embedding, MLP, norms)"
    assert f"16 tensors against the model of the arguments {parts}" in lines
    assert "the optimizer's moments against the weights" in lines
    unchecked = lines.partition("Not checked: ")[2]
    assert unchecked.startswith("values, because only VERIFY=1 reads them")
    lines = closing_lines(healthy, capsys, verify=True)
    assert "every piece against its checksums" in lines
    assert "VERIFY=1" not in lines


def test_parts_of_a_mixture_of_experts_are_missed_and_unknown_modules_are_not_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {name: values for name, values in states().items() if ".mlp.linear_fc" not in name}
    folder = written(tmp_path, held, num_experts=4, moe_ffn_hidden_size=FFN, moe_router_topk=1)
    problems = " ".join(find_problems(read_contents(folder)))
    for name in (
        "router.weight",
        "experts.experts.linear_fc1.weight",
        "linear_fc1.layer_norm_bias",
    ):
        assert f"decoder.layers.mlp.{name} is missing" in problems
    held = states()
    for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        held[f"{prefix}decoder.layers.adapter.weight"] = torch.ones(LAYERS, 2)
    lines = closing_lines(written(tmp_path / "adapter", held), capsys)
    assert "Not checked: 1 tensor such as decoder.layers.adapter.weight, because no rule" in lines


def test_a_buffer_of_the_router_needs_no_moments(tmp_path: Path) -> None:
    """The optimizer does not train the biases by which Megatron balances experts."""
    experts = {"router.weight": (4, HIDDEN), "router.expert_bias": (4,)}
    experts |= {"experts.experts.linear_fc1.weight": (4, FFN, HIDDEN)}
    experts |= {"experts.experts.linear_fc1.bias": (4, FFN), "router.bias": (4,)}
    experts |= {"experts.experts.linear_fc2.weight": (4, HIDDEN, FFN)}
    experts |= {"experts.experts.linear_fc2.bias": (4, HIDDEN)}
    held = {
        name: values
        for name, values in states().items()
        if ".mlp." not in name or "layer_norm" in name
    }
    for name, shape in experts.items():
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
            if not (prefix and "expert_bias" in name):
                held[f"{prefix}decoder.layers.mlp.{name}"] = torch.ones(LAYERS, *shape)
    mixture = {"num_experts": 4, "moe_ffn_hidden_size": FFN, "moe_router_topk": 1}
    mixture["moe_router_enable_expert_bias"] = True
    assert find_problems(read_contents(written(tmp_path, held, **mixture))) == ()
    del held["decoder.layers.mlp.router.expert_bias"]
    folder = written(tmp_path / "without", held, **mixture)
    assert "router.expert_bias is missing" in " ".join(find_problems(read_contents(folder)))


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("attack", ["system", "popen", "write"])
def test_a_hostile_common_state_is_not_executed_and_is_a_fault(
    healthy: Path, tmp_path: Path, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "touched"
    calls: dict[str, tuple[object, tuple[object, ...]]] = {
        "system": (os.system, (f"touch {target}",)),
        "popen": (subprocess.Popen, (["touch", str(target)],)),
        "write": (Path.touch, (target,)),
    }

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return calls[attack]

    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    common = {"args": Namespace(**ARGUMENTS), "iteration": 8, "extra": Hostile()}
    torch.save(common, copy / "iter_0000008/common.pt")
    assert inspect_command(str(copy), None, "tp2", verify=False) == 1
    assert re.search(
        r"common\.pt calls \S+ when it is loaded.*do not load it", capsys.readouterr().err
    )
    assert not target.exists()


def test_without_arguments_no_model_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, states())
    torch.save({"iteration": 8}, folder / "iter_0000008/common.pt")
    lines = closing_lines(folder, capsys)
    assert "which tensors the model has, because the checkpoint holds no arguments" in lines
    assert "against the model" not in lines


def test_a_model_of_another_family_is_not_claimed_and_a_damaged_config_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mamba"}')
    lines = closing_lines(tmp_path, capsys)
    assert "Checked: " not in lines
    assert lines.startswith("nothing. ")
    assert "which tensors the model has, because" in lines
    assert "has the model_type 'mamba'" in lines
    config.write_text('{"model_type')
    assert inspect_command(str(tmp_path), None, None, verify=False) == 1
    assert "config.json cannot be read" in capsys.readouterr().err


def test_a_checkpoint_without_its_common_state_is_at_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, states())
    (folder / "iter_0000008/common.pt").unlink()
    assert inspect_command(str(folder), None, None, verify=False) == 1
    assert "common.pt is missing, without which" in capsys.readouterr().err


def without(name: str) -> Callable[[States], object]:
    return lambda held: held.pop(name)


def shaped(name: str, *shape: int) -> Callable[[States], object]:
    return lambda held: held.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(QKV), f"{QKV} is missing"),
        (without(EMBEDDING), f"{EMBEDDING} is missing"),
        (without(POSITIONS), f"{POSITIONS} is missing"),
        (without("decoder.layers.mlp.linear_fc2.bias"), "linear_fc2.bias is missing"),
        (shaped(FC1, LAYERS, 2 * FFN, HIDDEN), f"{FC1} has the shape"),
        (shaped("output_layer.weight", PADDED, HIDDEN), "output_layer.weight is left over"),
        (without(f"optimizer.state.exp_avg.{QKV}"), f"no exp_avg of {QKV}"),
        (shaped(f"optimizer.state.exp_avg_sq.{FC1}", LAYERS, 4, HIDDEN), "of another run"),
        (shaped("optimizer.state.exp_avg.decoder.other", 2), "which is no weight here"),
    ],
)
def test_tensors_that_do_not_fit_the_arguments_are_named(
    tmp_path: Path, change: Callable[[States], object], named: str
) -> None:
    held = states()
    change(held)
    assert named in " ".join(find_problems(read_contents(written(tmp_path, held))))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"add_bias_linear": False}, "is left over"),
        ({"iteration": 4}, "holds the states of iteration 4"),
    ],
)
def test_arguments_that_do_not_fit_the_weights_are_named(
    tmp_path: Path, arguments: dict[str, object], named: str
) -> None:
    iteration = arguments.pop("iteration", 8)
    assert isinstance(iteration, int)
    folder = written(tmp_path, states(), iteration, **arguments)
    assert named in " ".join(find_problems(read_contents(folder)))


def data(folder: Path) -> Path:
    return next((folder / "iter_0000008").glob("*.distcp"))


def truncate(folder: Path) -> None:
    data(folder).write_bytes(data(folder).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "iter_0000008/.metadata").write_bytes(b"\x80"), "be read"),
        (lambda folder: (folder / "iter_0000008/metadata.json").unlink(), "torch's own"),
        (lambda folder: (folder / "iter_0000008/common.pt").write_bytes(b"PK"), "common.pt is"),
    ],
)
def test_a_damaged_file_is_named(
    healthy: Path, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    damage(copy)
    assert named in " ".join(find_problems(read_contents(copy), reads_pieces=True))


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
def test_a_pipe_is_not_opened_and_is_named(
    healthy: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    make_pipe(copy / "iter_0000008" / name)
    assert inspect_command(str(copy), None, None, verify=True) == 1
    printed = capsys.readouterr()
    assert re.search(rf"{name}\b.* is no regular file", printed.err)
    assert "Nothing is missing" not in printed.out


@pytest.mark.usefixtures("within_a_minute")
def test_a_pipe_in_place_of_the_tracker_or_of_a_rank_s_file_is_named(
    healthy: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    make_pipe(copy / "latest_checkpointed_iteration.txt")
    with pytest.raises(UnknownFormatError, match=r"iteration\.txt is no regular file; name"):
        read_contents(copy)
    rank = tmp_path / "mp_rank_00"
    rank.mkdir()
    make_pipe(rank / "model_optim_rng.pt")
    assert "is no regular file" in " ".join(read_contents(tmp_path).problems)


@pytest.mark.usefixtures("within_a_minute")
def test_a_device_is_not_read(healthy: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    (copy / "iter_0000008/common.pt").unlink()
    (copy / "iter_0000008/common.pt").symlink_to("/dev/zero")
    assert "common.pt cannot be read (it is no regular file)" in " ".join(
        find_problems(read_contents(copy))
    )


def swapped(name: str, order: list[int]) -> Callable[[States], object]:
    """Rows of every layer in equal blocks, in another order."""

    def change(held: States) -> None:
        blocks = held[name].chunk(len(order), 1)
        held[name] = torch.cat([blocks[at] for at in order], 1)

    return change


def changed(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[States], object]:
    return lambda held: held.update({name: how(held[name])})


def set_one(values: Tensor) -> Tensor:
    values[1, 2, 3] += 1
    return values


MOMENT = f"optimizer.state.exp_avg.{QKV}"


@pytest.mark.parametrize(
    ("name", "change", "relation", "detail"),
    [
        (QKV, changed(QKV, set_one), "different", "in 1 of 3 layers, first in 1: first at [2, 3]"),
        (QKV, changed(QKV, lambda w: w.bfloat16()), "equal but for dtype", "float32 and bfloat16"),
        (EMBEDDING, changed(EMBEDDING, lambda w: torch.cat([w, w])), "equal but for padding", ""),
        (QKV, without(QKV), "only in one", ""),
        (MOMENT, changed(MOMENT, lambda w: w + 1), "different", "in 3 of 3 layers"),
        (QKV, changed(QKV, lambda w: w * (1 + 1e-6 * w)), "equal but for rounding", "worst at"),
    ],
)
def test_differing_tensors_of_two_checkpoints_are_named(
    healthy: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[States], object],
    relation: str,
    detail: str,
) -> None:
    held = states()
    change(held)
    relations = compare_weights(read_contents(healthy), read_contents(written(tmp_path, held)))
    assert {pair.name for pair in relations if pair.relation != "equal"} == {name}
    only = next(pair for pair in relations if pair.name == name)
    assert only.relation == relation
    assert detail in only.detail


def test_scaling_factor_is_named_within_the_dtypes_precision(tmp_path: Path) -> None:
    narrow = {
        name: tensor.bfloat16() for name, tensor in states().items() if "optimizer" not in name
    }
    other = narrow | {FC1: narrow[FC1] * 1.25}
    relations = compare_weights(
        *(read_contents(written(tmp_path / at, held)) for at, held in (("a", narrow), ("b", other)))
    )
    (only,) = [tensor for tensor in relations if not tensor.is_same]
    assert (only.name, only.relation) == (FC1, "scaled")
    assert re.search("by 1.2[45]", only.detail)


def kept(held: States) -> None:
    """Main weights of an fp32 model's distributed optimizer: the weights."""
    weights = [name for name in held if "optimizer" not in name]
    held |= {f"optimizer.state.param.{name}": held[name].clone() for name in weights}


def one_layer_is_zero(held: States) -> None:
    held[FC1] = torch.zeros_like(held[FC1])


def not_finite(held: States) -> None:
    held[QKV][0, 0, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (kept, ""),
        (lambda held: (kept(held), set_one(held[QKV])), "main weights of decoder.layers.self_att"),
        (one_layer_is_zero, f"{FC1} is 0 in the whole piece"),
        (not_finite, f"{QKV} is not finite in the piece"),
    ],
)
def test_values_that_no_training_leaves_are_named(
    tmp_path: Path, change: Callable[[States], object], named: str
) -> None:
    held = states()
    change(held)
    problems = find_problems(read_contents(written(tmp_path, held)), reads_pieces=True)
    assert (named in " ".join(problems)) if named else problems == ()


def test_nan_and_infinity_equal_themselves(tmp_path: Path) -> None:
    held = states()
    not_finite(held)
    held[EMBEDDING][0] = torch.nan
    contents = read_contents(written(tmp_path, held))
    assert {relation.relation for relation in compare_weights(contents, contents)} == {"equal"}


def test_fsdps_checkpoints_are_compared_by_their_own_names(tmp_path: Path) -> None:
    name = "model.module.decoder.layers.0.mlp.linear_fc1.weight"
    folders = []
    for last in (1.0, 2.0):
        held = {name: torch.full((4, 2), last), "model.module.embedding.weight": torch.ones(3, 2)}
        folders.append(written(tmp_path / str(last), held))
        (folders[-1] / "iter_0000008/metadata.json").unlink()
    relations = compare_weights(*map(read_contents, folders))
    assert [
        (relation.name, relation.relation) for relation in relations if not relation.is_same
    ] == [("decoder.layers.mlp.linear_fc1.weight", "scaled")]


@pytest.mark.parametrize(
    ("strategy", "verdict", "flags", "reason"),
    [
        ("tp2", "loads without random states", ("--no-load-rng",), "It holds none"),
        ("pp3", "loads without random states", (), "ignores random states of another TP or PP"),
        ("dp2-zero1", "loads without optimizer and random states", ("--no-load-optim",), "formats"),
        ("tp3", "refuses", (), "3"),
    ],
)
def test_strategy_loads_all_states_or_some_or_refuses(
    healthy: Path, strategy: str, verdict: str, flags: tuple[str, ...], reason: str
) -> None:
    load_verdict = judge_loading(read_contents(healthy), strategy)
    assert load_verdict.verdict == verdict
    assert set(flags) <= set(load_verdict.flags)
    assert reason in " ".join(load_verdict.reasons)


UNTIED = "--untie-embeddings-and-output-weights"
FORMS = {
    "tied": ("loads", "loads", "loads", "loads", "refuses", "refuses", "refuses"),
    "untied": ("loads", "loads", "loads", "loads", "refuses", "refuses", "loads"),
    "tied, of zero1": ("loads", "loads", "loads", "loads", "refuses", "refuses", "refuses"),
    "untied, of zero1": ("loads", "loads", "loads", "loads", "refuses", "refuses", "loads"),
}
"""Whether a torch_dist checkpoint loads under each of `UNDER`; `test_real.py` tries it with Megatron."""
UNDER = ("dp2", "tp2", "pp2", "dp2-zero1", "zero2", "zero3", "fsdp2")


@pytest.mark.parametrize("form", FORMS)
def test_no_strategy_loads_a_format_or_tensors_that_it_cannot(tmp_path: Path, form: str) -> None:
    """Whether it does for each format and strategy, tied or untied."""
    held, arguments = states(), {**FOUR_LAYERS}
    for name in [name for name in held if "decoder.layers." in name]:
        held[name] = torch.cat((held[name], held[name][:1]))
    if "untied" in form:
        arguments["untie_embeddings_and_output_weights"] = True
        moments = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
        held |= {f"{prefix}output_layer.weight": torch.ones(PADDED, HIDDEN) for prefix in moments}
    if "zero1" in form:
        arguments |= {"use_distributed_optimizer": True, "tensor_model_parallel_size": 1}
        arguments |= {"data_parallel_size": 2}
    contents = read_contents(written(tmp_path, held, **arguments))
    assert find_problems(contents) == ()
    loadings = [judge_loading(contents, strategy) for strategy in UNDER]
    assert tuple(verdict.verdict.partition(" ")[0] for verdict in loadings) == FORMS[form]
    for verdict in loadings:
        loads = verdict.verdict.startswith("loads")
        assert (UNTIED in verdict.flags) == ("untied" in form and loads)
    assert "fsdp_dtensor alone, and this checkpoint is torch_dist" in loadings[4].reasons[0]
    if "untied" not in form:
        assert (
            "holds no output_layer.weight: its embedding is the output layer"
            in (loadings[-1].reasons[0])
        )


def test_two_degrees_of_one_number_are_both_among_the_flags(healthy: Path) -> None:
    verdict = judge_loading(read_contents(healthy), "tp2cp2")
    degrees = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    assert " ".join(verdict.flags) == f"{degrees} --no-load-rng"


def test_a_legacy_checkpoint_is_read_and_nothing_in_its_pickle_is_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (target,))

    folder = tmp_path / "iter_0000008" / "mp_rank_00"
    folder.mkdir(parents=True)
    saved = {
        "args": Namespace(**ARGUMENTS),
        "iteration": 4,
        "model": {"embedding.weight": torch.ones(3, 2, dtype=torch.bfloat16)},
        "optimizer": {"trap": Touch()},
    }
    torch.save(saved, folder / "model_optim_rng.pt", pickle_module=pickle)
    contents = read_contents(folder.parent)
    assert [(name, weight.shape, weight.dtype) for name, weight in contents.weights.items()] == [
        ("mp_rank_00.embedding.weight", (3, 2), "bfloat16")
    ]
    assert contents.states == ("optimizer",)
    assert "calls pathlib.Path.touch when it is loaded" in contents.problems[0]
    assert contents.problems[1:] == (
        "mp_rank_00 is of iteration 4, not of 8.",
        "mp_rank_01 is missing: the checkpoint's arguments imply it.",
    )
    assert not target.exists()


def test_a_damaged_checkpoint_is_not_compared(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    assert inspect_command(str(healthy), str(copy), None, verify=False) == 0
    truncate(copy)
    assert inspect_command(str(healthy), str(copy), None, verify=False) == 1
    error = capsys.readouterr().err
    assert "is truncated" in error
    assert "Nothing was compared" in error


def flip(path: Path, values: Tensor) -> None:
    """Change one bit of a tensor's last value."""
    saved = bytearray(path.read_bytes())
    pattern = values.numpy().tobytes()
    saved[saved.find(pattern) + len(pattern) - 1] ^= 1
    path.write_bytes(saved)


def test_a_flipped_byte_is_no_difference_between_models(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    flip(data(copy), states()[QKV])
    assert inspect_command(str(healthy), str(copy), None, verify=False) == 1
    error = capsys.readouterr().err
    assert f"{data(copy)} is damaged at byte" in error
    assert "Nothing was compared" in error


def test_zarr_and_folders_without_a_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="holds no"):
        read_contents(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnknownFormatError, match="zarr"):
        read_contents(tmp_path)


_MEASURED = """
import re, sys, time
from pathlib import Path
began = time.perf_counter()
from parakit.checkpoint.command import inspect_command
assert inspect_command(sys.argv[1], None, None, verify=False, json=True) == 1  # It has no norms.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(peak, round(time.perf_counter() - began, 2), "torch" in sys.modules, file=sys.stderr)
"""


def sparse(folder: Path) -> int:
    """A checkpoint of 8 ranks of TP with its moments, whose files hold nothing; its bytes."""
    hidden, layers, rows, ranks = 2048, 32, 51200, 8
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        EMBEDDING: ((rows, hidden), 0),
        QKV: ((layers, 3 * hidden, hidden), 1),
        "decoder.layers.self_attention.linear_proj.weight": ((layers, hidden, hidden), 2),
        FC1: ((layers, 4 * hidden, hidden), 1),
        "decoder.layers.mlp.linear_fc2.weight": ((layers, hidden, 4 * hidden), 2),
    }
    arguments = {
        **{
            "hidden_size": hidden,
            "num_layers": layers,
            "kv_channels": 128,
            "add_bias_linear": False,
        },
        **{"num_attention_heads": 16, "ffn_hidden_size": 4 * hidden, "padded_vocab_size": rows},
        **{
            "position_embedding_type": "rope",
            "vocab_size": rows,
            "tensor_model_parallel_size": ranks,
        },
        **{"world_size": ranks},
    }
    path = written(folder, {EMBEDDING: torch.ones(1)}, **arguments) / "iter_0000008"
    tensors, end = {}, 0
    for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        for name, (shape, axis) in shapes.items():
            parts, sizes = {}, {}
            size = [*shape]
            size[axis] //= ranks
            size[0] = 1 if axis else size[0]
            for layer in range(layers if axis else 1):
                for rank in range(ranks):
                    at = [layer, *(0 for _ in shape[1:])]
                    at[axis] = rank * size[axis]
                    length = 4 * torch.Size(size).numel()
                    parts[tuple(at)], sizes[tuple(at)] = StoredPart("all", end, length), tuple(size)
                    end += length
            tensors[prefix + name] = StoredTensor(shape, "float32", sizes, parts)
    write_metadata(path, StoredMetadata(tensors, (), {}))
    with (path / "all").open("wb") as file:
        file.truncate(end)
    return end


@pytest.mark.slow
def test_20_gb_are_inspected_in_200_mb_without_reading_a_tensor(tmp_path: Path) -> None:
    assert sparse(tmp_path) > 20 * 10**9
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, _, loads_torch = done.stderr.splitlines()[-1].split()
    assert int(peak) < 200 * 10**6
    assert loads_torch == "False"

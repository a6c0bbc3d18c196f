"""Faults in checkpoints of each format, one at a time, 81 of them; each is found and named.

A tiny gated GPT, tied, as TP 2 would have saved it. What a checkpoint says against itself is found by
reading it; what only another one can tell is found by comparing it with the healthy one in torch_dist.
"""

import shutil
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint

from parakit.artifacts.checkpoints import Checkpoint, verify_and_record
from parakit.checkpoint.checks import find_problems, judge_loading
from parakit.checkpoint.compare import compare_weights
from parakit.checkpoint.contents import Contents, read_contents
from parakit.convert.hf.random_model import write_model
from tests.checkpoint.test_inspect import ARGUMENTS as PLAIN
from tests.checkpoint.test_inspect import (
    EMBEDDING,
    FFN,
    HIDDEN,
    LAYERS,
    PADDED,
    QKV,
    ROWS,
    States,
    shaped,
    swapped,
    written,
)
from tests.convert.hf.folders import GPT2

EXPERTS = 4
ITERATION = "iter_0000008"
FC1, FC2 = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
ROUTER = "decoder.layers.mlp.router.weight"
E_FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
E_FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
ARGUMENTS: dict[str, Any] = {
    **PLAIN,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
}
SHAPES = {
    EMBEDDING: (PADDED, HIDDEN),
    NORM: (LAYERS, HIDDEN),
    QKV: (LAYERS, ROWS, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    MLP_NORM: (LAYERS, HIDDEN),
    FC1: (LAYERS, 2 * FFN, HIDDEN),
    FC2: (LAYERS, HIDDEN, FFN),
    "decoder.final_layernorm.weight": (HIDDEN,),
}
OF_EXPERTS = {
    **{name: shape for name, shape in SHAPES.items() if name not in (FC1, FC2)},
    ROUTER: (LAYERS, EXPERTS, HIDDEN),
    E_FC1: (LAYERS, EXPERTS, 2 * FFN, HIDDEN),
    E_FC2: (LAYERS, EXPERTS, HIDDEN, FFN),
}
MOMENT = "optimizer.state.exp_avg."


def made(shapes: dict[str, tuple[int, ...]]) -> States:
    """Weights, their two moments and their main weights."""
    generator = torch.Generator().manual_seed(1)
    states = {
        f"{prefix}{name}": torch.randn(shape, generator=generator)
        for prefix in ("", MOMENT, "optimizer.state.exp_avg_sq.")
        for name, shape in shapes.items()
    }
    main = {f"optimizer.state.fp32_param.{name}": states[name].clone() for name in shapes}
    return states | main


def rank_part(name: str, whole: Tensor, rank: int) -> Tensor:
    """What a rank of TP 2 has of a tensor of one layer."""
    if "linear_fc1.weight" in name:
        return torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
    if name.endswith(("linear_qkv.weight", EMBEDDING)):
        return whole.chunk(2)[rank].clone()
    return whole.chunk(2, 1)[rank] if whole.ndim == 2 and "router" not in name else whole


def by_layer(name: str, whole: Tensor) -> Iterator[tuple[str, int | None, Tensor]]:
    """A tensor's parts under the names of Megatron's own modules, each with its layer."""
    if "decoder.layers." not in name:
        yield name, None, whole
        return
    fsdp_name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    fsdp_name = fsdp_name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    for layer, values in enumerate(whole):
        if ".experts.experts." not in name:
            yield fsdp_name, layer, values
            continue
        for expert, expert_values in enumerate(values):
            yield (
                fsdp_name.replace("experts.experts", f"experts.local_experts.{expert}"),
                layer,
                expert_values,
            )


def of_kind(held: States, kind: str) -> States:
    """Weights, or one of what the optimizer keeps of them."""
    prefix = f"optimizer.state.{kind}." if kind else ""
    named = {
        name.removeprefix(prefix): tensor
        for name, tensor in held.items()
        if name.startswith(prefix)
    }
    return {name: tensor for name, tensor in named.items() if not name.startswith("optimizer")}


KEPT = ("exp_avg", "exp_avg_sq", "fp32_param")
Extra = dict[str, Any]


def as_torch_dist(folder: Path, held: States, extra: Extra) -> Path:
    return written(folder, held, **{**ARGUMENTS, **extra}) / ITERATION


def as_legacy(
    folder: Path, held: States, extra: Extra, stages: tuple[range, ...] = (range(LAYERS),)
) -> Path:
    """A file a rank of TP 2 and of each stage of PP."""
    last = len(stages) - 1
    for rank in range(2):
        for stage, layers in enumerate(stages):
            parts: dict[str, States] = {kind: {} for kind in ("", *KEPT)}
            for kind, into in parts.items():
                for name, whole in of_kind(held, kind).items():
                    ends = range(last, last + 1) if "final" in name else range(1)
                    for layer_name, layer, values in by_layer(name, whole):
                        if layer is None and stage in ends:
                            into[layer_name] = rank_part(layer_name, values, rank)
                        elif layer in layers:
                            local = layer_name.replace("layers.", f"layers.{layer - layers[0]}.")
                            into[local] = rank_part(layer_name, values, rank)
                if last and stage == last:
                    into["output_layer.weight"] = rank_part(
                        EMBEDDING, of_kind(held, kind)[EMBEDDING], rank
                    )
            rank_folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if last else "")
            save_rank(
                folder / ITERATION / rank_folder,
                parts,
                {**extra, "pipeline_model_parallel_size": last + 1},
            )
    return folder / ITERATION


def save_rank(path: Path, parts: dict[str, States], extra: Extra) -> None:
    """Groups are of matrices, and of what has no decay; each has the model's order."""
    first = parts["exp_avg"]
    groups = [
        [name for name in first if (first[name].ndim > 1) is decays] for decays in (True, False)
    ]
    order = [name for group in groups for name in group]
    kept = {name: {kind: parts[kind][name] for kind in KEPT[:2]} for name in order}
    optimizer = {
        "state": {at: {"step": torch.tensor(8.0), **kept[name]} for at, name in enumerate(order)},
        "param_groups": [{"params": [order.index(name) for name in group]} for group in groups],
    }
    model: OrderedDict[str, Tensor] = OrderedDict(parts[""])
    model._metadata = OrderedDict()  # type: ignore[attr-defined]  # As torch's modules have it.
    main = [[parts["fp32_param"][name] for name in group] for group in groups]
    saved = {
        "args": Namespace(**{**ARGUMENTS, **extra}),
        "iteration": extra.get("iteration", 8),
        "model": model,
        "optimizer": {"optimizer": optimizer, "fp32_from_fp16_params": main},
    }
    path.mkdir(parents=True)
    torch.save(saved, path / "model_optim_rng.pt")


def as_fsdp(folder: Path, held: States, extra: Extra) -> Path:
    """A name a layer, gate and value apart, arguments and iteration as objects."""
    # The iteration is no part of the arguments: its digits would move what follows in the file.
    arguments = {**ARGUMENTS, **{name: extra[name] for name in extra if name != "iteration"}}
    saved: dict[str, Any] = {
        "args": Namespace(**arguments),
        "iteration": extra.get("iteration", 8),
    }
    for kind in ("", *KEPT[:2]):
        form = f"optimizer.state.module.{{}}.{kind}" if kind else "model.module.{}"
        for name, whole in of_kind(held, kind).items():
            for layer_name, layer, values in by_layer(name, whole):
                local = layer_name.replace("layers.", f"layers.{layer}.")
                gated = zip(("_w", "_v"), values.chunk(2), strict=True)
                for half, part in gated if "linear_fc1" in layer_name else [("", values)]:
                    saved[form.format(local + half)] = part.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a single process.
        writer = checkpoint.FileSystemWriter(folder / ITERATION)
        checkpoint.save(saved, storage_writer=writer, no_dist=True)
    return folder / ITERATION


WRITERS: dict[str, Callable[[Path, States, Extra], Path]] = {
    "torch_dist": as_torch_dist,
    "torch": as_legacy,
    "fsdp_dtensor": as_fsdp,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Contents]:
    """Return the healthy checkpoint in torch_dist, with experts and without. No test changes it."""
    folder = tmp_path_factory.mktemp("healthy")
    dense = as_torch_dist(folder / "dense", made(SHAPES), {})
    mixture = as_torch_dist(folder / "mixture", made(OF_EXPERTS), {"num_experts": EXPERTS})
    return {False: read_contents(dense), True: read_contents(mixture)}


@pytest.mark.parametrize("shapes", [SHAPES, OF_EXPERTS])
@pytest.mark.parametrize("form", WRITERS)
def test_a_healthy_checkpoint_of_any_format_is_whole_and_is_the_same_model(
    tmp_path: Path,
    healthy: dict[bool, Contents],
    form: str,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    extra = {"num_experts": EXPERTS} if shapes is OF_EXPERTS else {}
    first = healthy[shapes is OF_EXPERTS]
    other = read_contents(WRITERS[form](tmp_path, made(shapes), extra))
    assert find_problems(other, reads_pieces=True) == ()
    assert other.parameters == sum(torch.Size(shape).numel() for shape in shapes.values())
    relations = compare_weights(first, other)
    assert {relation.relation for relation in relations} == {"equal"}
    assert len(relations) == len(shapes) * (3 if form == "fsdp_dtensor" else 4)


def test_rank_files_of_format_torch_are_joined_to_full_tensors(
    tmp_path: Path, healthy: dict[bool, Contents]
) -> None:
    other = read_contents(as_legacy(tmp_path, made(SHAPES), {}, (range(2), range(2, 3))))
    assert find_problems(other, reads_pieces=True) == ()
    assert {relation.relation for relation in compare_weights(healthy[False], other)} == {"equal"}


@pytest.mark.parametrize(
    ("strategy", "verdict"),
    [
        ("tp2", "loads without random states"),
        ("tp2dp2", "loads without random states"),
        ("dp2", "refuses"),
        ("tp2dp2-zero2", "refuses"),
        ("tp2dp2-fsdp2", "refuses"),
    ],
)
def test_a_rank_loads_its_own_file_of_the_format_torch(
    tmp_path: Path, strategy: str, verdict: str
) -> None:
    load_verdict = judge_loading(read_contents(as_legacy(tmp_path, made(SHAPES), {})), strategy)
    assert load_verdict.verdict == verdict
    assert ("--ckpt-format" in load_verdict.flags) == verdict.startswith("loads")


class Fault(NamedTuple):
    """What is done to a checkpoint, and what is said of it."""

    name: str
    change: Callable[[States], object]
    sentence: str
    extra: Mapping[str, Any] = MappingProxyType({})
    formats: tuple[str, ...] = tuple(WRITERS)


def both(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[States], object]:
    """Weights and main weights alike, as a converter would."""

    def changed(held: States) -> None:
        for name in names:
            held[name] = change(held[name])
            held[f"optimizer.state.fp32_param.{name}"] = held[name].clone()

    return changed


def rows(name: str, order: list[int]) -> Callable[[States], object]:
    return lambda held: [
        swapped(key, order)(held) for key in (name, f"optimizer.state.fp32_param.{name}")
    ]


def at_one(values: Tensor) -> Tensor:
    values[1, 2, 3] += 1
    return values


def nothing(_: States) -> None:
    """The fault is in the arguments."""


COMPARED = (
    Fault(
        "layers in another order",
        both(lambda w: w[[0, 2, 1]], QKV),
        "layers in the order [0, 2, 1]",
    ),
    Fault("gate and up swapped", rows(FC1, [1, 0]), f"blocks of {FFN} rows in the order [1, 0]"),
    Fault(
        "gate and up swapped in one TP rank", rows(FC1, [0, 3, 2, 1]), "in the order [0, 3, 2, 1]"
    ),
    Fault(
        "q, k and v interleaved otherwise",
        rows(QKV, [0, 3, 1, 4, 2, 5]),
        "blocks of 4 rows in the order",
    ),
    Fault(
        "experts permuted",
        both(lambda w: w[:, [2, 0, 1, 3]], E_FC1),
        "experts in the order [2, 0, 1, 3]",
    ),
    Fault("one element", both(at_one, QKV), "in 1 of 3 layers, first in 1: first at [2, 3]"),
    Fault("a factor", both(lambda w: w * 1.7, QKV), "by 1.7"),
)
INSPECTED = (
    Fault(
        "an embedding padded otherwise",
        both(lambda w: torch.cat([w, w]), EMBEDDING),
        "padded otherwise",
    ),
    Fault(
        "an optimizer of another run",
        shaped(f"{MOMENT}{FC2}", LAYERS, HIDDEN, 4),
        "which is no weight here",
        formats=("torch",),
    ),
    Fault(
        "an optimizer of another run",
        shaped(f"{MOMENT}{FC2}", LAYERS, HIDDEN, 4),
        "of another run",
        formats=("torch_dist", "fsdp_dtensor"),
    ),
    Fault(
        "main weights of another run",
        lambda held: at_one(held[QKV]),
        "main weights of",
        formats=("torch_dist", "torch"),
    ),
    Fault("another number of layers", nothing, "has the shape [3,", {"num_layers": 4}),
    Fault("another width", nothing, "has the shape", {"hidden_size": 16}),
    Fault("a gate that is not there", nothing, f"{FC1} has the shape", {"ffn_hidden_size": 8}),
    Fault(
        "biases that are not there",
        nothing,
        "linear_qkv.bias is missing",
        {"add_bias_linear": True},
    ),
    Fault(
        "an output layer that is not there",
        nothing,
        "output_layer.weight is missing",
        {"untie_embeddings_and_output_weights": True},
    ),
    Fault(
        "a weight that is not there",
        lambda held: [held.pop(n) for n in list(held) if n.endswith(FC2)],
        f"{FC2} is missing",
    ),
    Fault("another iteration", nothing, "of iteration 4", {"iteration": 4}),
    Fault("weights that nobody wrote", both(torch.zeros_like, FC2), "is 0 in the whole piece"),
    Fault("no numbers", both(lambda w: w * torch.nan, FC2), "is not finite"),
)


def cases(faults: tuple[Fault, ...]) -> list[Any]:
    return [
        pytest.param(fault, form, id=f"{form}: {fault.name}")
        for fault in faults
        for form in fault.formats
    ]


@pytest.mark.parametrize(("fault", "form"), cases(INSPECTED))
def test_a_fault_is_named(tmp_path: Path, fault: Fault, form: str) -> None:
    held = made(SHAPES)
    fault.change(held)
    contents = read_contents(WRITERS[form](tmp_path, held, dict(fault.extra)))
    assert fault.sentence in " ".join(find_problems(contents, reads_pieces=True))


@pytest.mark.parametrize(("fault", "form"), cases(COMPARED))
def test_a_difference_is_named(
    tmp_path: Path, healthy: dict[bool, Contents], fault: Fault, form: str
) -> None:
    shapes, extra = (
        (OF_EXPERTS, {"num_experts": EXPERTS}) if "experts" in fault.name else (SHAPES, {})
    )
    held = made(shapes)
    fault.change(held)
    faulty = read_contents(WRITERS[form](tmp_path, held, extra))
    assert find_problems(faulty, reads_pieces=True) == ()
    wrong = [
        relation
        for relation in compare_weights(healthy[shapes is OF_EXPERTS], faulty)
        if not relation.is_same
    ]
    assert "optimizer" not in wrong[0].name
    assert fault.sentence in wrong[0].detail


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    """One bit of a value, of the second layer's norm."""
    values = bytearray(path.read_bytes())
    values[values.find(made(SHAPES)[NORM][1].numpy().tobytes())] ^= 1
    path.write_bytes(values)


FILES = {"torch_dist": "*.distcp", "torch": "mp_rank_01/*.pt", "fsdp_dtensor": "*.distcp"}
DAMAGES = (
    (truncate, {"torch": "cannot be read"}, "is truncated"),
    (zero, {"torch": "cannot be read"}, "is damaged at byte"),
    (flip, {}, "the checksum of"),
    (Path.unlink, {"torch": "mp_rank_01 is missing"}, "is missing, with"),
)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(("damage", "otherwise", "sentence"), DAMAGES)
def test_a_damaged_file_is_named(
    tmp_path: Path,
    form: str,
    damage: Callable[[Path], None],
    otherwise: dict[str, str],
    sentence: str,
) -> None:
    folder = WRITERS[form](tmp_path, made(SHAPES), {})
    damage(next(folder.glob(FILES[form])))
    problems = " ".join(find_problems(read_contents(folder), reads_pieces=True))
    assert otherwise.get(form, sentence) in problems


@pytest.mark.parametrize("form", WRITERS)
def test_a_shard_of_another_iteration_is_named(tmp_path: Path, form: str) -> None:
    folder = WRITERS[form](tmp_path / "one", made(SHAPES), {})
    held = {name: tensor + 1 for name, tensor in made(SHAPES).items()}
    later = WRITERS[form](tmp_path / "later", held, {"iteration": 9})
    if form == "torch_dist":
        verify_and_record(Checkpoint(8, folder))
    shard = next(folder.glob(FILES[form]))
    shutil.copy(later / shard.relative_to(folder), shard)
    problems = " ".join(find_problems(read_contents(folder), reads_pieces=True))
    assert {"torch_dist": "is not what was saved", "torch": "is of iteration 9"}.get(
        form, "iteration 9"
    ) in problems


def test_unequal_copies_of_ranks_are_named(tmp_path: Path) -> None:
    """A norm that TP ranks have each, and the tied embedding of the last stage."""
    for name, rank_folder in ((NORM, "mp_rank_01_000"), (EMBEDDING, "mp_rank_00_001")):
        folder = as_legacy(tmp_path / rank_folder, made(SHAPES), {}, (range(2), range(2, 3)))
        path = folder / rank_folder / "model_optim_rng.pt"
        saved = torch.load(path, weights_only=False)
        at = "decoder.layers.1.input_layernorm.weight" if name == NORM else "output_layer.weight"
        saved["model"][at] += 1
        torch.save(saved, path)
        (sentence, *_) = find_problems(read_contents(folder), reads_pieces=True)
        assert sentence.startswith(f"{name} at")
        assert f"differs between {rank_folder}/" in sentence or f"and {rank_folder}/" in sentence


def of_hugging_face(change: Callable[[States], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(
            {name: tensor.contiguous() for name, tensor in held.items()},
            folder / "model.safetensors",
        )

    return changed


def on_file(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: damage(folder / "model.safetensors")


def exchange(held: States) -> None:
    first, other = (f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(2))
    held[first], held[other] = held[other], held[first]


def interleave(held: States) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    q, k, v = held[name].chunk(3, 1)
    held[name] = torch.cat([k, q, v], 1)


def last_bit(path: Path) -> None:
    values = bytearray(path.read_bytes())
    values[-1] ^= 1
    path.write_bytes(values)


IN_SAFETENSORS = (
    (
        of_hugging_face(lambda held: held.update({"lm_head.weight": torch.ones(131, 8)})),
        "of its own",
    ),
    (
        of_hugging_face(lambda held: held.pop("transformer.h.0.mlp.c_fc.weight")),
        "h.0.mlp.c_fc.weight",
    ),
    (on_file(truncate), "cannot be read"),
    (on_file(zero), "cannot be read"),
    (on_file(Path.unlink), "safetensors"),
    (of_hugging_face(exchange), "layers in the order"),
    (of_hugging_face(interleave), "in the order"),
    (on_file(last_bit), "worst at"),
)


@pytest.mark.parametrize(("damage", "sentence"), IN_SAFETENSORS)
def test_a_fault_in_safetensors_is_named(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    healthy = write_model(tmp_path / "healthy", GPT2)
    faulty = Path(shutil.copytree(healthy, tmp_path / "faulty"))
    damage(faulty)
    contents = read_contents(faulty)
    problems = find_problems(contents, reads_pieces=True)
    pairs = [] if problems else compare_weights(read_contents(healthy), contents)
    assert sentence in " ".join((*problems, *(relation.detail for relation in pairs)))


def test_there_are_as_many_faults_as_the_first_line_says() -> None:
    of_files = len(WRITERS) * (len(DAMAGES) + 1)
    assert len(cases(INSPECTED)) + len(cases(COMPARED)) + of_files + 2 + len(IN_SAFETENSORS) == 81

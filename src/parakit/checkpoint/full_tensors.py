"""Pieces under the names of a rank or a layer, as torch_dist has them: whole tensors, layers stacked.

Megatron's format `torch` is a file a model-parallel rank, in which layers and experts are counted from
0. FSDP's checkpoints have whole tensors, a name a layer. Of what several ranks hold alike one is a piece
and the others are copies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parakit.artifacts.pickles import DescribedTensor
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    NORMS,
    OUTPUT,
    Shape,
    StoredMetadata,
    StoredPart,
    StoredTensor,
)

LEGACY_FILE = "model_optim_rng.pt"
COLUMN_PARALLEL_MODULES = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
ROW_PARALLEL_MODULES = ("linear_proj", "linear_fc2")
"""Modules whose weights TP cuts by their first dimension, and by their second."""

_COPIED = re.compile(r"norm|router|position_embeddings|linear_(proj|fc2)\.bias")
"""What every rank of TP has alike; of other modules it is not known."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(
    r"\.experts\.(?:local_experts\.(\d+)\.(linear_fc.*)|(linear_fc\d\.\w+?)(\d+)(_[wv])?$)"
)
_STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
_MOMENT = re.compile(rf"optimizer\.state\.(.+)\.({'|'.join(_STATES)})")
_WRAPPED = re.compile(r"^(?:model\d*\.)?(?:module\.)*")


@dataclass(frozen=True)
class _Piece:
    """A piece of a tensor of one layer and one expert."""

    name: str
    stacked: Shape
    """The numbers of its layer and expert, where it has them."""
    begin: Shape
    size: Shape
    whole: Shape
    dtype: str
    part: StoredPart


@dataclass(frozen=True)
class ReplicatedPiece:
    """What a rank holds of a tensor that another holds too."""

    name: str
    begin: Shape
    part: StoredPart


def tensor_parallel_axis(name: str) -> int | None:
    """The dimension, without layers and experts, by which TP cuts a tensor; None if by none."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in ROW_PARALLEL_MODULES and kind == "weight":
        return 1
    return 0 if module in COLUMN_PARALLEL_MODULES and kind in ("weight", "bias") else None


def stack_fsdp_tensors(stored: StoredMetadata) -> StoredMetadata:
    """FSDP's tensors, stacked."""
    pieces = []
    for raw, tensor in stored.tensors.items():
        name, stacked, half = _canonical(raw)
        rows = tensor.shape[0] * (2 if half is not None else 1) if tensor.shape else 0
        whole = (rows, *tensor.shape[1:]) if tensor.shape else ()
        for at, part in tensor.parts.items():
            begin = ((half or 0) * tensor.shape[0] + at[0], *at[1:]) if at else ()
            size = tensor.sizes[at]
            pieces.append(_Piece(name, stacked, begin, size, whole, tensor.dtype, part))
    return replace(stored, tensors=_joined(pieces)[0])


def join_rank_files(
    folder: Path, ranks: Mapping[str, Any], arguments: Mapping[str, str]
) -> tuple[StoredMetadata, tuple[ReplicatedPiece, ...]]:
    """What the files of the format `torch` hold together, each of a rank by the name of its folder."""
    files = {
        rank: StoredPart(file := f"{rank}/{LEGACY_FILE}", 0, (folder / file).stat().st_size)
        for rank in ranks
    }
    joined, copies = _joined(_pieces_of_ranks(files, ranks, arguments))
    return StoredMetadata(joined, tuple(files.values()), {}), copies


def find_missing_ranks(ranks: Collection[str], arguments: Mapping[str, str]) -> list[str]:
    """Folders of ranks that the arguments have, and that are not there."""
    tensor, pipeline, expert = _degrees(arguments)
    wanted = (
        "mp_rank_" + "_".join((f"{t:02d}", *(f"{n:03d}" for n, of in rest if of > 1)))
        for t in range(tensor)
        for p in range(pipeline)
        for e in range(expert)
        for rest in [((p, pipeline), (e, expert))]
    )
    return [name for name in wanted if name not in ranks]


def _degrees(arguments: Mapping[str, str]) -> tuple[int, int, int]:
    """TP, PP, EP."""
    names = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
    tensor, pipeline, expert = (int(arguments.get(name) or 1) for name in names)
    return tensor, pipeline, expert


def _rank_tensors(found: Mapping[str, Any]) -> dict[str, DescribedTensor]:
    """The weights that a rank's file holds, and the optimizer's states of them as FSDP names those."""
    chunks = (key for key in found if re.fullmatch(r"model\d*", str(key)))
    weights = dict(_flattened({key: found[key] for key in chunks}))
    chained = found.get("optimizer") or []
    parts = chained if isinstance(chained, list) else [chained]
    groups = [one for part in parts for one in _groups(part)]
    apart = any(expert for expert, _ in groups)
    left, states = list(weights), dict[str, DescribedTensor]()
    for expert, members in groups:
        for held in members:
            # A group has its parameters in the model's order.
            shape = next(iter(held.values())).shape
            name = next(
                (
                    raw
                    for raw in left
                    if weights[raw].shape == shape and (not apart or (".experts." in raw) == expert)
                ),
                f"parameter {len(states)} that is no weight here",
            )
            left = [raw for raw in left if raw != name]
            states |= {f"optimizer.state.{name}.{key}": one for key, one in held.items()}
    return weights | states


def _groups(part: Mapping[str, Any]) -> Iterator[tuple[bool, list[dict[str, DescribedTensor]]]]:
    """An optimizer's groups: whether one is of experts, and what it keeps of each parameter."""
    inner = part.get("optimizer", part)
    states, main = inner.get("state") or {}, part.get("fp32_from_fp16_params") or ()
    for number, group in enumerate(inner.get("param_groups", ())):
        members = [dict(states.get(index, {})) for index in group["params"]]
        if len(main) > number and len(main[number]) == len(members):
            members = [
                {**one, "fp32_param": own} for one, own in zip(members, main[number], strict=True)
            ]
        described = [
            {key: one[key] for key in _STATES if isinstance(one.get(key), DescribedTensor)}
            for one in members
        ]
        yield bool(group.get("is_expert_parallel")), [one for one in described if one]


def _pieces_of_ranks(
    files: Mapping[str, StoredPart], ranks: Mapping[str, Any], arguments: Mapping[str, str]
) -> Iterator[_Piece]:
    tensor, pipeline, _ = _degrees(arguments)
    of_experts = int(arguments.get("expert_tensor_parallel_size") or tensor)
    tied = arguments.get("untie_embeddings_and_output_weights") != "True"
    held = {name: _rank_tensors(content) for name, content in ranks.items()}
    layers = _first_layers(held, pipeline)
    for rank, tensors in held.items():
        t, p, e = _numbers(rank, pipeline)
        named = {raw: _canonical(raw) for raw in tensors}
        experts = 1 + max(
            (at[-1] for name, at, _ in named.values() if _EXPERTS in name), default=-1
        )
        for raw, (own, stacked, _) in named.items():
            name = own.replace(OUTPUT, EMBEDDING) if tied else own
            count, axis = of_experts if _EXPERTS in name else tensor, tensor_parallel_axis(name)
            if axis is None and tensor > 1 and not _COPIED.search(name):
                name = f"{rank}.{name}"
            first = (layers[_chunk(raw), p], e * experts)
            at = tuple(n + more for n, more in zip(stacked, first, strict=False))
            halves = 2 if arguments.get("swiglu") == "True" and ".linear_fc1." in name else 1
            shape, part = tensors[raw].shape, replace(files[rank], tensor=tensors[raw])
            zeros = tuple(0 for _ in shape)
            uncut = _Piece(name, at, zeros, shape, shape, tensors[raw].dtype, part)
            if axis is None or axis >= len(shape):
                yield uncut
            else:
                yield from _cut_pieces(uncut, tensors[raw], axis, t % count, count, halves)


def _cut_pieces(
    uncut: _Piece, described: DescribedTensor, axis: int, rank: int, ranks: int, halves: int
) -> Iterator[_Piece]:
    """What a rank has of a tensor that TP cuts; with gate and value it is two pieces."""
    shape = described.shape
    own = shape[axis] // halves

    def along(length: int) -> Shape:
        return (*shape[:axis], length, *shape[axis + 1 :])

    for half in range(halves):
        begin = [0 for _ in shape]
        begin[axis] = (half * ranks + rank) * own
        skipped = described.begin + half * own * described.strides[axis]
        part = replace(uncut.part, tensor=replace(described, shape=along(own), begin=skipped))
        whole = along(shape[axis] * ranks)
        yield replace(uncut, begin=tuple(begin), size=along(own), whole=whole, part=part)


def _first_layers(
    held: Mapping[str, Mapping[str, Any]], pipeline: int
) -> dict[tuple[int, int], int]:
    """The number of the first layer of each chunk of each stage: all first chunks come first."""
    counts = dict[tuple[int, int], int]()
    for rank, tensors in held.items():
        for raw in tensors:
            key = _chunk(raw), _numbers(rank, pipeline)[1]
            found = _LAYER.search(raw)
            counts[key] = max(counts.get(key, 0), 1 + int(found[1]) if found else 0)
    first, firsts = 0, dict[tuple[int, int], int]()
    for key in sorted(counts):
        firsts[key] = first
        first += counts[key]
    return firsts


def _numbers(rank: str, pipeline: int) -> tuple[int, int, int]:
    """Of TP, PP and EP in `mp_rank_00_001_002`; the second stands for PP where there is any."""
    t, *others = map(int, rank.removeprefix("mp_rank_").split("_"))
    p = others.pop(0) if pipeline > 1 and others else 0
    return t, p, others[0] if others else 0


def _chunk(raw: str) -> int:
    found = re.search(r"\bmodel(\d+)\.", raw)
    return int(found[1]) if found else 0


def _canonical(raw: str) -> tuple[str, Shape, int | None]:
    """The name in torch_dist, the numbers of layer and expert, and which half, of gate and value."""
    moment = _MOMENT.fullmatch(raw)
    name = _WRAPPED.sub("", moment[1] if moment else raw)
    stacked = list[int]()
    if layer := _LAYER.search(f".{name}"):
        stacked.append(int(layer[1]))
        name = _LAYER.sub(".layers.", f".{name}", count=1)[1:]
    if expert := _EXPERT.search(name):
        stacked.append(int(expert[1] or expert[4]))
        kept = expert[2] or expert[3] + (expert[5] or "")
        name = f"{name[: expert.start()]}{_EXPERTS}{kept}"
    half = {"_w": 0, "_v": 1}.get(name[-2:]) if ".linear_fc1." in name else None
    name = name if half is None else name[:-2]
    for norm, module in NORMS.items():
        name = name.replace(module, norm)
    return f"optimizer.state.{moment[2]}.{name}" if moment else name, tuple(stacked), half


def _joined(
    pieces: Iterable[_Piece],
) -> tuple[dict[str, StoredTensor], tuple[ReplicatedPiece, ...]]:
    by_name = dict[str, list[_Piece]]()
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    tensors, copies = dict[str, StoredTensor](), list[ReplicatedPiece]()
    for name, found in by_name.items():
        counts = tuple(
            1 + max(numbers) for numbers in zip(*(one.stacked for one in found), strict=True)
        )
        whole = StoredTensor((*counts, *found[0].whole), found[0].dtype, {}, {})
        for piece in found:
            at = (*piece.stacked, *piece.begin)
            if at in whole.parts:
                copies.append(ReplicatedPiece(name, at, piece.part))
                continue
            whole.sizes[at] = (*(1 for _ in counts), *piece.size)
            whole.parts[at] = piece.part
        tensors[name] = whole
    return tensors, tuple(copies)


def _flattened(found: Any, prefix: str = "") -> Iterator[tuple[str, DescribedTensor]]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, DescribedTensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flattened(value, f"{name}.")

"""Join the pieces that ranks or layers store under their own names to full tensors with all layers stacked.

The result has the names and shapes of a torch_dist checkpoint. There are two inputs:

* Megatron's format `torch` has one file per model-parallel rank. Layers and experts are counted from 0 in
  each file.
* FSDP's checkpoints hold full tensors, one per layer.

If several ranks hold the same piece, the first becomes part of the full tensor and the others are returned as
`ReplicatedPiece`.
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
COLUMN_PARALLEL_MODULES = (
    *("word_embeddings", "output_layer", "linear_qkv", "linear_fc1", "eh_proj"),
    *("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"),
)
ROW_PARALLEL_MODULES = ("linear_proj", "linear_fc2")
"""Modules whose weights TP splits along the first dimension, and along the second."""

_REPLICATED = re.compile(r"norm|router|position_embeddings|linear_(proj|fc2)\.bias")
"""Names of tensors that are identical on all TP ranks.

Other tensors that TP does not split may differ between ranks.
"""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_MTP, _STACKED_LAYERS = "mtp.", "decoder.layers."
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(
    r"\.experts\.(?:"
    r"local_experts\.(?P<local_number>\d+)\.(?P<local_parameter>linear_fc.*)|"
    r"(?P<grouped_parameter>linear_fc\d\.\w+?)(?P<grouped_number>\d+)(?P<half>_[wv])?$)"
)
"""The two forms of an expert's name: `experts.local_experts.3.linear_fc1.weight`, and `experts.linear_fc1.weight3`."""
_STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
_MOMENT = re.compile(rf"optimizer\.state\.(.+)\.({'|'.join(_STATES)})")
_WRAPPED = re.compile(r"^(?:model\d*\.)?(?:module\.)*")


_LEGACY_MODULES = {
    r"^language_model\.(embedding|output_layer)\.": r"\1.",
    r"^language_model\.(?:encoder|transformer)\.layers\.": "decoder.layers.",
    r"^language_model\.(?:encoder|transformer)\.final_(?:layernorm|norm)\.": "decoder.final_layernorm.",
    r"\.(?:self_attention|attention)\.query_key_value\.": ".self_attention.linear_qkv.",
    r"\.(?:self_attention|attention)\.dense\.": ".self_attention.linear_proj.",
    r"\.input_norm\.": ".input_layernorm.",
    r"\.post_attention_(?:layernorm|norm)\.": ".pre_mlp_layernorm.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.linear_fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.linear_fc2.",
}
"""Modules of Megatron's models before Megatron-Core (`--use-legacy-models`), and their names today."""
_LEGACY_MODEL = "language_model."


@dataclass(frozen=True)
class _StackablePiece:
    """A piece of a tensor of one layer and one expert."""

    name: str
    stack_index: Shape
    """The numbers of its layer and of its expert; only those that the tensor has."""
    begin: Shape
    size: Shape
    full_shape: Shape
    """The shape of the full tensor of this layer and expert."""
    dtype: str
    part: StoredPart


@dataclass(frozen=True)
class _CanonicalName:
    """The name of a tensor in a torch_dist checkpoint, and its index in the stacked tensor."""

    name: str
    stack_index: Shape
    """The numbers of its layer and of its expert; only those that the tensor has."""
    half: int | None
    """0 for the gate's half of a gated MLP's input projection, 1 for the value's; None if not split."""


@dataclass(frozen=True)
class _RankIndices:
    """The position of a rank in TP, PP and EP."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class ReplicatedPiece:
    """A piece of a tensor that is also stored by another rank, whose piece is part of the full tensor."""

    name: str
    begin: Shape
    part: StoredPart


def tensor_parallel_axis(name: str) -> int | None:
    """Return the dimension along which TP splits a tensor; None if TP does not split it.

    The dimensions of stacked layers and experts do not count.
    """
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in ROW_PARALLEL_MODULES and kind == "weight":
        return 1
    return 0 if module in COLUMN_PARALLEL_MODULES and kind in ("weight", "bias") else None


def _has_equal_layers(arguments: Mapping[str, str]) -> bool:
    """Return True if all layers of a model are of one kind, so that Megatron's torch_dist format stacks them."""
    frequencies = (arguments.get(name) for name in ("moe_layer_freq", "linear_attention_freq"))
    return all(frequency in (None, "", "None", "1") for frequency in frequencies)


def stack_fsdp_tensors(stored: StoredMetadata, arguments: Mapping[str, str]) -> StoredMetadata:
    """Return the metadata of an FSDP checkpoint with its layers and experts stacked.

    If Megatron's `arguments` say that the layers are of several kinds, each layer keeps its own tensors.
    """
    pieces = []
    for raw_name, tensor in stored.tensors.items():
        canonical = _parse_name(raw_name)
        rows_before, full_shape = 0, tensor.shape
        if canonical.half is not None and tensor.shape:
            rows_before = canonical.half * tensor.shape[0]
            full_shape = (2 * tensor.shape[0], *tensor.shape[1:])
        for index, part in tensor.parts.items():
            piece = _StackablePiece(
                canonical.name,
                canonical.stack_index,
                begin=(rows_before + index[0], *index[1:]) if index else (),
                size=tensor.sizes[index],
                full_shape=full_shape,
                dtype=tensor.dtype,
                part=part,
            )
            pieces.append(piece)
    tensors, _ = _join_pieces(pieces, stacks_layers=_has_equal_layers(arguments))
    return replace(stored, tensors=tensors)


def join_rank_files(
    folder: Path, ranks: Mapping[str, Any], arguments: Mapping[str, str]
) -> tuple[StoredMetadata, tuple[ReplicatedPiece, ...]]:
    """Join the rank files of the format `torch` to full tensors. The values are not read.

    Args:
        folder: The checkpoint's folder.
        ranks: The content of each rank's file, by the name of the rank's folder (`mp_rank_00_001`).
        arguments: Megatron's arguments as it prints them.

    Returns:
        The full tensors, and the copies: pieces that another rank already gave for the same part of a tensor.
    """
    files = {}
    for rank in ranks:
        file = f"{rank}/{LEGACY_FILE}"
        files[rank] = StoredPart(file, 0, (folder / file).stat().st_size)
    pieces = _list_rank_pieces(files, ranks, arguments)
    tensors, copies = _join_pieces(pieces, stacks_layers=_has_equal_layers(arguments))
    return StoredMetadata(tensors, tuple(files.values()), {}), copies


def has_legacy_names(content: Mapping[str, Any]) -> bool:
    """Return True if a rank's file holds a model from before Megatron-Core (`language_model`)."""
    model = content.get("model")
    return isinstance(model, dict) and _LEGACY_MODEL.rstrip(".") in model


def find_missing_ranks(ranks: Collection[str], arguments: Mapping[str, str]) -> list[str]:
    """Return the names of the rank folders that the arguments imply and that `ranks` does not have."""
    tensor, pipeline, expert = _model_parallel_sizes(arguments)
    missing = []
    for tensor_index in range(tensor):
        for pipeline_index in range(pipeline):
            for expert_index in range(expert):
                name = f"mp_rank_{tensor_index:02d}"
                if pipeline > 1:
                    name += f"_{pipeline_index:03d}"
                if expert > 1:
                    name += f"_{expert_index:03d}"
                if name not in ranks:
                    missing.append(name)
    return missing


def _model_parallel_sizes(arguments: Mapping[str, str]) -> tuple[int, int, int]:
    """Return TP, PP and EP; 1 for a size that the arguments do not have."""
    names = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
    tensor, pipeline, expert = (int(arguments.get(name) or 1) for name in names)
    return tensor, pipeline, expert


def _describe_rank_tensors(content: Mapping[str, Any]) -> dict[str, DescribedTensor]:
    """Return the weights and the optimizer's states in a rank's file, by the names that FSDP gives them.

    The optimizer numbers its parameters and does not name them. A group has its parameters in the model's
    order. Therefore each parameter gets the name of the first weight of its shape that no earlier parameter
    got. If there is no such weight, the states get the name 'parameter N that is no weight here'.
    """
    chunks = {key: content[key] for key in content if re.fullmatch(r"model\d*", str(key))}
    weights = dict(_flatten_tensors(chunks))
    chained = content.get("optimizer") or []
    optimizers = chained if isinstance(chained, list) else [chained]
    groups: list[tuple[bool, list[dict[str, DescribedTensor]]]] = []
    for optimizer in optimizers:
        groups += _list_groups(optimizer)
    separates_experts = any(is_expert for is_expert, _ in groups)
    free_names = list(weights)
    states: dict[str, DescribedTensor] = {}
    for is_expert, parameters in groups:
        # None stands for a parameter of any kind.
        wanted_kind = is_expert if separates_experts else None
        for parameter in parameters:
            # All states of a parameter have the parameter's shape.
            shape = next(iter(parameter.values())).shape
            name = _find_weight_of_shape(weights, free_names, shape, wanted_kind)
            if name is None:
                name = f"parameter {len(states)} that is no weight here"
            else:
                free_names.remove(name)
            for key, state in parameter.items():
                states[f"optimizer.state.{name}.{key}"] = state
    return weights | states


def _find_weight_of_shape(
    weights: Mapping[str, DescribedTensor],
    names: Iterable[str],
    shape: Shape,
    is_expert: bool | None,
) -> str | None:
    """Return the first of `names` whose weight has the shape `shape`; None if there is no such weight.

    `is_expert` True accepts only weights of experts, False only other weights, and None both.
    """
    for name in names:
        is_of_kind = is_expert is None or (".experts." in name) == is_expert
        if is_of_kind and weights[name].shape == shape:
            return name
    return None


def _list_groups(
    optimizer: Mapping[str, Any],
) -> Iterator[tuple[bool, list[dict[str, DescribedTensor]]]]:
    """Yield two values per parameter group: True for a group of experts, and a list of its parameters' states.

    The list has one dictionary per parameter, with its state tensors by name. A parameter without any state is
    left out.
    """
    inner = optimizer.get("optimizer", optimizer)
    states = inner.get("state") or {}
    main_weights = optimizer.get("fp32_from_fp16_params") or ()
    for number, group in enumerate(inner.get("param_groups", ())):
        parameters = [dict(states.get(index, {})) for index in group["params"]]
        if len(main_weights) > number and len(main_weights[number]) == len(parameters):
            for parameter, main_weight in zip(parameters, main_weights[number], strict=True):
                parameter["fp32_param"] = main_weight
        described = [_select_states(parameter) for parameter in parameters]
        with_states = [tensors for tensors in described if tensors]
        yield bool(group.get("is_expert_parallel")), with_states


def _select_states(parameter: Mapping[str, Any]) -> dict[str, DescribedTensor]:
    """Return the state tensors of a parameter by name, without states that are no tensors or are not compared."""
    tensors: dict[str, DescribedTensor] = {}
    for name in _STATES:
        state = parameter.get(name)
        if isinstance(state, DescribedTensor):
            tensors[name] = state
    return tensors


def _list_rank_pieces(
    files: Mapping[str, StoredPart], ranks: Mapping[str, Any], arguments: Mapping[str, str]
) -> Iterator[_StackablePiece]:
    """Yield the pieces of all ranks' files, with layers and experts numbered over the whole model.

    Shards of a tensor that TP splits become pieces of the full tensor. For some tensors it is unknown whether
    TP splits them or all TP ranks hold copies. Such a tensor is yielded once per rank, under a name that begins
    with the rank's folder (`mp_rank_00.…`).
    """
    rules = _read_joining_rules(arguments)
    tensors_by_rank = {rank: _describe_rank_tensors(content) for rank, content in ranks.items()}
    first_layers = _find_first_layers(tensors_by_rank, rules.pipeline)
    for rank, tensors in tensors_by_rank.items():
        indices = _parse_rank(rank, rules.pipeline)
        canonical_names = {raw_name: _parse_name(raw_name) for raw_name in tensors}
        first_expert = indices.expert * _count_local_experts(canonical_names.values())
        for raw_name, described in tensors.items():
            canonical = canonical_names[raw_name]
            first_layer = first_layers[_parse_chunk(raw_name), indices.pipeline]
            piece = _StackablePiece(
                name=rules.name_full_tensor(canonical.name, rank),
                stack_index=_number_over_model(canonical.stack_index, first_layer, first_expert),
                begin=tuple(0 for _ in described.shape),
                size=described.shape,
                full_shape=described.shape,
                dtype=described.dtype,
                part=replace(files[rank], tensor=described),
            )
            axis = tensor_parallel_axis(canonical.name)
            if axis is None or axis >= len(described.shape):
                yield piece
                continue
            num_shards = rules.count_shards(canonical.name)
            yield from _split_piece(
                piece,
                described,
                axis=axis,
                rank=indices.tensor % num_shards,
                num_ranks=num_shards,
                halves=rules.count_halves(canonical.name),
            )


@dataclass(frozen=True)
class _JoiningRules:
    """Rules by which the tensors of ranks are joined. They follow from the checkpoint's arguments."""

    tensor: int
    pipeline: int
    expert_tensor: int
    """TP inside experts."""
    is_tied: bool
    """True if the embedding is the output layer as well."""
    is_gated: bool
    """True if the MLP is gated."""

    def name_full_tensor(self, name: str, rank: str) -> str:
        """Return the name of the full tensor that a rank's tensor belongs to.

        A tensor that is not joined with those of other ranks gets a name that begins with the rank's folder. If
        the embedding is tied, the output layer gets the embedding's name.
        """
        if self.is_tied:
            name = name.replace(OUTPUT, EMBEDDING)
        is_split = tensor_parallel_axis(name) is not None
        if is_split or self.tensor == 1 or _REPLICATED.search(name):
            return name
        return f"{rank}.{name}"

    def count_shards(self, name: str) -> int:
        """Return the number of shards of a tensor that TP splits."""
        return self.expert_tensor if _EXPERTS in name else self.tensor

    def count_halves(self, name: str) -> int:
        """Return 2 if a tensor holds gate and value of a gated MLP, each of which TP splits; else 1."""
        return 2 if self.is_gated and ".linear_fc1." in name else 1


def _read_joining_rules(arguments: Mapping[str, str]) -> _JoiningRules:
    """Read the rules by which a checkpoint's tensors are joined from its arguments."""
    tensor, pipeline, _ = _model_parallel_sizes(arguments)
    return _JoiningRules(
        tensor,
        pipeline,
        expert_tensor=int(arguments.get("expert_tensor_parallel_size") or tensor),
        is_tied=arguments.get("untie_embeddings_and_output_weights") != "True",
        is_gated=arguments.get("swiglu") == "True",
    )


def _number_over_model(stack_index: Shape, first_layer: int, first_expert: int) -> Shape:
    """Convert a tensor's layer and expert number within its rank to the numbers in the whole model.

    A tensor outside of layers has no number, and a tensor outside of experts has only the number of its layer.
    """
    first_numbers = (first_layer, first_expert)
    pairs = zip(stack_index, first_numbers, strict=False)
    return tuple(number + first for number, first in pairs)


def _count_local_experts(names: Iterable[_CanonicalName]) -> int:
    """Return the number of experts that a rank's tensors have; 0 without experts."""
    numbers = [name.stack_index[-1] for name in names if _EXPERTS in name.name]
    return 1 + max(numbers, default=-1)


def _split_piece(
    piece: _StackablePiece,
    described: DescribedTensor,
    *,
    axis: int,
    rank: int,
    num_ranks: int,
    halves: int,
) -> Iterator[_StackablePiece]:
    """Yield the pieces of the full tensor that a rank's shard consists of: one, or two for a gated MLP.

    Args:
        piece: The shard, placed at the begin of a full tensor of the shape of the shard.
        described: The shard as its file stores it.
        axis: The dimension along which TP splits the tensor.
        rank: The TP rank.
        num_ranks: TP.
        halves: 2 for a gated MLP, whose shard holds a part of the gate and a part of the value; else 1.
    """
    shape = described.shape
    length = shape[axis] // halves

    def resize_axis(axis_length: int) -> Shape:
        return (*shape[:axis], axis_length, *shape[axis + 1 :])

    for half in range(halves):
        begin = [0 for _ in shape]
        begin[axis] = (half * num_ranks + rank) * length
        offset = described.begin + half * length * described.strides[axis]
        view = replace(described, shape=resize_axis(length), begin=offset)
        yield replace(
            piece,
            begin=tuple(begin),
            size=resize_axis(length),
            full_shape=resize_axis(shape[axis] * num_ranks),
            part=replace(piece.part, tensor=view),
        )


def _find_first_layers(
    tensors_by_rank: Mapping[str, Mapping[str, Any]], pipeline: int
) -> dict[tuple[int, int], int]:
    """Return the number in the whole model of each chunk's first layer, by chunk and pipeline stage.

    The layers of chunk 0 of all stages come first, then the layers of chunk 1 of all stages, as Megatron
    interleaves them.
    """
    layer_counts = dict[tuple[int, int], int]()
    for rank, tensors in tensors_by_rank.items():
        stage = _parse_rank(rank, pipeline).pipeline
        for raw_name in tensors:
            key = _parse_chunk(raw_name), stage
            layer = _LAYER.search(raw_name)
            layers = 1 + int(layer[1]) if layer else 0
            layer_counts[key] = max(layer_counts.get(key, 0), layers)
    first_layers = dict[tuple[int, int], int]()
    layers_before = 0
    for key in sorted(layer_counts):
        first_layers[key] = layers_before
        layers_before += layer_counts[key]
    return first_layers


def _parse_rank(rank: str, pipeline: int) -> _RankIndices:
    """Return the indices in a folder's name such as `mp_rank_00_001_002`.

    Megatron leaves out the pipeline index if PP is 1, and the expert index if EP is 1. An index that is left
    out is 0.
    """
    tensor_index, *numbers = map(int, rank.removeprefix("mp_rank_").split("_"))
    pipeline_index = 0
    if pipeline > 1 and numbers:
        pipeline_index = numbers.pop(0)
    expert_index = numbers[0] if numbers else 0
    return _RankIndices(tensor_index, pipeline_index, expert_index)


def _parse_chunk(raw_name: str) -> int:
    """Return the model chunk (`model1.…`) that a name begins with; 0 without a number."""
    match = re.search(r"\bmodel(\d+)\.", raw_name)
    return int(match[1]) if match else 0


def _parse_name(raw_name: str) -> _CanonicalName:
    """Convert a tensor's name to its name in the format torch_dist, with its index in the stacked tensor."""
    moment = _MOMENT.fullmatch(raw_name)
    name = _WRAPPED.sub("", moment[1] if moment else raw_name)
    if name.startswith(_LEGACY_MODEL):
        for pattern, module in _LEGACY_MODULES.items():
            name = re.sub(pattern, module, name)
    name, layer = _cut_layer(name)
    name, expert = _cut_expert(name)
    # FSDP stores gate and value of a gated MLP as two tensors, whose names end in _w and _v.
    half = {"_w": 0, "_v": 1}.get(name[-2:]) if ".linear_fc1." in name else None
    if half is not None:
        name = name[:-2]
    for norm, module in NORMS.items():
        name = name.replace(module, norm)
    if moment:
        name = f"optimizer.state.{moment[2]}.{name}"
    stack_index = tuple(number for number in (layer, expert) if number is not None)
    return _CanonicalName(name, stack_index, half)


def _cut_layer(name: str) -> tuple[str, int | None]:
    """Return a tensor's name without the number of its layer, and the number; None if the name has none.

    A layer of multi-token prediction keeps its number, also in the format torch_dist.
    """
    layer = _LAYER.search(f".{name}")
    if layer is None or name.startswith(_MTP):
        return name, None
    # The dot in front lets the pattern match at the beginning of the name.
    without_number = _LAYER.sub(".layers.", f".{name}", count=1)[1:]
    return without_number, int(layer[1])


def _cut_expert(name: str) -> tuple[str, int | None]:
    """Return a tensor's name without the number of its expert, and the number; None if the name has none."""
    expert = _EXPERT.search(name)
    if expert is None:
        return name, None
    parameter = expert["local_parameter"]
    if parameter is None:
        parameter = expert["grouped_parameter"] + (expert["half"] or "")
    number = int(expert["local_number"] or expert["grouped_number"])
    return f"{name[: expert.start()]}{_EXPERTS}{parameter}", number


def _keep_layer_number(piece: _StackablePiece) -> _StackablePiece:
    """Return the piece with the number of its decoder layer in its name, and not in its index."""
    if _STACKED_LAYERS not in piece.name:
        return piece
    layer, *other_indices = piece.stack_index
    name = piece.name.replace(_STACKED_LAYERS, f"{_STACKED_LAYERS}{layer}.")
    return replace(piece, name=name, stack_index=tuple(other_indices))


def _join_pieces(
    pieces: Iterable[_StackablePiece], *, stacks_layers: bool
) -> tuple[dict[str, StoredTensor], tuple[ReplicatedPiece, ...]]:
    """Join pieces to full tensors, by name, and return these together with the copies.

    Several pieces may have the same name and begin at the same element. The first of them becomes part of the full
    tensor, and each later piece is returned as a copy. With `stacks_layers` False the number of a layer stays in the
    name, and each layer has its own tensors.
    """
    pieces_by_name = dict[str, list[_StackablePiece]]()
    for stackable in pieces:
        piece = stackable if stacks_layers else _keep_layer_number(stackable)
        pieces_by_name.setdefault(piece.name, []).append(piece)
    tensors, copies = dict[str, StoredTensor](), list[ReplicatedPiece]()
    for name, pieces_of_tensor in pieces_by_name.items():
        indices = zip(*(piece.stack_index for piece in pieces_of_tensor), strict=True)
        stack_shape = tuple(1 + max(numbers) for numbers in indices)
        first = pieces_of_tensor[0]
        tensor = StoredTensor((*stack_shape, *first.full_shape), first.dtype, sizes={}, parts={})
        for piece in pieces_of_tensor:
            begin = (*piece.stack_index, *piece.begin)
            if begin in tensor.parts:
                copies.append(ReplicatedPiece(name, begin, piece.part))
                continue
            tensor.sizes[begin] = (*(1 for _ in stack_shape), *piece.size)
            tensor.parts[begin] = piece.part
        tensors[name] = tensor
    return tensors, tuple(copies)


def _flatten_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, DescribedTensor]]:
    """Yield the tensors in nested dictionaries, each with its keys joined by dots. Other values are left out."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, DescribedTensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten_tensors(value, f"{name}.")

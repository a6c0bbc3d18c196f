"""Find the faults of a checkpoint, and judge whether a strategy can load it.

A checkpoint is compared with the model that its own arguments define. Each fault is a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.checkpoints import MANIFEST_FILE, Checkpoint, check_unchanged
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    OUTPUT,
    DamagedCheckpointError,
    PieceReader,
    Shape,
    StoredTensor,
    read_finished_iteration,
    read_metadata,
    verify_pieces,
    verify_readable,
)
from parakit.checkpoint.contents import (
    FSDP,
    HUGGING_FACE,
    LEGACY,
    TORCH_DIST,
    Contents,
    parse_folder_iteration,
)
from parakit.checkpoint.model_comparison import compare_with_model
from parakit.checkpoint.model_tensors import list_model_tensors
from parakit.checkpoint.parallelism import changes_model_parallel_ranks
from parakit.checkpoint.values import (
    FLOATING_TYPES,
    describe_wrong_values,
    find_mixed_types,
    has_centered_norms,
)
from parakit.config.model import ModelShape
from parakit.config.run import RunSpec
from parakit.config.strategy import (
    UNTIED,
    Parallelism,
    count_devices,
    parse_strategy,
    strategy_flags,
    strategy_name,
)
from parakit.costs import find_violations
from parakit.formatting.units import plural

_MOMENT = re.compile(r"(?:.*\.)?optimizer\.state\.(exp_avg|exp_avg_sq)\.(.+)")
_UNTRAINED = ".router.expert_bias"
"""End of the name of a buffer that Megatron stores with the weights and updates without the optimizer."""
_NOT_STORED = "It holds none: it was saved with {} or converted."
_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Formats of the distributed optimizer that Megatron 0.19 loads under any TP and PP."""


def find_problems(contents: Contents, reads_pieces: bool = False) -> tuple[str, ...]:
    """Return a sentence for each fault of a checkpoint; empty if there is none.

    Args:
        contents: The checkpoint.
        reads_pieces: True to read every piece, compare it with its checksum, and look at the weights' values.
    """
    return tuple(_iterate_problems(contents, reads_pieces))


@dataclass(frozen=True)
class CheckCoverage:
    """The parts of a checkpoint that `find_problems` checks, and the parts that it does not check."""

    checked: tuple[str, ...]
    """Noun phrases, such as `16 tensors against the model of the arguments (attention, MLP)`."""
    unchecked: tuple[str, ...]
    """Noun phrases with their reasons, such as `values, because only VERIFY=1 reads them`."""

    @property
    def sentences(self) -> str:
        """A line with the checked parts, and a line with the unchecked parts if there are any."""
        lines = [f"Checked: {'; '.join(self.checked) or 'nothing'}. No fault was found."]
        if self.unchecked:
            lines.append(f"Not checked: {'; '.join(self.unchecked)}.")
        return "\n".join(lines)


def describe_coverage(contents: Contents, reads_pieces: bool = False) -> CheckCoverage:
    """Return the parts that `find_problems` with the same arguments checks, and those that it does not."""
    if contents.format == HUGGING_FACE:
        return _describe_hugging_face_coverage(contents, reads_pieces)
    checked, unchecked = ["that the files hold every piece that is listed"], list[str]()
    if contents.spec is None:
        reason = "the checkpoint holds no arguments that define a model"
        unchecked.append(f"which tensors the model has, because {reason}")
    else:
        compared_names = compare_with_model(contents, contents.spec.shape).compared_names
        compared_parts = {_model_part(name) for name in compared_names}
        listed = ", ".join(sorted(compared_parts, key=str.lower)) or "none"
        checked.append(
            f"{len(compared_names)} tensors against the model of the arguments ({listed})"
        )
        if other_names := sorted(contents.weights.keys() - compared_names):
            reason = "no rule here says which models have them"
            tensors = plural(len(other_names), "tensor")
            unchecked.append(f"{tensors} such as {other_names[0]}, because {reason}")
    if any(_MOMENT.fullmatch(name) for name in contents.shapes):
        checked.append("the optimizer's moments against the weights")
    elif "optimizer" in contents.states:
        unchecked.append("the optimizer's states, because they are not named after weights")
    if reads_pieces:
        checked.append("every piece against its checksums, and the values of weights")
    else:
        unchecked.append("values, because only VERIFY=1 reads them")
    return CheckCoverage(tuple(checked), tuple(unchecked))


def _describe_hugging_face_coverage(contents: Contents, reads_pieces: bool) -> CheckCoverage:
    """Return the checked and unchecked parts of a Hugging Face folder, which has no checksums."""
    checked, unchecked = list[str](), list[str]()
    if contents.unknown_model:
        unchecked.append(f"which tensors the model has, because {contents.unknown_model}")
    else:
        checked.append(f"{len(contents.weights)} tensors against the model of config.json")
    if reads_pieces:
        checked.append("the values of weights")
        unchecked.append(
            "whether the values are those that were saved, because the format keeps no checksums"
        )
    else:
        unchecked.append("values, because only VERIFY=1 reads them")
    return CheckCoverage(tuple(checked), tuple(unchecked))


def _model_part(name: str) -> str:
    """Return the part of a model, such as `attention`, to which a tensor belongs by its name."""
    if name == OUTPUT:
        return "output layer"
    return next((part for pattern, part in _PARTS.items() if pattern in name), "other modules")


_PARTS = {
    "mtp.": "MTP",
    "norm": "norms",
    ".router.": "router",
    "experts.": "experts",
    "embedding": "embedding",
    ".self_attention.": "attention",
    ".mlp.": "MLP",
}
"""Parts of a model by a piece of their tensors' names. The first piece that a name contains decides."""


def describe_model_mismatch(folder: Path, shape: ModelShape, model: str) -> str | None:
    """Return a sentence on why a checkpoint does not fit a model; None if no misfit shows.

    Only the newest checkpoint is looked at, and only if it has Megatron's distributed format. For other
    formats, and for a checkpoint that cannot be read, the result is None: the load itself reports the fault.

    Args:
        folder: A folder of checkpoints.
        shape: The shape of the model that is to load the checkpoint.
        model: The model's name, for the sentence.
    """
    iteration = read_finished_iteration(folder)
    if iteration is None:
        return None
    try:
        stored = read_metadata(folder / f"iter_{iteration:07d}").tensors
    except DamagedCheckpointError:
        return None
    for name, expected in _list_stacked_shapes(shape):
        if name in stored and stored[name].shape != expected:
            return (
                f"{folder} is a checkpoint of another model: its {name} is {list(stored[name].shape)}, "
                f"and {model} as it is asked for here has {list(expected)}; name another checkpoint, or "
                "the model that was saved."
            )
    width = stored[EMBEDDING].shape[-1] if EMBEDDING in stored else shape.hidden
    if width != shape.hidden:
        return (
            f"{folder} is a checkpoint of another model: it is {width} wide and {model} "
            f"{shape.hidden}; name another checkpoint, or the model that was saved."
        )
    return None


def _list_stacked_shapes(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of a model's tensors, with all layers stacked, as if all layers had them."""
    for tensor in list_model_tensors(shape):
        layers = (len(tensor.layers),) if tensor.layers else ()
        for name in tensor.names:
            yield name, (*layers, *tensor.shape)


def _iterate_problems(contents: Contents, reads_pieces: bool) -> Iterator[str]:
    """Yield a sentence for each fault. Values are read only if the description of the checkpoint has no fault."""
    yield from contents.problems
    if contents.format == HUGGING_FACE:
        if reads_pieces and not contents.problems:
            yield from _find_wrong_hugging_face_values(contents)
        return
    folder_iteration = parse_folder_iteration(contents.folder)
    if folder_iteration is not None and contents.iteration not in (None, folder_iteration):
        yield f"{contents.folder.name} holds the states of iteration {contents.iteration}."
    if reads_pieces and not contents.problems:
        try:
            _verify_checksums(contents)
            yield from _find_wrong_values(contents)
        except DamagedCheckpointError as error:
            yield f"{error}."
    if contents.spec is not None:
        comparison = compare_with_model(contents, contents.spec.shape)
        yield from comparison.problems
        yield from find_mixed_types(contents.weights, comparison.compared_names)
    yield from _find_optimizer_misfits(contents)


def _verify_checksums(contents: Contents) -> None:
    """Compare a checkpoint with the kit's manifest, or without a manifest compare each piece with its checksum.

    Raises:
        DamagedCheckpointError: A piece is not what was saved.
    """
    if (contents.folder / MANIFEST_FILE).is_file():
        check_unchanged(Checkpoint(contents.iteration or 0, contents.folder))
    elif contents.format == TORCH_DIST:
        verify_readable(contents.folder)
    else:
        verify_pieces(contents.folder, contents.stored)


def _find_wrong_values(contents: Contents) -> Iterator[str]:
    """Yield a sentence for each weight with wrong values, and for each unequal pair of copies.

    A weight is wrong if `describe_wrong_values` says so, or if it differs from its main weight. Main weights are
    the optimizer's fp32 copies. An update ends by copying them to the weights, so rounded to the weights' dtype
    they must equal the weights.
    """
    is_centered = has_centered_norms(contents.arguments)
    with PieceReader(contents.folder) as reader:
        for name, weight in contents.stored.tensors.items():
            if "optimizer" not in name and weight.dtype in FLOATING_TYPES:
                yield from _find_wrong_values_of_weight(contents, reader, name, is_centered)
    yield from _find_unequal_copies(contents)


def _find_wrong_values_of_weight(
    contents: Contents, reader: PieceReader, name: str, is_centered: bool
) -> Iterator[str]:
    """Yield a sentence for each piece of a weight with wrong values, and one if the weight is not its main weight."""
    tensors = contents.stored.tensors
    weight, main = tensors[name], _find_main_weight(name, tensors)
    for begin, size in weight.sizes.items():
        values = reader.read_box(weight, begin, size)
        if flaw := describe_wrong_values(name, values, begin, is_centered):
            yield f"{name} {flaw}."
        elif main and not reader.read_box(main, begin, size).to(values.dtype).equal(values):
            yield (
                f"The optimizer's main weights of {name} are not the model's weights: they are of "
                "another run."
            )
            return  # The other pieces of the weight would give the same sentence.


def _find_main_weight(name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the optimizer's fp32 copy of the weight `name`; None if the checkpoint has none."""
    for kind in ("param", "fp32_param"):
        main = tensors.get(f"optimizer.state.{kind}.{name}")
        if main is not None:
            return main
    return None


def _find_wrong_hugging_face_values(contents: Contents) -> Iterator[str]:
    """Yield a sentence for each weight in a Hugging Face folder that is not finite, or that nobody wrote.

    Weights of 0 are faults only in families that the kit converts. In other families 0 may be usual: Gemma's norms
    multiply with 1 plus their weight.
    """
    from parakit.convert import TensorFolder

    folder = TensorFolder(contents.folder)
    for name in contents.weights:
        values = folder.read(name)
        if not contents.unknown_model:
            flaw = describe_wrong_values(name, values, begin=(), has_centered_norms=False)
        else:
            flaw = "" if values.isfinite().all() else "is not finite"
        if flaw:
            yield f"{name} {flaw}."


def _find_unequal_copies(contents: Contents) -> Iterator[str]:
    """Yield a sentence for each copy of a tensor's piece that has other values than the first copy."""
    tensors = contents.stored.tensors
    with PieceReader(contents.folder) as reader:
        for copy in contents.copies:
            first_part = tensors[copy.name].parts[copy.begin]
            if not reader.read_piece(copy.part).equal(reader.read_piece(first_part)):
                yield (
                    f"{copy.name} at {list(copy.begin)} differs between {copy.part.file} and "
                    f"{first_part.file}: all ranks must hold the same values."
                )


def _find_optimizer_misfits(contents: Contents) -> Iterator[str]:
    """Yield a sentence for each moment of the optimizer that does not fit the weights.

    Adam's moments are `exp_avg` and `exp_avg_sq`. A fault is a weight without a moment, a moment without a
    weight, or a moment whose shape is not that of its weight. A checkpoint without moments has no such fault.
    """
    weight_shapes = {name: weight.shape for name, weight in contents.weights.items()}
    shapes_by_moment: dict[str, dict[str, Shape]] = {}
    for name, shape in sorted(contents.shapes.items()):
        if match := _MOMENT.fullmatch(name):
            moment, weight_name = match[1], match[2]
            shapes_by_moment.setdefault(moment, {})[weight_name] = shape
    for moment, shapes in shapes_by_moment.items():
        for name in sorted(weight_shapes.keys() - shapes.keys()):
            if not name.endswith(_UNTRAINED):
                yield f"The optimizer has no {moment} of {name}."
        for name, shape in sorted(shapes.items()):
            if name not in weight_shapes:
                yield f"The optimizer has {moment} of {name}, which is no weight here."
            elif weight_shapes[name] != shape:
                yield (
                    f"The optimizer's {moment} of {name} has the shape {list(shape)}, and the weight "
                    f"{list(weight_shapes[name])}: it is of another run."
                )


@dataclass(frozen=True)
class LoadVerdict:
    """The verdict on whether a strategy can load a checkpoint, with flags and reasons."""

    verdict: str
    """`loads`, `loads without …`, `refuses` or `not judged`."""
    flags: tuple[str, ...]
    """Megatron's flags with which the strategy loads the checkpoint; empty if it does not."""
    reasons: tuple[str, ...]
    """A sentence for each state that is not loaded, or for each reason of a refusal."""


def replace_parallelism(spec: RunSpec, new: Parallelism) -> RunSpec:
    """Return the run with the strategy `new` in place of its own.

    If the global batch has too few samples for one micro batch per data-parallel rank, the micro batch is made
    smaller.
    """
    samples_per_rank = spec.batch.global_batch_size // new.data or 1
    micro_batch_size = min(spec.batch.micro_batch_size, samples_per_rank)
    batch = replace(spec.batch, micro_batch_size=micro_batch_size)
    return replace(spec, parallelism=new, batch=batch)


def _rank_file_sizes(parallelism: Parallelism) -> tuple[int, ...]:
    """Return TP, PP, virtual stages and EP, which decide the files of the format `torch`."""
    return parallelism.tensor, parallelism.pipeline, parallelism.virtual_stages, parallelism.expert


def _has_expert_optimizer(parallelism: Parallelism) -> bool:
    """Return True if experts have an optimizer of their own and its states are not sharded."""
    return parallelism.expert > 1 and not parallelism.sharding


def judge_loading(contents: Contents, strategy: str) -> LoadVerdict:
    """Judge by Megatron's rules whether a strategy can load a checkpoint. Nothing is loaded.

    A checkpoint without arguments, of an unknown format or of another trainer gets the verdict 'not judged'.

    Raises:
        StrategyError: The strategy's name cannot be parsed.
    """
    spec = contents.spec
    why_not_judged = _explain_no_verdict(contents)
    if spec is None or why_not_judged:
        return LoadVerdict("not judged", flags=(), reasons=(why_not_judged,))
    saved = spec.parallelism
    new = parse_strategy(strategy, count_devices(strategy, saved.world_size))
    refusals = [*contents.problems, *find_violations(replace_parallelism(spec, new))]
    refusals += _explain_unloadable(contents, new)
    is_legacy = contents.format == LEGACY
    if not refusals and is_legacy and _rank_file_sizes(new) != _rank_file_sizes(saved):
        refusals.append(
            "A rank loads its own file, so TP, PP, virtual stages and EP must be those of "
            f"{strategy_name(saved)}; load it so and save it with --ckpt-format torch_dist."
        )
    if refusals:
        return LoadVerdict("refuses", flags=(), reasons=tuple(refusals))
    losses: dict[str, str] = {}
    if changes_model_parallel_ranks(new, saved):
        losses["random states"] = "Megatron ignores random states of another TP or PP."
    optimizer_loss = _explain_optimizer_loss(contents, saved, new, strategy)
    if optimizer_loss:
        losses["optimizer"] = optimizer_loss
    if "random" not in contents.states:
        losses.setdefault("random states", _NOT_STORED.format("--no-save-rng"))
    flags = _list_load_flags(contents, spec, new, loses_optimizer=bool(optimizer_loss))
    verdict = f"loads without {' and '.join(sorted(losses))}" if losses else "loads"
    return LoadVerdict(verdict, tuple(flags), tuple(losses.values()))


def _explain_no_verdict(contents: Contents) -> str:
    """Return why loading a checkpoint is not judged; empty if it is judged."""
    if contents.format not in (LEGACY, TORCH_DIST):
        return (
            f"No verdict is given on a checkpoint of the format {contents.format}; convert it to "
            "torch_dist."
        )
    if contents.spec is None:
        return "No verdict is given on a checkpoint without arguments; convert it to torch_dist."
    if contents.trainer:
        return (
            f"No verdict is given on a checkpoint of {contents.trainer}, whose states Megatron keeps otherwise; "
            "load it there, or export its weights with 'make export-hf CKPT='."
        )
    return ""


def _list_load_flags(
    contents: Contents, spec: RunSpec, new: Parallelism, *, loses_optimizer: bool
) -> list[str]:
    """Return the flags with which Megatron loads a checkpoint under the strategy `new`."""
    flags = [*strategy_flags(new)]
    if contents.format == LEGACY:
        flags += ["--ckpt-format", LEGACY]
    if OUTPUT in contents.shapes and UNTIED not in flags:
        # Without the flag Megatron leaves the output layer out, and trains a model with tied embeddings.
        flags.append(UNTIED)
    if loses_optimizer:
        flags.append("--no-load-optim")
    if "random" not in contents.states:
        flags.append("--no-load-rng")
    rows = contents.vocabulary_rows
    is_other_tensor_size = new.tensor != spec.parallelism.tensor
    if spec.padded_vocabulary and is_other_tensor_size and rows % new.tensor == 0:
        flags += ["--make-vocab-size-divisible-by", str(rows // new.tensor)]
    return flags


def _explain_unloadable(contents: Contents, new: Parallelism) -> Iterator[str]:
    """Yield a sentence if Megatron cannot load the checkpoint's format or its tensors under the strategy `new`.

    The rules are those of Megatron 0.19 (`training/arguments.py: validate_args`). `--use-megatron-fsdp`
    takes only `--ckpt-format fsdp_dtensor`; a torch_dist checkpoint ends in `KeyError: 'model'`.
    `--use-torch-fsdp2` takes torch_dist and torch_dcp, and needs untied embeddings.
    """
    sharding, name = new.sharding, contents.format
    if contents.has_legacy_names:
        yield (
            "Its tensors have the names of Megatron's models before Megatron-Core (language_model), which Megatron "
            "no longer loads; convert it with tools/checkpoint/convert.py of Megatron-Core 0.12."
        )
    if sharding.is_megatron_fsdp:
        yield (
            f"Megatron-FSDP ({sharding}) loads the format {FSDP} alone, and this checkpoint is {name}; "
            "use zero1."
        )
    elif sharding.is_torch_fsdp and name == LEGACY:
        yield (
            f"torch FSDP2 loads the format {TORCH_DIST}, and this checkpoint is {name}; load it under "
            "the strategy that saved it and save it with --ckpt-format torch_dist."
        )
    elif new.unties_embeddings and OUTPUT not in contents.shapes:
        yield (
            f"Strategy {strategy_name(new)} needs {UNTIED}, and this checkpoint holds no {OUTPUT}: its "
            "embedding is the output layer; use zero1."
        )


def _explain_optimizer_loss(
    contents: Contents, saved: Parallelism, new: Parallelism, strategy: str
) -> str:
    """Return a sentence on why the optimizer's states are not loaded; empty if they are loaded.

    Args:
        contents: The checkpoint.
        saved: The strategy that saved the checkpoint.
        new: The strategy that loads the checkpoint.
        strategy: The name of `new` as the user wrote it.
    """
    if "optimizer" not in contents.states:
        return _NOT_STORED.format("--no-save-optim")
    if new.sharding != saved.sharding:
        return (
            f"Megatron keeps the optimizer states of {strategy_name(saved)} and {strategy} in different "
            "formats; a strategy that shards as the saved one does loads them."
        )
    if _has_expert_optimizer(new) != _has_expert_optimizer(saved):
        return (
            "Under EP Megatron has a separate optimizer for experts. Its states are not loaded without EP, "
            "nor the other way round; 'make reshard' converts them."
        )
    optimizer_format = contents.optimizer_format
    is_bound_to_ranks = optimizer_format not in (*_RESHARDABLE, "")
    if changes_model_parallel_ranks(new, saved) and new.sharding and is_bound_to_ranks:
        return (
            f"Its optimizer states are {optimizer_format}, which Megatron loads under the same "
            "TP and PP alone; save with --dist-ckpt-optim-fully-reshardable."
        )
    return ""

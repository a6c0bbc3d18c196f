"""What is wrong with a checkpoint for the model that its own arguments say, and what can load it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.checkpoints import MANIFEST_FILE, Checkpoint, check_unchanged
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    OUTPUT,
    VOCABULARY,
    DamagedCheckpointError,
    Shape,
    read_box,
    read_finished_iteration,
    read_metadata,
    read_piece,
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
from parakit.checkpoint.parallelism import changes_model_parallel_ranks
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

_STATE = re.compile(r"(?:.*\.)?optimizer\.state\.(exp_avg|exp_avg_sq)\.(.+)")
_LAYERS = "decoder.layers."
_NONE = "It holds none: it was saved with {} or converted."
_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Of the distributed optimizer's formats those that any TP and PP loads (Megatron 0.19)."""


def find_problems(contents: Contents, reads_pieces: bool = False) -> tuple[str, ...]:
    """Every sentence that says what is wrong; empty for a healthy checkpoint.

    If it `reads_pieces`, every piece is compared with its checksum.
    """
    return tuple(_problems(contents, reads_pieces))


@dataclass(frozen=True)
class CheckCoverage:
    """The parts of a checkpoint that `find_problems` compares, and those that it does not compare."""

    checked: tuple[str, ...]
    """Noun phrases, such as `16 tensors against the model of the arguments (attention, MLP)`."""
    unchecked: tuple[str, ...]
    """Noun phrases with their reasons, such as `values, because only VERIFY=1 reads them`."""

    @property
    def sentences(self) -> str:
        """A line of what was checked, and a line of what was not."""
        lines = [f"Checked: {'; '.join(self.checked) or 'nothing'}. No fault was found."]
        if self.unchecked:
            lines.append(f"Not checked: {'; '.join(self.unchecked)}.")
        return "\n".join(lines)


def describe_coverage(contents: Contents, reads_pieces: bool = False) -> CheckCoverage:
    """Return what `find_problems` with the same arguments compares and does not compare."""
    checked, unchecked = list[str](), list[str]()
    if contents.format == HUGGING_FACE:
        if contents.unknown_model:
            unchecked.append(f"which tensors the model has, because {contents.unknown_model}")
        else:
            checked.append(f"{len(contents.weights)} tensors against the model of config.json")
        unchecked.append("values, because the format keeps no checksums")
        return CheckCoverage(tuple(checked), tuple(unchecked))
    checked.append("that the files hold every piece that is listed")
    if contents.spec is None:
        reason = "the checkpoint holds no arguments that define a model"
        unchecked.append(f"which tensors the model has, because {reason}")
    else:
        compared = _compared_names(contents, contents.spec.shape)
        parts = {_part_of(name) for name in compared}
        named = ", ".join(sorted(parts, key=str.lower))
        checked.append(
            f"{len(compared)} tensors against the model of the arguments ({named or 'none'})"
        )
        known = _parts_of_model(contents.spec.shape)
        known |= {_part_of(name) for name in contents.weights.keys() - compared}
        if missing_parts := known - parts:
            listed = ", ".join(sorted(missing_parts, key=str.lower))
            reason = "the tensors that the arguments ask for are not worked out there"
            unchecked.append(f"{listed}, because {reason}")
    if any(_STATE.fullmatch(name) for name in contents.shapes):
        checked.append("the optimizer's moments against the weights")
    elif "optimizer" in contents.states:
        unchecked.append("the optimizer's states, because they are not named after weights")
    if reads_pieces:
        checked.append("every piece against its checksums, and the values of weights")
    else:
        unchecked.append("values, because only VERIFY=1 reads them")
    return CheckCoverage(tuple(checked), tuple(unchecked))


def _compared_names(contents: Contents, shape: ModelShape) -> set[str]:
    """Return the weights that `_misfits` compares with the model of the arguments."""
    stacks = _stacks_layers(contents)
    names = {EMBEDDING, *([OUTPUT] if OUTPUT in contents.shapes else [])}
    for name in expected_tensor_shapes(shape):
        if stacks or not name.startswith(_LAYERS):
            names.add(name)
    return names & contents.weights.keys()


def _stacks_layers(contents: Contents) -> bool:
    """Return True if a tensor holds all layers; layers that differ are stored one by one."""
    return not any(re.match(r"decoder\.layers\.\d", name) for name in contents.shapes)


def _parts_of_model(shape: ModelShape) -> set[str]:
    """Return the parts that a model has by its arguments, in the words of `_part_of`."""
    parts = {"attention", "embedding", "norms"}
    if shape.experts:
        parts |= {"experts", "router"}
    else:
        parts.add("MLP")
    return parts | ({"MTP"} if shape.mtp_layers else set())


def _part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to."""
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
"""Parts of a model by what the names of their tensors contain; the first that fits counts."""


def expected_tensor_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Tensors of a model in Megatron's distributed format, but for those whose rows TP may pad.

    A weight of all layers is one tensor. Of experts, mixers and latent attention nothing is said.
    """
    layers, hidden = shape.layers, shape.hidden
    wanted: dict[str, Shape] = {}
    if shape.positions:
        wanted["embedding.position_embeddings.weight"] = (shape.positions, hidden)
    if len(shape.blocks) > 1 or shape.mamba or shape.latent:
        return wanted
    gate = 2 if shape.output_gate else 1
    rows = shape.head_width * (shape.heads * gate + 2 * shape.query_groups)
    inside: dict[str, Shape] = {
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, shape.heads * shape.head_width),
    }
    if shape.bias or shape.qkv_bias:
        inside["self_attention.linear_qkv.bias"] = (rows,)
    if shape.bias:
        inside["self_attention.linear_proj.bias"] = (hidden,)
    if not shape.experts:
        first = shape.ffn_hidden * (2 if shape.gated else 1)
        inside["mlp.linear_fc1.weight"] = (first, hidden)
        inside["mlp.linear_fc2.weight"] = (hidden, shape.ffn_hidden)
        if shape.bias:
            inside |= {"mlp.linear_fc1.bias": (first,), "mlp.linear_fc2.bias": (hidden,)}
    return wanted | {f"{_LAYERS}{name}": (layers, *size) for name, size in inside.items()}


def describe_model_mismatch(folder: Path, shape: ModelShape, model: str) -> str | None:
    """Why a checkpoint cannot be loaded into a model, in one sentence; None if nothing says so.

    Layers are stacked in Megatron's distributed format: a weight of all of them is one tensor. What is
    in no such format, or cannot be read, is left to those who load it.
    """
    iteration = read_finished_iteration(folder)
    if iteration is None:
        return None
    try:
        stored = read_metadata(folder / f"iter_{iteration:07d}").tensors
    except DamagedCheckpointError:
        return None
    for name, wanted in expected_tensor_shapes(shape).items():
        if name in stored and (found := stored[name].shape) != wanted:
            return (
                f"{folder} is a checkpoint of another model: its {name} is {list(found)}, and {model} "
                f"as it is asked for here has {list(wanted)}; name another checkpoint, or the model "
                "that was saved."
            )
    width = stored[EMBEDDING].shape[-1] if EMBEDDING in stored else shape.hidden
    if width != shape.hidden:
        return (
            f"{folder} is a checkpoint of another model: it is {width} wide and {model} "
            f"{shape.hidden}; name another checkpoint, or the model that was saved."
        )
    return None


def _problems(contents: Contents, reads_pieces: bool) -> Iterator[str]:
    yield from contents.problems
    if contents.format == HUGGING_FACE:
        return
    named = parse_folder_iteration(contents.folder)
    if named is not None and contents.iteration not in (None, named):
        yield f"{contents.folder.name} holds the states of iteration {contents.iteration}."
    if reads_pieces and not contents.problems:
        try:
            if (contents.folder / MANIFEST_FILE).is_file():
                check_unchanged(Checkpoint(contents.iteration or 0, contents.folder))
            elif contents.format == TORCH_DIST:
                verify_readable(contents.folder)
            else:
                verify_pieces(contents.folder, contents.stored)
            yield from _value_flaws(contents)
        except DamagedCheckpointError as error:
            yield f"{error}."
    if contents.spec is not None:
        yield from _misfits(contents, contents.spec.shape)
    yield from _optimizer_flaws(contents)


def _value_flaws(contents: Contents) -> Iterator[str]:
    """Weights that nobody has set, main weights of the optimizer and copies that are not the model's.

    What the optimizer keeps in fp32 is, rounded, the weight: the update ends with that copy.
    """
    folder, tensors = contents.folder, contents.stored.tensors
    for name, weight in tensors.items():
        if "optimizer" in name or weight.dtype not in ("float32", "bfloat16", "float16"):
            continue
        kept = (f"optimizer.state.{main}.{name}" for main in ("param", "fp32_param"))
        main = next((tensors[key] for key in kept if key in tensors), None)
        for begin, size in weight.sizes.items():
            values = read_box(folder, weight, begin, size)
            if not values.isfinite().all():
                yield f"{name} is not finite in the piece at {list(begin)}."
            elif values.squeeze().ndim > 1 and not values.any():
                yield f"{name} is 0 in the whole piece at {list(begin)}: nobody has written it."
            elif main and not read_box(folder, main, begin, size).to(values.dtype).equal(values):
                yield (
                    f"The optimizer's main weights of {name} are others than the model's: it is of "
                    "another run."
                )
                break
    for copy in contents.copies:
        held = tensors[copy.name].parts[copy.begin]
        if not read_piece(folder, copy.part).equal(read_piece(folder, held)):
            yield (
                f"{copy.name} at {list(copy.begin)} differs between {copy.part.file} and {held.file}: "
                "ranks must hold it alike."
            )


def _misfits(contents: Contents, shape: ModelShape) -> Iterator[str]:
    """Tensors that the model of the arguments lacks, has otherwise, or has not at all."""
    held = contents.shapes
    stacks = _stacks_layers(contents)
    for name, size in expected_tensor_shapes(shape).items():
        if name.startswith(_LAYERS) and not stacks:
            continue
        if name not in held:
            yield f"{name} is missing, which the model of its arguments has."
        elif held[name] != size:
            yield (
                f"{name} has the shape {list(held[name])}, and the model of its arguments "
                f"{list(size)}."
            )
    rows = contents.arguments.get("padded_vocab_size", "")
    for name in VOCABULARY:
        if name in held and rows.isdigit() and held[name] != (int(rows), shape.hidden):
            yield (
                f"{name} has the shape {list(held[name])}, and its arguments say "
                f"{[int(rows), shape.hidden]}: it was padded otherwise, or is another model's."
            )
    if EMBEDDING not in held:
        yield f"{EMBEDDING} is missing, which the model of its arguments has."
    if OUTPUT in held and shape.tied_embeddings:
        yield f"{OUTPUT} is left over: its arguments say that the embedding is the output layer."
    if OUTPUT not in held and not shape.tied_embeddings:
        yield f"{OUTPUT} is missing: its arguments say --untie-embeddings-and-output-weights."
    for name in held:
        is_bias = name.startswith(_LAYERS) and name.endswith(".bias") and "layernorm" not in name
        has_one = shape.bias or (shape.qkv_bias and "linear_qkv" in name)
        if is_bias and not has_one:
            yield f"{name} is left over: its arguments say --disable-bias-linear."


def _optimizer_flaws(contents: Contents) -> Iterator[str]:
    """Moments that weights lack, and moments of other shapes or of no weight."""
    weights = {name: one.shape for name, one in contents.weights.items()}
    moments: dict[str, dict[str, Shape]] = {}
    for name, shape in sorted(contents.shapes.items()):
        if match := _STATE.fullmatch(name):
            moments.setdefault(match[1], {})[match[2]] = shape
    for moment, held in moments.items():
        for name in sorted(weights.keys() - held.keys()):
            yield f"The optimizer has no {moment} of {name}."
        for name, shape in sorted(held.items()):
            if name not in weights:
                yield f"The optimizer has {moment} of {name}, which is no weight here."
            elif weights[name] != shape:
                yield (
                    f"The optimizer's {moment} of {name} has the shape {list(shape)}, and the weight "
                    f"{list(weights[name])}: it is of another run."
                )


@dataclass(frozen=True)
class LoadVerdict:
    """Whether a strategy can load a checkpoint."""

    verdict: str
    """`loads`, `loads without …`, `refuses` or `not judged`."""
    flags: tuple[str, ...]
    reasons: tuple[str, ...]


def replace_parallelism(spec: RunSpec, new: Parallelism) -> RunSpec:
    """A run under a strategy, with a micro batch that its data-parallel ranks have samples for."""
    micro = spec.batch.global_batch_size // new.data or 1
    batch = replace(spec.batch, micro_batch_size=min(spec.batch.micro_batch_size, micro))
    return replace(spec, parallelism=new, batch=batch)


def _files_of(parallelism: Parallelism) -> tuple[int, ...]:
    """What decides which file of the format `torch` a rank has, and what is in it."""
    return parallelism.tensor, parallelism.pipeline, parallelism.virtual_stages, parallelism.expert


def _has_own_optimizer(parallelism: Parallelism) -> bool:
    """Whether experts do, as seen of states that are not sharded."""
    return parallelism.expert > 1 and not parallelism.sharding


def judge_loading(contents: Contents, strategy: str) -> LoadVerdict:
    """What becomes of a checkpoint under a strategy, as its arguments and Megatron's rules say it.

    Raises:
        StrategyError: The strategy is not in the grammar.
    """
    spec, is_legacy = contents.spec, contents.format == LEGACY
    is_known = is_legacy or contents.format == TORCH_DIST
    if spec is None or not is_known:
        what = (
            "one without arguments" if is_known else f"a checkpoint of the format {contents.format}"
        )
        why = f"No verdict is given on {what}; convert it to torch_dist."
        return LoadVerdict("not judged", (), (why,))
    saved = spec.parallelism
    new = parse_strategy(strategy, count_devices(strategy, saved.world_size))
    refused = [*contents.problems, *find_violations(replace_parallelism(spec, new))]
    refused += _unloadable(contents, new)
    if not refused and is_legacy and _files_of(new) != _files_of(saved):
        refused = [
            "A rank loads its own file, so TP, PP, virtual stages and EP must be those of "
            f"{strategy_name(saved)}; load it so and save it with --ckpt-format torch_dist."
        ]
    if refused:
        return LoadVerdict("refuses", (), tuple(refused))
    lost: dict[str, str] = {}
    flags = [*strategy_flags(new), *(("--ckpt-format", LEGACY) if is_legacy else ())]
    if OUTPUT in contents.shapes and UNTIED not in flags:
        # Without the flag Megatron leaves the tensor out, and trains a tied model.
        flags.append(UNTIED)
    if changes_model_parallel_ranks(new, saved):
        lost["random states"] = "Megatron ignores random states of another TP or PP."
    if why := _lost_optimizer(contents, saved, new, strategy):
        lost["optimizer"] = why
        flags.append("--no-load-optim")
    if "random" not in contents.states:
        lost.setdefault("random states", _NONE.format("--no-save-rng"))
        flags.append("--no-load-rng")
    if (
        spec.padded_vocabulary
        and contents.vocabulary_rows % new.tensor == 0
        and new.tensor != saved.tensor
    ):
        flags += ["--make-vocab-size-divisible-by", str(contents.vocabulary_rows // new.tensor)]
    verdict = f"loads without {' and '.join(sorted(lost))}" if lost else "loads"
    return LoadVerdict(verdict, tuple(flags), tuple(lost.values()))


def _unloadable(contents: Contents, new: Parallelism) -> Iterator[str]:
    """Yield why Megatron cannot load this format, or these tensors, with the flags of a strategy.

    Megatron 0.19: `--use-megatron-fsdp` takes `--ckpt-format fsdp_dtensor` alone, and a torch_dist
    checkpoint then ends in `KeyError: 'model'`; `--use-torch-fsdp2` takes torch_dist and torch_dcp, and
    asks for an output layer of its own (`training/arguments.py: validate_args`).
    """
    sharding, name = new.sharding, contents.format
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


def _lost_optimizer(contents: Contents, saved: Parallelism, new: Parallelism, strategy: str) -> str:
    """Why the optimizer's states are not loaded; empty where they are."""
    if "optimizer" not in contents.states:
        return _NONE.format("--no-save-optim")
    if new.sharding != saved.sharding:
        return (
            f"Megatron keeps the optimizer states of {strategy_name(saved)} and {strategy} in different "
            "formats; a strategy that shards as the saved one does loads them."
        )
    if _has_own_optimizer(new) != _has_own_optimizer(saved):
        return (
            "Megatron has experts under EP in an optimizer of their own, and does not load it without "
            "EP, nor the other way round; 'make reshard' writes it so."
        )
    form = contents.optimizer_format
    if (
        changes_model_parallel_ranks(new, saved)
        and new.sharding
        and form not in (*_RESHARDABLE, "")
    ):
        return (
            f"Its optimizer states are {form}, which Megatron loads under the same "
            "TP and PP alone; save with --dist-ckpt-optim-fully-reshardable."
        )
    return ""

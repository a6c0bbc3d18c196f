"""`make reshard`: convert a torch_dist checkpoint to another strategy, without starting ranks.

The result is the checkpoint that the other strategy would have saved. A strategy shows in four places of the
format (Megatron 0.19, `core/dist_checkpointing`), and those are what changes:

* The common state holds the arguments and the form of the optimizer's entry (`parakit.checkpoint.parallelism`).
* Tensors are stored in pieces. A tensor is full, with all layers and experts stacked, whichever strategy saved
  it, and a rank reads the pieces that overlap its shard. The pieces that are written are those of the new
  strategy, so that its ranks read full pieces, each once.
* The main weights of the optimizer have one name with ZeRO-1 and another without. An fp32 model has main
  weights with ZeRO-1 only.
* RNG states are stored per rank of TP and PP. They are kept if TP and PP stay, and dropped otherwise, because
  Megatron would ignore them. The states of the rerun machine, one per rank, are dropped if the ranks change.

All else stays: values, names of weights and moments, extra states per layer, the learning rate schedule, the
position in the data (samples), the padding of the vocabulary.

Refused are optimizer states in the order of gradient buffers (`dp_reshardable`), unless only DP changes;
flattened ranges (before 0.14); FSDP's formats; and pickles of `mp_rank_…` folders.

Files are written one after another. A file gets its index once it was read back and found equal. A command
that is started again after it was killed continues after the last file with an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from parakit.artifacts.io import compute_sha256, flush_to_disk, lock_file, write_record
from parakit.artifacts.pickles import rewrite_saved
from parakit.artifacts.torch_dist import (
    METADATA,
    TRACKER_FILE,
    DamagedCheckpointError,
    PieceReader,
    Shape,
    StoredMetadata,
    StoredPart,
    StoredTensor,
    read_bytes,
    read_piece,
)
from parakit.artifacts.torch_dist_writer import add_piece, write_metadata
from parakit.checkpoint.checks import find_problems, replace_parallelism
from parakit.checkpoint.compare import hash_values
from parakit.checkpoint.contents import (
    COMMON,
    COMMON_FILE,
    TORCH_DIST,
    Contents,
    is_stacked,
    read_contents,
)
from parakit.checkpoint.full_tensors import tensor_parallel_axis
from parakit.checkpoint.parallelism import (
    MULTIPLE,
    RESHARDABLE,
    changes_model_parallel_ranks,
    convert_common_state,
    padding_multiple,
    rerun_state_sizes,
)
from parakit.config.files import ROOT, relative_to_root
from parakit.config.strategy import (
    Parallelism,
    Sharding,
    count_devices,
    parse_strategy,
    strategy_name,
)
from parakit.convert import ConversionProgress, check_disk_space
from parakit.costs import find_violations

MIN_FILE_BYTES = 1 << 30
"""Size from which on a file is closed. A killed command loses at most the file that it was writing."""
MAX_PIECE_BYTES = 1 << 28
"""Upper bound on the size of a piece, so that memory is bounded. It matters for long tensors."""

_JOB_FILE, _LOCK_FILE = "job.json", "lock"
"""Files in an unfinished folder that are no part of the checkpoint."""
_OPTIMIZER = "optimizer.state."
_MAIN_WEIGHTS = {Sharding.NONE: f"{_OPTIMIZER}fp32_param.", Sharding.ZERO1: f"{_OPTIMIZER}param."}
"""Prefixes of main weights, by sharding. Other shardings cannot be resharded."""


class ReshardError(ValueError):
    """A checkpoint that cannot be resharded, or not to this strategy; the message is one sentence."""


@dataclass(frozen=True)
class _TargetPiece:
    """A piece of a tensor to write, with the tensor of the source checkpoint that its values are read from."""

    name: str
    source: StoredTensor
    begin: Shape
    size: Shape

    @property
    def size_bytes(self) -> int:
        """The size of the piece's values in bytes."""
        return math.prod(self.size) * _bytes_per_element(self.source)


class _ReshardJob(msgspec.Struct, frozen=True):
    """The content of `job.json` in an unfinished folder: what the folder is made from."""

    source: str
    metadata: str
    """The sha256 of the source's metadata file."""
    strategy: str


def reshard(contents: Contents, strategy: str, to: str, console: Console) -> int:
    """Write a checkpoint as another strategy would have saved it, and return 0.

    The files are first written to a hidden folder beside the target, which is renamed at the end. So the target
    is complete or does not exist. If the command is interrupted, the hidden folder stays, and the same command
    continues from it.

    Args:
        contents: The checkpoint.
        strategy: STRATEGY=, the name of the other strategy.
        to: TO=, the folder to write, which must not exist.
        console: Receives progress, the path of the result, and hints for the user who loads the result.

    Raises:
        ValueError: The checkpoint cannot be resharded. The message is one sentence with the reason.
    """
    target = ROOT / Path(to).expanduser()
    new = _parse_target_strategy(contents, strategy)
    if target.exists():
        raise ReshardError(f"TO={to} exists already; remove it, or name another folder.")
    plan = _ReshardPlan(contents, new)
    unfinished = target.with_name(f".{target.name}.resharding")
    written_bytes = sum(file.stat().st_size for file in unfinished.glob("iter_*/*.distcp"))
    check_disk_space(target, max(0, plan.size_bytes - written_bytes))
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / _LOCK_FILE).open("wb") as lock:
        try:
            lock_file(lock)
        except BlockingIOError:
            raise ReshardError(f"Another process reshards to TO={to}; wait for it.") from None
        metadata_hash = compute_sha256(contents.folder / METADATA)
        _begin_or_continue(unfinished, _ReshardJob(str(contents.folder), metadata_hash, strategy))
        folder = unfinished / f"iter_{contents.iteration or 0:07d}"
        summary = _write_checkpoint(plan, folder, console)
        _check_result(folder, contents, new)
        (unfinished / TRACKER_FILE).write_text(str(contents.iteration))
        for index in unfinished.glob("iter_*/*.distcp.json"):
            index.unlink()
        (unfinished / _JOB_FILE).unlink()
        (unfinished / _LOCK_FILE).unlink()
    unfinished.rename(target)
    for line in (f"{summary} → {relative_to_root(target)}", *plan.notes):
        console.print(line, highlight=False)
    return 0


def _write_checkpoint(plan: _ReshardPlan, folder: Path, console: Console) -> str:
    """Write the checkpoint to `folder` and return the summary line for the terminal.

    If the command is interrupted, print that the written files stay and that the command can be repeated.

    Raises:
        ReshardError: A piece of the source cannot be read.
    """
    try:
        return plan.write(folder, ConversionProgress(console))
    except DamagedCheckpointError as error:
        raise ReshardError(
            f"{error}; copy the file again from where the checkpoint was saved, or reshard an older "
            "checkpoint."
        ) from error
    except BaseException:  # Ctrl-C is no Exception.
        console.print(
            f"{relative_to_root(folder.parent)} is kept: the same command continues from it.",
            highlight=False,
        )
        raise


def _parse_target_strategy(contents: Contents, strategy: str) -> Parallelism:
    """Parse STRATEGY=, and check that the checkpoint can be converted to it.

    Raises:
        ReshardError, StrategyError: The checkpoint or the strategy does not allow the conversion; one sentence
            says why.
    """
    spec = contents.spec
    if contents.format != TORCH_DIST:
        raise ReshardError(
            f"{contents.folder} is of the format {contents.format}, whose values are not read here; "
            "load it with Megatron and save it with --ckpt-format torch_dist."
        )
    flaw = next(iter(find_problems(contents)), None)
    if flaw:
        raise ReshardError(f"{contents.folder} is not complete: {flaw}")
    if spec is None:
        raise ReshardError(
            f"{contents.folder} holds no arguments that define a model and its strategy."
        )
    new = parse_strategy(strategy, count_devices(strategy, spec.parallelism.world_size))
    for parallelism in (spec.parallelism, new):
        if parallelism.sharding not in _MAIN_WEIGHTS or parallelism.schedule:
            raise ReshardError(
                f"{strategy_name(parallelism)} has no checkpoints in Megatron's torch_dist format; name "
                "a product of dp, tp, sp, cp, pp, vpp and ep, with -zero1 or without."
            )
    for reason in find_violations(replace_parallelism(spec, new)):
        raise ReshardError(f"Megatron refuses STRATEGY={strategy}: {reason}")
    if contents.vocabulary_rows % new.tensor:
        raise ReshardError(
            f"{contents.folder} holds {contents.vocabulary_rows} rows of the vocabulary, which TP "
            f"{new.tensor} does not divide; name another TP."
        )
    _refuse_fixed_states(contents, spec.parallelism, new)
    return new


def _refuse_fixed_states(contents: Contents, old: Parallelism, new: Parallelism) -> None:
    """Raise an error if the optimizer's states are in a form that only the strategy `old` can load.

    Raises:
        ReshardError: The states are in such a form, and `new` is not `old` with another DP.
    """
    optimizer_format = contents.optimizer_format
    is_sharded = old.sharding is not Sharding.NONE
    if not is_sharded or "optimizer" not in contents.states or optimizer_format == RESHARDABLE:
        return
    changes_only_data = replace(new, data=old.data) == old
    if optimizer_format == "dp_reshardable" and changes_only_data:
        return
    raise ReshardError(
        f"{contents.folder} holds optimizer states that are {optimizer_format or 'of no named form'}: in "
        "the order of the ranks' gradient buffers, which another strategy has otherwise; load it under "
        f"{strategy_name(old)} and save it with --dist-ckpt-optim-fully-reshardable."
    )


def _begin_or_continue(unfinished: Path, job: _ReshardJob) -> None:
    """Write `job.json` into a new unfinished folder; in an existing one, check that it describes the same job.

    Raises:
        ReshardError: The folder is of another job.
    """
    path = unfinished / _JOB_FILE
    if not path.is_file():
        write_record(path, job)
        return
    if msgspec.json.decode(path.read_bytes(), type=_ReshardJob) != job:
        raise ReshardError(
            f"{relative_to_root(unfinished)} is left over from another reshard; remove it, or name "
            "another TO=."
        )


def _check_result(folder: Path, source: Contents, new: Parallelism) -> None:
    """Read the written checkpoint, and check that it has no fault, the strategy `new`, and the source's weights.

    Names, shapes and dtypes of the weights are compared, not their values.

    Raises:
        ReshardError: The written checkpoint is not the source under the new strategy.
    """
    result = read_contents(folder)
    written = result.spec.parallelism if result.spec else None
    flaws = find_problems(result)
    if flaws or written != new or _weight_types(result) != _weight_types(source):
        written_name = strategy_name(written) if written else "no strategy"
        reason = flaws[0] if flaws else f"it says {written_name}."
        raise ReshardError(
            f"{relative_to_root(folder)} did not become {strategy_name(new)}: {reason}"
        )


def _weight_types(contents: Contents) -> dict[str, tuple[Shape, str]]:
    """Return the shape and dtype of each weight, by name."""
    return {name: (weight.shape, weight.dtype) for name, weight in contents.weights.items()}


def _bytes_per_element(tensor: StoredTensor) -> int:
    """Return the size of one element of a stored tensor."""
    return int(getattr(torch, tensor.dtype).itemsize)


class _ReshardPlan:
    """The tensors and pieces to write for a new strategy."""

    def __init__(self, contents: Contents, new: Parallelism) -> None:
        assert contents.spec is not None
        self._contents, self._new, self._old = contents, new, contents.spec.parallelism
        self._spec = contents.spec
        self._stored = contents.stored

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors to write, by the name that they get in the new checkpoint. Their values are read from the source.

        Only the names and number of main weights (the optimizer's fp32 copies of weights) depend on the sharding.
        An fp32 model has main weights only under ZeRO-1, where they are equal to its weights.
        """
        tensors = dict(self._stored.tensors)
        if self._new.sharding == self._old.sharding:
            return tensors
        old_prefix = _MAIN_WEIGHTS[self._old.sharding]
        new_prefix = _MAIN_WEIGHTS[self._new.sharding]
        main_weights = {
            name.removeprefix(old_prefix): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(old_prefix)
        }
        if self._spec.dtype == "fp32":
            main_weights = {}
        if self._spec.dtype == "fp32" and self._new.sharding:
            # The weights that are trained are those for which Adam has a first moment.
            moment_prefix = f"{_OPTIMIZER}exp_avg."
            for moment in [name for name in tensors if name.startswith(moment_prefix)]:
                name = moment.removeprefix(moment_prefix)
                main_weights[name] = tensors[name]
        for name, tensor in main_weights.items():
            tensors[f"{new_prefix}{name}"] = tensor
        return tensors

    @cached_property
    def pieces(self) -> tuple[_TargetPiece, ...]:
        """Every piece to write, in the order of writing."""
        return tuple(
            _TargetPiece(name, tensor, begin, size)
            for name, tensor in sorted(self.tensors.items())
            for begin, size in self._split(name, tensor)
        )

    @property
    def size_bytes(self) -> int:
        """The size of all values in bytes."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def notes(self) -> Iterator[str]:
        """Hints for the user who loads the result, one sentence each; none if there is nothing to observe."""
        old, new = self._old, self._new
        rows = self._contents.vocabulary_rows
        if new.tensor != old.tensor and rows:
            old_multiple = int(self._contents.arguments.get(MULTIPLE, rows))
            multiple = padding_multiple(old_multiple, rows, new, old)
            yield (
                f"Load it with --make-vocab-size-divisible-by {multiple}, which pads the vocabulary to the "
                "same rows."
            )
        if changes_model_parallel_ranks(new, old) and "random" in self._contents.states:
            yield "The random states are left out, so dropout masks are those of a run that starts anew."

    def write(self, folder: Path, progress: ConversionProgress) -> str:
        """Write the files that are not written yet, then the metadata of all; return the summary line.

        Raises:
            ReshardError: A piece is not read as it was written.
        """
        folder.mkdir(exist_ok=True)
        progress.begin(f"reshard to {strategy_name(self._new)}", self.size_bytes)
        tensors: dict[str, StoredTensor] = {}
        files = list(self._pieces_by_file())
        for number, pieces in enumerate(files):
            file_name = f"__0_{number}.distcp"
            parts = _write_file(folder, file_name, pieces, self._contents.folder, progress)
            for piece, part in zip(pieces, parts, strict=True):
                empty_tensor = replace(piece.source, sizes={}, parts={})
                tensor = tensors.setdefault(piece.name, empty_tensor)
                tensor.sizes[piece.begin], tensor.parts[piece.begin] = piece.size, part
        objects = self._write_objects(folder, f"__0_{len(files)}.distcp")
        write_metadata(folder, StoredMetadata(tensors, (), objects))
        return progress.summary(self._contents.parameters)

    def _pieces_by_file(self) -> Iterator[list[_TargetPiece]]:
        """Yield the list of pieces that go into each file, in order.

        The next file begins once a file has more than MIN_FILE_BYTES.
        """
        pieces, size_bytes = list[_TargetPiece](), 0
        for piece in self.pieces:
            if size_bytes > MIN_FILE_BYTES:
                yield pieces
                pieces, size_bytes = [], 0
            pieces.append(piece)
            size_bytes += piece.size_bytes
        yield pieces

    def _split(self, name: str, tensor: StoredTensor) -> Iterator[tuple[Shape, Shape]]:
        """Yield for each piece of a tensor the index of its first element and its shape.

        Each layer, expert and TP rank gets a piece. A piece above MAX_PIECE_BYTES is split further, along the
        dimension that TP splits. If TP splits none, it is split along the first dimension of the layer's tensor.
        """
        shape = tensor.shape
        num_stacked = is_stacked(name) + (".experts.experts." in name)
        stacked_shape, element_shape = shape[:num_stacked], shape[num_stacked:]
        axis, count = self._split_axis(name, num_stacked)
        if axis >= len(shape) or shape[axis] % count:
            axis, count = num_stacked, 1
        can_split = axis < len(shape)
        if can_split:
            bytes_per_piece = math.prod(element_shape) * _bytes_per_element(tensor) // count
            length_per_piece = shape[axis] // count
            count *= max(1, min(bytes_per_piece // MAX_PIECE_BYTES, length_per_piece))
        for stack_index in product(*map(range, stacked_shape)):
            begin = [*stack_index, *(0 for _ in element_shape)]
            size = [*(1 for _ in stack_index), *element_shape]
            for number in range(count):
                if can_split:
                    begin[axis] = shape[axis] * number // count
                    end = shape[axis] * (number + 1) // count
                    size[axis] = end - begin[axis]
                yield tuple(begin), tuple(size)

    def _split_axis(self, name: str, num_stacked: int) -> tuple[int, int]:
        """Return the dimension along which TP of the new strategy splits a tensor, and the number of pieces.

        The first `num_stacked` dimensions stand for layers and experts. A tensor that TP does not split gives
        the next dimension and 1 piece. A gated MLP gives two pieces per TP rank, one for the gate and one for
        the value.
        """
        axis = tensor_parallel_axis(name)
        if axis is None:
            return num_stacked, 1
        ranks = self._new.effective_expert_tensor if ".experts." in name else self._new.tensor
        is_gated = ".linear_fc1." in name and self._spec.shape.gated
        return num_stacked + axis, ranks * (2 if is_gated else 1)

    def _write_objects(self, folder: Path, file_name: str) -> dict[str, StoredPart]:
        """Write everything that is not a tensor, and return where each object is stored, by its name.

        The objects go into the file `file_name`. The common state is converted to the new strategy, and is written
        to COMMON_FILE if the source has that file. RNG states and states of the rerun machine are left out if the
        new strategy cannot load them.
        """
        old, new = self._old, self._new
        dropped_prefixes = list[str]()
        if changes_model_parallel_ranks(new, old):
            dropped_prefixes.append("rng_state")
        if rerun_state_sizes(new) != rerun_state_sizes(old):
            dropped_prefixes.append("rerun_state_machine")

        def convert(content: Any) -> Any:
            common = content[0] if isinstance(content, list) else content
            convert_common_state(common, new, old, self._contents.vocabulary_rows)
            return content

        parts: dict[str, StoredPart] = {}
        source = self._contents.folder
        if (source / COMMON_FILE).is_file():
            common_part = StoredPart(COMMON_FILE, 0, (source / COMMON_FILE).stat().st_size)
            common_state = rewrite_saved(read_bytes(source, common_part), convert)
            (folder / COMMON_FILE).write_bytes(common_state)
        with (folder / file_name).open("wb") as file:
            for name, part in self._stored.objects.items():
                if name.startswith(tuple(dropped_prefixes)):
                    continue
                data = read_bytes(source, part)
                if name.startswith(COMMON):
                    data = rewrite_saved(data, convert)
                parts[name] = StoredPart(file_name, file.tell(), len(data))
                file.write(data)
            flush_to_disk(file)
        return parts


def _write_file(
    folder: Path,
    name: str,
    pieces: Sequence[_TargetPiece],
    source: Path,
    progress: ConversionProgress,
) -> list[StoredPart]:
    """Write pieces into one file, check the file by reading it back, and return where each piece is stored.

    The result is also written beside the file as an index (`NAME.json`). If the index exists already, an
    earlier attempt has completed the file, so it is not written again.

    Raises:
        ReshardError: A piece is not read as it was written.
    """
    index = folder / f"{name}.json"
    if index.is_file():
        progress.done(sum(piece.size_bytes for piece in pieces))
        return msgspec.json.decode(index.read_bytes(), type=list[StoredPart])
    parts, written_hashes = list[StoredPart](), list[bytes]()
    with (folder / name).open("wb") as file, PieceReader(source) as reader:
        for piece in pieces:
            values = reader.read_box(piece.source, piece.begin, piece.size)
            parts.append(add_piece(file, name, values))
            written_hashes.append(hash_values(values))
            progress.done(piece.size_bytes)
        flush_to_disk(file)
    for piece, part, written_hash in zip(pieces, parts, written_hashes, strict=True):
        if hash_values(read_piece(folder, part)) != written_hash:
            raise ReshardError(f"{piece.name} of {folder / name} is not read as it was written.")
    write_record(index, parts)
    return parts

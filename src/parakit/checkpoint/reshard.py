"""`make reshard`: a torch_dist checkpoint as another strategy would have saved it, without ranks.

What a strategy is in that format, and so what changes (Megatron 0.19, `core/dist_checkpointing`):

* The common state: arguments, and the form of the optimizer's own part (`parakit.checkpoint.parallelism`).
* Which pieces a tensor lies in. Each is whole, with all layers and experts stacked, whatever saved it,
  and a rank reads the pieces that overlap its own; those of the new strategy are read whole and once.
* Main weights of the optimizer between ZeRO-1 and none: another name; in fp32 only ZeRO-1 has them.
* Random states, one a rank of TP and PP, stay under the same TP and PP and are left out otherwise, as
  Megatron ignores them then; so are states of its rerun machine, one a rank, under other ranks.

What does not: values, names of weights and moments, extra states (one a layer), the schedule, the
position in the data (samples), the padding of the vocabulary. Optimizer states in the order of gradient
buffers (`dp_reshardable`) hold for one TP and PP and any DP; as flattened ranges (before 0.14) they are
refused. So are FSDP's, and pickles of `mp_rank_…` folders, whose values are not read.

Files are written one after another, each with its index once it was read back and found equal. A command
that was killed goes on behind the last of them.
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
    Shape,
    StoredMetadata,
    StoredPart,
    StoredTensor,
    read_box,
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
"""About the least of a file: what a kill costs."""
MAX_PIECE_BYTES = 1 << 28
"""The most of a piece that no strategy cuts, such as a bucket of a gradient buffer."""

_OWN = ("job.json", "lock")
"""What an unfinished folder holds beside the checkpoint."""
_OPTIMIZER = "optimizer.state."
_MAIN = {Sharding.NONE: f"{_OPTIMIZER}fp32_param.", Sharding.ZERO1: f"{_OPTIMIZER}param."}


class ReshardError(ValueError):
    """What cannot be resharded, or not to there; one sentence."""


@dataclass(frozen=True)
class _Piece:
    """One of the target's pieces, and the tensor that it is a part of."""

    name: str
    source: StoredTensor
    begin: Shape
    size: Shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.size) * int(getattr(torch, self.source.dtype).itemsize)


class _Job(msgspec.Struct, frozen=True):
    """`job.json` in an unfinished folder: what is made there."""

    source: str
    metadata: str
    """Its sha256."""
    strategy: str


def reshard(ckpt: str, strategy: str, to: str, console: Console) -> int:
    """Write `CKPT=` as `STRATEGY=` would have saved it to `TO=`; 0.

    Raises:
        ValueError: It cannot be, in one sentence; the target is there whole or not at all.
    """
    contents = read_contents(ROOT / Path(ckpt).expanduser())
    target = ROOT / Path(to).expanduser()
    new = _parallelism_of(contents, strategy)
    if target.exists():
        raise ReshardError(f"TO={to} exists already; remove it, or name another folder.")
    plan = _Plan(contents, new)
    unfinished = target.with_name(f".{target.name}.resharding")
    done = sum(file.stat().st_size for file in unfinished.glob("iter_*/*.distcp"))
    check_disk_space(target, max(0, plan.size_bytes - done))
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / _OWN[1]).open("wb") as held:
        try:
            lock_file(held)
        except BlockingIOError:
            raise ReshardError(f"Another process reshards to TO={to}; wait for it.") from None
        made_of = compute_sha256(contents.folder / METADATA)
        _begin(unfinished, _Job(str(contents.folder), made_of, strategy))
        folder = unfinished / f"iter_{contents.iteration or 0:07d}"
        try:
            summary = plan.write(folder, ConversionProgress(console))
        except DamagedCheckpointError as error:
            raise ReshardError(
                f"{error}; copy the file again from where the checkpoint was saved, or reshard an older "
                "checkpoint."
            ) from error
        except BaseException:  # Ctrl-C as well.
            kept = f"{relative_to_root(unfinished)} is kept: the same command goes on behind what is in it."
            console.print(kept, highlight=False)
            raise
        _check(folder, contents, new)
        (unfinished / TRACKER_FILE).write_text(str(contents.iteration))
        for left in (*unfinished.glob("iter_*/*.distcp.json"), *map(unfinished.joinpath, _OWN)):
            left.unlink()
    unfinished.rename(target)
    for line in (f"{summary} → {relative_to_root(target)}", *plan.sentences):
        console.print(line, highlight=False)
    return 0


def _parallelism_of(contents: Contents, strategy: str) -> Parallelism:
    """What the strategy asks for, if this checkpoint can be laid out so.

    Raises:
        ReshardError, StrategyError: It cannot, and why.
    """
    spec = contents.spec
    if contents.format != TORCH_DIST:
        raise ReshardError(
            f"{contents.folder} is of the format {contents.format}, whose values are not read here; "
            "load it with Megatron and save it with --ckpt-format torch_dist."
        )
    if flaw := next(iter(find_problems(contents)), None):
        raise ReshardError(f"{contents.folder} is not whole: {flaw}")
    if spec is None:
        raise ReshardError(
            f"{contents.folder} holds no arguments that define a model and its strategy."
        )
    new = parse_strategy(strategy, count_devices(strategy, spec.parallelism.world_size))
    for parallelism in (spec.parallelism, new):
        if parallelism.sharding not in _MAIN or parallelism.schedule:
            raise ReshardError(
                f"{strategy_name(parallelism)} has no checkpoints in Megatron's torch_dist format; name "
                "a product of dp, tp, sp, cp, pp, vpp and ep, with -zero1 or without."
            )
    for reason in find_violations(replace_parallelism(spec, new)):
        raise ReshardError(f"Megatron refuses STRATEGY={strategy}: {reason}")
    if contents.vocabulary_rows % new.tensor:
        raise ReshardError(
            f"{contents.folder} holds {contents.vocabulary_rows} rows of the vocabulary, which TP {new.tensor} "
            "does not divide; name another TP."
        )
    _refuse_fixed_states(contents, spec.parallelism, new)
    return new


def _refuse_fixed_states(contents: Contents, old: Parallelism, new: Parallelism) -> None:
    """Refuse optimizer states that hold for the strategy that saved them alone."""
    form = contents.optimizer_format
    if old.sharding is Sharding.NONE or form == RESHARDABLE or "optimizer" not in contents.states:
        return
    if form == "dp_reshardable" and replace(new, data=old.data) == old:
        return
    raise ReshardError(
        f"{contents.folder} holds optimizer states that are {form or 'of no named form'}: in the order "
        "of the ranks' gradient buffers, which another strategy has otherwise; load it under "
        f"{strategy_name(old)} and save it with --dist-ckpt-optim-fully-reshardable."
    )


def _begin(unfinished: Path, job: _Job) -> None:
    """Go on with what is there, or begin."""
    path = unfinished / _OWN[0]
    if path.is_file():
        if msgspec.json.decode(path.read_bytes(), type=_Job) == job:
            return
        raise ReshardError(
            f"{relative_to_root(unfinished)} is what another reshard has left; remove it, or name another TO=."
        )
    write_record(path, job)


def _check(folder: Path, source: Contents, new: Parallelism) -> None:
    """See that what was written says that it is the source in the new strategy.

    Raises:
        ReshardError: It does not.
    """
    made = read_contents(folder)
    said = made.spec.parallelism if made.spec else None
    weights = [
        {name: (one.shape, one.dtype) for name, one in each.weights.items()}
        for each in (source, made)
    ]
    flaws = find_problems(made)
    if flaws or said != new or weights[0] != weights[1]:
        why = flaws[0] if flaws else f"it says {strategy_name(said) if said else 'no strategy'}."
        raise ReshardError(f"{relative_to_root(folder)} did not become {strategy_name(new)}: {why}")


class _Plan:
    """Everything that the target holds, in the order in which it is written."""

    def __init__(self, contents: Contents, new: Parallelism) -> None:
        assert contents.spec is not None
        self._contents, self._new, self._old = contents, new, contents.spec.parallelism
        self._spec = contents.spec
        self._stored = contents.stored

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The target's, each with the source's pieces."""
        held = dict(self._stored.tensors)
        if self._new.sharding == self._old.sharding:
            return held
        old, new = _MAIN[self._old.sharding], _MAIN[self._new.sharding]
        main = {
            name.removeprefix(old): held.pop(name) for name in list(held) if name.startswith(old)
        }
        if self._spec.dtype == "fp32":
            moments = [name for name in held if name.startswith(f"{_OPTIMIZER}exp_avg.")]
            trained = [name.removeprefix(f"{_OPTIMIZER}exp_avg.") for name in moments]
            main = {name: held[name] for name in trained} if self._new.sharding else {}
        return held | {f"{new}{name}": one for name, one in main.items()}

    @cached_property
    def pieces(self) -> tuple[_Piece, ...]:
        """Every piece of every tensor."""
        return tuple(
            _Piece(name, tensor, begin, size)
            for name, tensor in sorted(self.tensors.items())
            for begin, size in self._cut(name, tensor)
        )

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def sentences(self) -> Iterator[str]:
        """What whoever loads it has to know."""
        old, new = self._old, self._new
        if new.tensor != old.tensor and (rows := self._contents.vocabulary_rows):
            given = int(self._contents.arguments.get(MULTIPLE, rows))
            multiple = padding_multiple(given, rows, new, old)
            yield f"Load it with --make-vocab-size-divisible-by {multiple}: its rows are padded so."
        if changes_model_parallel_ranks(new, old) and "random" in self._contents.states:
            yield "Without random states: masks of dropout are those of a fresh start."

    def write(self, folder: Path, work: ConversionProgress) -> str:
        """Write what is not there yet, and the index of all; the closing line."""
        folder.mkdir(exist_ok=True)
        work.begin(f"reshard to {strategy_name(self._new)}", self.size_bytes)
        tensors: dict[str, StoredTensor] = {}
        files = list(self._files())
        for number, pieces in enumerate(files):
            parts = _written(folder, f"__0_{number}.distcp", pieces, self._contents.folder, work)
            for piece, part in zip(pieces, parts, strict=True):
                whole = tensors.setdefault(piece.name, replace(piece.source, sizes={}, parts={}))
                whole.sizes[piece.begin], whole.parts[piece.begin] = piece.size, part
        objects = self._objects(folder, f"__0_{len(files)}.distcp")
        write_metadata(folder, StoredMetadata(tensors, (), objects))
        return work.summary(self._contents.parameters)

    def _files(self) -> Iterator[list[_Piece]]:
        file, held = list[_Piece](), 0
        for piece in self.pieces:
            if held > MIN_FILE_BYTES:
                yield file
                file, held = [], 0
            file.append(piece)
            held += piece.size_bytes
        yield file

    def _cut(self, name: str, tensor: StoredTensor) -> Iterator[tuple[Shape, Shape]]:
        """The new strategy's pieces: of a layer and an expert each, and of a rank of TP."""
        shape = tensor.shape
        stacked = is_stacked(name) + (".experts.experts." in name)
        axis, count = self._ranks(name, stacked)
        if axis >= len(shape) or shape[axis] % count:
            axis, count = stacked, 1
        length = math.prod(shape[stacked:]) * getattr(torch, tensor.dtype).itemsize
        if axis < len(shape):
            count *= max(1, min(length // count // MAX_PIECE_BYTES, shape[axis] // count))
        for at in product(*map(range, shape[:stacked])):
            begin, size = [*at, *(0 for _ in shape[stacked:])], [*(1 for _ in at), *shape[stacked:]]
            for part in range(count):
                if axis < len(shape):
                    begin[axis], end = (shape[axis] * each // count for each in (part, part + 1))
                    size[axis] = end - begin[axis]
                yield tuple(begin), tuple(size)

    def _ranks(self, name: str, stacked: int) -> tuple[int, int]:
        """Where the new strategy cuts a tensor, and in how many."""
        axis = tensor_parallel_axis(name)
        ranks = self._new.effective_expert_tensor if ".experts." in name else self._new.tensor
        if axis is None:
            return stacked, 1
        gated = ".linear_fc1." in name and self._spec.shape.gated
        return stacked + axis, ranks * (2 if gated else 1)

    def _objects(self, folder: Path, file_name: str) -> dict[str, StoredPart]:
        """What is no tensor, written anew."""
        old, new = self._old, self._new
        dropped = ["rng_state"] if changes_model_parallel_ranks(new, old) else []
        dropped += (
            ["rerun_state_machine"] if rerun_state_sizes(new) != rerun_state_sizes(old) else []
        )

        def change(content: Any) -> Any:
            common = content[0] if isinstance(content, list) else content
            convert_common_state(common, new, old, self._contents.vocabulary_rows)
            return content

        held: dict[str, StoredPart] = {}
        source = self._contents.folder
        if (source / COMMON_FILE).is_file():
            saved = StoredPart(COMMON_FILE, 0, (source / COMMON_FILE).stat().st_size)
            (folder / COMMON_FILE).write_bytes(rewrite_saved(read_bytes(source, saved), change))
        with (folder / file_name).open("wb") as file:
            for name, part in self._stored.objects.items():
                if name.startswith(tuple(dropped)):
                    continue
                data = read_bytes(source, part)
                data = rewrite_saved(data, change) if name.startswith(COMMON) else data
                held[name] = StoredPart(file_name, file.tell(), len(data))
                file.write(data)
            flush_to_disk(file)
        return held


def _written(
    folder: Path, name: str, pieces: Sequence[_Piece], source: Path, work: ConversionProgress
) -> list[StoredPart]:
    """Write a file, or find that it is written, and read it back."""
    index = folder / f"{name}.json"
    if index.is_file():
        work.done(sum(piece.size_bytes for piece in pieces))
        return msgspec.json.decode(index.read_bytes(), type=list[StoredPart])
    parts, digests = list[StoredPart](), list[bytes]()
    with (folder / name).open("wb") as file:
        for piece in pieces:
            values = read_box(source, piece.source, piece.begin, piece.size)
            parts.append(add_piece(file, name, values))
            digests.append(hash_values(values))
            work.done(piece.size_bytes)
        flush_to_disk(file)
    for piece, part, written in zip(pieces, parts, digests, strict=True):
        if hash_values(read_piece(folder, part)) != written:
            raise ReshardError(f"{piece.name} of {folder / name} is not read as it was written.")
    write_record(index, parts)
    return parts

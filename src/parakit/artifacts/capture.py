"""Format of a capture: the tensors of one iteration, which `parakit.verify` aligns and compares.

A capture is a folder with one folder per rank. A rank's folder has three files. `tensors.bin` holds the values of
all tensors one after another, as they are in memory. `index.jsonl` has one `TensorRecord` per line, in the order in
which the tensors were computed. `rank.json` (a `CapturedRank`) is written last: a rank without this file was cut
off. The slot of a tensor key says which tensor of a module or parameter it is.
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from parakit.artifacts.io import atomic_write

TENSORS_FILE, INDEX_FILE, RANK_FILE = "tensors.bin", "index.jsonl", "rank.json"
RESPONSES_FILE = "responses.json"
"""Change of each tensor of the reference if all tensors before it are off by rounding (rounding probe)."""
UNOBSERVED_FILE, UNOBSERVED_GRADIENT = "unobserved.json", "gradient, unobserved"
"""File with the change of each gradient if the iteration is repeated without probes, and its slot."""
NORM_RANKS_PREFIX = "counted over ranks "
"""Prefix of a slot of the norm's stage; the ranks of the group follow. An element is 1 if the rank counts it."""
BUFFER = "buffer"
"""Slot of a tensor that a module stores and saves and that is no parameter."""
SCORES, CHOICE = "scores", "choice"
"""Slots of a router: the scores by which it chooses experts, and its choice; both [tokens, experts]."""
COUNTS = "tokens per expert"
"""Slot of the tokens that a rank's router sent to each expert in the iteration, before Megatron resets them."""
EARLIER_ITERATION_PREFIX = "iteration "
"""Prefix of these router slots in an iteration before the captured one; its number and a blank follow."""
UPDATE_SUFFIX = "update"
"""Last word of the slot of the change of a weight, or of a master copy (`param`), in the optimizer's step."""
INITIAL_FILE, INITIAL = "initial.json", "weight, as initialised"
"""File of the weights that a rank itself initialised before it loaded shared ones, and their slot."""
GRADIENT_PART_PREFIX = "part: "
"""Prefix of the slot of a part of a local gradient: of one micro batch, or left from the iteration before."""
START_WEIGHT, START_BUFFER = "weight at the start", "buffer at the start"
"""Slots, in the stage of weights, of the weights and buffers before the captured iteration."""
INITIAL_SLOTS = (START_WEIGHT, START_BUFFER)
UPDATE_MAGNITUDE = "reach of earlier updates"
"""Slot of the distance by which earlier updates would have moved each weight with a gradient of its row's size."""
RATE_SLOTS = ("learning rate", "weight decay")
"""Slots of the optimizer's settings for a parameter."""
MASTER_CAST = "weight, rounded from its master copy"
"""Slot of a weight when captures are compared: it must equal the strategy's own fp32 copy, rounded."""
COUNTED_ONCE = "counted once"
"""Slot of a parameter in the norm's stage when captures are compared."""
BUCKETS, CLIPPING = "buckets", "clipping"
"""Further names in `CapturedRank.functions`: the reduction over data-parallel ranks, and gradient clipping."""
MODEL, LOSS, PER_TOKEN_LOSS = "model", "loss", "of each token"
"""Names of the full model and of the loss, and the slot of the loss per token."""
RECOMPUTED_PREFIX = "recomputed."
"""Prefix of the slot of a tensor of a recomputed forward pass, which must equal that of the first pass."""
CALLER_SEPARATOR = "@"
"""Separator at the end of a slot; the name of the calling module follows, if the called module is not part of it."""
ELEMENTS_PER_CHUNK = 1 << 16
"""Elements of a tensor that are computed with at once, so that they stay in the cache.

A full copy of a large tensor in another type would be memory that the kernel clears first, which takes ten times as
long as the arithmetic."""


class CaptureStage(StrEnum):
    """Stages of an iteration, in the order in which they happen."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    LOSS = "loss"
    ACTIVATION_GRADIENTS = "activation gradients"
    LOCAL_GRADIENTS = "local gradients"
    REDUCED_GRADIENTS = "reduced gradients"
    NORM = "norm"
    OPTIMIZER_STATE = "optimizer state"
    WEIGHTS = "weights"
    LOG = "log"
    """Values that the log prints for the iteration. No tensor of this stage is captured."""


class TensorKey(msgspec.Struct, frozen=True):
    """Key of a tensor of an iteration. All ranks that hold the tensor or a part of the tensor use the same key."""

    stage: CaptureStage
    name: str
    """Megatron's dotted name of a module or a parameter, with the global number of the layer."""
    slot: str = ""
    """Name of the tensor within its module (`input.0`, `output`), or of the optimizer's state (`exp_avg`)."""
    micro_batch: int | None = None
    """Number of the micro batch on this rank, from 0; None for tensors of the full iteration."""
    call: int = 0
    """Number of the module's call by one caller in this micro batch, from 0. A recomputed pass has another slot."""


class Placement(msgspec.Struct, frozen=True):
    """Position of a piece of a parameter in the full parameter, as in Megatron's checkpoints."""

    key: str
    """Name of the full parameter. Layers of one kind share the name, and so do tied copies."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Index of the piece's first element per dimension. Layers of one kind are stacked in the first one."""
    partial: bool = False
    """True if the rank holds only some elements of the piece. The other elements are NaN."""


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of one rank, and the position of its values in `tensors.bin`."""

    tensor_key: TensorKey = msgspec.field(name="site")
    dtype: str
    """torch's name: `float32`, `bfloat16`, `int64`, `bool`."""
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    placement: Placement | None = None
    """Position of a parameter, gradient or optimizer state in the full tensor; None for activations."""


class InitialPiece(msgspec.Struct, frozen=True):
    """A piece of a parameter as the strategy itself initialised it."""

    name: str
    placement: Placement
    shape: tuple[int, ...]
    digest: str
    """Hash of the values' bytes."""
    mean: float
    deviation: float
    """Standard deviation; 0 for a constant."""

    @property
    def position_key(self) -> tuple[object, ...]:
        """Parameter, offset and shape, which are equal for copies of one piece."""
        return (self.placement.key, self.placement.global_offset, self.shape)

    @property
    def initialisation_key(self) -> tuple[object, ...]:
        """Parameter, with layer and expert if these are stacked: the unit that one call initialises."""
        placement = self.placement
        num_stacked = len(placement.global_shape) - len(self.shape)
        return (placement.key, placement.global_offset[:num_stacked])


class CapturedModule(msgspec.Struct, frozen=True):
    """A module of the captured model."""

    kind: str
    """Name of the module's class."""
    source: str
    """File and line of its forward pass, from the folder that holds `megatron`."""


class CapturedRank(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a captured rank. It is needed to align the rank's tensors with the tensors of other ranks and
    runs.

    A pair of numbers is the rank's number in a parallel group, and the group's size. The defaults describe a
    single rank.
    """

    rank: int = 0
    world_size: int = 1
    iteration: int
    tensor: tuple[int, int] = (0, 1)
    """Rank in the tensor-parallel group, and the group's size."""
    pipeline: tuple[int, int] = (0, 1)
    virtual_stages: int = 1
    """Model chunks per pipeline stage; 1 without interleaving."""
    context: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)
    """Rank and size of the data-parallel group without context parallelism."""
    expert: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    expert_sources: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    """Data-, context- and tensor-parallel rank of each rank that sends tokens to the same experts.

    They are in the order of their rows in an expert's input."""
    sequence_parallel: bool = False
    gated: bool
    """True if an MLP's first layer returns gate and value, one after the other."""
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    per_token_loss: bool = False
    clip_gradient: float
    hidden_dropout: float
    attention_dropout: float
    vocabulary: int
    """Entries of the vocabulary without padding."""
    dtype: str
    loss_scales: tuple[float, ...] = ()
    """Loss scale of each iteration up to the captured one, in fp16; empty otherwise."""
    weight_hashes: tuple[str, ...] = ()
    """Hash of all weights and buffers of the rank after each iteration up to the captured one.

    The first hash is that of the initial weights. The tuple is empty under Megatron-FSDP, with overlapped parameter
    gathering, and in captures of older versions.
    """
    modules: dict[str, CapturedModule] = {}
    functions: dict[str, str] = {}
    """File and line of the function that computes a stage or slot that no module computes.

    For the stages of the loss, the cross entropy."""
    router_groups: tuple[int, int] | None = None
    """Groups of experts, and the number of groups that a router chooses from; None without groups."""
    norm_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks over which this rank summed the gradient norm; several if experts have their own."""
    notes: tuple[str, ...] = ()
    """Sentences on tensors that could not be captured, and why."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Parallel degrees of the run. If the degrees of two runs are equal, their ranks hold the same parts."""
        dimensions = (self.tensor, self.pipeline, self.context, self.data)
        expert_dimensions = (self.expert, self.expert_tensor)
        # A dimension is a pair of the rank's index and the size.
        sizes = [size for _, size in (*dimensions, *expert_dimensions)]
        return (*sizes, self.virtual_stages, int(self.sequence_parallel))

    @property
    def has_dropout(self) -> bool:
        """True if hidden or attention dropout is above 0."""
        return self.hidden_dropout > 0 or self.attention_dropout > 0


class CaptureWriter:
    """Writer of a rank's capture. `add` appends tensors, and `close` completes the capture.

    Used as a context manager, it closes its files even if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._tensors: BinaryIO = (folder / TENSORS_FILE).open("wb")
        self._index: BinaryIO = (folder / INDEX_FILE).open("wb")
        self._encoder = msgspec.json.Encoder()
        self._offset_bytes = 0
        self.records: dict[TensorKey, TensorRecord] = {}

    def add(
        self,
        tensor_key: TensorKey,
        dtype: str,
        shape: tuple[int, ...],
        values: memoryview,
        placement: Placement | None = None,
    ) -> TensorRecord:
        """Append a tensor, whose values must be contiguous, and return its record."""
        self._tensors.write(values)
        record = TensorRecord(
            tensor_key, dtype, shape, self._offset_bytes, values.nbytes, placement
        )
        self._offset_bytes += values.nbytes
        self._write_record(record)
        return record

    def add_same(self, tensor_key: TensorKey, known: TensorRecord, shape: tuple[int, ...]) -> None:
        """Append a record of a tensor whose values were already written under `known`, with another shape."""
        record = msgspec.structs.replace(known, tensor_key=tensor_key, shape=shape, placement=None)
        self._write_record(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tensors, self._index):
            with suppress(OSError):
                file.close()

    def close(self, rank: CapturedRank) -> None:
        """Close the files and write `rank.json`, which marks the capture as complete."""
        self._tensors.close()
        self._index.close()
        with atomic_write(self._folder / RANK_FILE) as file:
            file.write(msgspec.json.encode(rank))

    def flush(self) -> None:
        """Flush all written tensors to the files, so that other processes can read them."""
        self._tensors.flush()
        self._index.flush()

    def _write_record(self, record: TensorRecord) -> None:
        """Append a record to the index. `records` keeps the first record of each tensor key."""
        self.records.setdefault(record.tensor_key, record)
        self._index.write(self._encoder.encode(record) + b"\n")


def read_index(folder: Path) -> list[TensorRecord]:
    """Read the records of a rank's folder, in the order in which the tensors were computed."""
    decoder = msgspec.json.Decoder(TensorRecord)
    with (folder / INDEX_FILE).open("rb") as file:
        return [decoder.decode(line) for line in file]


def read_initial(folder: Path) -> tuple[InitialPiece, ...]:
    """Read the initialised pieces of a rank's folder; empty if the rank did not load shared weights."""
    path = folder / INITIAL_FILE
    if not path.is_file():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=tuple[InitialPiece, ...])


def read_rank(folder: Path) -> CapturedRank:
    """Read the description of a rank from its folder.

    Raises:
        FileNotFoundError: The capture was cut off.
    """
    return msgspec.json.decode((folder / RANK_FILE).read_bytes(), type=CapturedRank)

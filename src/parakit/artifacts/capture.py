"""What a rank writes of one iteration's tensors, for `parakit.verify` to align and compare.

A capture is a folder with one folder a rank: `tensors.bin` (the values, one after another, as they are
in memory), `index.jsonl` (a `TensorRecord` a line, in the order in which the tensors were computed) and
`rank.json` (a `CapturedRank`), which is written last: a rank without it was cut off.
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
"""How much each tensor of the reference changes when all that it follows from is off by rounding."""
UNOBSERVED_FILE, UNOBSERVED_GRADIENT = "unobserved.json", "gradient, unobserved"
"""How far each gradient is another one if the iteration is repeated without probes; that slot."""
NORM_RANKS_PREFIX = "counted over ranks "
"""Begins a slot of the norm's stage; the group's ranks follow. 1 for an element that a rank counts."""
BUFFER = "buffer"
"""Slot of what a module keeps and saves beside its parameters."""
SCORES, CHOICE = "scores", "choice"
"""Slots of a router: what it chooses the experts by, and which it would choose, [tokens, experts]."""
COUNTS = "tokens per expert"
"""Slot of how many a rank's router gave each expert in the iteration, before Megatron resets it."""
EARLIER_ITERATION_PREFIX = "iteration "
"""Begins these slots in an iteration before the captured one; its number and a blank follow."""
UPDATE_SUFFIX = "update"
"""Ends the slot of how far a weight, or a master copy (`param`), moved."""
INITIAL_FILE, INITIAL = "initial.json", "weight, as initialised"
"""What a rank has initialised by itself, before shared weights are loaded; what is wrong of that."""
GRADIENT_PART_PREFIX = "part: "
"""Begins the slot of a part of a local gradient; a micro batch's, or what the iteration before left."""
START_WEIGHT, START_BUFFER = "weight at the start", "buffer at the start"
"""Slots, in the stage of weights, of what the captured iteration begins with."""
INITIAL_SLOTS = (START_WEIGHT, START_BUFFER)
UPDATE_MAGNITUDE = "reach of earlier updates"
"""Slot of how far earlier updates would have moved each weight by a gradient of its row's size."""
RATE_SLOTS = ("learning rate", "weight decay")
"""Slots of what a parameter's update is made with."""
COUNTED_ONCE = "counted once"
"""Slot of a parameter in the norm's stage, once captures are compared."""
BUCKETS, CLIPPING = "buckets", "clipping"
"""Beside stages and slots, names of functions: the reduction over data-parallel ranks, the clipping."""
MODEL, LOSS, PER_TOKEN_LOSS = "model", "loss", "of each token"
"""The whole, whose inputs are a stage of their own, and what gives a token's loss; its slot."""
RECOMPUTED_PREFIX = "recomputed."
"""Begins the slot of what a recomputed forward pass gives, which must be what the first one gave."""
CALLER_SEPARATOR = "@"
"""Ends the slot of a module that one which it is no part of calls; that one's name follows."""
ELEMENTS_PER_CHUNK = 1 << 16
"""Elements of a tensor that are computed with at once: what stays in the cache. All of a large tensor in
another type is memory that the kernel clears first, which takes ten times as long as the arithmetic."""


class CaptureStage(StrEnum):
    """Parts of an iteration, in the order in which they happen."""

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
    """What the log prints of the iteration; no tensor is captured of it."""


class TensorKey(msgspec.Struct, frozen=True):
    """Which tensor of an iteration it is, the same on every rank that has it or a part of it."""

    stage: CaptureStage
    name: str
    """Megatron's dotted name of a module or a parameter, with the global number of the layer."""
    slot: str = ""
    """Which of the module's tensors (`input.0`, `output`), or of the optimizer's (`exp_avg`)."""
    micro_batch: int | None = None
    """Of this rank, from 0."""
    call: int = 0
    """Of the module by one caller in this micro batch, from 0; a recomputed pass is another slot."""


class Placement(msgspec.Struct, frozen=True):
    """Where a piece of a parameter lies in the whole parameter, as Megatron's checkpoints have it."""

    key: str
    """Of the whole parameter; layers of one kind share it, and so do tied copies."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """As many numbers as `global_shape`; layers of one kind are stacked in the first dimension."""
    partial: bool = False
    """Only some of its elements are held by this rank; the others are NaN."""


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of one rank, and where its values are in `tensors.bin`."""

    tensor_key: TensorKey = msgspec.field(name="site")
    dtype: str
    """torch's name: `float32`, `bfloat16`, `int64`, `bool`."""
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    placement: Placement | None = None
    """Of a parameter, its gradient or its optimizer state; None for activations."""


class InitialPiece(msgspec.Struct, frozen=True):
    """A piece of a parameter as the layout itself has initialised it."""

    name: str
    placement: Placement
    shape: tuple[int, ...]
    digest: str
    """Of its bytes: equal where the values are."""
    mean: float
    deviation: float
    """Standard deviation; 0 of a constant."""

    @property
    def position_key(self) -> tuple[object, ...]:
        """Its place in the whole model."""
        return (self.placement.key, self.placement.global_offset, self.shape)

    @property
    def initialisation_key(self) -> tuple[object, ...]:
        """Key of the whole, and the layer and expert where those are stacked."""
        place = self.placement
        return (place.key, place.global_offset[: len(place.global_shape) - len(self.shape)])


class CapturedModule(msgspec.Struct, frozen=True):
    """A module of the model."""

    kind: str
    """Its class."""
    source: str
    """File and line of its forward pass, from the folder that holds `megatron`."""


class CapturedRank(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to align a rank's tensors with others; by default it is alone."""

    rank: int = 0
    world_size: int = 1
    iteration: int
    tensor: tuple[int, int] = (0, 1)
    """Its number in the tensor-parallel group, and the group's size; the others alike."""
    pipeline: tuple[int, int] = (0, 1)
    virtual_stages: int = 1
    """Parts of the model that a pipeline stage has; 1 without interleaving."""
    context: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)
    """Data parallel without context parallel."""
    expert: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    expert_sources: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    """Data-, context- and tensor-parallel number of the ranks that send tokens to the same experts, in
    the order in which an expert has their rows."""
    sequence_parallel: bool = False
    gated: bool
    """Whether an MLP's first layer gives gate and value, one after the other."""
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    per_token_loss: bool = False
    clip_gradient: float
    hidden_dropout: float
    attention_dropout: float
    vocabulary: int
    """Tokens without padding."""
    dtype: str
    loss_scales: tuple[float, ...] = ()
    """In fp16, what each iteration from the first to the captured one multiplied losses by."""
    modules: dict[str, CapturedModule] = {}
    functions: dict[str, str] = {}
    """By stage or slot, file and line of what computes it where no module does; of the loss' stages
    the cross entropy's."""
    router_groups: tuple[int, int] | None = None
    """Groups of experts, and how many of them a router chooses from; None if from all experts."""
    norm_groups: tuple[tuple[int, ...], ...] = ()
    """Ranks over which this rank summed the gradient norm; several where experts have their own."""
    notes: tuple[str, ...] = ()
    """What could not be captured, and why."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """What two runs share that are split alike, so that a rank of one is a rank of the other."""
        split = (self.tensor, self.pipeline, self.context, self.data, self.expert)
        sizes = (size for _, size in (*split, self.expert_tensor))
        return (*sizes, self.virtual_stages, int(self.sequence_parallel))

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped."""
        return self.hidden_dropout > 0 or self.attention_dropout > 0


class CaptureWriter:
    """Appends tensors to a rank's folder; `close` makes it a whole capture.

    A context, it leaves no file open where the disk is full.
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
        """Write one tensor, its values contiguous."""
        self._tensors.write(values)
        record = TensorRecord(
            tensor_key, dtype, shape, self._offset_bytes, values.nbytes, placement
        )
        self._offset_bytes += values.nbytes
        self._write(record)
        return record

    def add_same(self, tensor_key: TensorKey, known: TensorRecord, shape: tuple[int, ...]) -> None:
        """Note that a tensor has the values of one that was written."""
        record = msgspec.structs.replace(known, tensor_key=tensor_key, shape=shape, placement=None)
        self._write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tensors, self._index):
            with suppress(OSError):
                file.close()

    def close(self, rank: CapturedRank) -> None:
        """Complete the capture."""
        self._tensors.close()
        self._index.close()
        with atomic_write(self._folder / RANK_FILE) as file:
            file.write(msgspec.json.encode(rank))

    def flush(self) -> None:
        """Make what was written readable by others."""
        self._tensors.flush()
        self._index.flush()

    def _write(self, record: TensorRecord) -> None:
        self.records.setdefault(record.tensor_key, record)
        self._index.write(self._encoder.encode(record) + b"\n")


def read_index(folder: Path) -> list[TensorRecord]:
    """Records of a rank's folder, in the order in which the tensors were computed."""
    decoder = msgspec.json.Decoder(TensorRecord)
    with (folder / INDEX_FILE).open("rb") as file:
        return [decoder.decode(line) for line in file]


def read_initial(folder: Path) -> tuple[InitialPiece, ...]:
    """Of a rank's folder; empty where nothing was initialised and then loaded."""
    path = folder / INITIAL_FILE
    if not path.is_file():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=tuple[InitialPiece, ...])


def read_rank(folder: Path) -> CapturedRank:
    """A rank's description.

    Raises:
        FileNotFoundError: The capture was cut off.
    """
    return msgspec.json.decode((folder / RANK_FILE).read_bytes(), type=CapturedRank)

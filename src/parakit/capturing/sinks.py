"""What becomes of an iteration's tensors: written, compared with those written, or replaced."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from parakit.artifacts.capture import (
    STRETCH,
    TENSORS_FILE,
    UPDATE,
    CaptureWriter,
    Placement,
    Site,
    Stage,
    TensorRecord,
    read_index,
)


@dataclass(frozen=True)
class Piece:
    """A part of a whole parameter, and the values of something that has the parameter's shape."""

    name: str
    """The parameter's, with global numbers; a part of it that checkpoints hold apart has its number."""
    placement: Placement
    values: torch.Tensor


class KnownTensors:
    """Tensors of a micro batch's forward pass by their memory, so that one seen twice is kept once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, torch.dtype], tuple[torch.Tensor, float, Any]] = {}

    def find(self, tensor: torch.Tensor) -> Any:
        """What was noted of a tensor with the same values, or None."""
        entry = self._known.get(self._key(tensor))
        if entry is None or not tensor.is_contiguous():
            return None
        noted, total, what = entry
        # Megatron may have freed its memory, which another tensor then has; or written to it by a view
        # that does not count changes.
        same = noted.data_ptr() == tensor.data_ptr() and total == _total(tensor)
        return what if same else None

    def note(self, tensor: torch.Tensor, what: Any) -> None:
        """Remember what a tensor is; it is kept alive, so that its memory is not used again."""
        if tensor.is_contiguous():
            self._known[self._key(tensor)] = (tensor, _total(tensor), what)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    @staticmethod
    def _key(tensor: torch.Tensor) -> tuple[int, int, int, torch.dtype]:
        # The version counts changes in place.
        return (tensor.data_ptr(), tensor.numel(), tensor._version, tensor.dtype)


def _total(tensor: torch.Tensor) -> float:
    return sum(float(one.sum(dtype=torch.float64)) for one in _stretches(tensor.detach()))


def _stretches(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor in parts."""
    flat = tensor.reshape(-1)
    return [flat[begin : begin + STRETCH] for begin in range(0, flat.numel(), STRETCH)]


class StoredTensors:
    """Tensors of a rank's folder by their sites, read as they are asked for."""

    def __init__(self, folder: Path, records: dict[Site, TensorRecord] | None = None) -> None:
        if records is None:
            records = {record.site: record for record in read_index(folder)}
        self._records = records
        size = (folder / TENSORS_FILE).stat().st_size
        # Nothing changes it; torch warns of what cannot be written to.
        self._bytes = numpy.memmap(folder / TENSORS_FILE, mode="c") if size else None

    def get(self, site: Site) -> torch.Tensor | None:
        """A tensor on the CPU, which is the file's: not to be changed."""
        record = self._records.get(site)
        if record is None:
            return None
        dtype: torch.dtype = getattr(torch, record.dtype)
        if record.size_bytes == 0 or self._bytes is None:
            return torch.empty(record.shape, dtype=dtype)
        values = self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes]
        return torch.frombuffer(values, dtype=dtype).view(record.shape)


class Recording:
    """Writes every tensor; with `forced`, puts what is stored there in the place of the model's own.

    Forced are inputs of modules in the forward pass, and gradients of their outputs in the backward
    pass: what a module then gives is its own doing alone. The tensor that arrived is what is written.
    """

    def __init__(self, writer: CaptureWriter, forced: StoredTensors | None = None) -> None:
        self._writer = writer
        self._forced = forced
        self._known = KnownTensors()

    def begin_micro_batch(self) -> None:
        """Forget the tensors of the micro batch before."""
        self._known.clear()

    def forward(self, site: Site, tensor: torch.Tensor) -> torch.Tensor | None:
        """Write a tensor of the forward pass."""
        known: TensorRecord | None = self._known.find(tensor)
        if known is not None:
            self._writer.add_same(site, known, tuple(tensor.shape))
        else:
            self._known.note(tensor, self.write(site, tensor))
        return self._stored(site, tensor) if _is_given(site) else None

    def backward(self, site: Site, gradient: torch.Tensor) -> torch.Tensor | None:
        """Write a gradient."""
        self.write(site, gradient)
        return self._stored(site, gradient) if _is_given(site) else None

    def write(
        self, site: Site, tensor: torch.Tensor, placement: Placement | None = None
    ) -> TensorRecord:
        """Write any tensor."""
        name = str(tensor.dtype).removeprefix("torch.")
        return self._writer.add(site, name, tuple(tensor.shape), _bytes_of(tensor), placement)

    def write_piece(self, stage: Stage, slot: str, piece: Piece) -> None:
        """Write a part of a parameter, or of what has its shape."""
        self.write(Site(stage, piece.name, slot), piece.values, piece.placement)

    def _stored(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        if self._forced is None:
            return None
        stored = self._forced.get(site)
        if stored is None or stored.shape != like.shape:
            return None
        return stored.to(device=like.device, dtype=like.dtype, copy=True)

    def begin(self, slot: str, piece: Piece) -> torch.Tensor | None:
        """Write a part of what the iteration begins with; return what it shall, if that is forced."""
        self.write_piece(Stage.WEIGHTS, slot, piece)
        return self._stored(Site(Stage.WEIGHTS, piece.name, slot), piece.values)

    def choose(self, site: Site, chosen: torch.Tensor) -> torch.Tensor | None:
        """Write which experts a router would choose; return which it shall, if that is forced."""
        self.write(site, chosen)
        return self._forced.get(site) if self._forced is not None else None


class RoundingProbe:
    """Compares every tensor with the one written, and keeps how far it moved.

    What a module is given may be off by a rounding error as well, each element by its own. Weights that
    are off move all keys alike, of which a softmax takes no notice, as it does of what rounding does.
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self._rounding: torch.Generator | None = None
        self.responses: defaultdict[str, float] = defaultdict(float)
        """Largest relative change by stage, name and slot, joined by `|`."""

    def round_otherwise(self, seed: int) -> None:
        """From now on let what modules are given be off by a rounding error."""
        self._rounding = torch.Generator().manual_seed(seed)

    def begin_micro_batch(self) -> None:
        """Nothing to forget."""

    def forward(self, site: Site, tensor: torch.Tensor) -> torch.Tensor | None:
        """Compare a tensor of the forward pass."""
        self.write(site, tensor)
        return self._off(tensor) if _is_given(site) else None

    def backward(self, site: Site, gradient: torch.Tensor) -> torch.Tensor | None:
        """Compare a gradient."""
        self.write(site, gradient)
        return self._off(gradient) if _is_given(site) else None

    def _off(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Every element off by one rounding error, either way."""
        if self._rounding is None or not tensor.is_floating_point():
            return None
        signs = torch.randint(0, 2, tensor.shape, generator=self._rounding, dtype=torch.int8)
        off = (signs.float() - 0.5) * torch.finfo(tensor.dtype).eps
        return (tensor + tensor * off.to(tensor.device)).to(tensor.dtype)

    def write(self, site: Site, tensor: torch.Tensor) -> None:
        """Compare any tensor."""
        before = self._stored.get(site) if tensor.is_floating_point() else None
        if before is None or before.shape != tensor.shape:
            return
        both = zip(_stretches(before), _stretches(tensor.detach().cpu()), strict=True)
        norms = []
        for held, now in both:
            if (now.isfinite() < held.isfinite()).any():
                return  # Where fp16 overflows with other weights, that is no response to rounding.
            norms.append((norm_without_nan(held), norm_without_nan(_filled(now) - _filled(held))))
        size, moved = (math.hypot(*(each[n] for each in norms)) for n in (0, 1))
        key = f"{site.stage}|{site.name}|{site.slot}"
        if size > 0:
            self.responses[key] = max(self.responses[key], moved / size)

    def write_piece(self, stage: Stage, slot: str, piece: Piece) -> None:
        """Compare a part of a parameter, or of what has its shape."""
        site = Site(stage, piece.name, slot)
        self.write(site, piece.values)
        before = self._stored.get(site) if slot == "exp_avg" else None
        if before is None:
            return
        # How far a row of the average gradient moves, which an update follows, as a part of itself.
        held = _rows(before)
        moved, size = (one.norm(dim=1) for one in (_rows(piece.values) - held, held))
        if (size > 0).any():
            most = float((moved / size)[size > 0].max())
            copy = f"{Stage.OPTIMIZER_STATE}|{piece.name}|param {UPDATE}"
            for key in (f"{Stage.WEIGHTS}|{piece.name}|{UPDATE}", copy):
                self.responses[key] = max(self.responses[key], most)

    def choose(self, site: Site, chosen: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Let a router choose as it did: a tensor's response is that of rounding alone."""
        return self._stored.get(site)

    def carry(self, states: Iterable[tuple[Site, float]]) -> None:
        """Add how far states are off by earlier iterations' gradients, each by as much as this one's.

        A state is a sum of what it was and of this iteration's gradient, and is off by at most the sum
        of how far they are. What was measured is the gradient's part alone.

        Args:
            states: With their norms at the start, which may be larger than at the end: sums cancel out.
        """
        for site, size in states:
            stored = self._stored.get(site)
            gradient = self.responses.get(f"{Stage.REDUCED_GRADIENTS}|{site.name}|gradient")
            if stored is None or gradient is None:
                continue
            now = norm_without_nan(stored)
            if now > 0:
                power = 2 if site.slot.endswith("_sq") else 1
                key = f"{site.stage}|{site.name}|{site.slot}"
                self.responses[key] += power * gradient * size / now


def _is_given(site: Site) -> bool:
    """Whether a module is given it: an input in forward, the gradient of an output in backward."""
    if site.stage is Stage.OUTPUTS:
        return "input." in site.slot
    return site.stage is Stage.ACTIVATION_GRADIENTS and site.slot.startswith("output")


def _filled(values: torch.Tensor) -> torch.Tensor:
    """NaN, where another rank holds the element, as 0."""
    return values.double().nan_to_num()


def norm_without_nan(values: torch.Tensor) -> float:
    """Of the elements that this rank holds, in fp64."""
    return float(torch.linalg.vector_norm(_filled(values)))


def fp64_scalar(value: float | torch.Tensor) -> torch.Tensor:
    """A number as captures hold it: fp64, shape [1]."""
    return torch.as_tensor(value).detach().reshape(1).double()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, or a vector as one."""
    flat = _filled(values.detach().cpu())
    return flat.reshape(-1, flat.shape[-1]) if flat.ndim > 1 else flat.reshape(1, -1)


def update_magnitude(moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """How far an update would have moved each weight by a gradient of the size that its row has.

    Adam divides by the gradient's size: where that is all rounding, a weight moves as far as any other.

    Args:
        moved: By the update.
        squares: The optimizer's average of the squared gradient.
    """
    roots = squares.detach().float().sqrt()
    followed = moved.detach().float() * roots
    size = followed.square().mean(-1, keepdim=True).sqrt()
    return torch.where(roots > 0, size / roots, 0)


Sink = Recording | RoundingProbe


def tap(
    sink: Sink,
    tensor: torch.Tensor,
    sites: Sequence[tuple[Site, Site]],
    form: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    value: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hand a tensor to a sink, and later its gradient; what the sink gives is put in their place.

    A copy of the tensor is returned, whose gradient is what this module alone contributes, while the
    original's may be a sum over several users. A copy, not a view, because Megatron's pipeline schedule
    frees a stage's output and refuses to do that with views.

    Args:
        sink: It may replace what it gets as it is, at one site.
        tensor: What a module takes or gives.
        sites: Of the tensor and of its gradient; several where another model has several modules.
        form: Brings both into the form in which they are compared.
        value: What is handed over instead of the tensor.
    """
    seen, given = form(tensor.detach() if value is None else value), None
    for site, _ in sites:
        given = sink.forward(site, seen)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor if given is None else given

    def taken(gradient: torch.Tensor) -> torch.Tensor | None:
        formed, replaced = form(gradient), None
        for _, site in reversed(sites):
            replaced = sink.backward(site, formed)
        return replaced

    copied: torch.Tensor = _Probe.apply(tensor, given, taken)
    return copied


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, value: torch.Tensor | None, taken: Any
    ) -> torch.Tensor:
        context.taken = taken
        return (tensor if value is None else value).clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        replaced = context.taken(gradient)
        return (gradient if replaced is None else replaced), None, None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values without a copy, in a way that lets the model free the tensor's memory afterwards.

    What `Tensor.numpy` has been called of cannot: torch never resizes its storage again.
    """
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    array = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    array.tensor = flat  # type: ignore[attr-defined] # Alive as long as the view is.
    return memoryview(array)

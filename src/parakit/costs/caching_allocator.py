"""PyTorch's caching allocator of device memory, without a device: which bytes it reserves for a sequence of
allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings and one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import inf

from parakit.formatting.units import MIB

_ROUNDING_BYTES = 512
"""Sizes are rounded up to multiples of these bytes."""
_LARGEST_SMALL_BYTES = MIB
"""Largest size that is allocated in the pool of small blocks."""
_SMALL_SEGMENT_BYTES = 2 * MIB
_MEDIUM_SEGMENT_BYTES = 20 * MIB
"""Segment for sizes that are too large for the small pool, and below `_LEAST_OWN_SEGMENT_BYTES`."""
_LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""Least size for which the device is asked for a segment of just this size, rounded up to 2 MiB."""


type AllocatorState = tuple[int, tuple[tuple[int, int], ...]]
"""Address of the next segment, and size and address of each free block.

An allocator whose live tensors are those of an earlier time, in an equal state, repeats what it did from that time on.
"""


class OutOfDeviceMemoryError(MemoryError):
    """No segment fits below the limit, even after all empty segments were given back."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(f"{needed_bytes:,} bytes are needed.")
        self.needed_bytes = needed_bytes
        """Bytes in segments that cannot be given back, and in the segment that is missing."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """Part of a segment, used or free, with its neighbours in the segment."""

    size: int
    address: int
    is_small: bool
    is_used: bool = False
    previous: MemoryBlock | None = field(default=None, repr=False)
    following: MemoryBlock | None = field(default=None, repr=False)

    @property
    def is_segment(self) -> bool:
        """True if the block is a full segment, which can be given back to the device."""
        return self.previous is None and self.following is None


class CachingAllocator:
    """Allocator that keeps freed blocks, and gives empty segments back only if the device has no more memory."""

    def __init__(self, limit: float = inf) -> None:
        """Start without segments.

        Args:
            limit: Bytes that all segments together may have.
        """
        self._limit = limit
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}
        self._next_address = 0
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self.live_bytes = 0
        """Bytes of all used blocks."""
        self.peak_live_bytes = 0
        """Largest number of live bytes so far."""

    def snapshot(self) -> AllocatorState:
        """Return the state of the allocator, as far as it decides where further blocks are placed."""
        free = [(size, address) for blocks in self._free.values() for size, address, _ in blocks]
        return self._next_address, tuple(free)

    def allocate(self, size: int) -> MemoryBlock:
        """Return a used block of at least `size` bytes: the smallest free one, or a part of a new segment.

        Raises:
            OutOfDeviceMemoryError: No free block is large enough, and a new segment exceeds the limit.
        """
        size = max(1, -(-size // _ROUNDING_BYTES)) * _ROUNDING_BYTES
        is_small = size <= _LARGEST_SMALL_BYTES
        free = self._free[is_small]
        index = bisect_left(free, (size, -1))
        block = free.pop(index)[2] if index < len(free) else self._reserve(size, is_small)
        remainder = block.size - size
        if remainder >= _ROUNDING_BYTES if is_small else remainder > _LARGEST_SMALL_BYTES:
            self._split(block, size)
        block.is_used = True
        self.live_bytes += block.size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free a used block, and join it with the free blocks beside it in its segment."""
        block.is_used = False
        self.live_bytes -= block.size
        previous, following = block.previous, block.following
        if previous is not None and not previous.is_used:
            self._remove_free(previous)
            block = _join(previous, block)
        if following is not None and not following.is_used:
            self._remove_free(following)
            block = _join(block, following)
        self._add_free(block)

    def _reserve(self, size: int, is_small: bool) -> MemoryBlock:
        """Return the block of a new segment for `size` bytes.

        Raises:
            OutOfDeviceMemoryError: The segment exceeds the limit after all empty segments were given back.
        """
        if is_small:
            segment_bytes = _SMALL_SEGMENT_BYTES
        elif size < _LEAST_OWN_SEGMENT_BYTES:
            segment_bytes = _MEDIUM_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES
        if self.reserved_bytes + segment_bytes > self._limit:
            self._give_empty_segments_back()
        if self.reserved_bytes + segment_bytes > self._limit:
            raise OutOfDeviceMemoryError(self.reserved_bytes + segment_bytes)
        self.reserved_bytes += segment_bytes
        block = MemoryBlock(segment_bytes, self._next_address, is_small)
        self._next_address += segment_bytes
        return block

    def _give_empty_segments_back(self) -> None:
        """Return all segments without a used block to the device."""
        for is_small, free in self._free.items():
            kept = [entry for entry in free if not entry[2].is_segment]
            self.reserved_bytes -= sum(size for size, _, block in free if block.is_segment)
            self._free[is_small] = kept

    def _split(self, block: MemoryBlock, size: int) -> None:
        """Shorten a block to `size` bytes, and make its remainder a free block."""
        remainder = MemoryBlock(
            block.size - size,
            block.address + size,
            block.is_small,
            previous=block,
            following=block.following,
        )
        if block.following is not None:
            block.following.previous = remainder
        block.size, block.following = size, remainder
        self._add_free(remainder)

    def _add_free(self, block: MemoryBlock) -> None:
        """Add a block to the free blocks of its pool, which are sorted by size and address."""
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _remove_free(self, block: MemoryBlock) -> None:
        """Remove a block from the free blocks of its pool."""
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]


def _join(block: MemoryBlock, following: MemoryBlock) -> MemoryBlock:
    """Return a block that has grown by the block after it."""
    block.size += following.size
    block.following = following.following
    if following.following is not None:
        following.following.previous = block
    return block

"""PyTorch's caching allocator of device memory, without a device: which bytes it reserves for a sequence of
allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings and one stream. An
`AllocationRecorder` records the allocations and frees of a run as a trace. A `CachingAllocator` replays traces, and may
replay one trace several times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
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
_ADDRESS_BITS = 48
"""Bits of the address in the key of a free block. The size is in the bits above."""
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1

type AllocationTrace = Sequence[tuple[int, int]]
"""Allocations and frees in their order. A pair has the rounded bytes and the number of a tensor that is allocated, or 0
and the number of a tensor that is freed."""

type AllocatorState = tuple[int, tuple[int, ...]]
"""Address of the next segment, and the key of each free block.

An allocator whose live tensors are those of an earlier time, in an equal state, repeats what it did from that time on.
"""


class OutOfDeviceMemoryError(MemoryError):
    """No segment fits below the limit, even after all empty segments were given back."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(f"{needed_bytes:,} bytes are needed.")
        self.needed_bytes = needed_bytes
        """Bytes in segments that cannot be given back, and in the segment that is missing."""


class AllocationRecorder:
    """Recorder of allocations and frees, which become a trace."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []
        self._num_tensors = 0

    def allocate(self, size: int) -> int:
        """Record the allocation of a tensor of `size` bytes, and return the number of the tensor."""
        rounded = -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES or _ROUNDING_BYTES
        self._num_tensors += 1
        self._events.append((rounded, self._num_tensors))
        return self._num_tensors

    def free(self, *tensors: int) -> None:
        """Record that tensors are freed, in this order."""
        for tensor in tensors:
            self._events.append((0, tensor))

    def take_trace(self) -> AllocationTrace:
        """Return everything that was recorded since the last call of this method."""
        events, self._events = self._events, []
        return events


class CachingAllocator:
    """Allocator that keeps freed blocks, and gives empty segments back only if the device has no more memory.

    Blocks are ranges of addresses. Segments do not touch each other, so that only blocks of one segment are joined.
    Each pool has the sorted keys of its free blocks. A key is one number of size and address, because numbers are
    compared faster than pairs.
    """

    def __init__(self, limit: float = inf) -> None:
        """Start without segments.

        Args:
            limit: Bytes that all segments together may have.
        """
        self._limit = limit
        self._small_keys: list[int] = []
        self._large_keys: list[int] = []
        self._free_sizes_by_start: dict[int, int] = {}
        """Size of each free block, by its address."""
        self._free_starts_by_end: dict[int, int] = {}
        """Address of each free block, by its end."""
        self._used_starts: dict[int, int] = {}
        """Address of the block of each live tensor, by the tensor's number. Tensors that were freed may remain."""
        self._used_sizes: dict[int, int] = {}
        """Size of the same blocks."""
        self._segments: dict[int, int] = {}
        """Size of each segment, by its address."""
        self._next_address = 0
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self.live_bytes = 0
        """Bytes of all used blocks."""
        self.peak_live_bytes = 0
        """Largest number of live bytes so far."""

    def snapshot(self) -> AllocatorState:
        """Return the state of the allocator, as far as it decides where further blocks are placed."""
        return self._next_address, (*self._small_keys, *self._large_keys)

    def replay(self, trace: AllocationTrace) -> None:
        """Allocate and free the tensors of a trace.

        An allocation takes the smallest free block that is large enough, or a part of a new segment. A freed block is
        joined with the free blocks beside it in its segment. One loop does all of this and calls no Python function but
        `_reserve`, because a plan may replay 800,000 events.

        Raises:
            OutOfDeviceMemoryError: No free block is large enough, and a new segment exceeds the limit.
        """
        small_keys, large_keys = self._small_keys, self._large_keys
        free_sizes_by_start, free_starts_by_end = (
            self._free_sizes_by_start,
            self._free_starts_by_end,
        )
        used_starts, used_sizes = self._used_starts, self._used_sizes
        live, peak_live = self.live_bytes, self.peak_live_bytes
        try:
            for size, tensor in trace:
                if size:
                    keys = small_keys if size <= _LARGEST_SMALL_BYTES else large_keys
                    index = bisect_left(keys, size << _ADDRESS_BITS)
                    if index < len(keys):
                        start = keys.pop(index) & _ADDRESS_MASK
                        block_size = free_sizes_by_start.pop(start)
                        del free_starts_by_end[start + block_size]
                    else:
                        start, block_size = self._reserve(size)
                    if block_size > size:
                        remainder = block_size - size
                        if remainder > _LARGEST_SMALL_BYTES or keys is small_keys:
                            end = start + size
                            insort(keys, remainder << _ADDRESS_BITS | end)
                            free_sizes_by_start[end] = remainder
                            free_starts_by_end[start + block_size] = end
                            block_size = size
                    used_starts[tensor] = start
                    used_sizes[tensor] = block_size
                    live += block_size
                    # A call of max() here would take a tenth of the replay's time.
                    if live > peak_live:  # noqa: PLR1730
                        peak_live = live
                else:
                    start, block_size = used_starts[tensor], used_sizes[tensor]
                    live -= block_size
                    keys = small_keys if block_size <= _LARGEST_SMALL_BYTES else large_keys
                    end = start + block_size
                    if start in free_starts_by_end:
                        previous = free_starts_by_end.pop(start)
                        del keys[bisect_left(keys, start - previous << _ADDRESS_BITS | previous)]
                        del free_sizes_by_start[previous]
                        start = previous
                    if end in free_sizes_by_start:
                        following_size = free_sizes_by_start.pop(end)
                        del keys[bisect_left(keys, following_size << _ADDRESS_BITS | end)]
                        end += following_size
                    block_size = end - start
                    insort(keys, block_size << _ADDRESS_BITS | start)
                    free_sizes_by_start[start] = block_size
                    free_starts_by_end[end] = start
        finally:
            self.live_bytes, self.peak_live_bytes = live, peak_live

    def _reserve(self, size: int) -> tuple[int, int]:
        """Return address and size of a new segment for a tensor of `size` bytes.

        Raises:
            OutOfDeviceMemoryError: The segment exceeds the limit after all empty segments were given back.
        """
        if size <= _LARGEST_SMALL_BYTES:
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
        address = self._next_address
        self._segments[address] = segment_bytes
        # A gap after the segment keeps its last block apart from the next segment's first block.
        self._next_address += segment_bytes + _ROUNDING_BYTES
        return address, segment_bytes

    def _give_empty_segments_back(self) -> None:
        """Return all segments without a used block to the device."""
        for address, segment_bytes in list(self._segments.items()):
            if self._free_sizes_by_start.get(address) != segment_bytes:
                continue
            # Only small segments have this size.
            is_small = segment_bytes == _SMALL_SEGMENT_BYTES
            keys = self._small_keys if is_small else self._large_keys
            del keys[bisect_left(keys, segment_bytes << _ADDRESS_BITS | address)]
            del self._segments[address], self._free_sizes_by_start[address]
            del self._free_starts_by_end[address + segment_bytes]
            self.reserved_bytes -= segment_bytes

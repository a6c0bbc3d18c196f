"""The rules of PyTorch's caching allocator, with sizes that were worked out by hand from its source."""

from math import inf

import pytest

from parakit.costs.caching_allocator import (
    AllocationRecorder,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from parakit.formatting.units import MIB


class ImmediateAllocator(CachingAllocator):
    """Allocator that replays each allocation and each free on its own."""

    def __init__(self, limit: float = inf) -> None:
        super().__init__(limit)
        self._recorder = AllocationRecorder()

    def allocate(self, size: int) -> int:
        tensor = self._recorder.allocate(size)
        self.replay(self._recorder.take_trace())
        return tensor

    def free(self, tensor: int) -> None:
        self._recorder.free(tensor)
        self.replay(self._recorder.take_trace())


@pytest.mark.parametrize(
    ("size", "reserved", "live"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (15 * MIB + 1, 16 * MIB, 16 * MIB),
        (14 * MIB + 1024, 16 * MIB, 14 * MIB + 1024),
    ],
)
def test_segment_of_the_first_allocation_depends_on_its_size(
    size: int, reserved: int, live: int
) -> None:
    allocator = ImmediateAllocator()
    allocator.allocate(size)
    assert (allocator.reserved_bytes, allocator.live_bytes) == (reserved, live)


def test_a_part_of_at_most_a_mebibyte_is_not_split_off() -> None:
    allocator = ImmediateAllocator()
    allocator.allocate(15 * MIB)
    assert allocator.live_bytes == 16 * MIB


def test_medium_sizes_share_a_segment() -> None:
    allocator = ImmediateAllocator()
    for _ in range(6):
        allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_used() -> None:
    allocator = ImmediateAllocator()
    tensors = [allocator.allocate(size * MIB) for size in (50, 30)]
    for tensor in tensors:
        allocator.free(tensor)
    allocator.allocate(29 * MIB)
    allocator.allocate(48 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_the_remainder_of_a_block_is_lost_for_larger_tensors() -> None:
    allocator = ImmediateAllocator()
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(39 * MIB)
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == (50 + 12) * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == (50 + 12) * MIB


def test_freed_neighbours_are_joined_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        allocator = ImmediateAllocator()
        allocator.free(allocator.allocate(60 * MIB))
        tensors = [allocator.allocate(20 * MIB) for _ in range(3)]
        for index in order:
            allocator.free(tensors[index])
        allocator.allocate(60 * MIB)
        assert allocator.reserved_bytes == allocator.live_bytes == 60 * MIB


def test_empty_segments_are_given_back_only_at_the_limit() -> None:
    for limit, reserved in ((130 * MIB, 130 * MIB), (129 * MIB, 70 * MIB)):
        allocator = ImmediateAllocator(limit)
        allocator.free(allocator.allocate(60 * MIB))
        allocator.allocate(70 * MIB)
        assert allocator.reserved_bytes == reserved


def test_a_segment_with_one_used_block_is_not_given_back() -> None:
    allocator = ImmediateAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(20 * MIB)
    with pytest.raises(OutOfDeviceMemoryError) as error:
        allocator.allocate(42 * MIB)
    assert error.value.needed_bytes == (60 + 42) * MIB


def test_the_peak_of_live_bytes_outlasts_the_tensors() -> None:
    allocator = ImmediateAllocator()
    tensors = [allocator.allocate(20 * MIB) for _ in range(3)]
    for tensor in tensors:
        allocator.free(tensor)
    assert (allocator.live_bytes, allocator.peak_live_bytes) == (0, 60 * MIB)


def test_segments_are_not_joined_with_each_other() -> None:
    allocator = ImmediateAllocator()
    tensors = [allocator.allocate(20 * MIB) for _ in range(2)]
    for tensor in tensors:
        allocator.free(tensor)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_a_trace_may_free_tensors_of_an_earlier_trace_and_be_replayed_again() -> None:
    recorder, allocator = AllocationRecorder(), CachingAllocator()
    weights = recorder.allocate(30 * MIB)
    allocator.replay(recorder.take_trace())
    recorder.free(weights)
    allocator.replay(recorder.take_trace())
    recorder.free(recorder.allocate(20 * MIB))
    iteration = recorder.take_trace()
    for _ in range(3):
        allocator.replay(iteration)
    assert (allocator.reserved_bytes, allocator.live_bytes) == (30 * MIB, 0)

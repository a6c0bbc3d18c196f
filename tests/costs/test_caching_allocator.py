"""The rules of PyTorch's caching allocator, with sizes that were worked out by hand from its source."""

import pytest

from parakit.costs.caching_allocator import CachingAllocator, OutOfDeviceMemoryError
from parakit.formatting.units import MIB


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
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.reserved_bytes, allocator.live_bytes) == (reserved, live)


def test_a_part_of_at_most_a_mebibyte_is_not_split_off() -> None:
    allocator = CachingAllocator()
    allocator.allocate(15 * MIB)
    assert allocator.live_bytes == 16 * MIB


def test_medium_sizes_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(6):
        allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_used() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (50, 30)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(29 * MIB)
    allocator.allocate(48 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_the_remainder_of_a_block_is_lost_for_larger_tensors() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(39 * MIB)
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == (50 + 12) * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == (50 + 12) * MIB


def test_freed_neighbours_are_joined_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(60 * MIB))
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for index in order:
            allocator.free(blocks[index])
        allocator.allocate(60 * MIB)
        assert allocator.reserved_bytes == allocator.live_bytes == 60 * MIB


def test_empty_segments_are_given_back_only_at_the_limit() -> None:
    for limit, reserved in ((130 * MIB, 130 * MIB), (129 * MIB, 70 * MIB)):
        allocator = CachingAllocator(limit)
        allocator.free(allocator.allocate(60 * MIB))
        allocator.allocate(70 * MIB)
        assert allocator.reserved_bytes == reserved


def test_a_segment_with_one_used_block_is_not_given_back() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(20 * MIB)
    with pytest.raises(OutOfDeviceMemoryError) as error:
        allocator.allocate(42 * MIB)
    assert error.value.needed_bytes == (60 + 42) * MIB


def test_the_peak_of_live_bytes_outlasts_the_blocks() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    assert (allocator.live_bytes, allocator.peak_live_bytes) == (0, 60 * MIB)

import gzip
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.preprocess import lines
from tools.preprocess.documents import Problem, ProblemKind
from tools.preprocess.lines import Format, Slice, line_blocks, lines_before, next_line_start

LINES = [b"a" * n + b"\n" for n in (3, 40, 0, 7, 90, 1, 1, 1, 25)]
TEXT = b"".join(LINES)
PACKERS = {
    Format.LINES: lambda data: data,
    Format.GZIP: gzip.compress,
    Format.ZSTD: zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)


def write(tmp_path, format_, data):
    path = tmp_path / "x"
    path.write_bytes(data)
    return Slice(str(path), format_, 0, None, len(data))


def text_of(blocks):
    return b"".join(b.content for b in blocks if not isinstance(b.content, Problem))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("format_", PACKERS)
def test_blocks_hold_complete_lines_and_reading_can_start_at_any_block_end(tmp_path, format_):
    slice_ = write(tmp_path, format_, PACKERS[format_](TEXT))
    blocks = list(line_blocks(slice_, 0, None))
    assert text_of(blocks) == TEXT
    assert all(block.content.endswith(b"\n") for block in blocks)
    for index, block in enumerate(blocks):
        remaining_blocks = list(line_blocks(slice_, block.next_offset, None))
        assert [b.content for b in remaining_blocks] == [b.content for b in blocks[index + 1 :]]


@settings(max_examples=100)
@given(data=st.lists(st.binary(max_size=40), max_size=12).map(b"\n".join))
def test_no_byte_is_lost_for_any_lines(tmp_path_factory, data):
    slice_ = write(tmp_path_factory.mktemp("x"), Format.LINES, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", 8)
        blocks = list(line_blocks(slice_, 0, None))
    assert text_of(blocks) == data
    assert all(block.content.endswith(b"\n") for block in blocks[:-1])


@pytest.mark.usefixtures("small_blocks")
def test_slice_ends_at_its_end_offset(tmp_path):
    whole = write(tmp_path, Format.LINES, TEXT)
    for cut in (4, 45, 54, len(TEXT)):
        part = Slice(whole.name, Format.LINES, 0, cut, cut)
        assert text_of(line_blocks(part, 0, None)) == TEXT[:cut]


@pytest.mark.usefixtures("small_blocks")
def test_line_over_the_limit_is_skipped_and_named(tmp_path):
    data = b"short\n" + b"x" * 500 + b"\nlast\n"
    slice_ = write(tmp_path, Format.LINES, data)
    blocks = list(line_blocks(slice_, 0, 10))
    assert text_of(blocks) == b"short\nlast\n"
    problem = next(block.content for block in blocks if isinstance(block.content, Problem))
    assert (problem.kind, problem.detail) == (ProblemKind.TOO_LARGE, "501 bytes")


@pytest.mark.parametrize("format_", [Format.GZIP, Format.ZSTD])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_archive_gives_the_text_before_the_damage_and_is_reported(
    tmp_path, format_, damage
):
    text = b"".join(b'{"text":"%d"}\n' % i for i in range(200_000))
    packed = PACKERS[format_](text)
    half = len(packed) // 2
    packed = packed[:half] if damage == "cut" else packed[:half] + b"\0\xff\0" + packed[half + 3 :]
    *blocks, last = line_blocks(write(tmp_path, format_, packed), 0, None)
    text_before_damage = text_of(blocks)
    assert isinstance(last.content, Problem)
    assert last.content.kind is ProblemKind.BROKEN_ARCHIVE
    assert text_before_damage.endswith(b"\n") or not text_before_damage
    if damage == "cut":
        assert len(text_before_damage) > 100_000
        assert text.startswith(text_before_damage)


def test_archives_of_several_members_are_read_to_the_end(tmp_path):
    for format_ in (Format.GZIP, Format.ZSTD):
        slice_ = write(tmp_path, format_, PACKERS[format_](b"a\n") + PACKERS[format_](b"b\n"))
        assert text_of(line_blocks(slice_, 0, None)) == b"a\nb\n"


def test_next_line_start_is_the_offset_after_the_next_line_end(tmp_path):
    (tmp_path / "x").write_bytes(b"ab\ncd\nef")
    starts = [next_line_start(tmp_path / "x", offset) for offset in range(9)]
    assert starts == [0, 3, 3, 3, 6, 6, 6, 8, 8]


def test_lines_are_counted_as_python_counts_them_in_text_mode(tmp_path):
    whole = write(tmp_path, Format.LINES, b"a\r\nb\rc\nd")
    slice_ = replace(whole, start=7)
    assert lines_before(slice_) == 3

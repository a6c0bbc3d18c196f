"""Bytes of a log come as pieces of complete lines, and a line of gigabytes is bounded."""

from __future__ import annotations

import pytest

from parakit.logs import pieces


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_LINE", 4)
    monkeypatch.setattr(pieces, "_MAX_LONG_LINE", 8)


def read(*chunks: bytes) -> list[tuple[bytes, list[int], bool]]:
    return [
        (piece.data, list(piece.numbers), piece.whole) for piece in pieces._number_lines(chunks)
    ]


def test_complete_lines_of_a_chunk_are_one_piece_and_the_rest_is_not_whole() -> None:
    assert read(b"a\nb\nc", b"d\n") == [
        (b"a\nb\n", [1, 2], True),
        (b"cd\n", [3], True),
        (b"", [4], False),
    ]


def test_parts_of_a_long_line_have_its_number_and_the_next_line_has_the_next_one() -> None:
    assert read(b"aaaaa", b"bb\nc\n") == [
        (b"aaaaa", [1], False),
        (b"bb\n", [1], False),
        (b"c\n", [2], True),
        (b"", [3], False),
    ]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_text_beyond_the_limit_is_dropped_up_to_the_end_of_the_line(newline: bytes) -> None:
    # With \r\n the end of the line came back, joined to its begin.
    read_pieces = read(b"aaaaa", b"bbbbb", b"loss 1" + newline, b"c\n")
    assert read_pieces == [
        (b"aaaaa", [1], False),
        (b"\n", [1], False),
        (b"c\n", [2], True),
        (b"", [3], False),
    ]


def test_a_carriage_return_begins_to_count_anew_as_a_progress_bar_does() -> None:
    read_pieces = read(b"aaaaa", b"bbbbb", b"\rcc\n")
    assert (b"\rcc\n", [1], False) in read_pieces

import gzip

from hypothesis import given
from hypothesis import strategies as st

from parakit.logs.lines import drop_escapes, make_printable, read_lines, split_lines, unwrap_json
from parakit.logs.pieces import MAX_LINE


def write(tmp_path, content: bytes):
    path = tmp_path / "a.log"
    path.write_bytes(content)
    return path


def test_every_kind_of_line_end_ends_a_line(tmp_path):
    path = write(tmp_path, b"one\r\ntwo\rthree\nfour")
    assert [line for line in read_lines(path) if line] == ["one", "two", "three", "four"]


def test_escape_codes_are_removed_and_invalid_bytes_replaced(tmp_path):
    path = write(tmp_path, b"\x1b[1;31mred\x1b[0m \xff end\n")
    assert list(read_lines(path)) == ["red � end"]


def test_gzip_is_recognised_by_its_magic_number(tmp_path):
    path = write(tmp_path, gzip.compress(b"one\ntwo\n"))
    assert list(read_lines(path)) == ["one", "two"]


def test_truncated_gzip_gives_the_text_before_the_truncation(tmp_path):
    packed = gzip.compress("".join(f"line {n}\n" for n in range(500_000)).encode())
    lines = list(read_lines(write(tmp_path, packed[: len(packed) // 2])))
    assert lines[0] == "line 0"
    assert 1000 < len(lines) < 500_000


def test_long_line_is_split_before_an_iteration():
    record = " [stamp] iteration 1/2 |" + "elapsed time per iteration (ms): " + "x" * 1000
    lines, unfinished = split_lines(record * 200 + "\n")
    assert unfinished == ""
    assert max(len(line) for line in lines) <= MAX_LINE
    assert "".join(lines) == record * 200
    assert sum(line.count("iteration 1/2 |") for line in lines) == 200


def test_unfinished_line_is_bounded_in_length():
    lines, unfinished = split_lines("y" * (5 * MAX_LINE + 7))
    assert len(unfinished) <= MAX_LINE
    assert sum(map(len, lines)) + len(unfinished) == 5 * MAX_LINE + 7


@given(st.text(alphabet="ab\n\r\x1b[0m", max_size=200), st.integers(0, 200))
def test_lines_do_not_depend_on_where_the_text_is_split(text, cut):
    whole, whole_rest = split_lines(text)
    first, unfinished = split_lines(text[:cut])
    second, last = split_lines(unfinished + text[cut:])
    # If the split separates "\r" from "\n", an additional empty line may appear.
    assert [line for line in first + second if line] == [line for line in whole if line]
    assert drop_escapes(last) == drop_escapes(whole_rest)


def test_control_and_direction_characters_are_removed(tmp_path):
    wrapped = '{"log":"\\u001b[31mred\\u001b[0m \\u202egnp\\u2066.exe\\u0007\\n","stream":"stdout"}'
    path = write(tmp_path, f"a\u202eb\u200bc\x07d\n{wrapped}\n".encode())
    plain, packed = read_lines(path)
    assert plain == "abcd"
    assert unwrap_json(packed) == "red gnp.exe "
    assert make_printable("a\u202eb\nc\x1b[1m\x9b") == "ab c"

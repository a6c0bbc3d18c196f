import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.preprocess.documents import Parser, Problem, ProblemKind

PARSER = Parser(["text"])


def texts(rows):
    return [row[0] for row in rows if not isinstance(row, Problem)]


def kinds(rows):
    return [(row.kind, line) for line, row in enumerate(rows) if isinstance(row, Problem)]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "a"', ProblemKind.BROKEN_JSON),
        (b'{"text": "a"} {"text": "b"}', ProblemKind.BROKEN_JSON),
        (b'{"text": "a",}', ProblemKind.BROKEN_JSON),
        (b'["a"]', ProblemKind.BROKEN_JSON),
        (b'{"text": "tab\tin it"}', ProblemKind.BROKEN_JSON),
        (b'{"other": "a"}', ProblemKind.MISSING_KEY),
        (b'{"text": null}', ProblemKind.NULL_TEXT),
        (b'{"text": 7}', ProblemKind.NOT_TEXT),
        (b'{"text": ["a", 7]}', ProblemKind.NOT_TEXT),
        (b'{"text": "a\xff"}', ProblemKind.INVALID_UTF8),
        (b'{"text": "a", "other": "\xff"}', ProblemKind.INVALID_UTF8),
        (b'{"text": "\\ud800"}', ProblemKind.INVALID_UTF8),
        (b"", ProblemKind.BLANK_LINE),
        (b"  \t", ProblemKind.BLANK_LINE),
    ],
)
def test_each_kind_of_bad_line_is_named_with_its_place(line, kind):
    data = b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n'
    rows = PARSER.parse(data)
    assert kinds(rows) == [(kind, 1)]
    assert [list(rows[0]), list(rows[2])] == [["one"], ["two"]]
    assert len(rows) == 3


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", "n": NaN}',
        b'{"text": "a", "n": [1e999, -Infinity]}',
        b'{"text": "b", "text": "a"}',
        b'{"te\\u0078t": "a"}',
        b'  {"text": "a"}  ',
        b'{"text": "a", "odd": "\\ud800"}',
    ],
)
def test_json_that_python_reads_is_read(line):
    assert json.loads(line)["text"] == "a"
    assert [list(row) for row in PARSER.parse(line + b"\n")] == [["a"]]


def test_object_over_two_lines_is_refused_even_if_another_line_has_two_objects():
    data = b'{"text": "a"} {"text": "b"}\n{"text":\n"c"}\n'
    assert [kind for kind, _ in kinds(PARSER.parse(data))] == [ProblemKind.BROKEN_JSON] * 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(
    rows=st.lists(st.fixed_dictionaries({"text": json_values, "other": json_values}), max_size=5)
)
def test_any_json_is_accepted_or_refused_like_by_python(rows):
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows]
    parsed = PARSER.parse(b"".join(line + b"\n" for line in lines) or b"\n")
    expected = [
        row["text"]
        for row in rows
        if isinstance(row["text"], str)
        or (isinstance(row["text"], list) and all(isinstance(x, str) for x in row["text"]))
    ]
    assert texts(parsed) == expected
    assert len(parsed) == len(rows) or not rows


@settings(max_examples=200)
@given(data=st.binary(max_size=80))
def test_any_bytes_give_documents_or_problems_but_no_crash(data):
    rows = PARSER.parse(data or b"\n")
    assert len(texts(rows)) + len(kinds(rows)) == len(rows)


def test_the_verdict_on_a_line_does_not_depend_on_its_neighbours():
    """Python's json refuses integers of more than 4,300 digits, even in a key that is not read."""
    long_integer = b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n"
    sentences = b'{"text": ["b"], "n": ' + b"9" * 5000 + b"}\n"
    for neighbours in (
        b"",
        b"broken\n",
        b'{"text": "x\xff"}\n',
        b'{"text": ["a", "list"]}\n',
        b"\n",
    ):
        for line, text in ((long_integer, "a"), (sentences, ["b"])):
            rows = PARSER.parse(neighbours + line)
            assert list(rows[-1]) == [text]
            assert rows[:-1] == (PARSER.parse(neighbours) if neighbours else [])


LINE_PIECES = (
    *(b'{"text": ', b'"a"', b'"\\ud800"', b"[", b"]", b", ", b'"n": ', b"{", b"}", b"1", b"-"),
    *(b"9" * 4301, b"1e999", b"01", b"NaN", b"\xff", b'"\x01"', b"null", b" ", b"'", b'"'),
)


@settings(max_examples=300)
@given(
    lines=st.lists(
        st.lists(st.sampled_from(LINE_PIECES), max_size=8).map(b"".join), min_size=1, max_size=4
    )
)
def test_block_of_lines_gives_the_documents_of_single_lines(lines):
    together = PARSER.parse(b"".join(line + b"\n" for line in lines))
    alone = [row for line in lines for row in PARSER.parse(line + b"\n")]
    assert [row if isinstance(row, Problem) else list(row) for row in together] == [
        row if isinstance(row, Problem) else list(row) for row in alone
    ]


def test_rows_of_tables_follow_the_same_rules():
    values = ["a", None, 3, ["b", "c"], "\ud800"]
    rows = PARSER.parse((SimpleNamespace(to_pylist=lambda: values),))
    assert texts(rows) == ["a", ["b", "c"]]
    assert kinds(rows) == [
        (ProblemKind.NULL_TEXT, 1),
        (ProblemKind.NOT_TEXT, 2),
        (ProblemKind.INVALID_UTF8, 4),
    ]


def test_large_documents_are_refused_by_their_utf8_size():
    data = '{"text":"éé"}\n{"text":"abcd"}\n{"text":"abcde"}\n'.encode()
    rows = Parser(["text"], 4).parse(data)
    assert texts(rows) == ["éé", "abcd"]
    assert rows[2] == Problem(ProblemKind.TOO_LARGE, "5 bytes")

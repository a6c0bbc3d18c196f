"""`.txt` files: a document per file or per paragraph."""

import json

import pytest

from parakit.data import open_dataset
from tools.preprocess import plain_text

PARAGRAPHS = ["One line.", "Two\nlines, é “quoted”.", "  indented\n\ttabs ", "last"]


@pytest.fixture
def make(tool, tmp_path, read_pair):
    def make_named(*inputs, flags=()):
        assert tool("--input", *inputs, "--output-prefix", tmp_path / "o", *flags) == 0
        return read_pair(tmp_path / "o_text_document")

    return make_named


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def test_a_file_is_a_document_by_default(make, tmp_path, reference):
    for number, text in enumerate(PARAGRAPHS):
        write(tmp_path / "texts" / f"{number}.txt", f"{text}\n")
    assert make(tmp_path / "texts") == reference(PARAGRAPHS, None)


@pytest.mark.parametrize("blank", ["\n\n", "\n \t\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_paragraphs_become_documents_on_request(make, tmp_path, reference, blank, encoding):
    path = write(tmp_path / "in.txt", blank + blank.join(PARAGRAPHS) + "\n", encoding)
    flags = ("--txt-documents", "paragraph")
    assert make(path, flags=flags) == reference(PARAGRAPHS, None)


def test_a_long_file_of_paragraphs_is_read_in_blocks_and_resumed(
    tool, tmp_path, capsys, reference, read_pair, monkeypatch
):
    documents = [f"paragraph {number}" for number in range(60)]
    path = write(tmp_path / "in.txt", "\n\n".join([*documents[:-1], "\x00bad\x00", documents[-1]]))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"\x00bad\x00", b"\xff"))
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--txt-documents", "paragraph")
    flags = (*flags, "--commit-mib", "0.0001")
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 100)
    assert tool(*flags) == 1
    assert "invalid UTF-8 (byte 1 of the document)" in capsys.readouterr().err
    path.write_bytes(raw)
    assert tool(*flags, "--restart") == 0
    expected = [*documents[:-1], "\x00bad\x00", documents[-1]]
    assert read_pair(tmp_path / "o_text_document") == reference(expected, None)


def test_json_lines_in_a_txt_file_are_still_json_lines(make, tmp_path, reference):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in PARAGRAPHS)
    assert make(write(tmp_path / "in.txt", rows)) == reference(PARAGRAPHS, None)


def test_text_files_in_a_folder_of_json_lines_are_no_documents(
    make, tmp_path, reference, write_lines
):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "README.txt", "Do not train on this.")
    write_lines(["one"], "data/in.jsonl")
    assert make(folder) == reference(["one"], None)


def test_the_stretch_that_is_a_document_belongs_to_the_identity(make, tool, tmp_path, capsys):
    path = write(tmp_path / "in.txt", "one\n\ntwo\n")
    make(path)
    assert open_dataset(tmp_path / "o_text_document").documents == 1
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--txt-documents", "paragraph")
    assert tool(*flags) == 1
    assert "--txt-documents was file, now paragraph" in capsys.readouterr().err


def test_plain_text_has_no_keys_and_a_blank_file_no_document(tool, tmp_path, capsys):
    path = write(tmp_path / "in.txt", "one")
    flags = ("--output-prefix", tmp_path / "o")
    assert tool("--input", path, *flags, "--json-keys", "text", "title") == 1
    assert "is plain text, which has no keys" in capsys.readouterr().err
    assert tool("--input", write(tmp_path / "b.txt", " \n\n"), *flags) == 1
    assert f"{tmp_path / 'b.txt'}: empty file" in capsys.readouterr().err

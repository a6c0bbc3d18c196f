"""Every error in an input is named with its position, counted, and does no damage."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import resource
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tools.preprocess import parts

GOOD = ["one", "two", "three"]
BAD_LINES = {
    "broken JSON line": b'{"text": "a"',
    "missing key ('text')": b'{"body": "a"}',
    "null text (key 'text')": b'{"text": null}',
    "invalid UTF-8 (byte 11 of the line)": b'{"text": "\xff"}',
}


def write_bad(tmp_path, line):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text":"one"}\n{"text":"two"}\n' + line + b'\n{"text":"three"}\n')
    return path


@pytest.mark.parametrize(("message", "line"), BAD_LINES.items())
def test_bad_line_stops_the_run_and_is_named(tool, tmp_path, capsys, message, line):
    path = write_bad(tmp_path, line)
    assert tool("--input", path, "--output-prefix", tmp_path / "o") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:3: {message}")
    assert "--on-error skip" in error
    assert not (tmp_path / "o_text_document.idx").exists()


@pytest.mark.parametrize(("message", "line"), BAD_LINES.items())
def test_skip_option_omits_and_counts_bad_lines(
    tool, tmp_path, capsys, message, line, reference, read_pair
):
    path = write_bad(tmp_path, line)
    assert tool("--input", path, "--output-prefix", tmp_path / "o", "--on-error", "skip") == 0
    printed = capsys.readouterr()
    assert f"{path}:3: {message}" in printed.err
    assert f"1 × {message.partition(' (')[0]}" in printed.out
    assert read_pair(tmp_path / "o_text_document") == reference(GOOD, None)


def test_stopped_run_resumes_with_the_skip_option(tool, tmp_path, capsys, reference, read_pair):
    documents = [f"document {i}" for i in range(400)]
    lines = [json.dumps({"text": d}) for d in documents]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*lines[:399], "broken", lines[399]]) + "\n")
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--commit-mib", "0.0001")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.preprocess.lines.BLOCK_BYTES", 1 << 10)
        assert tool(*flags) == 1
        assert f"{path}:400: broken JSON" in capsys.readouterr().err
        assert tool(*flags, "--on-error", "skip") == 0
    message = capsys.readouterr().err
    assert "Resuming after" in message
    assert f"{path}:400: broken JSON" in message
    assert read_pair(tmp_path / "o_text_document") == reference(documents, None)


def test_bad_line_of_a_part_is_named_by_its_number_in_the_file(tool, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text":"a"}\n' * 99 + "broken\n")
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--shard", "1/2")
    assert tool(*flags) == 1
    assert f"{path}:100: broken JSON" in capsys.readouterr().err


def test_an_empty_file_is_named(tool, tmp_path, capsys, write_lines, reference, read_pair):
    (tmp_path / "a.jsonl").touch()
    flags = ("--input", tmp_path / "a.jsonl", write_lines(GOOD, "b.jsonl"))
    flags = (*flags, "--output-prefix", tmp_path / "o")
    assert tool(*flags) == 1
    assert f"{tmp_path / 'a.jsonl'}: empty file" in capsys.readouterr().err
    assert tool(*flags, "--on-error", "skip") == 0
    assert "1 × empty file" in capsys.readouterr().out
    assert read_pair(tmp_path / "o_text_document") == reference(GOOD, None)


def archive(kind, text):
    """The bytes of a text in a container that the tool does not read."""
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr("in.jsonl", text)
    elif kind == "tar":
        with tarfile.open(fileobj=stream, mode="w") as file:
            entry = tarfile.TarInfo("in.jsonl")
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text.encode()))
    else:
        return {
            "bzip2": bz2.compress,
            "xz": lzma.compress,
            "UTF-16": lambda data: data.decode().encode("utf-16"),
        }[kind](text.encode())
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar", "bzip2", "xz", "UTF-16"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.zip", "in"])
def test_a_format_that_is_not_read_is_named_and_no_document_is_to_be_skipped(
    tool, tmp_path, capsys, kind, name
):
    path = tmp_path / name
    path.write_bytes(archive(kind, '{"text": "one"}\n{"text": "two"}\n'))
    assert tool("--input", path, "--output-prefix", tmp_path / "o", "--on-error", "skip") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path} is ")
    assert kind in error
    assert "which is not read; " in error
    assert "--on-error" not in error


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_byte_order_mark_belongs_to_no_document(tool, tmp_path, reference, read_pair, end):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text}) + end for text in GOOD]
    path.write_bytes("".join(lines).encode("utf-8-sig"))
    assert tool("--input", path, "--output-prefix", tmp_path / "o") == 0
    assert read_pair(tmp_path / "o_text_document") == reference(GOOD, None)


def test_advice_on_an_empty_or_damaged_file_is_about_the_file(tool, tmp_path, capsys):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 9)[:-12])
    for name, advice in (("a.jsonl", "take it out of --input"), ("b.gz", "fetch it again")):
        assert tool("--input", tmp_path / name, "--output-prefix", tmp_path / name[0]) == 1
        error = capsys.readouterr().err
        assert advice in error
        assert "such documents" not in error


def test_empty_document_is_written_like_by_megatron_and_named(
    tool, tmp_path, capsys, write_lines, reference, read_pair
):
    path = write_lines(["one", "", "two"])
    assert tool("--input", path, "--output-prefix", tmp_path / "o", "--append-eod") == 0
    printed = capsys.readouterr()
    assert f"{path}:2: empty document (noted)" in printed.err
    assert "1 × empty document" in printed.out
    assert read_pair(tmp_path / "o_text_document") == reference(["one", "", "two"])


def test_a_truncated_archive_is_named(tool, tmp_path, capsys, write_lines):
    packed = gzip.compress(write_lines([f"text {i}" for i in range(5000)]).read_bytes())
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    flags = ("--input", path, "--output-prefix", tmp_path / "o")
    assert tool(*flags) == 1
    assert "truncated or damaged archive" in capsys.readouterr().err
    assert tool(*flags, "--on-error", "skip") == 0
    printed = capsys.readouterr()
    assert "1 × truncated or damaged archive" in printed.out
    assert "documents" in printed.out


def test_a_truncated_parquet_file_is_named(tool, tmp_path, capsys):
    (tmp_path / "in.parquet").write_bytes(b"PAR1" + bytes(100))
    assert tool("--input", tmp_path / "in.parquet", "--output-prefix", tmp_path / "o") == 1
    assert "truncated or damaged archive" in capsys.readouterr().err


def test_documents_over_the_limit_are_refused(
    tool, tmp_path, capsys, write_lines, reference, read_pair
):
    path = write_lines(["short", "x" * 2000, "also short"])
    flags = ("--input", path, "--output-prefix", tmp_path / "o", "--max-document-mb", "0.001")
    assert tool(*flags) == 1
    assert f"{path}:2: document over --max-document-mb (2000 bytes)" in capsys.readouterr().err
    assert tool(*flags, "--on-error", "skip") == 0
    assert read_pair(tmp_path / "o_text_document") == reference(["short", "also short"], None)


def test_an_output_of_another_run_is_not_touched(tool, tmp_path, capsys, write_lines, read_pair):
    path = write_lines(GOOD)
    flags = ("--input", path, "--output-prefix", tmp_path / "o")
    assert tool(*flags) == 0
    before = read_pair(tmp_path / "o_text_document")
    capsys.readouterr()
    assert tool(*flags) == 0
    assert "Nothing to do" in capsys.readouterr().err
    assert tool(*flags, "--append-eod") == 1
    error = capsys.readouterr().err
    assert "exists already, but --append-eod (end-of-document id) was None, now 50256" in error
    assert read_pair(tmp_path / "o_text_document") == before
    assert tool(*flags, "--append-eod", "--overwrite") == 0
    assert read_pair(tmp_path / "o_text_document") != before


def test_an_output_without_a_manifest_is_not_touched(tool, tmp_path, capsys, write_lines):
    (tmp_path / "o_text_document.bin").write_bytes(b"precious")
    flags = ("--input", write_lines(GOOD), "--output-prefix", tmp_path / "o")
    assert tool(*flags) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "o_text_document.bin").read_bytes() == b"precious"


def test_full_disk_gives_a_single_sentence_and_the_run_resumes_later(
    tool, tmp_path, capsys, write_lines, reference, read_pair, monkeypatch
):
    path = write_lines(GOOD)
    flags = ("--input", path, "--output-prefix", tmp_path / "o")

    def full(_stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(parts, "flush_to_disk", full)
        assert tool(*flags) == 1
    error = capsys.readouterr().err
    assert "The disk is full or limited" in error
    assert error.count("\n") == 1
    assert tool(*flags) == 0
    assert read_pair(tmp_path / "o_text_document") == reference(GOOD, None)


def test_file_size_limit_gives_a_single_sentence(tmp_path, write_lines):
    """A file size limit of the system, set in a separate process, fails in the same way as a full disk."""
    path = write_lines(["word " * 20_000])
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.preprocess",
            "--input",
            path,
            "--output-prefix",
            tmp_path / "o",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "The disk is full or limited" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "o_text_document.bin").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--json-keys", "a/b"), "cannot name a data set"),
        (("--json-keys", "text", "text"), "cannot name a data set"),
        (("--max-document-mb", "-1"), "is not positive"),
        (("--shard", "2/2"), "parts count from 0"),
        (("--workers", "-1"), "is negative"),
        (("--tokenizer", "gpt-2"), "did you mean gpt2?"),
        (("--split-sentences",), "as a list of its sentences"),
        (("--partitions", "4"), "run once with --shard I/N"),
        (("--partitions=4",), "join them with the command merge"),
        (("--keep-newlines",), "leave it away"),
        (("--tokenizer-type", "GPT2BPETokenizer"), "give --tokenizer gpt2"),
        (("--tokenizer-model", "x.model"), "tokenizer.json"),
        (("--tokenizer", "nowhere/at/all"), "folder that holds a tokenizer.json"),
    ],
)
def test_invalid_flag_is_refused(tool, tmp_path, capsys, write_lines, flags, message):
    assert tool("--input", write_lines(GOOD), "--output-prefix", tmp_path / "o", *flags) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_pipe_is_refused_with_an_alternative(tool, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "-", "/dev/null"):
        assert tool("--input", name, "--output-prefix", tmp_path / "o") == 1
        error = capsys.readouterr().err
        assert f"--input {name} is a pipe or a device" in error
        assert "write it into a file first" in error
        assert error.count("\n") == 1


def test_a_large_document_is_announced(tool, tmp_path, capsys, write_lines, monkeypatch):
    monkeypatch.setattr("tools.preprocess.run.ANNOUNCED_BYTES", 1 << 20)
    path = write_lines(["small", "large " * 1_000_000])
    assert tool("--input", path, "--output-prefix", tmp_path / "o") == 0
    assert "has a document of 5 MiB" in capsys.readouterr().err

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.data import indexed
from parakit.data.indexed import (
    DatasetError,
    DocumentIndex,
    hash_file,
    largest_token,
    open_dataset,
    strip_suffix,
    token_dtype,
    write_index,
)


def test_token_type_is_uint16_below_65500_entries_and_int32_from_there_on():
    assert token_dtype(50_257) == np.uint16
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


def test_index_file_has_megatrons_layout_byte_by_byte(tmp_path):
    path = tmp_path / "x.idx"
    pieces = [
        DocumentIndex(np.array([3]), np.array([0, 1, 1])),
        DocumentIndex(np.array([2]), np.array([0, 1])),
    ]
    write_index(path, "uint16", lambda: pieces)
    assert path.read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2, 4)
        + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<4q", 0, 1, 1, 2)
    )


@settings(max_examples=50)
@given(counts=st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=20))
def test_written_index_of_any_documents_can_be_opened_with_the_same_counts(
    tmp_path_factory, counts
):
    folder = tmp_path_factory.mktemp("index")
    lengths = np.array([n for document in counts for n in document], np.int32)
    boundaries = np.cumsum([0, *map(len, counts)], dtype=np.int64)
    write_index(folder / "x.idx", "int32", lambda: [DocumentIndex(lengths, boundaries)])
    (folder / "x.bin").write_bytes(bytes(4 * int(lengths.sum())))
    dataset = open_dataset(folder / "x")
    assert (dataset.sequences, dataset.documents) == (len(lengths), len(counts))
    assert (dataset.dtype, dataset.tokens) == ("int32", int(lengths.sum()))
    assert dataset.lengths.tolist() == lengths.tolist()
    assert dataset.boundaries.tolist() == np.cumsum([0, *(len(d) for d in counts)]).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no Megatron index"),
        (b"MMIDIDX\0\0" + b"\1", "no Megatron index"),
        (b"PK" + bytes(40), "no Megatron index"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 2, 8, 0, 1), "version 2"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 99, 0, 1), "dtype code 99"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 0), "0 document boundaries"),
    ],
)
def test_error_names_the_fault_of_a_damaged_header(tmp_path, content, message):
    (tmp_path / "x.idx").write_bytes(content)
    (tmp_path / "x.bin").touch()
    with pytest.raises(DatasetError, match=message):
        open_dataset(tmp_path / "x")


@pytest.fixture
def prefix(tool, tmp_path, write_lines):
    flags = ("--output-prefix", tmp_path / "o", "--append-eod")
    assert tool("--input", write_lines(["Hello world", "", "Second one"]), *flags) == 0
    return tmp_path / "o_text_document"


def test_open_dataset_returns_counts_and_the_manifests_vocabulary_and_hash(prefix):
    dataset = open_dataset(prefix)
    assert (dataset.documents, dataset.sequences, dataset.tokens) == (3, 2, 6)
    assert (dataset.dtype, dataset.vocabulary) == ("uint16", 50257)
    assert len(dataset.bin_sha256) == 64


def test_vocabulary_and_hash_are_none_without_a_manifest(prefix):
    prefix.with_name(prefix.name + ".manifest.json").unlink()
    dataset = open_dataset(prefix)
    assert dataset.tokens == 6
    assert (dataset.vocabulary, dataset.bin_sha256) == (None, None)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_error_names_a_missing_file(prefix, suffix):
    path = prefix.with_name(prefix.name + suffix)
    path.unlink()
    with pytest.raises(DatasetError, match=f"{path} does not exist; run 'make prepare-ds"):
        open_dataset(prefix)


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (".bin", "is 10 bytes where o_text_document.idx describes 12; it is cut short"),
        (".idx", "is 88 bytes where its header asks for 90; it is cut short"),
    ],
)
def test_error_names_a_truncated_file_and_both_sizes(prefix, suffix, message):
    path = prefix.with_name(prefix.name + suffix)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DatasetError, match=message):
        open_dataset(prefix)


def test_manifest_of_another_data_set_is_refused(prefix, tool, tmp_path, write_lines):
    assert tool("--input", write_lines(["x"], "b.jsonl"), "--output-prefix", tmp_path / "b") == 0
    other = (tmp_path / "b_text_document.manifest.json").read_bytes()
    prefix.with_name(prefix.name + ".manifest.json").write_bytes(other)
    with pytest.raises(DatasetError, match="says documents 1, but the files say 3"):
        open_dataset(prefix)


def test_error_names_an_unreadable_manifest(prefix):
    prefix.with_name(prefix.name + ".manifest.json").write_text("{}")
    with pytest.raises(DatasetError, match="is not a manifest of this tool"):
        open_dataset(prefix)


def replace_by_another_tool(prefix):
    """Put files with the counts of the old ones and other content in their place, after the manifest."""
    dataset = open_dataset(prefix)
    lengths, tokens = dataset.lengths[::-1].copy(), dataset.stored[::-1].copy()
    documents = np.arange(len(lengths) + 1)
    dataset.bin_path.write_bytes(tokens.tobytes())
    write_index(dataset.idx_path, dataset.dtype, lambda: [DocumentIndex(lengths, documents)])
    later = prefix.with_name(prefix.name + ".manifest.json").stat().st_mtime_ns + 10**9
    for path in (dataset.bin_path, dataset.idx_path):
        os.utime(path, ns=(later, later))


def test_hashes_are_those_of_the_present_files_if_the_manifest_is_older(
    tool, tmp_path, write_lines
):
    text = write_lines(["one", "one two three", "one two"])
    assert tool("--input", text, "--output-prefix", tmp_path / "x") == 0
    prefix = tmp_path / "x_text_document"
    made = open_dataset(prefix)
    before = (made.index_sha256, made.content_sha256)
    assert before == (made.manifest.idx_sha256, made.manifest.bin_sha256)
    replace_by_another_tool(prefix)
    replaced = open_dataset(prefix)
    now = (replaced.index_sha256, replaced.content_sha256)
    assert now[0] != before[0]
    assert now[1] != before[1]
    assert now[1] == hashlib.sha256(made.bin_path.read_bytes()).hexdigest()


def test_a_data_set_without_manifest_is_hashed_and_a_large_one_in_ranges(
    prefix, tmp_path, monkeypatch
):
    prefix.with_name(prefix.name + ".manifest.json").unlink()
    content = open_dataset(prefix).bin_path.read_bytes()
    assert open_dataset(prefix).content_sha256 == hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(indexed, "FULLY_HASHED_BYTES", 10)
    monkeypatch.setattr(indexed, "CHUNK", 4)
    large = tmp_path / "large.bin"
    large.write_bytes(bytes(1000))
    first = hash_file(large)
    assert first.startswith("sampled-")
    large.write_bytes(bytes(999) + b"x")
    assert hash_file(large) != first


def test_largest_token_of_a_small_data_set_is_exact(prefix):
    assert largest_token(open_dataset(prefix)) == 50256


def test_largest_token_reads_a_bounded_sample_of_a_large_data_set(prefix, monkeypatch):
    dataset = open_dataset(prefix)
    tokens = np.zeros(10_000, np.uint16)
    tokens[-1] = 60_000
    dataset.bin_path.write_bytes(tokens.tobytes())
    monkeypatch.setattr(type(dataset), "tokens", 10_000, raising=False)
    object.__setattr__(dataset, "tokens", 10_000)
    assert largest_token(dataset, sample=640) == 60_000


def test_largest_token_of_an_empty_data_set_is_minus_one(tool, tmp_path, write_lines):
    assert tool("--input", write_lines([""]), "--output-prefix", tmp_path / "o") == 0
    dataset = open_dataset(tmp_path / "o_text_document")
    assert (dataset.documents, dataset.tokens) == (1, 0)
    assert largest_token(dataset) == -1


def test_strip_suffix_removes_bin_and_idx(tmp_path):
    assert strip_suffix(tmp_path / "x.y.bin") == tmp_path / "x.y"
    assert strip_suffix(tmp_path / "x.y") == tmp_path / "x.y"


def test_checking_and_preprocessing_import_no_torch():
    code = (
        "import sys, parakit.data.indexed, tools.preprocess.cli, tools.preprocess.run, "
        "parakit.data.verify, parakit.data.merge; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

import struct

import numpy as np
import pytest

from parakit.data.indexed import open_dataset
from parakit.data.verify import find_common_end_token, verify_dataset

DOCUMENTS = ["One two three", "", "Four five", "Six", "Seven eight nine ten"]


@pytest.fixture
def made(tool, tmp_path, write_lines):
    flags = ("--output-prefix", tmp_path / "o", "--append-eod")
    assert tool("--input", write_lines(DOCUMENTS), *flags) == 0
    return tmp_path / "o_text_document"


@pytest.fixture
def bare(made):
    made.with_name(made.name + ".manifest.json").unlink()
    return made


def files(prefix):
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def test_verify_of_a_valid_data_set_reports_what_was_checked(tool, made, capsys):
    assert tool("verify", made) == 0
    assert "every byte agrees with the manifest's sha256" in capsys.readouterr().out
    made.with_name(made.name + ".manifest.json").unlink()
    assert tool("verify", f"{made}.bin") == 0
    out = capsys.readouterr().out
    assert "without a manifest, changed tokens within the vocabulary cannot be detected" in out
    assert "vocabulary unknown" in out


def test_every_changed_byte_is_reported_with_a_manifest(made):
    for path in files(made):
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            assert verify_dataset(made).problems, f"{path.name} byte {at}"
        path.write_bytes(content)
    assert not verify_dataset(made).problems


def test_truncation_of_either_file_is_reported(bare):
    for path in files(bare):
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            assert verify_dataset(bare).problems, f"{path.name} of {size} bytes"
        path.write_bytes(content)
    assert not verify_dataset(bare).problems


def test_changed_bytes_of_the_index_are_reported_without_a_manifest(bare):
    """True for documents of one sequence each that end in an end-of-document token."""
    path = bare.with_name(bare.name + ".idx")
    content = path.read_bytes()
    missed = []
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x01]) + content[at + 1 :])
        if not verify_dataset(bare).problems:
            missed.append(at)
    # What is left are boundaries that stay a possible order of documents: one of them empty.
    for at in missed:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x01]) + content[at + 1 :])
        boundaries = np.frombuffer(path.read_bytes()[-48:], "<i8")
        assert set(np.diff(boundaries).tolist()) <= {0, 1}


def test_moved_document_boundary_is_reported_by_the_end_tokens(bare):
    path = bare.with_name(bare.name + ".idx")
    content = path.read_bytes()
    boundaries = list(struct.unpack("<6q", content[-48:]))
    assert boundaries == [0, 1, 1, 2, 3, 4]
    boundaries[3] = 1
    path.write_bytes(content[:-48] + struct.pack("<6q", *boundaries))
    assert open_dataset(bare)  # in order, so that Megatron would take it
    (problem,) = verify_dataset(bare).problems
    assert "document 3 holds 2 sequences" in problem


def test_token_id_outside_the_vocabulary_is_reported(bare):
    assert not verify_dataset(bare, 50257).problems
    (problem,) = verify_dataset(bare, 50256).problems
    assert "token 3 is 50256, outside the vocabulary of 50256" in problem


def test_error_names_the_token_range_of_the_damaged_shard(tool, tmp_path, write_lines, monkeypatch):
    monkeypatch.setattr("tools.preprocess.lines.BLOCK_BYTES", 64)
    path = write_lines([f"text {i}" for i in range(40)])
    flags = ("--output-prefix", tmp_path / "o", "--commit-mib", "0.0001")
    assert tool("--input", path, *flags) == 0
    prefix = tmp_path / "o_text_document"
    raw = bytearray(files(prefix)[0].read_bytes())
    raw[-2] ^= 1
    files(prefix)[0].write_bytes(raw)
    (problem,) = verify_dataset(prefix).problems
    assert "differs from its manifest within tokens" in problem


def test_results_do_not_depend_on_the_chunk_size(bare, monkeypatch):
    monkeypatch.setattr("parakit.data.indexed.CHUNK", 3)
    assert find_common_end_token(open_dataset(bare)) == 50256
    assert not verify_dataset(bare).problems
    path = bare.with_name(bare.name + ".idx")
    path.write_bytes(path.read_bytes()[:-16] + struct.pack("<2q", 2, 4))
    (problem,) = verify_dataset(bare).problems
    assert "document 4 holds 2 sequences" in problem

import json
import shutil

import pytest

from parakit.data.indexed import open_dataset
from parakit.data.verify import verify_dataset
from tests.preprocess.conftest import interrupt_after_moves
from tools.preprocess.cli import main

DOCUMENTS = [f"Document {i} " + "and words " * (i % 5) for i in range(60)] + [""]


@pytest.fixture(scope="module")
def made_parts(tmp_path_factory):
    """Return a folder with the three parts of `DOCUMENTS`, which no test changes."""
    folder = tmp_path_factory.mktemp("parts")
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    for i in range(3):
        flags = ("--output-prefix", str(folder / f"p{i}"), "--shard", f"{i}/3", "--append-eod")
        assert main(["--input", str(path), *flags]) == 0
    return folder


@pytest.fixture
def parts(made_parts, tmp_path):
    """Return the prefixes of copies of the three parts."""
    shutil.copytree(made_parts, tmp_path, dirs_exist_ok=True)
    return [tmp_path / f"p{i}_text_document" for i in range(3)]


def test_merged_parts_equal_the_data_set_of_the_whole_input(
    tool, parts, tmp_path, reference, read_pair
):
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 0
    assert read_pair(tmp_path / "all") == reference(DOCUMENTS)
    assert open_dataset(tmp_path / "all").manifest
    assert not verify_dataset(tmp_path / "all").problems
    assert not (tmp_path / "all.partial").exists()


def test_merge_writes_the_same_bytes_as_megatrons_builder(
    tool, parts, tmp_path, indexed_dataset, read_pair
):
    dtype = indexed_dataset.DType.optimal_dtype(50257)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for part in parts:
        builder.add_index(str(part))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 0
    assert read_pair(tmp_path / "all") == read_pair(tmp_path / "theirs")


def test_merge_refuses_parts_that_are_missing_or_out_of_order(tool, parts, tmp_path, capsys):
    out = ("--output-prefix", tmp_path / "all")
    assert tool("merge", parts[1], parts[0], parts[2], *out) == 1
    assert (
        "parts 1/3, 0/3, 2/3 of one input, but a merge needs 0/3, 1/3, 2/3"
        in capsys.readouterr().err
    )
    assert tool("merge", parts[0], parts[2], *out) == 1
    assert not list(tmp_path.glob("all*"))


def test_merge_refuses_data_sets_of_different_tokenizers_or_dtypes(tool, parts, tmp_path, capsys):
    manifest = tmp_path / "p1_text_document.manifest.json"
    content = json.loads(manifest.read_text())
    content["identity"]["tokenizer_sha256"] = "0" * 64
    manifest.write_text(json.dumps(content))
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 1
    assert "was made with tokenizer 000000" in capsys.readouterr().err
    index = tmp_path / "p1_text_document.idx"
    raw = bytearray(index.read_bytes())
    raw[17] = 3  # int16 is as wide
    index.write_bytes(raw)
    manifest.unlink()
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 1
    assert "was made with dtype int16 but" in capsys.readouterr().err


def test_merge_without_manifests_warns_and_writes_no_manifest(tool, parts, tmp_path, capsys):
    for part in parts:
        part.with_name(part.name + ".manifest.json").unlink()
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 0
    assert "3 of 3 data sets have no manifest" in capsys.readouterr().err
    assert not (tmp_path / "all.manifest.json").exists()


def test_merge_refuses_a_part_with_a_wrong_hash(tool, parts, tmp_path, capsys):
    path = tmp_path / "p2_text_document.bin"
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 1
    assert "p2_text_document.bin is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("all*.idx"))


def test_merge_replaces_an_existing_output_only_with_overwrite(tool, parts, tmp_path, capsys):
    assert tool("merge", *parts, "--output-prefix", parts[0]) == 1
    assert "is one of the inputs" in capsys.readouterr().err
    (tmp_path / "all.bin").write_bytes(b"precious")
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 1
    assert (tmp_path / "all.bin").read_bytes() == b"precious"
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all", "--overwrite") == 0


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_merge_that_was_killed_while_renaming_can_be_repeated(
    tool, parts, tmp_path, monkeypatch, moves, reference, read_pair
):
    with monkeypatch.context() as patch:
        interrupt_after_moves(patch, moves)
        assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 130
    assert not (tmp_path / "all.idx").exists()
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 0
    assert read_pair(tmp_path / "all") == reference(DOCUMENTS)

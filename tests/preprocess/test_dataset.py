import subprocess
import sys

import numpy as np
import pytest

from tools.dataset.indexed import DatasetError, largest_token, open_dataset, strip_suffix


@pytest.fixture
def prefix(tool, tmp_path, write_lines):
    flags = ("--output-prefix", tmp_path / "o", "--append-eod")
    assert tool("--input", write_lines(["Hello world", "", "Second one"]), *flags) == 0
    return tmp_path / "o_text_document"


def test_a_data_set_is_described_with_its_manifest(prefix):
    dataset = open_dataset(prefix)
    assert (dataset.documents, dataset.sequences, dataset.tokens) == (3, 2, 6)
    assert (dataset.dtype, dataset.vocabulary, dataset.tokenizer) == ("uint16", 50257, "gpt2")
    assert len(dataset.bin_sha256) == 64


def test_without_a_manifest_the_tokenizer_is_unknown(prefix):
    prefix.with_name(prefix.name + ".manifest.json").unlink()
    dataset = open_dataset(prefix)
    assert dataset.tokens == 6
    assert (dataset.vocabulary, dataset.tokenizer, dataset.bin_sha256) == (None, None, None)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, suffix):
    path = prefix.with_name(prefix.name + suffix)
    path.unlink()
    with pytest.raises(DatasetError, match=f"{path} does not exist; run 'make prepare-ds"):
        open_dataset(prefix)


@pytest.mark.parametrize(
    ("suffix", "said"),
    [
        (".bin", "is 10 bytes where o_text_document.idx describes 12; it is cut short"),
        (".idx", "is 88 bytes where its header asks for 90; it is cut short"),
    ],
)
def test_a_truncated_file_is_named_with_both_sizes(prefix, suffix, said):
    path = prefix.with_name(prefix.name + suffix)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DatasetError, match=said):
        open_dataset(prefix)


def test_a_manifest_of_another_data_set_is_noticed(prefix, tool, tmp_path, write_lines):
    assert tool("--input", write_lines(["x"], "b.jsonl"), "--output-prefix", tmp_path / "b") == 0
    other = (tmp_path / "b_text_document.manifest.json").read_bytes()
    prefix.with_name(prefix.name + ".manifest.json").write_bytes(other)
    with pytest.raises(DatasetError, match="says documents 1, but the files say 3"):
        open_dataset(prefix)


def test_an_unreadable_manifest_is_named(prefix):
    prefix.with_name(prefix.name + ".manifest.json").write_text("{}")
    with pytest.raises(DatasetError, match="is not a manifest of this tool"):
        open_dataset(prefix)


def test_the_largest_token_shows_a_vocabulary_that_is_too_small(prefix):
    assert largest_token(open_dataset(prefix)) == 50256


def test_the_largest_token_looks_at_a_bounded_sample_of_a_large_data_set(prefix, monkeypatch):
    dataset = open_dataset(prefix)
    tokens = np.zeros(10_000, np.uint16)
    tokens[-1] = 60_000
    dataset.bin_path.write_bytes(tokens.tobytes())
    monkeypatch.setattr(type(dataset), "tokens", 10_000, raising=False)
    object.__setattr__(dataset, "tokens", 10_000)
    assert largest_token(dataset, sample=640) == 60_000


def test_an_empty_data_set_has_no_largest_token(tool, tmp_path, write_lines):
    assert tool("--input", write_lines([""]), "--output-prefix", tmp_path / "o") == 0
    dataset = open_dataset(tmp_path / "o_text_document")
    assert (dataset.documents, dataset.tokens) == (1, 0)
    assert largest_token(dataset) == -1


def test_a_prefix_may_be_given_with_a_suffix(tmp_path):
    assert strip_suffix(tmp_path / "x.y.bin") == tmp_path / "x.y"
    assert strip_suffix(tmp_path / "x.y") == tmp_path / "x.y"


def test_neither_checking_nor_preprocessing_imports_torch():
    code = (
        "import sys, tools.dataset.indexed, tools.preprocess.cli, tools.preprocess.run, "
        "tools.dataset.verify, tools.dataset.merge; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

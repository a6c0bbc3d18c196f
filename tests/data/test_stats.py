import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from parakit.data.indexed import DatasetError, open_dataset
from parakit.data.split import count_draws
from parakit.data.stats import bin_label, measure_dataset, text_histogram

# GPT-2 tokens: 1, 2, 0, 4; with the end tokens: 2, 3, 0, 5.
DOCUMENTS = ["one", "one two", "", "one two three four"]


@pytest.fixture
def prefix(tool, tmp_path, write_lines):
    flags = ("--output-prefix", tmp_path / "o", "--append-eod")
    assert tool("--input", write_lines(DOCUMENTS), *flags) == 0
    return tmp_path / "o_text_document"


def test_measured_counts_are_exact(prefix):
    stats = measure_dataset(open_dataset(prefix))
    assert (stats.documents, stats.sequences, stats.tokens) == (4, 3, 10)
    assert (stats.empty_documents, stats.longest_document) == (1, 5)
    assert (stats.eod, stats.eod_tokens) == (50256, 3)
    assert stats.text_bytes == len("".join(DOCUMENTS))
    # 0 | 1 | 2 to 3 | 4 to 7
    assert stats.length_histogram[:5] == (1, 0, 2, 1, 0)


def test_end_token_without_a_manifest_is_the_token_that_ends_all_sequences(prefix):
    stats = measure_dataset(replace(open_dataset(prefix), manifest=None))
    assert (stats.eod, stats.eod_tokens, stats.text_bytes) == (50256, 3, None)


def test_measuring_refuses_an_index_with_any_damaged_byte(prefix):
    path = prefix.with_name(prefix.name + ".idx")
    prefix.with_name(prefix.name + ".manifest.json").unlink()
    content, refused = path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            measure_dataset(open_dataset(prefix))
        except DatasetError:
            refused += 1
    assert refused == len(content)


def test_length_of_a_document_is_the_sum_of_its_sentences(tool, tmp_path, write_lines, monkeypatch):
    monkeypatch.setattr("parakit.data.indexed.CHUNK", 2)
    documents = [["one", "two"], ["one"], [], ["one", "two", "three"], ["one"]]
    assert tool("--input", write_lines(documents), "--output-prefix", tmp_path / "o") == 0
    stats = measure_dataset(replace(open_dataset(tmp_path / "o_text_document"), manifest=None))
    assert (stats.documents, stats.sequences, stats.tokens) == (5, 7, 7)
    assert stats.length_histogram[:4] == (1, 2, 2, 0)


def test_draws_count_samples_and_epochs_of_each_part(prefix):
    """10 tokens: the sample of an epoch needs one more, for the last prediction."""
    train, valid, test = count_draws(open_dataset(prefix), "100,0,0", seq_length=3, samples=4)
    assert (train.tokens, train.samples_an_epoch, train.epochs) == (10, 3, 2)
    assert valid.sequences == test.sequences == 0
    train, valid, _ = count_draws(open_dataset(prefix), "2,1,0", seq_length=2, samples=2)
    assert (train.sequences, train.tokens, train.samples_an_epoch) == (2, 5, 2)
    assert (valid.sequences, valid.tokens, train.epochs) == (1, 5, 1)


@pytest.mark.usefixtures("indexed_dataset")
def test_epochs_equal_megatrons_gpt_data_set(prefix):
    from megatron.core.datasets.gpt_dataset import GPTDataset

    stub = SimpleNamespace(config=SimpleNamespace(sequence_length=3, add_extra_token_to_sequence=1))
    for samples in (1, 3, 4, 7, 20):
        stub.num_samples = samples
        megatron_epochs = GPTDataset._get_num_epochs(stub, 10)
        assert count_draws(open_dataset(prefix), "1", 3, samples)[0].epochs == megatron_epochs


def test_stats_command_prints_bars_and_warns_of_empty_parts(tool, prefix, capsys):
    assert tool("stats", prefix, "--seq-length", 2, "--steps", 3, "--global-batch-size", 1) == 0
    out = capsys.readouterr().out
    assert "longest document  5 tokens" in out
    assert "█" in out
    assert "test  0 sequences" in out
    assert "Megatron cannot evaluate on it" in out


def test_stats_command_prints_json_with_the_json_option(tool, prefix, capsys):
    assert tool("stats", prefix, "--json") == 0
    assert json.loads(capsys.readouterr().out)["stats"]["tokens"] == 10


def test_histogram_labels_and_bar_lengths():
    assert [bin_label(i) for i in (0, 1, 2, 11)] == ["0", "1", "2–3", "1,024–2,047"]
    assert [line.count("█") for line in text_histogram([0, 4, 0, 2])] == [40, 0, 20]

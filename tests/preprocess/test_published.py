"""The published data set is recognised by its documents and by the samples that Megatron draws from them."""

from pathlib import Path

import numpy as np

from parakit.data.indexed import Dataset, DocumentIndex, open_dataset, write_index
from parakit.data.split import count_draws, count_samples
from tools.preprocess.hub import DOCUMENTS, comparison


def dataset(folder: Path, lengths: list[int]) -> Dataset:
    prefix = folder / "d_text_document"
    np.zeros(sum(lengths), "<u2").tofile(f"{prefix}.bin")
    piece = DocumentIndex(np.array(lengths, "<i4"), np.arange(len(lengths) + 1))
    write_index(Path(f"{prefix}.idx"), "uint16", lambda: [piece])
    return open_dataset(prefix)


def test_whole_epochs_are_drawn_until_there_are_enough_samples(tmp_path: Path) -> None:
    made = dataset(tmp_path, [10] * 8 + [7, 5])
    # An epoch has 80 tokens: 9 samples of 8 need 73 tokens, 10 samples need 81.
    for asked, drawn in ((9, [9, 1, 1]), (10, [19, 1, 1])):
        parts = count_draws(made, "8,1,1", 8, asked, 1, 1)
        assert [count_samples(part.epochs, part.tokens, 8) for part in parts] == drawn


def test_different_number_of_documents_is_reported(tmp_path: Path) -> None:
    assert "3 documents instead of 10,000" in comparison(dataset(tmp_path, [4, 4, 4]))


def test_different_documents_of_equal_number_are_recognised_by_the_samples(
    tmp_path: Path,
) -> None:
    text = comparison(dataset(tmp_path, [3] * DOCUMENTS))
    assert text.startswith("Not the published data set: Megatron draws 2,000,0")
    assert "2,008,302 / 400,551 / 45" in text

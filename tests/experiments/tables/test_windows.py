import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.files import ROOT
from parakit.data.split import Split, split_documents
from parakit.experiments.tables.moe import count_shared_windows, hash_windows

SPLIT = "949,50,1"


@pytest.fixture(scope="module")
def unique_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "unique"
    command = (sys.executable, "-m", "tools.preprocess", "sample", "--unique")
    subprocess.run(
        (*command, "--output-prefix", str(prefix)), cwd=ROOT, check=True, capture_output=True
    )
    return prefix.with_name("unique_text_document")


def test_no_validation_window_of_the_unique_sample_appears_in_training(unique_prefix: Path) -> None:
    windows_shared = count_shared_windows(unique_prefix, SPLIT, seq_length=64)
    assert windows_shared["windows"] > 4000
    assert windows_shared["shared"] == 0


def test_windows_shared_by_training_and_validation_are_counted(sample_prefix: Path) -> None:
    assert count_shared_windows(sample_prefix, SPLIT, seq_length=64)["shared"] > 500


def test_every_document_is_in_one_part() -> None:
    parts = [split_documents(SPLIT, 1000, part) for part in Split]
    assert [len(part) for part in parts] == [949, 50, 1]
    assert np.array_equal(np.concatenate(parts), np.arange(1000))


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 5),
)
def test_hashes_are_equal_exactly_for_equal_windows(
    first: list[int], second: list[int], length: int
) -> None:
    def windows(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]

    first_hashes, second_hashes = (
        hash_windows(np.array(tokens, dtype="<u2"), length) for tokens in (first, second)
    )
    assert len(first_hashes) == len(windows(first))
    expected = [[a == b for b in windows(second)] for a in windows(first)]
    assert (first_hashes[:, None] == second_hashes[None, :]).tolist() == expected

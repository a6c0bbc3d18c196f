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
    found = count_shared_windows(unique_prefix, SPLIT, seq_length=64)
    assert found["windows"] > 4000
    assert found["shared"] == 0


def test_paragraphs_that_topics_share_are_found_in_both_parts(sample_prefix: Path) -> None:
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
def test_hashes_agree_where_windows_do_and_nowhere_else(
    one: list[int], two: list[int], length: int
) -> None:
    def windows(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]

    ours, theirs = (hash_windows(np.array(tokens, dtype="<u2"), length) for tokens in (one, two))
    assert len(ours) == len(windows(one))
    expected = [[a == b for b in windows(two)] for a in windows(one)]
    assert (ours[:, None] == theirs[None, :]).tolist() == expected

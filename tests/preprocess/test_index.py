import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.dataset.indexed import DatasetError, open_dataset, token_dtype, write_index


def test_uint16_below_65500_entries_and_int32_from_there_on():
    assert token_dtype(50_257) == np.uint16
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


def test_the_layout_byte_by_byte(tmp_path):
    path = tmp_path / "x.idx"
    lengths = [np.array([3]), np.array([2])]
    boundaries = [np.array([1, 1]), np.array([2])]
    write_index(path, "uint16", lambda: lengths, lambda: boundaries)
    assert path.read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2, 4)
        + struct.pack("<2i", 3, 2)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<4q", 0, 1, 1, 2)
    )


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=20))
def test_an_index_of_any_documents_has_the_size_its_header_says(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("index")
    lengths = np.array([n for document in counts for n in document], np.int32)
    ends = np.cumsum([len(document) for document in counts], dtype=np.int64)
    write_index(folder / "x.idx", "int32", lambda: [lengths], lambda: [ends])
    (folder / "x.bin").write_bytes(bytes(4 * int(lengths.sum())))
    dataset = open_dataset(folder / "x")
    assert (dataset.sequences, dataset.documents) == (len(lengths), len(counts))
    assert (dataset.dtype, dataset.tokens) == ("int32", int(lengths.sum()))
    assert dataset.lengths.tolist() == lengths.tolist()
    assert dataset.boundaries.tolist() == np.cumsum([0, *(len(d) for d in counts)]).tolist()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no Megatron index"),
        (b"MMIDIDX\0\0" + b"\1", "no Megatron index"),
        (b"PK" + bytes(40), "no Megatron index"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 2, 8, 0, 1), "version 2"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 99, 0, 1), "dtype code 99"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 0), "0 document boundaries"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, content, said):
    (tmp_path / "x.idx").write_bytes(content)
    (tmp_path / "x.bin").touch()
    with pytest.raises(DatasetError, match=said):
        open_dataset(tmp_path / "x")

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.data.indexed import DatasetError
from tools.preprocess.lines import line_blocks
from tools.preprocess.source import InputShard, cut, parse_shard, whole_file


@settings(max_examples=60)
@given(
    files=st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=4),
    count=st.integers(1, 6),
)
def test_parts_joined_in_order_are_the_full_input(tmp_path_factory, files, count):
    folder = tmp_path_factory.mktemp("parts")
    contents = [b"".join(b"x" * n + b"\n" for n in sizes) for sizes in files]
    for index, content in enumerate(contents):
        (folder / f"{index}.jsonl").write_bytes(content)
    slices = [whole_file(path) for path in sorted(folder.iterdir())]
    joined = b""
    for index in range(count):
        for slice_ in cut(slices, InputShard(index, count)):
            joined += b"".join(b.content for b in line_blocks(slice_, slice_.start, None))
    assert joined == b"".join(contents)


def test_parts_are_near_equal(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"0123456789\n" * 100)
    files = [whole_file(tmp_path / "x.jsonl")]
    sizes = [sum(s.size_bytes for s in cut(files, InputShard(i, 3))) for i in range(3)]
    assert sizes == [374, 363, 363]


@pytest.mark.parametrize(
    ("text", "message"),
    [("4/4", "the last of 4 is 3/4"), ("0/0", "does not exist"), ("1", "i/n"), ("a/b", "i/n")],
)
def test_invalid_part_is_refused(text, message):
    with pytest.raises(DatasetError, match=message):
        parse_shard(text)


def test_a_slurm_array_may_start_anywhere(monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    with pytest.raises(DatasetError, match="SLURM_ARRAY_TASK_ID"):
        parse_shard("slurm")
    for name, value in (("ID", "7"), ("MIN", "5"), ("COUNT", "4")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert parse_shard("slurm") == InputShard(2, 4)

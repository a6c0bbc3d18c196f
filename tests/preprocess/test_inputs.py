import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

DOCUMENTS = [f"Document number {i} " + "with words " * (i % 7) for i in range(50)]


@pytest.fixture
def made(tool, tmp_path, read_pair):
    def make(*inputs, flags=()):
        prefix = tmp_path / "o"
        assert tool("--input", *inputs, "--output-prefix", prefix, "--append-eod", *flags) == 0
        return read_pair(tmp_path / "o_text_document")

    return make


def write_parquet(path, documents, **options):
    pq.write_table(pa.table({"id": range(len(documents)), "text": documents}), path, **options)
    return path


def test_gzip_gives_the_same_bytes(made, write_lines, tmp_path, reference):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(write_lines(DOCUMENTS).read_bytes()))
    assert made(path) == reference(DOCUMENTS)


def test_zstd_gives_the_same_bytes(made, write_lines, tmp_path, reference):
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(write_lines(DOCUMENTS).read_bytes()))
    assert made(path) == reference(DOCUMENTS)


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_parquet_gives_the_same_bytes(made, tmp_path, reference, type_):
    path = tmp_path / "in.parquet"
    texts = pa.array(DOCUMENTS, type_)
    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    assert made(path) == reference(DOCUMENTS)


def test_parquet_parts_follow_row_groups_and_merge_to_the_full_data_set(
    tool, tmp_path, reference, read_pair
):
    path = write_parquet(tmp_path / "in.parquet", DOCUMENTS, row_group_size=7)
    for i in range(3):
        assert (
            tool("--input", path, "--output-prefix", tmp_path / f"p{i}", "--shard", f"{i}/3") == 0
        )
    parts = [tmp_path / f"p{i}_text_document" for i in range(3)]
    assert tool("merge", *parts, "--output-prefix", tmp_path / "all") == 0
    assert read_pair(tmp_path / "all") == reference(DOCUMENTS, None)


def test_a_folder_and_a_glob_are_read_in_sorted_order(made, write_lines, tmp_path, reference):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(["second"], "data/b.jsonl")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text":"first"}\n'))
    write_parquet(folder / "c.parquet", ["third"])
    (folder / "notes.txt").write_text("not data")
    assert made(folder) == reference(["first", "second", "third"])
    assert made(folder / "*.jsonl*", flags=["--overwrite"]) == reference(["first", "second"])


def test_a_hub_data_set_is_streamed(made, tmp_path, reference, monkeypatch):
    """A folder replaces the hub, because `datasets` reads both in the same way."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "hub" / "train.parquet", DOCUMENTS, row_group_size=10)
    assert made(f"hub:{tmp_path / 'hub'}") == reference(DOCUMENTS)


def test_hub_data_set_is_not_split_into_parts(tool, tmp_path, capsys):
    flags = ("--output-prefix", tmp_path / "o", "--shard", "0/2")
    assert tool("--input", "hub:org/name", *flags) == 1
    assert "hub:org/name is not cut by --shard; download it" in capsys.readouterr().err


def test_missing_column_is_named_with_the_existing_columns(tool, tmp_path, capsys):
    path = write_parquet(tmp_path / "in.parquet", DOCUMENTS)
    flags = ("--output-prefix", tmp_path / "o", "--json-keys", "body")
    assert tool("--input", path, *flags) == 1
    assert "has no column 'body', only id, text" in capsys.readouterr().err


def test_null_and_invalid_rows_are_named_by_row(tool, tmp_path, capsys, reference, read_pair):
    raw = pa.array([b"fine", None, b"bad \xff", b"good"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 4, raw.buffers(), null_count=1)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    prefix = tmp_path / "o"
    assert tool("--input", path, "--output-prefix", prefix) == 1
    assert f"{path}:2: null text" in capsys.readouterr().err
    assert tool("--input", path, "--output-prefix", prefix, "--on-error", "skip") == 0
    printed = capsys.readouterr().err
    assert f"{path}:2: null text" in printed
    assert f"{path}:3: invalid UTF-8" in printed
    assert read_pair(tmp_path / "o_text_document") == reference(["fine", "good"], None)


@pytest.mark.parametrize("name", ["nothing.jsonl", "*.parquet"])
def test_an_input_that_matches_nothing_is_refused(tool, tmp_path, capsys, name):
    assert tool("--input", tmp_path / name, "--output-prefix", tmp_path / "o") == 1
    assert "matches nothing; check the path" in capsys.readouterr().err


def test_invalid_archive_is_refused(tool, tmp_path, capsys):
    (tmp_path / "x.gz").write_bytes(b'{"text":"a"}\n')
    assert tool("--input", tmp_path / "x.gz", "--output-prefix", tmp_path / "o") == 1
    assert "is no gzip file, whatever its name says" in capsys.readouterr().err

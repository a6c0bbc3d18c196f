"""Packed logs that are damaged, endless lines, folders, and standard input."""

import bz2
import gzip
import io
import lzma

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.logs import pieces
from parakit.logs.pieces import CUT_OFF, DAMAGED, read_chunks
from parakit.logs.runs import load_runs
from parakit.logs.scrape import scrape_log, scrape_runs
from parakit.logs.training_log import UnreadableLogError, read_training_logs
from parakit.reporting import command
from parakit.reporting.analyse.comparability import why_withheld
from parakit.reporting.analyse.configurations import Configuration, estimate_pooled_runs
from parakit.reporting.analyse.must_agree import DAMAGED_FILE
from parakit.reporting.analyse.parity import NOT_COMPARABLE, judge_parity
from tests.reporting.factory import iteration_line, log_text

LINES = "".join(f"{iteration_line(n, 100.0 + n % 7, 10.8 - n / 1000)}\n" for n in range(1, 3001))
PACK = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": lambda data: bz2.compress(data, 1),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("is_cut_off", [True, False])
def test_a_damaged_packed_log_gives_the_lines_that_can_be_unpacked(tmp_path, suffix, is_cut_off):
    packed = PACK[suffix](LINES.encode())
    half = len(packed) // 2
    damaged = packed[:half]
    if not is_cut_off:
        damaged += bytes(byte ^ 0x5A for byte in packed[half : half + 64]) + packed[half + 64 :]
    path = tmp_path / f"a.log.{suffix}"
    path.write_bytes(damaged)
    runs = scrape_runs(path)
    log = runs[-1]
    # What follows damage may be lost in blocks, of which bzip2's hold 100 kB.
    assert 300 < sum(len(run.iterations) for run in runs) < 3000
    if is_cut_off:
        complete = scrape_log(write(tmp_path, LINES)).iterations
        count = len(log.iterations) - 1
        assert log.iterations[:count] == complete[:count]
    # bzip2 checks each block before it is unpacked, so its lines are right.
    assert log.notes[-1] == (CUT_OFF if is_cut_off or suffix == "bz2" else DAMAGED)


@settings(max_examples=15, deadline=None)
@given(suffix=st.sampled_from(list(PACK)), position=st.floats(0, 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_reported_or_changes_nothing(tmp_path_factory, suffix, position, bit):
    text = LINES[:60_000].encode()
    packed = bytearray(PACK[suffix](text))
    # The first bytes show that the file is packed.
    index = 12 + int(position * (len(packed) - 13))
    packed[index] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / f"a.log.{suffix}"
    path.write_bytes(packed)
    damages = []
    unpacked = b"".join(read_chunks(path, damages.append))
    assert damages or unpacked == text


def test_no_verdict_rests_on_a_damaged_packed_log(tmp_path):
    text = LINES[:60_000]
    packed = bytearray(gzip.compress(text.encode()))
    packed[-6] ^= 1  # The checksum.
    (tmp_path / "damaged.log.gz").write_bytes(packed)
    (tmp_path / "whole.log").write_text(text)
    (damaged,), problems = load_runs([tmp_path / "damaged.log.gz"])
    (whole,), _ = load_runs([tmp_path / "whole.log"])
    assert (problems, damaged.has_damaged_file, whole.has_damaged_file) == ([], True, False)
    rows = [Configuration((run,), estimate_pooled_runs([run])) for run in (whole, damaged)]
    assert why_withheld(rows[0]) == ""
    assert why_withheld(rows[1]) == DAMAGED_FILE
    assert judge_parity(rows)[1].verdict == NOT_COMPARABLE


@pytest.mark.parametrize("suffix", PACK)
def test_an_undamaged_packed_log_is_read_to_its_end(tmp_path, suffix):
    path = tmp_path / f"a.log.{suffix}"
    first, second = LINES[:200_000], LINES[200_000:]
    path.write_bytes(b"".join(PACK[suffix](part.encode()) for part in (first, second)))
    assert b"".join(read_chunks(path)).decode() == LINES
    assert scrape_log(path).notes == ()


def write(folder, text):
    path = folder / "plain.log"
    path.write_text(text)
    return path


def test_a_line_without_end_is_bounded_and_lines_after_it_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "_MAX_LONG_LINE", 1 << 20)
    path = tmp_path / "a.log"
    line = iteration_line(1).encode()
    path.write_bytes(b"%b\n%b\n%b\n" % (line, b"x" * (12 << 20), iteration_line(2).encode()))
    log = scrape_log(path)
    assert [iteration.iteration for iteration in log.iterations] == [1, 2]
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(1 << 20), b"")
        assert sum(len(piece.data) for piece in pieces._number_lines(chunks)) < 4 << 20


def test_a_bar_that_only_returns_the_carriage_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"{iteration_line(n)}\r" for n in range(1, 2001)))
    assert len(scrape_log(path).iterations) == 2000


def test_a_folder_names_its_logs(tmp_path):
    (tmp_path / "b.log").write_text(log_text([9.0, 8.0]))
    (tmp_path / "readme.md").write_text("nothing")
    runs, problems = load_runs([tmp_path])
    assert runs == []
    assert problems == [
        f"{tmp_path} is a folder and no run; name what is in it: {tmp_path / 'b.log'}."
    ]
    with pytest.raises(UnreadableLogError, match="is a folder and no run"):
        read_training_logs(tmp_path)


def test_a_hyphen_is_standard_input(monkeypatch):
    class Input:
        buffer = io.BytesIO(log_text([9.0, 8.0, 7.0]).encode())

    monkeypatch.setattr("sys.stdin", Input)
    command._store_standard_input.cache_clear()
    ((path, name),) = command.named_logs("-")
    assert (path.name, name) == ("standard-input.log", "")
    assert len(scrape_log(path).iterations) == 3

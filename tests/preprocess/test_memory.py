"""Peak memory does not grow with the input. It is VmHWM of the tool, which is a single process."""

import shutil
import string
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.synthetic_text import synthetic_documents

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 1 << 30


def peak_bytes(*arguments):
    """Run the tool; the most memory it had resident.

    VmHWM, not ru_maxrss: that one begins at the peak of the process that forked, which pytest's may be.
    """
    code = (
        "import re, sys; from tools.preprocess.cli import main; status = main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return 1024 * int(run.stdout.split()[-1])


def write_shifted(path, size_bytes, base_bytes=64_000_000):
    """Write copies of a text with shifted letters, so that all words are new to the encoder."""
    documents = list(synthetic_documents(base_bytes))
    lower, encode, copy = string.ascii_lowercase, msgspec.json.Encoder().encode, 0
    with path.open("wb") as stream:
        while stream.tell() < size_bytes:
            step, turn = copy % 26, 1 + copy // 26
            table = str.maketrans(
                lower, "".join(lower[(turn * 2 - 1) * i % 26 - step] for i in range(26))
            )
            for text in documents:
                stream.write(encode({"text": text.translate(table)}) + b"\n")
            copy += 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path):
    write_shifted(tmp_path / "small.jsonl", 4_000_000, 4_000_000)
    write_shifted(tmp_path / "large.jsonl", 48_000_000, 4_000_000)
    small, large = (
        peak_bytes("--input", tmp_path / f"{name}.jsonl", "--output-prefix", tmp_path / name)
        for name in ("small", "large")
    )
    assert large < small + (200 << 20)


@pytest.mark.slow
def test_ten_gigabytes_of_input_need_less_than_one_gigabyte(tmp_path):
    if shutil.disk_usage(tmp_path).free < 18 << 30:
        pytest.skip("needs 18 GiB of free disk")
    path = tmp_path / "in.jsonl"
    write_shifted(path, 10_000_000_000)
    peak = peak_bytes("--input", path, "--output-prefix", tmp_path / "o", "--append-eod")
    print(f"peak {peak / 2**20:.0f} MiB for {path.stat().st_size / 1e9:.1f} GB")
    path.unlink()
    assert peak < LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["english", "symbols", "chinese"])
def test_documents_of_64_megabytes_stay_below_one_gigabyte(tmp_path, kind):
    unit = {
        "english": "\n".join(synthetic_documents(1_000_000)),
        "symbols": "!@ #$ %^ &* () ab 12 é 😀 ",
        "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。",
    }[kind]
    document = unit * (64_000_000 // len(unit.encode()))
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"text": document}) + b"\n" for _ in range(4)))
    peak = peak_bytes("--input", path, "--output-prefix", tmp_path / "o", "--append-eod")
    print(f"peak {peak / 2**20:.0f} MiB for documents of {len(document.encode()) / 1e6:.0f} MB")
    assert peak < LIMIT_BYTES

"""Fixtures for the tests of `tools.preprocess`: Megatron as the reference, and the tool."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from parakit.data import folder
from tools.preprocess.cli import main
from tools.preprocess.encoders import Encoder, GigatokenEncoder, HuggingFaceEncoder
from tools.preprocess.tokenizer import TokenizerSpec, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]

Reference = Callable[..., tuple[bytes, bytes]]
Tool = Callable[..., int]


def interrupt_after_moves(patch: pytest.MonkeyPatch, moves: int) -> None:
    """Interrupt the output of a data set once so many of its files have their final names."""
    move, done = folder.move, 0

    def dying(source: Path, target: Path) -> None:
        nonlocal done
        if done == moves:
            raise KeyboardInterrupt
        move(source, target)
        done += 1

    patch.setattr(folder, "move", dying)


@pytest.fixture(scope="session")
def gpt2() -> TokenizerSpec:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="session")
def gigatoken_gpt2(gpt2: TokenizerSpec) -> Encoder:
    return GigatokenEncoder(gpt2)


@pytest.fixture(scope="session")
def hugging_face_gpt2(gpt2: TokenizerSpec) -> Encoder:
    return HuggingFaceEncoder(gpt2)


@pytest.fixture
def indexed_dataset(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return Megatron's module from the installed wheel."""
    monkeypatch.setenv("RANK", "0")  # it warns without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@pytest.fixture
def reference(
    indexed_dataset: ModuleType,
    hugging_face_gpt2: Encoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """Return a function that gives `.bin` and `.idx` of Megatron's builder for ids of Hugging Face `tokenizers`."""

    def build(
        documents: Iterable[str | list[str]],
        eod: int | None = 50256,
        encoder: Encoder = hugging_face_gpt2,
        vocabulary: int = 50257,
    ) -> tuple[bytes, bytes]:
        folder = tmp_path_factory.mktemp("megatron")
        dtype = indexed_dataset.DType.optimal_dtype(vocabulary)
        builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "x.bin"), dtype=dtype)
        for document in documents:
            sentences = [document] if isinstance(document, str) else document
            ids = [encoder.encode([sentence])[0].tolist() for sentence in sentences]
            ids = [sentence for sentence in ids if sentence]
            if ids and eod is not None:
                ids[-1].append(eod)
            builder.add_document([i for part in ids for i in part], [len(part) for part in ids])
        builder.finalize(str(folder / "x.idx"))
        return (folder / "x.bin").read_bytes(), (folder / "x.idx").read_bytes()

    return build


@pytest.fixture
def tool() -> Tool:
    """Return a function that runs the tool in this process and gives its exit status."""

    def run(*arguments: object) -> int:
        return main([str(argument) for argument in arguments])

    return run


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes JSON lines `{"text": …}`, or unchanged rows, and gives the file."""

    def write(documents: Sequence[object], name: str = "in.jsonl") -> Path:
        rows = [d if isinstance(d, dict) else {"text": d} for d in documents]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts the tool as a separate process."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tools.preprocess", *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def pair(prefix: Path) -> tuple[bytes, bytes]:
    """Return the bytes of a data set's two files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def read_pair() -> Callable[[Path], tuple[bytes, bytes]]:
    return pair

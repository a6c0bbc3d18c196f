import os
import pickle
import shutil
import warnings
import zipfile
from itertools import product
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.artifacts import torch_dist
from parakit.artifacts.torch_dist import (
    DamagedCheckpointError,
    PieceReader,
    ReadingStoppedError,
    StoredPart,
    StoredTensor,
    hash_weights,
    is_finished,
    read_metadata,
    read_piece,
    verify_readable,
)
from parakit.artifacts.torch_dist_writer import add_piece
from parakit.config.files import open_regular_file


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "iter"))


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def test_checkpoint_of_torch_is_readable_and_its_pieces_fill_the_file(copy: Path) -> None:
    verify_readable(copy)
    pieces = read_metadata(copy).parts
    assert len(pieces) == 3
    assert sum(piece.length_bytes for piece in pieces) == data_file(copy).stat().st_size


def test_shapes_and_types_are_read_without_torch(copy: Path) -> None:
    tensors = read_metadata(copy).tensors
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        "weight": ((4096,), "float32"),
        "bias": ((8,), "float32"),
    }


def test_tensor_is_assembled_from_pieces_of_any_ranks(tmp_path: Path) -> None:
    whole = torch.arange(60).reshape(3, 5, 4)
    sizes, parts = {}, {}
    with (tmp_path / "pieces").open("wb") as file:
        for (a, b), (c, d), (e, f) in product([(0, 1), (1, 3)], [(0, 2), (2, 5)], [(0, 3), (3, 4)]):
            sizes[a, c, e] = (b - a, d - c, f - e)
            parts[a, c, e] = add_piece(file, "pieces", whole[a:b, c:d, e:f].clone())
    stored = StoredTensor(tuple(whole.shape), "int64", sizes, parts)
    with PieceReader(tmp_path) as reader:
        for layer, rows, wanted in (
            (None, None, whole),
            (None, 2, whole[:2]),
            (1, None, whole[1]),
            (2, 3, whole[2, :3]),
        ):
            assert torch.equal(reader.read_tensor(stored, layer, rows), wanted)
        assert torch.equal(reader.read_box(stored, (1, 1, 2), (2, 3, 2)), whole[1:, 1:4, 2:])


def test_reader_opens_an_archive_once_and_keeps_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[BinaryIO] = []

    def open_and_note(path: Path) -> BinaryIO:
        opened.append(open_regular_file(path))
        return opened[-1]

    monkeypatch.setattr(torch_dist, "open_regular_file", open_and_note)
    parts = []
    with (tmp_path / "pieces").open("wb") as file:
        for number in range(50):
            parts.append(add_piece(file, "pieces", torch.full((2,), number)))
    with PieceReader(tmp_path) as reader:
        for number, part in enumerate(parts):
            for _ in range(2):
                assert reader.read_piece(part).tolist() == [number, number]
        assert len(opened) == 50
        assert sum(not file.closed for file in opened) == 32
        assert reader.read_piece(parts[0]).tolist() == [0, 0], "closed before, and opened again"
    assert all(file.closed for file in opened)


def test_checkpoint_without_metadata_is_unfinished(copy: Path) -> None:
    (copy / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match="not finished"):
        verify_readable(copy)


def test_truncated_metadata_counts_as_missing(copy: Path) -> None:
    path = copy / ".metadata"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DamagedCheckpointError, match="metadata cannot be read"):
        verify_readable(copy)


@pytest.mark.parametrize("text", [None, '{"sharded_back'])
def test_missing_or_truncated_format_file_is_detected(copy: Path, text: str | None) -> None:
    assert is_finished(copy)
    (copy / "metadata.json").unlink()
    if text is None:
        assert not is_finished(copy)
    else:
        (copy / "metadata.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"metadata\.json"):
        verify_readable(copy)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bits_in_archive_fields_are_detected_or_harmless(copy: Path, every: int) -> None:
    smallest = min(read_metadata(copy).parts, key=lambda piece: piece.length_bytes)
    path = copy / smallest.file
    whole = path.read_bytes()
    end = smallest.offset_bytes + smallest.length_bytes
    noticed = 0
    for offset in range(
        end - 200, end
    ):  # These bytes are the central directory, which names the archive's files.
        for bit in range(offset % every, 8, every):
            path.write_bytes(
                whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :]
            )
            noticed += not _is_readable(copy)
    assert noticed > 200 // every


def test_reading_stops_when_its_consumer_is_gone(copy: Path) -> None:
    with pytest.raises(ReadingStoppedError):
        verify_readable(copy, lambda: False)


def test_a_missing_file_is_named(copy: Path) -> None:
    name = data_file(copy).name
    data_file(copy).unlink()
    with pytest.raises(DamagedCheckpointError, match=name):
        verify_readable(copy)


@settings(max_examples=60)
@given(st.data())
def test_flipped_bit_or_truncated_file_is_detected(saved: Path, data: st.DataObject) -> None:
    path = data_file(saved)
    whole = path.read_bytes()
    offset = data.draw(st.integers(0, len(whole) - 1))
    shorter = data.draw(st.booleans())
    bit = 1 << data.draw(st.integers(0, 7))
    damaged = whole[:offset] if shorter else whole[:offset] + bytes([whole[offset] ^ bit])
    damaged = damaged if shorter else damaged + whole[offset + 1 :]
    path.write_bytes(damaged)
    try:
        noticed = not _is_readable(saved)
    finally:
        path.write_bytes(whole)
    # Zip archives of such small tensors have bytes without information: padding and time stamps.
    assert noticed or _holds_the_same(whole, damaged)


def _is_readable(folder: Path) -> bool:
    try:
        verify_readable(folder)
    except DamagedCheckpointError:
        return False
    return True


def _holds_the_same(whole: bytes, damaged: bytes) -> bool:
    weight = torch.arange(4096, dtype=torch.float32).numpy().tobytes()
    return weight in whole and weight in damaged and len(whole) == len(damaged)


def test_code_named_in_a_metadata_pickle_is_not_executed(copy: Path, tmp_path: Path) -> None:
    target = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (target,))

    (copy / ".metadata").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(DamagedCheckpointError):
        verify_readable(copy)
    with pytest.raises(DamagedCheckpointError):
        read_metadata(copy)
    assert not target.exists()


def test_hash_of_weights_does_not_depend_on_other_saved_state(tmp_path: Path) -> None:

    from torch.distributed import checkpoint

    def saved(name: str, weight: float, note: str) -> str:
        states = {"weight": torch.full((8,), weight), "arguments": {"save": note}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that this is a single process.
            writer = checkpoint.FileSystemWriter(tmp_path / name)
            checkpoint.save(states, storage_writer=writer, no_dist=True)
        return hash_weights(tmp_path / name)

    first = saved("a", 1.0, "runs/a")
    assert saved("b", 1.0, "another/folder") == first
    assert saved("c", 1.0 + 2**-23, "runs/a") != first


def test_piece_with_a_flipped_byte_is_read_as_saved_or_refused(tmp_path: Path) -> None:
    """torch.load reads flipped values without a warning, and advises to execute a damaged pickle."""
    whole = torch.arange(24.0).reshape(4, 6)
    path = tmp_path / "pieces"
    with path.open("wb") as file:
        part = add_piece(file, path.name, whole)
    saved = path.read_bytes()
    refused = 0
    for position in range(len(saved)):
        path.write_bytes(saved[:position] + bytes([saved[position] ^ 16]) + saved[position + 1 :])
        try:
            assert torch.equal(read_piece(tmp_path, part), whole), position
        except DamagedCheckpointError as error:
            assert str(error).startswith(f"{path} is damaged at byte 0")  # noqa: PT017
            assert "weights_only" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 24 * 4


def test_an_archive_without_a_pickle_is_refused_with_this_reason(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "piece", "w") as archive:
        archive.writestr("piece/version", "3")
    part = StoredPart("piece", 0, (tmp_path / "piece").stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"damaged at byte 0 \(it has no data\.pkl\)$"):
        read_piece(tmp_path, part)


def test_a_piece_that_would_run_code_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    # A process that has imported Megatron allows torch to read paths, but never `print`.
    torch.save({"trap": print}, tmp_path / "piece")
    part = StoredPart("piece", 0, (tmp_path / "piece").stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"torch reads no tensor there$"):
        read_piece(tmp_path, part)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool])
def test_pieces_of_any_type_and_of_no_elements_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    for number, values in enumerate((torch.ones(3, 2).to(dtype), torch.ones(0, 2).to(dtype))):
        with (tmp_path / str(number)).open("wb") as file:
            part = add_piece(file, str(number), values)
        piece = read_piece(tmp_path, part)
        assert (piece.dtype, piece.shape) == (dtype, values.shape)
        assert torch.equal(piece.float(), values.float())


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp", "common.pt"])
@pytest.mark.usefixtures("within_a_minute")
def test_pipe_is_named_and_not_opened(copy: Path, name: str) -> None:
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(
        DamagedCheckpointError, match=rf"{name} cannot be read \(it is no regular file"
    ):
        verify_readable(copy)

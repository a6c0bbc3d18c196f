from dataclasses import fields
from pathlib import Path

import pytest

from parakit.artifacts.io import write_record
from parakit.artifacts.run import (
    RunRecord,
    Status,
    StatusRecord,
    encode_run,
    read_run,
    read_status,
)
from parakit.config.files import ROOT


def test_two_nodes_can_write_the_same_record_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = StatusRecord(Status.OK, 0)
    rename = Path.replace

    def rename_after_another_node_has(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        monkeypatch.setattr("platform.node", lambda: "the-other")
        write_record(tmp_path / "status.json", record)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", rename_after_another_node_has)
    write_record(tmp_path / "status.json", record)
    assert read_status(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_failed_write_of_a_record_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_record(tmp_path / "status.json", StatusRecord(Status.OK, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_every_field_of_a_run_record_is_in_its_file() -> None:
    folder = next((ROOT / "tests/golden/runs").glob("*-tp2-*"))
    written = encode_run(read_run(folder))
    assert {field.name for field in fields(RunRecord)} - {"spec"} <= written.keys()

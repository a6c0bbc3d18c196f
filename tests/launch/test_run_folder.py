"""The scripts that run folders hold, as a shell takes them."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.launch import run_folder
from parakit.launch.run_folder import format_command_script, read_named_run
from tests.reporting.factory import run_record


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """As much of a kit as a script looks for."""
    folder = tmp_path / "a kit"
    (folder / "src" / "parakit" / "launch").mkdir(parents=True)
    (folder / "megatron_patches").mkdir()
    (folder / "megatron_patches" / "__main__.py").touch()
    return folder


@pytest.fixture
def script(kit: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a run that says where it runs and what it was given."""
    monkeypatch.setattr(run_folder, "ROOT", kit)
    command = ("sh", "-c", 'echo "$PWD $SEEN"')
    record = replace(run_record("tp2"), command=command, environment={"SEEN": "it's set"})
    return format_command_script(record)


def said(script: Path, **environment: str) -> tuple[int, str]:
    answer = subprocess.run(
        ("bash", str(script)),
        cwd="/",
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.returncode, (answer.stdout + answer.stderr).strip()


def put(text: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "command.sh"
    path.write_text(text)
    return path


def test_a_command_repeats_from_any_folder_inside_the_kit_and_outside(
    script: str, kit: Path, tmp_path: Path
) -> None:
    for folder in (kit / "runs" / "one", tmp_path / "elsewhere" / "one"):
        assert said(put(script, folder)) == (0, f"{kit} it's set")


def test_a_kit_that_was_moved_is_found_around_the_script_or_by_its_name(
    script: str, kit: Path, tmp_path: Path
) -> None:
    inside, outside = put(script, kit / "runs" / "one"), put(script, tmp_path / "one")
    moved = tmp_path / "moved"
    shutil.move(kit, moved)
    assert said(moved / inside.relative_to(kit)) == (0, f"{moved} it's set")
    assert said(outside) == (
        2,
        f"The kit is not in {kit} (any more); name its folder: KIT=/path/to/kit {outside}",
    )
    assert said(outside, KIT=str(moved)) == (0, f"{moved} it's set")


def test_this_kit_is_one_that_a_script_finds() -> None:
    assert (ROOT / "megatron_patches" / "__main__.py").is_file()
    assert (ROOT / "src" / "parakit" / "launch").is_dir()


@pytest.mark.usefixtures("within_a_minute")
def test_a_pipe_in_place_of_a_run_s_record_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(
        LaunchError, match=r"run\.json cannot be read \(it is no regular file\); name"
    ):
        read_named_run(tmp_path)

from pathlib import Path

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import set_aside_newer_checkpoints
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.launch.checkpoints import select_checkpoint
from tests.launch.checkpoint.conftest import Write, damage, iterations
from tests.reporting.factory import iteration_line

NAN = float("nan")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / records.CHECKPOINTS_FOLDER


def ended(run: Path, status: Status, *losses: float) -> None:
    """A run that logged these losses and ended so."""
    lines = (iteration_line(number, loss=loss) for number, loss in enumerate(losses, start=1))
    (run / records.LOG_FILE).write_text("\n".join(lines) + "\n")
    write_record(run / records.STATUS_FILE, StatusRecord(status))


def test_the_newest_whole_one_is_chosen_and_damaged_ones_make_way(
    tmp_path: Path, stored: Path, write: Write
) -> None:
    write(stored, 5)
    damage(write(stored, 10))
    (write(stored, 15) / ".metadata").unlink()
    choice = select_checkpoint(tmp_path)
    assert choice.checkpoint.iteration == 5
    assert [checkpoint.iteration for checkpoint, _ in choice.skipped] == [15, 10]
    set_aside_newer_checkpoints(stored, choice.checkpoint.iteration)
    assert iterations(stored) == [5]
    assert (stored / "damaged-iter_0000010").is_dir()
    assert not list(stored.glob("*15"))


def test_without_a_whole_checkpoint_it_says_what_is_wrong_with_each(
    tmp_path: Path, stored: Path, write: Write
) -> None:
    with pytest.raises(LaunchError, match="SAVE_EVERY="):
        select_checkpoint(tmp_path)
    damage(write(stored, 10))
    with pytest.raises(LaunchError, match=r"iter_0000010: .*damaged"):
        select_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ((7.0, 6.0, 5.0), 2),  # Validation stopped iteration 4: its last save was 3.
        ((7.0, 6.0, 5.0, NAN, NAN), 2),  # Nothing checks for NaN, and training continued.
        ((7.0, 6.0), 1),
    ],
)
def test_after_a_nan_a_run_resumes_only_from_a_checkpoint_that_gave_a_loss(
    tmp_path: Path, stored: Path, write: Write, losses: tuple[float, ...], chosen: int
) -> None:
    for iteration in (1, 2, 3, 5):
        write(stored, iteration)
    ended(tmp_path, Status.NAN, *losses)
    choice = select_checkpoint(tmp_path)
    assert choice.checkpoint.iteration == chosen
    assert all("NaN" in flaw for _, flaw in choice.skipped)
    ended(tmp_path, Status.CRASHED, *losses)
    assert select_checkpoint(tmp_path).checkpoint.iteration == 5


def test_what_an_earlier_attempt_had_logged_speaks_for_no_later_checkpoint(
    tmp_path: Path, stored: Path, write: Write
) -> None:
    for iteration in (4, 5):
        write(stored, iteration)
    ended(tmp_path, Status.NAN, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    with (tmp_path / records.LOG_FILE).open("a") as log:  # Gone on from 4, and no number after 5.
        log.write(iteration_line(5, loss=5.0) + "\n")
    assert select_checkpoint(tmp_path).checkpoint.iteration == 4


def test_a_run_that_had_no_number_but_nan_begins_again(
    tmp_path: Path, stored: Path, write: Write
) -> None:
    write(stored, 1)
    ended(tmp_path, Status.NAN, NAN)
    with pytest.raises(LaunchError, match=r"NaN before it gave a loss.*start the run again"):
        select_checkpoint(tmp_path)

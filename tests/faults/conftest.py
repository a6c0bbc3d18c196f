from pathlib import Path

import pytest

from tests.faults.runs import Kit


@pytest.fixture(scope="session")
def kit(
    tmp_path_factory: pytest.TempPathFactory, small_prefix: Path, starting_weights: Path
) -> Kit:
    return Kit(tmp_path_factory.mktemp("faults"), small_prefix, starting_weights)

import shutil
from pathlib import Path
from typing import Any

import pytest

from parakit.config.files import read_yaml
from parakit.planner.time.constants import CONSTANTS_FILE
from tests.planner.readings.fit import refit


def leaves(data: Any, where: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(data, dict):
        return {k: v for name in data for k, v in leaves(data[name], (*where, str(name))).items()}
    return {where: data}


@pytest.mark.slow
def test_shipped_constants_equal_the_result_of_the_fit(tmp_path: Path) -> None:
    again = tmp_path / "constants.yaml"
    shutil.copy(CONSTANTS_FILE, again)
    refit(again)
    shipped, fitted = (leaves(read_yaml(path)) for path in (CONSTANTS_FILE, again))
    # Steps end where the error no longer falls, so another machine's rounding shows in the third digit.
    assert fitted == {
        name: pytest.approx(value, rel=5e-3) if isinstance(value, float) else value
        for name, value in shipped.items()
    }

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_patches.plant import PlantError, execute_plant


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Megatron as a module that is there already: importing the real one takes seconds."""
    megatron = ModuleType("megatron.training")
    megatron.answer = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    return megatron


def planted(folder: Path, code: str) -> dict[str, str]:
    path = folder / "plant.py"
    path.write_text(code)
    return {"KIT_PLANT": str(path), "KIT_PLANT_SHA256": hashlib.sha256(code.encode()).hexdigest()}


def test_nothing_is_executed_unless_it_is_named() -> None:
    assert execute_plant({}) is None


def test_a_plant_changes_what_is_imported(tmp_path: Path, imported: ModuleType) -> None:
    code = "import sys\nsys.modules['megatron.training'].answer = lambda: 2\n"
    environment = planted(tmp_path, code)
    assert execute_plant(environment) == environment["KIT_PLANT"]
    assert imported.answer() == 2


def test_an_exception_in_it_is_named_with_the_file_and_its_line(tmp_path: Path) -> None:
    environment = planted(tmp_path, "def fail():\n    return {}['key']\n\nfail()\n")
    with pytest.raises(PlantError, match=r"PLANT=\S+plant.py, line 2: KeyError: 'key'"):
        execute_plant(environment)


def test_a_file_that_changed_since_the_run_was_recorded_is_refused(tmp_path: Path) -> None:
    environment = planted(tmp_path, "x = 1\n")
    (tmp_path / "plant.py").write_text("x = 2\n")
    with pytest.raises(PlantError, match="is not the file whose hash the run recorded"):
        execute_plant(environment)
    (tmp_path / "plant.py").unlink()
    with pytest.raises(PlantError, match=r"plant.py cannot be read here \(No such file"):
        execute_plant(environment)


def test_several_files_are_executed_in_their_order_and_known_by_what_they_hold(
    tmp_path: Path, imported: ModuleType
) -> None:
    codes = ["answer = lambda: 2\n", "answer = lambda old=Megatron.answer: old() + 1\n"]
    paths = [tmp_path / f"{number}.py" for number in range(2)]
    whole = ""
    for path, code in zip(paths, codes, strict=True):
        path.write_text(f"import sys\nMegatron = sys.modules['megatron.training']\nMegatron.{code}")
        whole += path.read_text()
    name = ",".join(map(str, paths))
    sha256 = hashlib.sha256(whole.encode()).hexdigest()
    assert execute_plant({"KIT_PLANT": name, "KIT_PLANT_SHA256": sha256}) == name
    assert imported.answer() == 3
    paths[1].write_text("x = 1\n")
    with pytest.raises(PlantError, match=r"0.py,\S+1.py is not the file whose hash"):
        execute_plant({"KIT_PLANT": name, "KIT_PLANT_SHA256": sha256})

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_patches.patch_file import PatchFileError, execute_patch_file


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provide a fake imported Megatron, because importing the real package takes seconds."""
    megatron = ModuleType("megatron.training")
    megatron.answer = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    return megatron


def written(folder: Path, code: str) -> dict[str, str]:
    path = folder / "change.py"
    path.write_text(code)
    return {
        "KIT_PATCH_FILE": str(path),
        "KIT_PATCH_FILE_SHA256": hashlib.sha256(code.encode()).hexdigest(),
    }


def test_patch_file_is_executed_only_if_named() -> None:
    assert execute_patch_file({}) is None


def test_a_patch_file_changes_what_is_imported(tmp_path: Path, imported: ModuleType) -> None:
    code = "import sys\nsys.modules['megatron.training'].answer = lambda: 2\n"
    environment = written(tmp_path, code)
    assert execute_patch_file(environment) == environment["KIT_PATCH_FILE"]
    assert imported.answer() == 2


def test_exception_in_a_patch_file_is_named_with_file_and_line(tmp_path: Path) -> None:
    environment = written(tmp_path, "def fail():\n    return {}['key']\n\nfail()\n")
    with pytest.raises(PatchFileError, match=r"PATCH_FILE=\S+change.py, line 2: KeyError: 'key'"):
        execute_patch_file(environment)


def test_a_file_that_changed_since_the_run_was_recorded_is_refused(tmp_path: Path) -> None:
    environment = written(tmp_path, "x = 1\n")
    (tmp_path / "change.py").write_text("x = 2\n")
    with pytest.raises(PatchFileError, match="is not the file whose hash the run recorded"):
        execute_patch_file(environment)
    (tmp_path / "change.py").unlink()
    with pytest.raises(PatchFileError, match=r"change.py cannot be read here \(No such file"):
        execute_patch_file(environment)


def test_several_patch_files_are_executed_in_order_and_identified_by_their_contents(
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
    assert execute_patch_file({"KIT_PATCH_FILE": name, "KIT_PATCH_FILE_SHA256": sha256}) == name
    assert imported.answer() == 3
    paths[1].write_text("x = 1\n")
    with pytest.raises(PatchFileError, match=r"0.py,\S+1.py is not the file whose hash"):
        execute_patch_file({"KIT_PATCH_FILE": name, "KIT_PATCH_FILE_SHA256": sha256})


def test_command_with_the_old_variable_is_refused() -> None:
    with pytest.raises(PatchFileError, match="KIT_PLANT= is KIT_PATCH_FILE= now"):
        execute_patch_file({"KIT_PLANT": "a.py"})

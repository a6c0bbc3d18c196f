import sysconfig
from pathlib import Path

import pytest

from tools.launch import toolchain
from tools.launch.toolchain import compiler_problem, torch_problem


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler, triton, and Python's headers in one folder of Debian's two."""
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "Python.h").touch()
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    folders = {"posix_prefix": "prefix", "posix_local": "local"}
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / folders[scheme])}
    )
    return tmp_path


def test_debians_own_python_has_its_headers_where_triton_looks(everything: Path) -> None:
    assert compiler_problem() is None


def test_missing_headers_are_named_with_the_package_that_brings_them(everything: Path) -> None:
    (everything / "prefix" / "Python.h").unlink()
    assert "install python3-dev" in (compiler_problem() or "")


def test_a_missing_compiler_is_named(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert "needs a C compiler" in (compiler_problem() or "")


@pytest.mark.parametrize(("version", "fits"), [("2.8.1", False), ("2.9.0+cu130", True)])
def test_an_old_torch_is_refused(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda name: version)
    assert (torch_problem() is None) == fits

import importlib.metadata
from pathlib import Path

import pytest
from packaging.version import Version

from megatron_patches.context import checkout_version, find_context


def checkout(folder: Path, text: str) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(text)
    (folder / "pretrain_gpt.py").touch()
    return folder


def test_a_checkouts_version_is_read_without_importing_it(tmp_path: Path) -> None:
    text = "MAJOR = 0\nMINOR = 15\nPATCH = 0\nPRE_RELEASE = 'rc2'\nraise SystemExit\n"
    assert checkout_version(checkout(tmp_path, text)) == Version("0.15.0rc2")


@pytest.mark.ranks
def test_an_entry_in_a_checkout_runs_that_checkout(tmp_path: Path) -> None:
    folder = checkout(tmp_path, "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n")
    context = find_context(folder / "pretrain_gpt.py", "cpu")
    assert context.megatron == Version("0.16.1")


def test_any_other_entry_runs_the_wheel(tmp_path: Path) -> None:
    context = find_context(tmp_path / "entry.py", "gpu")
    wheel = Version(importlib.metadata.version("megatron-core"))
    assert (context.megatron, context.on_cpu) == (wheel, False)


def test_a_checkout_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="has no version"):
        checkout_version(checkout(tmp_path, "MAJOR = 0\n"))

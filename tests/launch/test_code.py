"""What `run.json` says of the code that ran."""

from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts.run import CodeHashes, read_run
from parakit.launch import code
from parakit.launch.code import hash_sources
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.run_folder import create_run_folder
from parakit.launch.train import compose_job


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a kit that is in no repository."""
    root = tmp_path / "kit"
    for name in (
        "megatron_patches/cpu/norms.py",
        "src/parakit/config/run.py",
        "examples/gpt3/a.sh",
    ):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(name)
    monkeypatch.setattr(code, "ROOT", root)
    return root


def composed(options: Options) -> Launch:
    target = parse_target("train-sp2-gpt2-tiny-2cpu")
    return compose_job(target.with_options(options))


def checkout(folder: Path) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    version = "MAJOR = 0\nMINOR = 19\nPATCH = 0\n"
    (folder / "megatron" / "core" / "package_info.py").write_text(version)
    (folder / "pretrain_gpt.py").write_text("pretrain()")
    return folder


def test_every_edit_of_the_kit_is_another_code_and_undoing_it_is_the_first_again(
    kit: Path,
) -> None:
    launch = composed(Options())
    before = launch.code.kit
    for name in (
        "megatron_patches/cpu/norms.py",
        "src/parakit/config/run.py",
        "examples/gpt3/a.sh",
    ):
        (kit / name).write_text("edited")
        assert launch.code.kit != before
        (kit / name).write_text(name)
    (kit / "src" / "new.py").touch()
    assert launch.code.kit != before
    (kit / "src" / "new.py").unlink()
    assert launch.code.kit == before


def test_caches_text_and_an_editors_own_files_are_no_code(kit: Path) -> None:
    before = hash_sources(kit, ["src"])
    for name in ("__pycache__/run.cpython-312.pyc", "spec/README.md", ".idea/x.py"):
        (kit / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / "src" / name).touch()
    (kit / "src" / ".#run.py").symlink_to("nobody@nowhere")
    assert hash_sources(kit, ["src"]) == before


def test_an_edit_of_the_checkout_in_use_is_another_megatron_and_its_first_build_is_not(
    kit: Path, tmp_path: Path
) -> None:
    folder = checkout(tmp_path / "Megatron-LM")
    launch = composed(Options(megatron_lm=folder))
    before = launch.code
    assert before.megatron != composed(Options()).code.megatron  # the wheel's
    (folder / "megatron" / "core" / "helpers_cpp.so").write_text("compiled by the first run")
    assert launch.code == before
    for name in ("megatron/core/package_info.py", "pretrain_gpt.py"):
        text = (folder / name).read_text()
        (folder / name).write_text(text + "\n")
        assert launch.code.megatron != before.megatron
        assert launch.code.kit == before.kit
        (folder / name).write_text(text)


def test_a_run_that_resumes_with_other_code_says_both(
    tmp_path: Path, sample_prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = composed(Options(data=str(sample_prefix)))
    parent = create_run_folder(launch, tmp_path)
    assert read_run(parent).code == launch.code
    resumed = replace(launch, resume_point=ResumePoint(parent.name, parent / "checkpoints", 4))
    child = create_run_folder(resumed, tmp_path, folder=_made(tmp_path / "child"))
    assert read_run(child).code == launch.code
    before = launch.code
    monkeypatch.setattr("parakit.launch.compose.identify_code", lambda _: CodeHashes("edited", "m"))
    both = read_run(create_run_folder(resumed, tmp_path, folder=_made(tmp_path / "other"))).code
    assert both is not None
    assert both.kit == f"{before.kit}+edited"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder

"""PATCH_FILE=: a Python file that every rank executes before it trains."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts.run import decode_run, encode_run
from parakit.config.run import Backend, PatchFile
from parakit.launch.backends import backend_problems
from parakit.launch.compose import Launch
from parakit.launch.initial_checkpoint import _compose_writer
from parakit.launch.job import parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.resume import _choose_patch_file
from parakit.launch.runtime import ON_HOST
from parakit.launch.train import compose_job
from tests.reporting.factory import run_record

Composer = Callable[..., Launch]
TP2 = "train-tp2-gpt2-tiny-2cpu"


@pytest.fixture
def composed(tmp_path: Path) -> Composer:
    def compose_named(name: str, **changes: object) -> Launch:
        options = Options(data="owt-ds/any", runs=tmp_path / "runs", **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        return compose_job(target.with_options(options), ON_HOST)

    return compose_named


def written(folder: Path, code: str = "CHANGED = 1\n") -> Path:
    path = folder / "change.py"
    path.write_text(code)
    return path


def options_with(path: Path | str) -> Options:
    return options_from_texts({"PATCH_FILE": str(path)})


def test_a_patch_file_is_known_by_what_it_holds(tmp_path: Path) -> None:
    path = written(tmp_path)
    sha256 = hashlib.sha256(b"CHANGED = 1\n").hexdigest()
    assert options_with(path).patch_file == PatchFile(str(path), sha256)
    assert PatchFile("a.py", sha256) == PatchFile("b.py", sha256)


def test_several_patch_files_are_one_of_all_that_they_hold(tmp_path: Path) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    paths[0].write_text("A = 1\n")
    paths[1].write_text("B = 1\n")
    name = ",".join(map(str, paths))
    sha256 = hashlib.sha256(b"A = 1\nB = 1\n").hexdigest()
    patch_file = options_with(name).patch_file
    assert patch_file == PatchFile(name, sha256)
    assert patch_file.path == name
    paths[1].write_text("B = (\n")
    with pytest.raises(ValueError, match=r"PATCH_FILE=\S+/b.py does not compile"):
        options_with(name)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            None,
            r"PATCH_FILE=\S+change.py cannot be read \(No such file or directory\); name a Python file",
        ),
        (
            "x = 1\nx = (\n",
            r"PATCH_FILE=\S+change.py does not compile \('\(' was never closed in line 2\)",
        ),
        ("x = '\0'\n", r"PATCH_FILE=\S+change.py does not compile \(source code\D+ null"),
    ],
)
def test_a_patch_file_that_is_no_python_file_is_refused_in_a_sentence(
    tmp_path: Path, code: str | None, sentence: str
) -> None:
    path = tmp_path / "change.py" if code is None else written(tmp_path, code)
    with pytest.raises(ValueError, match=sentence):
        options_with(path)


def test_ranks_get_the_file_and_its_hash_and_the_record_keeps_both(
    tmp_path: Path, composed: Composer
) -> None:
    patch_file = options_with(written(tmp_path)).patch_file
    assert patch_file is not None
    launch = composed(TP2, patch_file=patch_file)
    told = {name: value for name, value in launch.environment.items() if "PATCH_FILE" in name}
    assert told == {"KIT_PATCH_FILE": patch_file.path, "KIT_PATCH_FILE_SHA256": patch_file.sha256}
    record = replace(run_record("a"), spec=launch.spec, argv=launch.arguments("runs/a"))
    read = decode_run(encode_run(record))
    assert encode_run(record)["patch_file"] == {
        "path": patch_file.path,
        "sha256": patch_file.sha256,
    }
    assert (read.spec.patch_file, read.spec == launch.spec) == (patch_file, True)


def test_a_run_with_a_patch_file_is_no_other_runs_equal(tmp_path: Path, composed: Composer) -> None:
    patch_file = options_with(written(tmp_path)).patch_file
    assert composed(TP2, patch_file=patch_file).spec != composed(TP2).spec


def test_shared_starting_weights_are_written_without_it(tmp_path: Path, composed: Composer) -> None:
    options = options_with(written(tmp_path))
    writer = _compose_writer(composed(TP2, patch_file=options.patch_file), tmp_path / "start")
    assert (writer.spec.patch_file, "KIT_PATCH_FILE" in writer.environment) == (None, False)


def test_a_backend_without_megatron_takes_none(tmp_path: Path, composed: Composer) -> None:
    patch_file = options_with(written(tmp_path)).patch_file
    launch = composed("train-dp2-gpt2-tiny-2cpu", patch_file=patch_file, backend=Backend.NATIVE)
    assert any(
        "changes Megatron, which BACKEND=native does not run" in p for p in backend_problems(launch)
    )


def test_a_resumed_run_keeps_its_patch_file_and_takes_no_other(tmp_path: Path) -> None:
    options = options_with(written(tmp_path))
    record = run_record("a", patch_file=options.patch_file)
    assert _choose_patch_file(record, Options()) == options.patch_file
    with pytest.raises(ValueError, match="a was trained with no PATCH_FILE=, which cannot change"):
        _choose_patch_file(run_record("a"), options)
    written(tmp_path, "CHANGED = 2\n")
    with pytest.raises(
        ValueError, match="was changed after a was trained with it; restore the file"
    ):
        _choose_patch_file(record, Options())


def test_a_record_of_before_has_the_old_name_of_the_field(
    tmp_path: Path, composed: Composer
) -> None:
    patch_file = options_with(written(tmp_path)).patch_file
    launch = composed(TP2, patch_file=patch_file)
    record = replace(run_record("a"), spec=launch.spec, argv=launch.arguments("runs/a"))
    data = encode_run(record)
    data["plant"] = data.pop("patch_file")
    assert decode_run(data).spec.patch_file == patch_file

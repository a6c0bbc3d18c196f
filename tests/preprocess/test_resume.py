"""After a kill at any moment, a repetition of the command gives the same files."""

import json
import os
import platform
import random
import re
import shutil
import signal
import time
from contextlib import contextmanager

import pytest

from tests.bench.synthetic_text import write_synthetic
from tests.preprocess.conftest import interrupt_after_moves
from tools.preprocess import lines

KILL_FLAGS = ("--append-eod", "--commit-mib", "1", "--workers", "2")


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    path = tmp_path_factory.mktemp("english") / "in.jsonl"
    write_synthetic(path, 6_000_000, seed=7)
    return path


@pytest.fixture(scope="module")
def undisturbed(english, tmp_path_factory):
    from tools.preprocess.cli import main

    prefix = tmp_path_factory.mktemp("whole") / "o"
    arguments = ["--input", str(english), "--output-prefix", str(prefix), *KILL_FLAGS]
    assert main(arguments) == 0
    return outputs(prefix)


SHORT_FLAGS = ("--append-eod", "--commit-mib", "0.015625", "--workers", "2")
"""Flags with which `SHORT_TEXT`, read in blocks of `SHORT_BLOCK_BYTES`, gives three parts."""
SHORT_BLOCK_BYTES = 4096
SHORT_TEXT = [f"Document {n} repeats its number. " * (1 + n % 20) for n in range(130)]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Return a file of 45 kB, for tests that run the tool in this process."""
    path = tmp_path_factory.mktemp("short") / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in SHORT_TEXT))
    return path


@pytest.fixture(scope="module")
def result(short, tmp_path_factory):
    """Return the files of a run without interruption."""
    from tools.preprocess.cli import main

    prefix = tmp_path_factory.mktemp("result") / "o"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", SHORT_BLOCK_BYTES)
        assert main(["--input", str(short), "--output-prefix", str(prefix), *SHORT_FLAGS]) == 0
    return outputs(prefix)


@pytest.fixture
def arguments(short, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", SHORT_BLOCK_BYTES)
    return ("--input", short, "--output-prefix", tmp_path / "o", *SHORT_FLAGS)


def outputs(prefix):
    folder = prefix.parent
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def kill_after(running, folder, commits, delay):
    """Kill the tool a moment after so many commits. Return at once if the tool is done before."""
    while running.poll() is None:
        if len(list(folder.glob("part-??????"))) >= commits:
            break
        time.sleep(0.001)
    time.sleep(delay)
    running.send_signal(signal.SIGKILL)
    running.communicate()


def kill_until_done(process, english, folder, moments):
    """Run the tool and kill it at each of the moments, then run it to the end."""
    arguments = ("--input", english, "--output-prefix", folder / "o", *KILL_FLAGS)
    for commits, delay in moments:
        running = process(*arguments)
        kill_after(running, folder / "o.partial", commits, delay)
        if (folder / "o_text_document.idx").exists():
            assert (folder / "o_text_document.bin").exists()
            assert (folder / "o_text_document.manifest.json").exists()
    running = process(*arguments)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tool_killed_twice_ends_with_identical_files(process, english, undisturbed, tmp_path, seed):
    pick = random.Random(seed)
    moments = [(pick.randint(0, 2), pick.uniform(0, 0.05)), (pick.randint(3, 5), 0.01)]
    kill_until_done(process, english, tmp_path, moments)
    assert outputs(tmp_path / "o") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_tool_killed_at_twenty_random_moments_ends_with_identical_files(
    process, english, undisturbed, tmp_path, seed
):
    pick = random.Random(1000 + seed)
    moments = [(pick.randint(0, 7), pick.uniform(0, 0.1)) for _ in range(3)]
    kill_until_done(process, english, tmp_path, moments)
    assert outputs(tmp_path / "o") == undisturbed


def stop_after(monkeypatch, commits):
    """End the tool as by a kill right after so many commits."""
    from tools.preprocess import parts

    written, done = parts.atomic_directory, 0

    @contextmanager
    def dying(folder, durable):
        nonlocal done
        with written(folder, durable) as unfinished:
            yield unfinished
        done += 1
        if done == commits:
            raise KeyboardInterrupt

    monkeypatch.setattr(parts, "atomic_directory", dying)


@pytest.fixture
def interrupted(tool, arguments, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert tool(*arguments) == 130
    assert "resumes from the last commit" in capsys.readouterr().err
    return arguments


def test_tool_resumes_from_the_last_commit(tool, interrupted, result, tmp_path, capsys):
    assert not list(tmp_path.glob("*.idx"))
    assert tool(*interrupted) == 0
    assert "Resuming after 2 finished parts" in capsys.readouterr().err
    assert outputs(tmp_path / "o") == result
    assert not (tmp_path / "o.partial").exists()


def test_bytes_after_the_last_commit_are_dropped(tool, interrupted, result, tmp_path):
    for name in ("part-000002", "whole"):
        unfinished = tmp_path / "o.partial" / f".{name}.{platform.node()}-{2**22 + 1}.partial"
        unfinished.mkdir()
        for file in ("text.bin", "part.json"):
            (unfinished / file).write_bytes(b"half a line")
    assert tool(*interrupted) == 0
    assert outputs(tmp_path / "o") == result


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--json-keys", "body"), "--json-keys was ('text',), now ('body',)"),
        (("--max-document-mb", "5"), "--max-document-mb (in bytes) was None, now 5000000"),
        (("--commit-mib", "3"), "--commit-mib (in bytes) was 16384, now 3145728"),
        (("--shard", "0/2"), "--shard was 0/1, now 0/2"),
    ],
)
def test_a_changed_flag_is_refused_with_the_difference(tool, interrupted, capsys, flags, message):
    assert tool(*interrupted, *flags) == 1
    assert message in capsys.readouterr().err


def test_a_changed_input_is_refused_with_the_difference(
    tool, arguments, short, tmp_path, monkeypatch, capsys
):
    copy = tmp_path / "copy.jsonl"
    shutil.copy(short, copy)
    arguments = (*arguments, "--input", copy)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert tool(*arguments) == 130
    with copy.open("a") as stream:
        stream.write('{"text":"more"}\n')
    capsys.readouterr()
    assert tool(*arguments) == 1
    assert re.search(r"input copy.jsonl was \d+ bytes, now \d+", capsys.readouterr().err)
    assert tool(*arguments, "--restart") == 0


def test_damaged_shard_is_detected_on_resume(tool, interrupted, tmp_path, capsys):
    with (tmp_path / "o.partial/part-000000/text.bin").open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\xff\xff")
    assert tool(*interrupted) == 1
    assert "part-000000/text.bin is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("o_text_document.*"))


@pytest.mark.parametrize("size", [10, 50])
def test_truncated_index_of_a_part_is_detected_before_publishing(
    tool, interrupted, tmp_path, capsys, size
):
    os.truncate(tmp_path / "o.partial/part-000000/text.idx", size)
    assert tool(*interrupted) == 1
    assert "--restart" in capsys.readouterr().err
    assert not list(tmp_path.glob("o_text_document.*"))
    assert tool(*interrupted, "--restart") == 0


def test_concurrent_runs_with_the_same_output_are_refused(tool, interrupted, tmp_path, capsys):
    from parakit.data.folder import lock_folder

    with lock_folder(tmp_path / "o.partial"):
        assert tool(*interrupted) == 1
    assert "Another process is writing" in capsys.readouterr().err


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_tool_killed_while_renaming_finishes_the_renames(
    tool, arguments, result, tmp_path, monkeypatch, moves
):
    with monkeypatch.context() as patch:
        interrupt_after_moves(patch, moves)
        assert tool(*arguments) == 130
    assert not (tmp_path / "o_text_document.idx").exists()
    assert tool(*arguments) == 0
    assert outputs(tmp_path / "o") == result


@pytest.mark.parametrize("removals", range(0, 12))
def test_repetition_after_a_kill_during_cleanup_uses_the_result(
    tool, arguments, result, tmp_path, monkeypatch, removals
):
    """The folder of an unfinished run is removed file by file; a kill after any of them is harmless."""
    with monkeypatch.context() as patch:
        done = 0

        def counted(remove):
            def dying(*arguments, **named):
                nonlocal done
                if (tmp_path / "o_text_document.idx").exists():
                    done += 1
                    if done > removals:
                        raise KeyboardInterrupt
                remove(*arguments, **named)

            return dying

        patch.setattr("os.unlink", counted(os.unlink))
        patch.setattr("os.rmdir", counted(os.rmdir))
        assert tool(*arguments) == 130
    assert tool(*arguments) == 0
    assert outputs(tmp_path / "o") == result
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_archive_input_is_resumed(tool, short, arguments, tmp_path, monkeypatch):
    import gzip

    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(short.read_bytes()))
    arguments = (*arguments, "--input", packed)
    assert tool(*arguments, "--output-prefix", tmp_path / "whole" / "o") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert tool(*arguments) == 130
    assert tool(*arguments) == 0
    for suffix in ("bin", "idx", "manifest.json"):
        whole = (tmp_path / f"whole/o_text_document.{suffix}").read_bytes()
        assert (tmp_path / f"o_text_document.{suffix}").read_bytes() == whole

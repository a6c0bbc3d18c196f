"""Fakes: a machine with two H200, and a `docker` on PATH that records its calls."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from tests.launch.fake_nvml import FakeGpu, FakeNvml, machine_with
from tests.launch.megatron_parser import MegatronParser

DOCKER = """#!{python}
import json, os, sys
folder = {folder!r}
state = json.load(open(folder + "/state.json"))
with open(folder + "/calls.jsonl", "a") as file:
    print(json.dumps({{"argv": sys.argv[1:], "environment": dict(os.environ)}}), file=file)
verb = " ".join(sys.argv[1:3]) if sys.argv[1] == "image" else sys.argv[1]
answer = state.get(verb, {{}})
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("code", 0))
"""


@dataclass
class FakeDocker:
    """Recorded calls of the client, and its answers."""

    folder: Path

    def answer(self, verb: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Set the answer of `info`, `image inspect`, `run`, `build` or `rm`."""
        path = self.folder / "state.json"
        state = json.loads(path.read_text())
        state[verb] = {"out": out, "err": err, "code": code}
        path.write_text(json.dumps(state))

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of every call, in order."""
        return [call["argv"] for call in self._recorded()]

    def call(self, verb: str) -> list[str]:
        """Return the arguments of the last call of a verb."""
        return [argv for argv in self.calls if argv[0] == verb][-1]

    def environment(self, verb: str) -> dict[str, str]:
        """Return the environment of docker in the last call of a verb."""
        last_call = [call for call in self._recorded() if call["argv"][0] == verb][-1]
        return dict(last_call["environment"])

    def _recorded(self) -> list[dict[str, object]]:  # type: ignore[type-arg]
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="session")
def megatron_parser() -> Iterator[MegatronParser]:
    parser = MegatronParser()
    yield parser
    parser.close()


@pytest.fixture(scope="session", autouse=True)
def _early_megatron_parser(request: pytest.FixtureRequest) -> None:
    """Start importing Megatron while the first tests of this folder run, if a test needs it."""
    if any(
        "megatron_parser" in getattr(item, "fixturenames", ()) for item in request.session.items
    ):
        request.getfixturevalue("megatron_parser")


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by a second per reading, so that names by the second differ without waiting."""

    class Clock(datetime):
        seconds = 0

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            Clock.seconds += 1
            return datetime.now(tz) + timedelta(seconds=Clock.seconds)

    monkeypatch.setattr("parakit.artifacts.run.datetime", Clock)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """Provide a fake client whose engine has the NVIDIA runtime and the kit's image."""
    folder = tmp_path / "docker"
    folder.mkdir()
    client = folder / "docker"
    client.write_text(DOCKER.format(python=sys.executable, folder=str(folder)))
    client.chmod(0o755)
    (folder / "state.json").write_text("{}")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KIT_IMAGE", raising=False)
    fake = FakeDocker(folder)
    fake.answer("info", '{"runtimes":{"nvidia":{},"runc":{}},"is":["name=seccomp"]}')
    fake.answer("image inspect", "sha256:abc123\n")
    return fake


@pytest.fixture
def two_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Simulate the published machine."""
    yield from machine_with(monkeypatch, FakeGpu(), FakeGpu())


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a PATH with only the shell's programs and those that a test adds, without NVIDIA and Docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "env", "bash"):
        (folder / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("KIT_IMAGE", raising=False)
    return folder

from pathlib import Path

import pytest

from tests.golden.commands_of_the_kit import Commands


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this machine's programs without container engines, which would change the output."""
    folder = tmp_path_factory.mktemp("programs")
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("docker", "podman")):
            (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture
def commands(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], programs: Path
) -> Commands:
    return Commands(monkeypatch, capfd, programs)

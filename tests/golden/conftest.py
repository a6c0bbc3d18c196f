import pytest

from tests.golden.commands_of_the_kit import Commands


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capfd)

"""Download of the published data set from a hub on loopback with the real `datasets` client."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from parakit.data import HUB_CACHES, find_default_hub_cache
from parakit.data.indexed import open_dataset
from tests.launch.hub_server import Hub, parquet, serving

# The client stores data in steps of 10 MiB, so half of the file must be larger.
TEXTS = [f"Document {n}.\n" + f"word{n % 97} “quoted” é \\ " * 75 for n in range(300)]
BESIDE_BYTES = 75_000
HUB_NAME = "vuiseng9/openwebtext-10k"
STEP_BYTES = 10 << 20
NAMES = ("bin", "idx")


@pytest.fixture(scope="module")
def content() -> bytes:
    data = parquet(TEXTS, BESIDE_BYTES)
    assert len(data) // 2 > STEP_BYTES
    return data


def fetch(
    folder: Path, endpoint: str, home: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        (
            *(sys.executable, "-m", "tools.preprocess", "hub", HUB_NAME),
            *("--output-prefix", str(folder / "openwebtext-10k")),
        ),
        cwd=ROOT,
        env={**kept, "HF_ENDPOINT": endpoint, "HOME": str(home), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def made(folder: Path) -> list[bytes]:
    return [(folder / f"openwebtext-10k_text_document.{name}").read_bytes() for name in NAMES]


@dataclass(frozen=True)
class Down:
    """A hub that stopped in the middle of a download, and the result of the download."""

    hub: Hub
    folder: Path
    home: Path
    failed: Future[subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def down(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Down]:
    """Return the result of a stopped hub. It starts with the first download, because the client retries for 5 s."""
    folder, home = tmp_path_factory.mktemp("down") / "ds", tmp_path_factory.mktemp("home")
    hub_that_goes_down = Hub(HUB_NAME, content, drops=1, down_after_drop=True)
    with serving(hub_that_goes_down) as hub, ThreadPoolExecutor(1) as thread:
        yield Down(hub, folder, home, thread.submit(fetch, folder, hub.url, home))


@pytest.fixture(scope="module")
def dropped_once(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hub]:
    """Return a data set whose download lost its connection half-way and was resumed."""
    folder, home = tmp_path_factory.mktemp("owt-ds"), tmp_path_factory.mktemp("home")
    with serving(Hub(HUB_NAME, content, drops=1)) as hub:
        answer = fetch(folder, hub.url, home)
    assert answer.returncode == 0, answer.stderr
    assert list(home.iterdir()) == []
    return folder, hub


def test_dropped_connection_is_resumed_at_its_last_byte(
    down: Down, dropped_once: tuple[Path, Hub]
) -> None:
    folder, hub = dropped_once
    assert hub.ranges == ["", f"bytes={STEP_BYTES}-"]
    lines = (folder / "openwebtext-10k.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == TEXTS
    dataset = open_dataset(folder / "openwebtext-10k_text_document")
    assert dataset.documents == len(TEXTS)
    assert not (folder / ".hub").exists()


def test_hub_failure_gives_a_single_sentence_and_the_next_call_gives_the_same_bytes(
    down: Down, dropped_once: tuple[Path, Hub]
) -> None:
    failed = down.failed.result()
    assert failed.returncode == 1
    sentence = failed.stderr.strip().splitlines()[-1]
    assert sentence.startswith(f"error: Data set {HUB_NAME} was not fetched from {down.hub.url} (")
    for fix in ("HF_ENDPOINT=", "HF_HOME=", "prepare-ds-sample", "prepare-ds INPUT="):
        assert fix in sentence
    assert "Traceback" not in failed.stderr
    assert [path.name for path in down.folder.iterdir()] == [".hub"]
    down.hub.down = False
    again = fetch(down.folder, down.hub.url, down.home)
    assert again.returncode == 0, again.stderr
    assert made(down.folder) == made(dropped_once[0])


def test_repetition_makes_no_request_to_the_hub(
    dropped_once: tuple[Path, Hub], tmp_path: Path
) -> None:
    before = made(dropped_once[0])
    answer = fetch(dropped_once[0], "http://127.0.0.1:9", tmp_path)
    assert answer.returncode == 0
    assert "300 documents" in answer.stdout
    assert made(dropped_once[0]) == before


def test_existing_lines_are_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "openwebtext-10k.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    answer = fetch(tmp_path, "http://127.0.0.1:9", tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert open_dataset(tmp_path / "openwebtext-10k_text_document").documents == 2


def test_a_hub_without_the_data_set_is_distinguished_from_a_broken_one(tmp_path: Path) -> None:
    with serving(Hub("somebody/else", b"")) as hub:
        answer = fetch(tmp_path / "ds", hub.url, tmp_path / "home")
    assert answer.returncode == 1
    assert f"{HUB_NAME} was not fetched from {hub.url} (" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_without_network_the_reason_comes_before_the_client_tries_for_a_minute(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time; from tools.preprocess import hub; began = time.monotonic(); "
        "reason = hub._go_offline_if_unreachable(); import os, huggingface_hub.constants as c; "
        "print(reason, c.HF_HUB_OFFLINE, time.monotonic() - began < 30)"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    answer = subprocess.run(
        (sys.executable, "-c", code),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip().endswith("Connection refused True True")


def test_a_default_cache_that_holds_the_data_set_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in HUB_CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_default_hub_cache(HUB_NAME) is None
    snapshot = tmp_path / "huggingface/hub/datasets--vuiseng9--openwebtext-10k/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "train.parquet").touch()
    assert find_default_hub_cache(HUB_NAME) == tmp_path / "huggingface" / "hub"
    assert find_default_hub_cache("somebody/else") is None
    monkeypatch.setenv("HF_HOME", str(tmp_path / "mine"))
    assert find_default_hub_cache(HUB_NAME) is None


@pytest.mark.slow
def test_filled_cache_of_the_user_is_used_and_kept_without_a_connection(
    content: bytes, tmp_path: Path
) -> None:
    home = tmp_path / "hf"
    fill = f"import datasets; datasets.load_dataset({HUB_NAME!r}, split='train')"
    with serving(Hub(HUB_NAME, content)) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
        cache_environment = {**environment, "HF_HUB_DISABLE_XET": "1"}
        subprocess.run(
            (sys.executable, "-c", fill), env=cache_environment, check=True, capture_output=True
        )
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    answer = fetch(tmp_path / "ds", "http://127.0.0.1:9", tmp_path, **offline)
    assert answer.returncode == 0, answer.stderr
    assert open_dataset(tmp_path / "ds/openwebtext-10k_text_document").documents == len(TEXTS)
    assert any(home.iterdir())

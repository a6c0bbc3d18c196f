"""`make serve`: the built site answers on this machine until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.site.server import serve_folder
from tests.patience import OF_A_RUN

SERVE = """
import sys
from pathlib import Path
from rich.console import Console
from parakit.site.server import serve_folder
sys.exit(serve_folder(Path(sys.argv[1]), Console(), int(sys.argv[2])))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(address: str, server: subprocess.Popen[str]) -> int:
    """Return the status of the first answer; a server that ends, or does not answer in time, fails the test."""
    deadline = time.monotonic() + OF_A_RUN
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(address) as answer:
                status: int = answer.status
                return status
        except URLError:
            time.sleep(0.1)
    raise AssertionError(f"{address} did not answer; the server's code is {server.poll()}")


def test_a_folder_is_served_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner/planner.html").write_text("<!doctype html>")
    port = free_port()
    with subprocess.Popen(
        (sys.executable, "-c", SERVE, str(tmp_path), str(port)),
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert wait_for(f"http://127.0.0.1:{port}/planner/planner.html", server) == 200
        server.send_signal(signal.SIGINT)
        printed, _ = server.communicate(timeout=OF_A_RUN)
    assert server.returncode == 0
    assert printed.splitlines() == [
        f"The site is at http://127.0.0.1:{port}/index.html, the planner at "
        f"http://127.0.0.1:{port}/planner/planner.html",
        "Ctrl-C ends it.",
        "Ended.",
    ]


def test_a_port_in_use_is_refused_with_another_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"^Port {port} is in use; choose another one: "):
            serve_folder(tmp_path, Console(file=StringIO()), port)


@pytest.mark.slow
def test_make_serve_builds_the_site_and_ends_on_ctrl_c() -> None:
    port = free_port()
    command = ("make", "--no-print-directory", "serve", f"ARGS=--port {port}")
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, process_group=0
    ) as server:
        for page in ("planner/planner.html", "planner/pyodide.asm.wasm", "index.html"):
            assert wait_for(f"http://127.0.0.1:{port}/{page}", server) == 200
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=OF_A_RUN)
    # A shell shows -SIGINT as 130.
    assert server.returncode in (0, 130, -signal.SIGINT)

"""A real browser for tests of pages: skipped without one, unless `CHROMIUM_REQUIRED` is set (CI)."""

import os
import shutil
import subprocess

import pytest

from tests.patience import OF_A_RUN

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CHROMIUM_REQUIRED"),
    reason="no chromium on PATH: the page was not opened in a browser",
)


def chromium(*arguments):
    """Run Chromium and return its output and the lines of the page's console."""
    assert CHROMIUM, "CHROMIUM_REQUIRED is set and neither chromium nor google-chrome is on PATH"
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", "--log-level=0", "--hide-scrollbars"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=OF_A_RUN,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console

"""What several test folders need: the sample data set, made once, and its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.spec.files import ROOT


@pytest.fixture(scope="session")
def sample_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`…_text_document` of the sample data set, written by the kit's own command."""
    prefix = tmp_path_factory.mktemp("data") / "sample"
    command = (sys.executable, "-m", "tools.preprocess", "sample", "--output-prefix", str(prefix))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return prefix.with_name("sample_text_document")


@pytest.fixture(scope="session")
def starting_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that all strategies start from, written once; runs folders link it as `.start`."""
    return tmp_path_factory.mktemp("start")

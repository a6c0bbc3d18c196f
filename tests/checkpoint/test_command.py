"""Commands on checkpoints and models refuse what the user wrote before they import torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.files import ROOT

REFUSED_COMMANDS = """
import json, sys
from parakit.cli.dispatch import run_command
for name, arguments in json.loads(sys.argv[1]):
    code = run_command(name, arguments, f"parakit {name}")
    print(json.dumps([code, sorted({"torch", "megatron", "transformers"} & sys.modules.keys())]))
"""
"""Program that runs commands, and prints exit code and heavy imports after each."""


@pytest.mark.usefixtures("within_a_minute")
def test_wrong_folders_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch takes 5 to 15 s, and users waited 48 s for these sentences."""
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    nowhere, mamba, target = (
        str(tmp_path / "nowhere"),
        str(tmp_path / "mamba"),
        str(tmp_path / "to"),
    )
    commands = [
        ("reshard", ["--strategy", "tp2", "--to", target]),
        ("reshard", ["--ckpt", nowhere, "--strategy", "tp2", "--to", target]),
        ("reshard", ["--ckpt", str(tmp_path), "--strategy", "tp2", "--to", target]),
        ("import-hf", []),
        ("import-hf", ["--hf", nowhere]),
        ("import-hf", ["--hf", str(tmp_path)]),
        ("import-hf", ["--hf", mamba]),
        ("export-hf", ["--to", target]),
        ("export-hf", ["--run", nowhere, "--to", target]),
        ("export-hf", ["--ckpt", nowhere, "--to", target]),
        ("inspect", ["--ckpt", nowhere]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_COMMANDS, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert outcomes == [[2, []]] * len(commands), done.stderr
    assert "--ckpt is required, for example" in done.stderr
    assert "nowhere is no folder" in done.stderr
    assert "There is no folder" in done.stderr
    assert "Megatron-Bridge may convert it" in done.stderr

"""What the planner's page calls in the browser's Python: the same command line as everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from tools.cli.main import from_words
from tools.spec.hardware import load_hardware
from tools.spec.model import load_model, model_names


def choices() -> str:
    """Models, devices and links to choose from, as JSON; memory in bytes."""
    hardware = load_hardware()
    devices = hardware.devices.values()
    return json.dumps(
        {
            "models": [
                {"name": name, "global_batch": load_model(name).batch.global_batch_size}
                for name in model_names()
            ],
            "devices": [
                {"key": d.key, "name": d.name, "memory_bytes": d.memory_bytes} for d in devices
            ],
            "links": [{"key": link.key, "name": link.name} for link in hardware.links.values()],
        }
    )


def plan(words: Sequence[str]) -> str:
    """The command line's own answer: its exit code and what it prints, as JSON."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = from_words("plan", [*words, "--json"], "make plan")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
    return json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()})

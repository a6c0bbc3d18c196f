"""What the pages call in the browser's Python: the functions of everywhere, answering in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp

from parakit.cli import run_command
from parakit.config.hardware import load_hardware
from parakit.config.model import load_model, model_names
from parakit.site.drawing.figure import draw_figure, resolve_run

OWN_MODEL = "mine/config.json"
"""Where a pasted one would lie; its folder names the model."""


def choices() -> str:
    """Models, devices and links to choose from; memory in bytes, links in bytes a second of a device."""
    hardware = load_hardware()
    return json.dumps(
        {
            "own_model": OWN_MODEL,
            "models": [
                {"name": name, "global_batch": load_model(name).batch.global_batch_size}
                for name in model_names()
            ],
            "devices": [
                {"key": key, "name": device.name, "memory_bytes": device.memory_bytes}
                for key, device in hardware.devices.items()
            ],
            "links": [
                {"key": key, "name": link.name, "bytes_per_second": link.bytes_per_second}
                for key, link in hardware.links.items()
            ],
        }
    )


def plan(words: Sequence[str], config: str = "") -> str:
    """The command line's own answer: its exit code and what it prints.

    Args:
        words: Options of `python -m parakit plan`.
        config: Text of a `config.json` that is planned instead of a named model; empty is none.
    """
    if config:
        path = Path(mkdtemp(), OWN_MODEL)
        path.parent.mkdir()
        path.write_text(config, encoding="utf-8")
        words = [*words, "--model", str(path)]
    return _answer(lambda: run_command("plan", [*words, "--json"], "make plan"))


def draw(model: str, strategy: str, device: str, *numbers: str) -> str:
    """The drawing of a run as HTML, or why there is none.

    Args:
        model: One of `choices`.
        strategy: As targets have it.
        device: A GPU's key, or `cpu`.
        numbers: Devices, micro batch and global batch; an empty one is what training takes.
    """

    def drawn() -> int:
        given = (int(number) if number else None for number in numbers)
        print(draw_figure(resolve_run(model, strategy, device, *given), "drawn"))
        return 0

    return _answer(drawn)


def _answer(run: Callable[[], int]) -> str:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
        except ValueError as error:
            code = 2
            print(error, file=err)
    return json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()})

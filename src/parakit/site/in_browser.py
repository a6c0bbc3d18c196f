"""The functions that the site's pages call in the browser's Python. Each returns its answer as JSON text."""

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
"""The path that a pasted config.json gets. Its folder is the name of the model."""


def choices() -> str:
    """Return the models, devices and links that a user can choose from, as JSON.

    Memory is in bytes, and the rates of links are in bytes per second and device.
    """
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


def plan(arguments: Sequence[str], config: str = "") -> str:
    """Run `parakit plan --json`, and return its exit code and output as JSON.

    Args:
        arguments: Options of `python -m parakit plan`.
        config: The text of a `config.json` to plan instead of a named model; empty for none.
    """
    if config:
        path = Path(mkdtemp(), OWN_MODEL)
        path.parent.mkdir()
        path.write_text(config, encoding="utf-8")
        arguments = [*arguments, "--model", str(path)]
    return _capture_answer(lambda: run_command("plan", [*arguments, "--json"], "make plan"))


def draw(model: str, strategy: str, device: str, *numbers: str) -> str:
    """Draw a run, and return its answer as JSON with the keys code, out and err.

    The drawing is HTML in `out`. If the run cannot be drawn, the reason is in `err`.

    Args:
        model: The name of a model.
        strategy: The name of a strategy.
        device: Key of a GPU, or `cpu`.
        numbers: Devices, micro batch and global batch, each as text. An empty or missing text stands for the value
            with which `make` would train the model.
    """

    def print_drawing() -> int:
        sizes = (int(number) if number else None for number in numbers)
        print(draw_figure(resolve_run(model, strategy, device, *sizes), "drawn"))
        return 0

    return _capture_answer(print_drawing)


def _capture_answer(run: Callable[[], int]) -> str:
    """Call a function, and return its exit code, stdout and stderr as JSON with the keys code, out and err.

    A ValueError gives code 2, and its message is appended to stderr.
    """
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

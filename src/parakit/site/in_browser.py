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
from parakit.config.model import model_names
from parakit.config.strategy import Parallelism, Sharding, strategy_name
from parakit.site.drawing.figure import draw_figure, resolve_run

WELL_KNOWN = (
    *("llama3-8b", "llama3-70b", "llama3.1-405b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b"),
    *("deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "gpt3-175b", "gpt2-xl", "gpt2-large"),
)
"""Models that the page lists first, some of them only known from published measurements."""

OWN_MODEL = "mine/config.json"
"""The path that a pasted config.json gets. Its folder is the name of the model."""


def choices() -> str:
    """Return the models, devices and links that a user can choose from, as JSON. Some well-known models come first.

    Memory is in bytes, and the rates of links are in bytes per second and device.
    """
    hardware = load_hardware()
    return json.dumps(
        {
            "own_model": OWN_MODEL,
            "well_known": WELL_KNOWN,
            "models": list(model_names()),
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
        arguments = [*arguments, "--model", str(_write_config(config))]
    return _capture_answer(lambda: run_command("plan", [*arguments, "--json"], "parakit plan"))


def resize(arguments: Sequence[str], sizes: str, config: str = "") -> str:
    """Time one strategy as `parakit plan --strategy` does, and return its exit code and output as JSON.

    Args:
        arguments: Options of `parakit plan` besides the strategy.
        sizes: A JSON object with the number of `devices`, the sizes `tensor`, `pipeline`, `context` and `expert`,
            the number of `virtual` stages per rank, and the `sharding`, which may be empty. Data parallelism takes
            the other devices.
        config: As for `plan`.
    """
    wanted = json.loads(sizes)
    product = wanted["tensor"] * wanted["pipeline"] * wanted["context"]
    if wanted["devices"] % product:
        message = (
            f"TP {wanted['tensor']}, PP {wanted['pipeline']} and CP {wanted['context']} need a multiple of "
            f"{product} devices, and there are {wanted['devices']}."
        )
        return json.dumps({"code": 2, "out": "", "err": message})
    data = wanted["devices"] // product
    if data % wanted["expert"]:
        message = f"EP {wanted['expert']} does not divide the {data} data-parallel ranks."
        return json.dumps({"code": 2, "out": "", "err": message})
    is_sharded = data * wanted["context"] > 1
    parallelism = Parallelism(
        data=data,
        tensor=wanted["tensor"],
        pipeline=wanted["pipeline"],
        context=wanted["context"],
        expert=wanted["expert"],
        virtual_stages=wanted["virtual"] if wanted["pipeline"] > 1 else 1,
        sequence_parallel=wanted["tensor"] > 1,
        sharding=Sharding(wanted["sharding"] if is_sharded else ""),
    )
    return plan([*arguments, "--strategy", strategy_name(parallelism)], config)


def _write_config(config: str) -> Path:
    """Write a pasted `config.json` to a new folder, and return the file's path."""
    path = Path(mkdtemp(), OWN_MODEL)
    path.parent.mkdir()
    path.write_text(config, encoding="utf-8")
    return path


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

"""Serve the public functions of `parakit` as tools for agents, over stdin and stdout (`parakit mcp`).

The protocol is the Model Context Protocol, and the server is that of the official Python SDK, `mcp`. Each tool calls
a function of `parakit.api` and returns a `ToolAnswer`: the text that the command prints, the same as data, the
intervals of the times in it, and its sources. Tools read the files that they are given, and write and execute nothing.
A refusal is the sentence of a ValueError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit import api
from parakit.artifacts.verdict import read_verdicts

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = (
    "Tools on training with Megatron-LM. plan and estimate predict time and memory from closed forms whose "
    "constants are fitted to published measurements; each answer has an interval and the nearest measurements. "
    "report compares measured runs and logs. why_hang, inspect_checkpoint and verify_result explain failures from "
    "files. Quote an interval with every predicted time, and say which source it rests on."
)
CLOSED_FORMS = "closed forms of time and memory, with constants fitted to published measurements"


@dataclass(frozen=True)
class ToolAnswer:
    """Answer of every tool."""

    text: str
    """The answer as the command prints it."""
    data: dict[str, Any]
    """The answer as data: what the command prints as JSON."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """Lower and upper bound by the name of a figure, such as `iteration_seconds_80`; empty if it has no time."""
    sources: list[str] = field(default_factory=list)
    """What the answer rests on: published measurements, closed forms, or the files that were read."""


def plan(
    model: str,
    gpus: int | None = None,
    gpu: str = "h200",
    nodes: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    recipe: str | None = None,
    imbalance: float | None = None,
    peft: str | None = None,
) -> ToolAnswer:
    """Rank every strategy (TP, PP, CP, EP, DP, ZeRO) for a model on a number of devices by predicted time.

    Args:
        model: Name of a model, such as llama3-8b or deepseek-v3, or path of a Hugging Face config.json.
        gpus: Total number of devices. Without it: devices per node times nodes, or one device.
        gpu: Key of the device, such as h100, h200, b200, a100-80g or mi300x.
        nodes: Number of machines.
        global_batch: Samples per iteration on all devices. Without it: the number in the model's file.
        seq: Tokens per sample.
        dtype: bf16, fp16, fp32 or fp8.
        recipe: "tuned" also tries flags that change how an iteration is computed; "all" tries fewer bits as well.
        imbalance: Tokens of the busiest expert-parallel rank over the mean, at least 1; for models with experts.
        peft: "lora" trains adapters alone; "lora rank=16 targets=linear_qkv weights=nf4" states more of them.
    """
    result = api.plan(
        model,
        gpus=gpus,
        gpu=gpu,
        nodes=nodes,
        global_batch=global_batch,
        seq=seq,
        dtype=dtype,
        recipe=recipe,
        imbalance=imbalance,
        peft=peft,
    )
    data = result.to_dict()
    return _answer_with_prediction(str(result), data)


def estimate(
    model: str,
    strategy: str,
    gpu: str = "h200",
    gpus: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    recompute: str | None = None,
    seq: int | None = None,
    dtype: str | None = None,
) -> ToolAnswer:
    """Predict the time per iteration and the peak memory of one strategy.

    Args:
        model: Name of a model, such as llama3-8b or deepseek-v3, or path of a Hugging Face config.json.
        strategy: Such as tp4pp2dp2-zero1; sp is tensor parallelism with sequence parallelism.
        gpu: Key of the device, such as h100, h200, b200, a100-80g or mi300x.
        gpus: Total number of devices. Without it: the product of the strategy's sizes.
        micro_batch: Samples per micro batch.
        global_batch: Samples per iteration on all devices.
        recompute: none, selective or full.
        seq: Tokens per sample.
        dtype: bf16, fp16, fp32 or fp8.
    """
    result = api.estimate(
        model,
        strategy,
        gpu=gpu,
        gpus=gpus,
        micro_batch=micro_batch,
        global_batch=global_batch,
        recompute=recompute,
        seq=seq,
        dtype=dtype,
    )
    return _answer_with_prediction(str(result), result.to_dict())


def report(paths: list[str], device: str | None = None) -> ToolAnswer:
    """Compare measured runs with one another: time, memory, throughput, loss parity, and the reasons.

    Args:
        paths: Logs of Megatron or another trainer, or run folders of the kit.
        device: Key of the device, such as h100, for logs that do not name one.
    """
    finished = api.report(paths, device=device)
    intervals: dict[str, list[float]] = {}
    for row in finished.to_rows():
        low, high = row.get("iteration_ms_ci_low"), row.get("iteration_ms_ci_high")
        if low is not None and high is not None:
            intervals[f"{row['run']}: iteration_ms_95"] = [low, high]
    return ToolAnswer(str(finished), finished.to_dict(), intervals, sources=paths)


def why_hang(paths: list[str]) -> ToolAnswer:
    """Find the rank that stopped a training job, and where it stopped.

    Args:
        paths: Flight recorder dumps, stacks of py-spy, logs, and folders of such files.
    """
    diagnosis = api.why_hang(paths)
    return ToolAnswer(str(diagnosis), diagnosis.to_dict(), sources=paths)


def inspect_checkpoint(
    path: str, compare: str | None = None, strategy: str | None = None, verify: bool = False
) -> ToolAnswer:
    """Describe a checkpoint of Megatron and find its faults. Nothing that it holds is executed.

    Args:
        path: Folder of a checkpoint, or of a run.
        compare: Another checkpoint, with which every tensor is compared.
        strategy: A strategy to judge: can it load the checkpoint?
        verify: True to read every piece and compare it with its checksum, which takes longer.
    """
    inspection = api.inspect_checkpoint(path, compare=compare, strategy=strategy, verify=verify)
    sources = [path] if compare is None else [path, compare]
    return ToolAnswer(str(inspection), inspection.to_dict(), sources=sources)


def verify_result(run: str) -> ToolAnswer:
    """Return what verifications of a run found: the first wrong tensor with file and line, or that all tensors held.

    Args:
        run: Run folder of a verification (`make verify-…` prints its path).
    """
    verdicts = list(read_verdicts(Path(run).expanduser()))
    if not verdicts:
        raise ValueError(f"{run} has no verdict; name a folder that 'make verify-…' has written.")
    return ToolAnswer(
        "\n\n".join(map(str, verdicts)),
        {"verdicts": [verdict.to_dict() for verdict in verdicts]},
        sources=[run],
    )


TOOLS = (plan, estimate, report, why_hang, inspect_checkpoint, verify_result)
"""The functions that an agent can call. Their docstrings are the descriptions that the agent reads."""


def _answer_with_prediction(text: str, data: dict[str, Any]) -> ToolAnswer:
    """Return the answer of a prediction, with the intervals of its time and the measurements nearest to it."""
    uncertainty: Mapping[str, Any] = data["uncertainty"]
    intervals = {}
    for level in ("80", "95"):
        bounds = uncertainty.get(f"interval_{level}")
        if bounds is not None:
            intervals[f"iteration_seconds_{level}"] = list(bounds)
    nearest: Sequence[Mapping[str, Any]] = uncertainty.get("nearest", ())
    return ToolAnswer(text, data, intervals, [CLOSED_FORMS, *_list_sources(nearest)])


def _list_sources(measurements: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the sources of published measurements, each once, in their order."""
    return list(dict.fromkeys(str(measurement["source"]) for measurement in measurements))


def make_server() -> MCPServer[Any]:
    """Return the server with all tools; every tool only reads.

    Raises:
        ModuleNotFoundError: The package `mcp` is not installed.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    try:
        own_version = version("parakit")
    except PackageNotFoundError:
        own_version = ""
    server: MCPServer[Any] = MCPServer("parakit", instructions=INSTRUCTIONS, version=own_version)
    only_reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in TOOLS:
        server.tool(annotations=only_reads)(_pass_on_refusals(tool))
    return server


def _pass_on_refusals(tool: Callable[..., ToolAnswer]) -> Callable[..., ToolAnswer]:
    """Return the tool with refusals as the SDK's `ToolError`, whose sentence reaches the client.

    The SDK hides the text of every other error, because it may hold what a client must not see.
    """
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    def call(*arguments: Any, **options: Any) -> ToolAnswer:
        try:
            return tool(*arguments, **options)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise ToolError(str(error)) from error

    return call


def serve() -> int:
    """Serve tools over stdin and stdout until the client closes them, and return 0."""
    make_server().run("stdio")
    return 0

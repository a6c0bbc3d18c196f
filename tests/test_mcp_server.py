"""Every tool of `parakit mcp` answers a client of the official SDK, with an interval and sources."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VERDICT_FILE, VERIFY_FOLDER, VerifyOutcome, VerifyVerdict
from parakit.cli.options import find_command
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.mcp_server import TOOLS

pytestmark = pytest.mark.ranks

DATA = ROOT / "examples/notebooks/data"
LOG = ROOT / "tests/reporting/logs/megatron-0.19.0.log"


def ask_server[T](question: Callable[[ClientSession], Awaitable[T]]) -> T:
    """Start `parakit mcp`, and return what the question gets from a session with it."""

    async def run() -> T:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "parakit", "mcp"],
            env={"PYTHONPATH": PYTHON_PATH},
            cwd=str(ROOT),
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            return await question(session)

    return asyncio.run(run())


def call_tools(calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the result of each tool, called with its arguments in one session."""

    async def call_all(session: ClientSession) -> dict[str, Any]:
        return {name: await session.call_tool(name, arguments) for name, arguments in calls.items()}

    return ask_server(call_all)


@pytest.fixture
def verified_run(tmp_path: Path) -> Path:
    """Return a run folder with the verdict of a wrong tensor."""
    verdict = VerifyVerdict(
        VerifyOutcome.DIFFERS,
        stage=CaptureStage.OUTPUTS,
        module="decoder.layers.0.mlp",
        tensor="output",
        kind="missing sum over TP ranks",
        source="megatron/core/tensor_parallel/mappings.py:34",
    )
    folder = tmp_path / "run" / VERIFY_FOLDER / "tp2"
    folder.mkdir(parents=True)
    (folder / VERDICT_FILE).write_bytes(msgspec.json.encode(verdict))
    return tmp_path / "run"


def test_a_client_calls_every_tool(verified_run: Path) -> None:
    calls: dict[str, dict[str, Any]] = {
        "plan": {"model": "gpt2-large", "gpus": 2, "gpu": "h200"},
        "estimate": {"model": "llama3-8b", "strategy": "tp4dp2", "gpu": "h100", "micro_batch": 1},
        "report": {"paths": [str(LOG)]},
        "why_hang": {"paths": [str(DATA / "stacks")]},
        "inspect_checkpoint": {"path": str(DATA / "gpt2-one-layer")},
        "verify_result": {"run": str(verified_run)},
    }
    assert calls.keys() == {tool.__name__ for tool in TOOLS}
    results = call_tools(calls)
    assert not any(result.is_error for result in results.values())
    answers = {name: result.structured_content for name, result in results.items()}

    low, high = answers["plan"]["intervals"]["iteration_seconds_80"]
    assert 0 < low < high
    assert answers["plan"]["data"]["winner"]["strategy"]
    assert len(answers["plan"]["sources"]) > 1
    assert answers["estimate"]["data"]["layout"]["strategy"] == "tp4dp2"
    assert "iteration_seconds_95" in answers["estimate"]["intervals"]
    (row,) = answers["report"]["data"]["rows"]
    assert answers["report"]["intervals"] == {
        "megatron-0.19.0.log: iteration_ms_95": [
            row["iteration_ms_ci_low"],
            row["iteration_ms_ci_high"],
        ]
    }
    assert answers["why_hang"]["data"]["culprits"] == [2]
    assert answers["inspect_checkpoint"]["sources"] == [str(DATA / "gpt2-one-layer")]
    (verdict,) = answers["verify_result"]["data"]["verdicts"]
    assert verdict["source"] == "megatron/core/tensor_parallel/mappings.py:34"
    assert "missing sum over TP ranks" in answers["verify_result"]["text"]
    assert all(answer["text"] and answer["sources"] for answer in answers.values())


def test_a_refusal_reaches_the_client_as_one_sentence(tmp_path: Path) -> None:
    results = call_tools(
        {
            "plan": {"model": "no-such-model", "gpus": 2},
            "verify_result": {"run": str(tmp_path)},
            "estimate": {"model": "gpt2-large"},
        }
    )
    assert all(result.is_error for result in results.values())
    texts = {name: result.content[0].text for name, result in results.items()}
    assert "no-such-model" in texts["plan"]
    assert "has no verdict" in texts["verify_result"]
    assert "strategy" in texts["estimate"]


def test_tools_are_described_as_reading_only() -> None:
    async def list_tools(session: ClientSession) -> list[Any]:
        return list((await session.list_tools()).tools)

    tools = ask_server(list_tools)
    assert [tool.name for tool in tools] == [tool.__name__ for tool in TOOLS]
    for tool in tools:
        assert tool.annotations.read_only_hint
        assert tool.description
        assert tool.output_schema["properties"].keys() == {"text", "data", "intervals", "sources"}


def test_the_skill_names_every_tool_and_only_commands_that_exist() -> None:
    text = (ROOT / "skills/parakit/SKILL.md").read_text()
    assert text.startswith("---\nname: parakit\ndescription: ")
    assert all(f"`{tool.__name__}`" in text for tool in TOOLS)
    commands = re.findall(r"`(?:parakit|make) ([a-z-]+)", text)
    assert commands
    assert all(find_command(command) for command in commands)


def test_the_page_for_agents_names_every_tool() -> None:
    text = (ROOT / "docs/agents.md").read_text()
    assert all(f"`{tool.__name__}`" in text for tool in TOOLS)

"""A scraped log as JSON: the contract of `scrape LOG… --json`."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tools.records.run import StatusRecord
from tools.report.read.scraped import Iteration, ScrapedLog


def log_as_json(log: ScrapedLog, status: StatusRecord) -> dict[str, Any]:
    """Everything a log says; what it does not say is null or left out of an iteration."""
    return {
        "path": log.path,
        "part": log.part,
        "parts": log.parts,
        "status": status.status.value,
        "reason": status.reason,
        "rank": status.rank,
        "dialect": log.dialect.value,
        "iterations": [iteration_as_json(found) for found in log.iterations],
        "restarts": list(log.restarts),
        "parameters": msgspec.to_builtins(log.parameters),
        "memory": msgspec.to_builtins(log.memory),
        "theoretical_parameters_billions": log.theoretical_parameters_billions,
        "theoretical_memory": msgspec.to_builtins(log.theoretical_memory),
        "timers": msgspec.to_builtins(log.timers),
        "validation": msgspec.to_builtins(log.validation),
        "checkpoints": msgspec.to_builtins(log.checkpoints),
        "exit_reason": log.exit_reason,
        "notes": list(log.notes),
    }


def iteration_as_json(found: Iteration) -> dict[str, Any]:
    """An iteration's fields; those that the line lacks are left out, NaN becomes null."""
    fields = msgspec.to_builtins(found)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
        if value is not None and (value is not False)
    }

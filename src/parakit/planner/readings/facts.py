"""What is known of a source's trainer and of a model by name, beside a reading's own columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from parakit.config.files import read_yaml
from parakit.planner.readings.table import PublishedMeasurement

_CONDITIONS = ("model", "gpus", "bits", "since", "noted", "lines")


def source_facts(measurement: PublishedMeasurement) -> dict[str, Any]:
    """How a reading's run was trained where its table does not say, from `sources.yaml`: of its source,
    and of the last of the source's cases that fits it."""
    facts = _usual_facts(measurement.source)
    release = container_release(measurement, facts)
    for case in facts.get("cases", ()):
        # Of `gpt2.md@9e64ede:390` the line of its page; some cases are of those between two.
        line, (first, last) = measurement.where.rpartition(":")[2], case.get("lines", (0, 0))
        if (
            any(measurement.model.startswith(name) for name in case.get("model", [""]))
            and measurement.gpu in case.get("gpus", [measurement.gpu])
            and measurement.dtype in case.get("bits", [measurement.dtype])
            and release >= case.get("since", 0)
            and case.get("noted", "") in measurement.notes
            and (not last or (line.isdecimal() and first <= int(line) <= last))
        ):
            facts |= {name: value for name, value in case.items() if name not in _CONDITIONS}
    return facts


def facts_for_fields(kind: type, *facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that set a field of a data class, by its name; of two the later."""
    names = {field.name for field in fields(kind)}
    return {name: value for each in facts for name, value in each.items() if name in names}


def origin_of_source(source: str) -> str:
    """What a fit leaves out with a source: the other name under which its figures are published."""
    return str(_usual_facts(source).get("origin", source))


def container_release(measurement: PublishedMeasurement, facts: Mapping[str, Any]) -> float:
    """Of NVIDIA's container, as its notes say (26.06) or its path implies; 0 where neither does."""
    found = re.search(r"release (\d+\.\d+)", measurement.notes)
    if found:
        return float(found[1])
    implied: dict[str, float] = facts.get("released", {})
    return next((release for part, release in implied.items() if part in measurement.where), 0.0)


@cache
def model_facts(model: str) -> dict[str, Any]:
    """What is known of a model by its name, from `models.yaml`; empty if it is not there."""
    name = model.lower().replace("_", "-").replace("llama-", "llama").replace("llama31", "llama3.1")
    known = _known("models")
    fits = [key for key in known if name.startswith(key)]
    return known[max(fits, key=len)] if fits else {}


def _usual_facts(source: str) -> dict[str, Any]:
    known = _known("sources")
    longest = max((name for name in known if source.startswith(name)), key=len)
    return {**known[""], **known[longest]}


@cache
def _known(what: str) -> dict[str, dict[str, Any]]:
    return dict(read_yaml(Path(__file__).with_name(f"{what}.yaml"))[what])

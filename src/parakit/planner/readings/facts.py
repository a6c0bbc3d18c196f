"""Facts about the trainer of a source and about a model, where the columns of a published measurement lack them.

The facts stand in `sources.yaml` and `models.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from parakit.config.files import read_yaml
from parakit.planner.readings.fact_columns import FACT_COLUMNS
from parakit.planner.readings.table import PublishedMeasurement

_CONDITIONS = ("model", "gpus", "bits", "since", "noted", "lines")


def source_facts(measurement: PublishedMeasurement) -> dict[str, Any]:
    """Return what `sources.yaml` states about the training of a measured run, by name of the fact.

    A source is a publication of measurements. Its entry in the file may have cases, which apply only to some of its
    measurements. The facts of a case that applies replace the facts of the source. If several cases apply, the later
    case wins. Facts that columns of the measurement state replace all others.
    """
    facts = _read_source(measurement.source)
    release = container_release(measurement, facts)
    for case in facts.get("cases", ()):
        if _case_applies(case, measurement, release):
            facts |= {name: value for name, value in case.items() if name not in _CONDITIONS}
    return facts | dict(measurement.facts)


def assumed_facts(measurements: Iterable[PublishedMeasurement]) -> dict[str, Any]:
    """Return the default facts that no source and no column states for some of the measurements, by name.

    Measurements with flags of Megatron state their facts with these flags.
    """
    assumed: dict[str, Any] = {}
    for measurement in measurements:
        if measurement.flags or _find_source(measurement.source):
            continue
        stated = dict(measurement.facts)
        defaults = _read_facts("sources")[""]
        assumed |= {
            name: value
            for name, value in defaults.items()
            if name in FACT_COLUMNS and name not in stated
        }
    return assumed


def _case_applies(
    case: Mapping[str, Any], measurement: PublishedMeasurement, release: float
) -> bool:
    """Return True if a published measurement meets all conditions of a case of its source's facts.

    Args:
        case: The case. Conditions that it leaves out are met.
        measurement: The published measurement.
        release: Release of the container that the measurement used, such as 26.06, or 0 if unknown.
    """
    has_model = any(measurement.model.startswith(name) for name in case.get("model", [""]))
    has_line = True
    if "lines" in case:
        first, last = case["lines"]
        # The last part of `gpt2.md@9e64ede:390` is a line of the page.
        line = measurement.where.rpartition(":")[2]
        has_line = line.isdecimal() and first <= int(line) <= last
    return (
        has_model
        and measurement.gpu in case.get("gpus", [measurement.gpu])
        and measurement.dtype in case.get("bits", [measurement.dtype])
        and release >= case.get("since", 0)
        and case.get("noted", "") in measurement.notes
        and has_line
    )


def facts_for_fields(kind: type, *facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that are named as fields of the data class `kind`; later facts replace earlier ones."""
    names = {field.name for field in fields(kind)}
    selected: dict[str, Any] = {}
    for known in facts:
        selected |= {name: value for name, value in known.items() if name in names}
    return selected


def origin_of_source(source: str) -> str:
    """Return the source that first published the figures of `source`, or `source` itself if it is the first.

    A fit without a source leaves out all sources with the same origin.
    """
    return str(_read_source(source).get("origin", source))


def container_release(measurement: PublishedMeasurement, facts: Mapping[str, Any]) -> float:
    """Return the release of NVIDIA's container that a measurement used, such as 26.06, or 0 if unknown.

    The notes of the measurement state the release. Otherwise the source's fact `released` gives it for parts of the
    measurement's path. A column `release` of the measurement replaces both.
    """
    stated = dict(measurement.facts).get("release")
    if isinstance(stated, float):
        return stated
    noted = re.search(r"release (\d+\.\d+)", measurement.notes)
    if noted:
        return float(noted[1])
    releases: dict[str, float] = facts.get("released", {})
    return next((release for part, release in releases.items() if part in measurement.where), 0.0)


@cache
def model_facts(model: str) -> dict[str, Any]:
    """Return the facts about a model from `models.yaml`. The result is empty if no entry of the file matches.

    An entry matches if the model's name begins with the entry's name. The entry with the longest name is taken.
    """
    name = re.sub("^llama-", "llama", model.lower().replace("_", "-")).replace(
        "llama31", "llama3.1"
    )
    models = model_entries()
    matches = [key for key in models if name.startswith(key)]
    return models[max(matches, key=len)] if matches else {}


def model_entries() -> dict[str, dict[str, Any]]:
    """Return the entries of `models.yaml`, by name."""
    return _read_facts("models")


@cache
def hub_names() -> dict[str, str]:
    """Return the names of models by their ids on the Hugging Face hub, from `models.yaml`."""
    return dict(read_yaml(Path(__file__).with_name("models.yaml"))["hub"])


def _read_source(source: str) -> dict[str, Any]:
    """Return the facts of a source from `sources.yaml`.

    An entry matches if the source's name begins with the entry's name. The entry with the longest name is taken. Facts
    that this entry lacks come from the entry with the empty name, which has the defaults.
    """
    sources = _read_facts("sources")
    return {**sources[""], **sources[_find_source(source)]}


def _find_source(source: str) -> str:
    """Return the longest name in `sources.yaml` with which a source's name begins; empty for an unknown source."""
    return max((name for name in _read_facts("sources") if source.startswith(name)), key=len)


@cache
def _read_facts(table: str) -> dict[str, dict[str, Any]]:
    """Return the entries of `models.yaml` or `sources.yaml`, by name."""
    return dict(read_yaml(Path(__file__).with_name(f"{table}.yaml"))[table])

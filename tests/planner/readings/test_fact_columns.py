"""Columns of a user's rows state the facts that `sources.yaml` has for known sources."""

from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from parakit.planner.readings.fact_columns import FACT_COLUMNS
from parakit.planner.readings.facts import assumed_facts, source_facts
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.residual import compute_residual
from parakit.planner.readings.table import (
    COLUMNS,
    MeasurementsError,
    PublishedMeasurement,
    read_measurements,
)
from tests.planner.readings.test_validate import file_of, parse_single_row
from tests.program import run_plan as main

_DEGREES = {"tp", "pp", "vpp", "ep", "mbs"}
"""Facts of `sources.yaml` that replace columns of a row. A row of the user states them in these columns."""


def state_facts(measurement: PublishedMeasurement) -> PublishedMeasurement:
    """Return a measurement of an unknown source that states in columns what its own source's entry says."""
    facts = source_facts(measurement)
    spec, execution = (
        convert_measurement(measurement).spec,
        convert_measurement(measurement).cluster.execution,
    )
    stated = {
        # A column holds several numbers as a tuple, and `sources.yaml` as a list.
        name: tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
        if name in FACT_COLUMNS
    }
    stated |= {"graphs": execution.graphs, "peft": str(spec.lora or "none")}
    return replace(
        measurement,
        source="somebody else",
        facts=tuple(stated.items()),
        recompute=measurement.recompute or facts["recompute"],
        vocab=measurement.vocab or facts.get("vocab"),
        counts=measurement.counts or facts["counts"],
        vpp=measurement.vpp if "vpp" not in facts else spec.parallelism.virtual_stages,
    )


def test_another_name_of_the_source_changes_no_prediction_if_columns_state_the_facts() -> None:
    sources = set()
    for measurement in read_measurements()[0]:
        facts = source_facts(measurement)
        try:
            run = convert_measurement(measurement)
        except RefusedError:
            continue
        has_flags = measurement.flags or "golden values" in measurement.source
        is_first = (measurement.source, measurement.model, measurement.gpu) not in sources
        if has_flags or not is_first or _DEGREES & facts.keys() or "misprinted_pipeline" in facts:
            continue
        sources.add((measurement.source, measurement.model, measurement.gpu))
        relabelled = convert_measurement(state_facts(measurement))
        assert relabelled.spec == run.spec
        assert relabelled.cluster.execution == run.cluster.execution
        assert (relabelled.cluster.inter, relabelled.cluster.per_node) == (
            run.cluster.inter,
            run.cluster.per_node,
        )
        assert relabelled.unstated == run.unstated
    assert len(sources) > 150


def test_a_cell_that_is_no_value_of_its_fact_is_named(tmp_path: Path) -> None:
    for column, text, expected in (
        ("overlap", "perhaps", "'perhaps' is not yes or no"),
        ("network_gb_per_second", "-3", "'-3' is not a number of at least 0"),
        ("mtp_layers", "1.5", "'1.5' is not a whole number"),
        ("groups", "8", "'8' is not two whole numbers such as 8 4"),
    ):
        with pytest.raises(MeasurementsError, match=f"row 2, column {column}: {expected}"):
            parse_single_row(tmp_path, **{column: text})


def test_the_old_column_of_frozen_weights_is_refused_with_its_present_name(tmp_path: Path) -> None:
    with pytest.raises(MeasurementsError, match="the column frozen, which is peft now"):
        read_measurements(file_of(tmp_path, {"frozen": "yes"}, columns=(*COLUMNS, "frozen")))


def test_columns_replace_the_facts_of_a_known_source(tmp_path: Path) -> None:
    known = {"source": "NVIDIA-NeMo/Megatron-Bridge"}
    as_known = parse_single_row(tmp_path, **known)
    changed = parse_single_row(tmp_path, **known, half_gradients="no", sharding="none")
    assert convert_measurement(as_known).spec.state_types.gradients == "bf16"
    assert convert_measurement(changed).spec.state_types.gradients == ""
    assert not convert_measurement(changed).spec.parallelism.sharding


def test_release_of_the_container_is_a_column(tmp_path: Path) -> None:
    changes = {"source": "NVIDIA-NeMo/Megatron-Bridge", "model": "llama3-8b", "gpu": "B200"}
    graphs = [
        convert_measurement(
            parse_single_row(tmp_path, **changes, release=release)
        ).cluster.execution.graphs
        for release in ("25.04", "25.11")
    ]
    assert graphs == [False, True]


def test_facts_that_nobody_states_are_listed_for_unknown_sources_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = parse_single_row(tmp_path, overlap="no")
    assert "overlap" not in assumed_facts([unknown])
    assert assumed_facts([unknown])["sharding"] == "zero1"
    assert not assumed_facts([replace(unknown, source="NVIDIA-NeMo/Megatron-Bridge")])
    main(["validate", "--readings", str(file_of(tmp_path, {"overlap": "no"}))])
    text = " ".join(capsys.readouterr().out.split())
    assert "no known source. Assumed for them:" in text
    assert "sharding zero1" in text
    assert "overlap yes" not in text


def test_packed_documents_of_unknown_length_are_refused_and_shorten_attention(
    tmp_path: Path,
) -> None:
    sample = {"seq": "16384", "value": "20"}
    packed = sample | {"notes": "packed to 16384"}
    with pytest.raises(RefusedError, match="state their mean number of tokens in the column doc"):
        convert_measurement(parse_single_row(tmp_path, **packed))
    whole, short = (
        compute_residual(
            convert_measurement(parse_single_row(tmp_path, **packed, document_length=length))
        )
        for length in ("16384", "1024")
    )
    plain = compute_residual(convert_measurement(parse_single_row(tmp_path, **sample)))
    assert whole.seconds == plain.seconds
    assert short.seconds is not None
    assert whole.seconds is not None
    assert short.seconds < 0.8 * whole.seconds


def test_page_of_published_measurements_lists_every_fact_column() -> None:
    page = (ROOT / "src/parakit/planner/readings/README.md").read_text()
    assert [name for name in FACT_COLUMNS if f"`{name}`" not in page] == []

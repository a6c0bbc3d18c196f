import pytest

from parakit.experiments.load import load_experiment
from parakit.experiments.tables import backends as compare_backends
from parakit.experiments.tables import zero as compare_zero
from parakit.launch.options import Options
from parakit.reporting.analyse.entry import Entry
from tests.reporting.factory import report_row


def measured(backend: str, strategy: str, milliseconds: float, **changes: object) -> Entry:
    values: dict[str, object] = {
        "peak_bytes": 100_000_000,
        "sent_bytes": 50_000_000,
        "nccl_bytes": 30_000_000,
        "communication_seconds": 0.1,
        "pass_seconds_without_communication": 0.08,
        "overhead": 0.5,
        "published_fractions": (0.25, 0.5, 0.25),
        "final_loss": 9.0,
        "implementation": "Megatron-LM 0.19.0 (commit abc)",
    }
    return report_row(strategy, milliseconds, backend=backend, **{**values, **changes})  # type: ignore[arg-type]


def cells(text: str, name: str, table: int = 0) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in lines[table].strip("|").split("|")]


def test_bandwidth_is_sent_bytes_over_communication_time() -> None:
    assert measured("megatron", "dp2", 100).implied_gigabits == pytest.approx(4.0)
    assert measured("megatron", "dp2", 100, communication_seconds=None).implied_gigabits is None


def test_each_measured_value_is_next_to_the_published_one() -> None:
    runs = [
        measured("megatron", "dp2", 100, peak_bytes=200_000_000),
        measured("megatron", "zero2", 200),
    ]
    text = compare_zero.render("gpt3-64m", runs)
    row = cells(text, "ZeRO-2")
    assert row[3] == "100.0 MB (1.62 GB)"
    assert row[4].endswith("(2861)")
    assert row[5] == "40 (2.8)"
    assert row[6] == "0.50x (0.42x)"
    assert cells(text, "ZeRO-2", 1)[1:] == ["25.0%", "50.0% (79.2%)", "25.0%"]
    assert cells(text, "ZeRO-2", 2)[1:] == [
        *("−50% (+9%)", "50.0 MB", "30.0 MB", "100.0 ms", "4.00 Gbit/s")
    ]
    assert "ZeRO-2: Megatron-LM 0.19.0 (commit abc)" in text


def test_published_transfers_are_next_to_the_sent_bytes() -> None:
    text = compare_zero.render("gpt3-355m", [measured("megatron", "zero3", 200)])
    row = cells(text, "ZeRO-3", 2)
    assert row[2] == "50.0 MB (700 MB)"
    assert row[4:] == ["100.0 ms (11 s)", "4.00 Gbit/s (0.5 Gbit/s)"]


def test_unpublished_model_has_no_published_values() -> None:
    text = compare_zero.render("gpt2-tiny", [measured("megatron", "dp2", 100)])
    assert "has figures of gpt3-64m and gpt3-355m, none of gpt2-tiny." in text
    assert not any("(" in cell for cell in cells(text, "Baseline"))
    published = compare_zero.render("gpt3-64m", [measured("megatron", "dp2", 100)])
    assert any("(" in cell for cell in cells(published, "Baseline"))


def test_a_failed_run_has_dashes_and_no_speedup() -> None:
    failed = measured(
        "megatron",
        "zero3",
        1,
        status="crashed",
        samples_ms=(),
        peak_bytes=None,
        sent_bytes=None,
        communication_seconds=None,
        published_fractions=(),
    )
    row = cells(compare_zero.render("gpt3-64m", [measured("megatron", "dp2", 1), failed]), "ZeRO-3")
    assert row[1] == "crashed"
    assert [cell.partition(" ")[0] for cell in row[3:]] == ["–"] * 4


def test_overhead_is_relative_to_the_passes_of_the_run_and_next_to_the_bare_time() -> None:
    runs = [measured("megatron", "dp2", 120), measured("bare", "dp2", 100)]
    text = compare_backends.render("gpt2-tiny", runs)
    assert cells(text, "megatron")[5:8] == ["80.0 ms", "+50.0%", "+20.0%"]
    assert cells(text, "bare")[7] == "–"


def test_faster_is_reported_with_its_ratio_only_beyond_the_noise() -> None:
    runs = [measured("megatron", "dp2", 110), measured("native", "dp2", 100)]
    assert compare_backends.describe_pairs(runs) == [
        "native dp2 against megatron dp2: 10.0% faster on this machine."
    ]
    alike = [measured("megatron", "dp2", 100), measured("native", "dp2", 100)]
    assert "which is within noise" in compare_backends.describe_pairs(alike)[0]


def test_missing_runs_are_reported() -> None:
    text = compare_backends.render("gpt2-tiny", [], ("DeepSpeed is left out: why.",))
    assert "- DeepSpeed is left out: why." in text


def test_speedup_within_noise_is_marked() -> None:
    runs = [measured("megatron", "dp2", 100), measured("megatron", "zero1", 100.02)]
    text = compare_zero.render("gpt3-64m", runs)
    assert cells(text, "ZeRO-1")[6] == "1.00x, within noise (0.68x)"
    assert cells(text, "Baseline")[6] == "1.00x (1.00x)"
    few = [measured("megatron", name, 100, samples_ms=(100.0,)) for name in ("dp2", "zero1")]
    few_text = compare_zero.render("gpt3-64m", few)
    assert cells(few_text, "ZeRO-1")[6] == "1.00x, too few samples (0.68x)"


def equal_terms(model: str, overrides: Options) -> Options:
    return load_experiment("zero", overrides, model).options


def test_published_models_get_their_published_batches_without_dropout() -> None:
    small, large = (equal_terms(name, Options()) for name in ("gpt3-64m", "gpt3-512m"))
    assert (small.micro_batch_size, small.global_batch_size) == (2, 8)
    assert (large.micro_batch_size, large.global_batch_size) == (2, 16)
    assert small.dropout == 0
    assert equal_terms("gpt2-tiny", Options(global_batch_size=4)).global_batch_size == 4


def test_column_recommends_the_winner_or_the_one_with_least_memory_within_noise() -> None:
    runs = [
        measured("megatron", "dp2", 100, peak_bytes=300_000_000),
        measured("megatron", "zero1", 100.1, peak_bytes=200_000_000),
        measured("megatron", "zero3", 300, peak_bytes=100_000_000, sent_bytes=3_000_000),
    ]
    assert compare_zero.describe_winners(runs) == [
        "Least memory: ZeRO-3, 100.0 MB.",
        "Least sent: ZeRO-3, 3.0 MB per iteration.",
        "Fastest: Baseline; within noise of it: ZeRO-1.",
        "Use ZeRO-1: of Baseline and those within noise of it, it takes the least memory.",
    ]
    assert compare_zero.describe_winners([*runs[2:], measured("megatron", "pp2", 100)])[2:] == [
        "Fastest: Pipeline, beyond the noise.",
        "Use Pipeline: nothing is within noise of it.",
    ]
    assert compare_zero.describe_winners([]) == []

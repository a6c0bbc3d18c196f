import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryCategory,
    RankCommunication,
    RankTime,
    TimeRecord,
)
from parakit.artifacts.run import RUN_FILE
from parakit.config.strategy import Parallelism, Sharding
from parakit.costs.operations import Phase
from parakit.formatting.units import amount, joined, milliseconds, number, signed
from parakit.reporting.explain.costs import costs_above_fair_time
from parakit.reporting.explain.explanation import (
    NOTHING,
    Explanation,
    explain,
    explanation_markdown,
)
from parakit.reporting.render.files import FinishedReport, write_report
from tests.program import run_report as main
from tests.reporting.factory import run_record
from tests.reporting.ledger_factory import (
    communication,
    held,
    report_of,
    seconds,
    write,
    write_calls,
    write_memory,
    write_times,
)

WORK = {Phase.FORWARD: 0.04, Phase.BACKWARD: 0.05, Phase.OPTIMIZER: 0.01}
COST = "Which cost separates each strategy from baseline?"


def answers(*folders: Path) -> dict[str, tuple[str, ...]]:
    return {topic.question: topic.sentences for topic in explain(report_of(*folders)).topics}


def sentence(question: str, *folders: Path) -> str:
    return " ".join(answers(*folders)[question])


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    folder = write(tmp_path, "baseline")
    write_times(folder, seconds(0, WORK))
    return folder


def test_costs_are_above_a_share_of_baseline_and_sum_to_the_difference() -> None:
    reference = TimeRecord((seconds(0, WORK),))
    half = {phase: 0.5 * value for phase, value in WORK.items()}
    ranks = [seconds(0, half | {Phase.PIPELINE: 0.03}), seconds(1, half | {Phase.PIPELINE: 0.01})]
    costs = costs_above_fair_time(reference, TimeRecord(tuple(ranks)), 0.5)
    assert next(iter(costs)) == "waiting for other pipeline stages"
    assert costs["waiting for other pipeline stages"] == pytest.approx(0.02)
    assert sum(costs.values()) == pytest.approx(0.02)


def test_largest_cost_is_named_with_its_numbers(baseline: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2", times=(85.0,) * 9)
    phases = {Phase.FORWARD: 0.02, Phase.BACKWARD: 0.025, Phase.GRADIENT_SYNC: 0.03}
    phases |= {Phase.OPTIMIZER: 0.01}
    write_times(folder, *(seconds(rank, phases) for rank in (0, 1)))
    assert answers(baseline, folder)[COST] == (
        "dp2 ×2: an iteration takes 85.00 ms; baseline's work divided over 2 ranks would take "
        "50.0 ms. The difference is 35.0 ms: +30.0 ms gradient sync and +5.0 ms all other parts, "
        "within noise.",
    )


def test_an_iteration_takes_what_its_row_says_and_the_ledger_says_of_what(
    tmp_path: Path, baseline: Path
) -> None:
    """The ledger's means are of other iterations than the row's median: here 170 ms and 85 ms."""
    folder = write(tmp_path, "dp2", times=(85.0,) * 9)
    phases = {Phase.FORWARD: 0.04, Phase.BACKWARD: 0.05, Phase.GRADIENT_SYNC: 0.06}
    phases |= {Phase.OPTIMIZER: 0.02}
    write_times(folder, *(seconds(rank, phases) for rank in (0, 1)))
    report = report_of(baseline, folder)
    (row,) = (entry for entry in report.entries if entry.run.strategy == "dp2")
    assert row.estimate is not None
    assert f"an iteration takes {number(row.estimate.median)} ms" in sentence(
        COST, baseline, folder
    )
    assert "+30.0 ms gradient sync and +5.0 ms all other parts" in sentence(COST, baseline, folder)
    (table,) = (t for t in explain(report).tables if t.name == "time-shares")
    assert [line[2] for line in table.lines] == ["100.0", "85.0"]


def test_a_difference_within_noise_names_no_cost(tmp_path: Path, baseline: Path) -> None:
    folder = write(tmp_path, "dp2", times=(50.0, 70.0, 40.0, 60.0, 30.0) * 4)
    write_times(folder, seconds(0, {Phase.FORWARD: 0.055}))
    sentence_text = sentence(COST, baseline, folder)
    assert "which is within noise (a difference below " in sentence_text
    assert "so no cost can be named." in sentence_text


def test_too_few_iterations_name_no_cost(tmp_path: Path, baseline: Path) -> None:
    folder = write(tmp_path, "dp2", times=(90.0,) * 4)
    write_times(folder, seconds(0, {Phase.FORWARD: 0.055}))
    assert "too few iterations were timed for a verdict" in sentence(COST, baseline, folder)


def test_arithmetic_faster_than_its_share_is_another_machine(
    tmp_path: Path, baseline: Path
) -> None:
    folder = write(tmp_path, "tp2", times=(210.0,) * 9)
    write_times(folder, seconds(0, {Phase.FORWARD: 0.01, Phase.PIPELINE: 0.2}))
    assert "the machine was not the same for both runs" in sentence(COST, baseline, folder)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        (2, "each rank had a core of its own, so the cause is smaller matrices, memory"),
        (1, "2 ranks shared each core, which explains up to 45.0 ms, and 110 ms of it not."),
    ],
)
def test_slower_arithmetic_is_split_by_the_cores_that_ranks_share(
    tmp_path: Path, baseline: Path, cores: int, message: str
) -> None:
    host = replace(run_record("x").host, cores=cores)
    folder = write(tmp_path, "tp2", times=(210.0,) * 9, host=host)
    write_times(folder, seconds(0, {Phase.FORWARD: 0.2, Phase.OPTIMIZER: 0.01}))
    text = sentence(COST, baseline, folder)
    assert "+180 ms forward without communication" in text
    assert f"The largest part is arithmetic itself, 155 ms in all: {message}" in text


def test_without_baseline_or_its_ledger_no_cost_is_named(tmp_path: Path, baseline: Path) -> None:
    folder = write(tmp_path, "tp2")
    write_times(folder, seconds(0, WORK))
    assert "there is no baseline run" in sentence(COST, folder)
    (baseline / "time.json").unlink()
    assert "baseline ×1 left no usable time.json" in sentence(COST, baseline, folder)


def test_traffic_names_what_is_sent_and_what_is_not_attributed(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    record = communication(folder)
    write_calls(folder, record)
    question = "What does each strategy send?"
    text = sentence(question, folder)
    assert "13.06 MiB in 2 all_reduce of dp_cp (gradients; loss and its token count)" in text
    assert "for this rank it has 13,694,476 bytes, measured are 13,694,476." in text
    fewer = replace(record.ranks[0], calls=record.ranks[0].calls[:-1])
    write_calls(folder, replace(record, ranks=(fewer, record.ranks[1])))
    assert "Not attributed: 1 all_reduce" in sentence(question, folder)
    assert "predicted and not made" in sentence(question, folder)


def test_context_parallelism_is_compared_with_tensor_parallelism(tmp_path: Path) -> None:
    folders = [write(tmp_path, name) for name in ("cp2", "tp2")]
    for folder in folders:
        write_calls(folder, communication(folder))
    text = sentence("How does context parallelism compare with tensor parallelism?", *folders)
    assert "2 MiB instead of 2.256 MiB on the wire (11% less), in 96 instead of 84" in text
    assert "This run cannot show how much of a ring's communication overlaps" in text


def test_pipeline_sentences_say_what_more_micro_batches_would_do(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2", times=(500.0,) * 9)
    phases = {Phase.FORWARD: 0.1, Phase.BACKWARD: 0.3, Phase.PIPELINE: 0.1}
    write_times(folder, *(seconds(rank, phases) for rank in (0, 1)))
    text = sentence("What does the pipeline wait for, and would more micro batches help?", folder)
    assert "with 4 micro batches and equal stages the bubble is (2−1)/4 = 25.0%" in text
    assert "Measured, sending and waiting take 25.0% on rank 0 and 25.0% on rank 1" in text
    assert "8 would take 112 ms (−10.0%, (p−1)/m = 12.5%)" in text
    (folder / "time.json").unlink()
    write_calls(folder, communication(folder))
    text = sentence("What does the pipeline wait for, and would more micro batches help?", folder)
    assert "no usable time.json to compare it with" in text


def test_uneven_pipeline_memory_is_named_by_category(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2")
    weights = {MemoryCategory.WEIGHTS: 5 << 20}
    write_memory(
        folder,
        held(0, weights, Phase.OPTIMIZER, peaks={Phase.FORWARD: 8 << 20}),
        held(1, weights | {MemoryCategory.LOGITS: 24 << 20}),
    )
    text = sentence("Why is a pipeline's memory uneven?", folder)
    assert "rank 1 peaks at 29 MiB (in backward, output_layer), rank 0 peaks at 5 MiB" in text
    assert "the 24 MiB between them are +24 MiB logits" in text
    assert "the tied embedding's 3,219,456 elements are on the first stage" in text
    assert "rank 0 2 micro batches, in closed form 2.5 MiB of activations, measured 3 MiB" in text


def test_ledger_of_one_stage_compares_no_stages(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2")
    write_memory(folder, held(0, {MemoryCategory.WEIGHTS: 1}))
    text = sentence("Why is a pipeline's memory uneven?", folder)
    assert "no memory.json of two ranks" in text


def test_sequence_parallelism_saves_what_norms_keep(tmp_path: Path) -> None:
    question = "What does sequence parallelism save?"
    tp2, sp2 = write(tmp_path, "tp2"), write(tmp_path, "sp2")
    write_memory(tp2, held(0, {}, kept={"decoder.final_layernorm": 2048, "loss": 9}))
    write_memory(sp2, held(0, {}, kept={"decoder.final_layernorm": 1024, "loss": 99}))
    text = sentence(question, tp2, sp2)
    assert "1 KiB less, where the closed form has 1.125 MiB" in text
    assert "The final norm alone: 2 KiB to 1 KiB." in text
    assert "there is no tp2 run of this batch" in sentence(question, sp2)


def test_sharded_optimizer_is_compared_with_plain_data_parallelism(tmp_path: Path) -> None:
    plain, sharded = write(tmp_path, "dp2"), write(tmp_path / "z", "dp2")
    record = json.loads((sharded / RUN_FILE).read_text())
    split = Parallelism(data=2, sharding=Sharding.ZERO1)
    record |= {"strategy": "zero1", "run": "z", "argv": [*record["argv"], "--sharded"]}
    record["parallelism"] |= {"sharding": split.sharding.value}
    (sharded / RUN_FILE).write_text(json.dumps(record))
    write_memory(plain, held(0, {MemoryCategory.OPTIMIZER_STATE: 2048}))
    write_memory(sharded, held(0, {MemoryCategory.OPTIMIZER_STATE: 1024}))
    text = sentence("What does sharding the optimizer save?", plain, sharded)
    assert "optimizer state 2 KiB to 1 KiB; the peak 2 KiB to 1 KiB." in text


def test_without_any_ledger_there_is_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, "tp2")
    assert explain(report_of(folder)) == Explanation()
    assert explanation_markdown(Explanation()) == ""
    assert main(["explain", str(folder)]) == 0
    assert " ".join(capsys.readouterr().out.split()) == NOTHING
    assert main(["explain", "--runs", str(tmp_path / "none")]) == 1


def test_tables_merge_equal_ranks_and_say_what_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    write_calls(folder, communication(folder))
    tables = {table.name: table for table in explain(report_of(folder)).tables}
    assert [line[:4] for line in tables["calls"].lines] == [
        ("dp2 ×2", "0, 1", "dp_cp", "all_reduce"),
        ("dp2 ×2", "0, 1", "world", "all_reduce"),
    ]
    assert tables["calls"].lines[0][-3:] == ("13,694,472", "13,694,472", "0")
    assert [line[2] for line in tables["missing"].lines] == [
        "no usable memory.json",
        "no time.json",
    ]
    assert "unattributed" not in tables


def test_report_has_the_explanation_in_every_form(tmp_path: Path, baseline: Path) -> None:
    folder = write(tmp_path, "dp2", model="gpt2-tiny<b>")
    write_times(folder, seconds(0, WORK))
    write_report(FinishedReport(report_of(baseline, folder)), tmp_path / "report")
    page, markdown, data = (
        (tmp_path / "report" / name).read_text()
        for name in ("report.html", "report.md", "results.json")
    )
    assert "<b>" not in page
    assert "Where each rank&#39;s iteration goes" in page
    assert "### Where each rank's iteration goes" in markdown
    evidence = json.loads(data)["explanation"]["evidence"]
    assert evidence["run-dp2"]["shares"][0]["phases"]["forward"] == pytest.approx(0.4)


def test_amounts_keep_four_digits_and_a_true_minus() -> None:
    assert [amount(v) for v in (0, 12, 2048, 1.5 * 2**20, -(2**30))] == [
        *("0 bytes", "12 bytes", "2 KiB", "1.5 MiB", "−1 GiB")
    ]
    assert (signed("2 KiB"), signed("-2.1%")) == ("+2 KiB", "−2.1%")
    assert (milliseconds(0.1234), milliseconds(-0.01)) == ("123 ms", "−10.0 ms")
    assert [joined(p) for p in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        *("", "a", "a and b", "a, b and c")
    ]


def with_split(folder: Path, strategy: str, split: Parallelism) -> Path:
    record = json.loads((folder / RUN_FILE).read_text())
    record["parallelism"] = msgspec.to_builtins(split)
    record |= {"strategy": strategy, "run": strategy}
    (folder / RUN_FILE).write_text(json.dumps(record))
    return folder


def test_a_sharded_product_is_compared_with_the_same_product_unsharded(tmp_path: Path) -> None:
    product = Parallelism(data=2, tensor=2)
    whole = with_split(write(tmp_path / "a", "tp2"), "tp2dp2", product)
    replicas = with_split(write(tmp_path / "b", "dp2"), "dp4", Parallelism(data=4))
    sharded = with_split(
        write(tmp_path / "c", "tp2"), "tp2dp2-zero1", replace(product, sharding=Sharding.ZERO1)
    )
    for folder, size in ((whole, 2048), (replicas, 9999), (sharded, 1024)):
        write_memory(folder, held(0, {MemoryCategory.OPTIMIZER_STATE: size}))
    text = sentence("What does sharding the optimizer save?", whole, replicas, sharded)
    assert text.startswith("tp2dp2-zero1 ×4 against tp2dp2 ×4, rank 0")
    assert "optimizer state 2 KiB to 1 KiB" in text


def test_experts_under_tensor_parallelism_are_not_compared_with_themselves(tmp_path: Path) -> None:
    split = Parallelism(data=2, tensor=2, expert=2, sequence_parallel=True)
    folder = with_split(write(tmp_path, "sp2"), "tp2ep2", split)
    write_memory(folder, held(0, {}, kept={"decoder.final_layernorm": 1024}))
    questions = [topic.question for topic in explain(report_of(folder)).topics]
    assert "What does sequence parallelism save?" not in questions


def test_a_run_that_crashed_before_a_steady_iteration_has_no_figures(
    tmp_path: Path, baseline: Path
) -> None:
    folder = write(tmp_path, "dp2")
    write_times(folder, *(RankTime(rank, 0.0, {}, {}) for rank in (0, 1)))
    empty = [RankCommunication(rank, 0, 0, ()) for rank in (0, 1)]
    write_calls(folder, CommunicationRecord(tuple(empty)))
    write_memory(folder)
    sentence_text = sentence(COST, folder, baseline)
    assert (
        sentence_text == "dp2 ×2: dp2 ×2 left no usable time.json, so its cost cannot be split up."
    )
    assert "there is no comm.json" in sentence("What does each strategy send?", folder, baseline)
    (row,) = (entry for entry in report_of(folder, baseline).entries if entry.run.strategy == "dp2")
    assert row.sent_bytes is row.nccl_bytes is row.communication_seconds is None

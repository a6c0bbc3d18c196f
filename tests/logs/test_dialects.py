"""Logs of trainers derived from Megatron: all values of their lines are read, or a sentence names the reason."""

import bz2
import gzip
import json
import lzma
import subprocess
import textwrap
from pathlib import Path

import pytest
import zstandard

from parakit.artifacts.run import Status
from parakit.config.strategy import Sharding
from parakit.logs.diagnosis import classify_log
from parakit.logs.dialects import find_iterations
from parakit.logs.printed import drop_unreadable_values
from parakit.logs.runs import load_log
from parakit.logs.scrape import scrape_log, scrape_runs
from tests.reporting.factory import iteration_line

DIALECTS = Path(__file__).parents[1] / "reporting" / "dialects"
LOGS = Path(__file__).parents[1] / "reporting" / "logs"
FIELDS = ("iteration", "elapsed_ms", "lm_loss", "throughput_tflops_per_gpu", "global_batch_size")
EXPECTED = {
    "megatron-1": [
        (100, 143.1, 10.22573, None, None),
        (200, 123.4, 10.12573, None, None),
        (300, 124.2, 9.912573, None, None),
    ],
    "megatron-2": [(30, 123.4, 10.12573, None, 4), (40, 124.0, 10.02573, None, 4)],
    "megatron-deepspeed": [
        (199, 14287.5, 5.905366, 69.85, 768),
        (200, 14541.4, 5.897035, 68.63, 768),
    ],
    "bigscience": [
        (13910, 11180.0, 2.152785, 40.83, 1024),
        (13911, 10070.0, 2.148816, 45.33, 1024),
    ],
    "primus": [
        (125, 13100.0, 6.748988e-3, 579.4, 128),
        (126, 13372.8, 6.548988e-3, 567.6, 128),
    ],
    "gpt-neox": [(10, 2630.3, 10.93458, 48.6, None), (20, 2559.9, 10.21245, 49.9, None)],
    "nemo-2": [
        (0, 7126.0, 1.315, None, 8),
        (1, 2505.0, 1.653, None, 8),
        (2, 2516.0, 1.452, None, 8),
    ],
    "mlperf": [(32, 335.6, 8.1666, None, None), (64, 340.4, 7.7411, None, None)],
    # The time of a block divided by its steps: blocks of 384 and 43 samples, and of 24 * 2**21 tokens.
    "mlperf-samples": [
        (384, (1759966614209 - 1759966206549) / 384, None, None, 32),
        (768, (1759967026079 - 1759966624658) / 384, None, None, 32),
    ],
    "mlperf-steps": [
        (350, None, 9.61087703704834, None, None),
        (380, None, 8.964824676513672, None, None),
        (387, (1759852231189 - 1759852223332) / 43, None, None, 9),
    ],
    "mlperf-tokens": [
        (240, (1709189542631 - 1709189256857) / 12, None, None, 2048),
        (252, (1709189828410 - 1709189542631) / 12, None, None, 2048),
    ],
    "verl": [(4, 161077.8, None, None, None), (5, 158500.0, None, None, None)],
    "slime": [(0, 60000.0, None, 91.2, None), (1, 43900.0, None, 93.2, None)],
    # The first iteration took 40 s, the second 10 s, the next two 22 s in total.
    "ms-swift": [
        (1, 40000.0, 2.2258, None, None),
        (2, 10000.0, 2.1258, None, None),
        (4, 11000.0, 2.0258, None, None),
    ],
    "nanotron": [(1, 4390, 11, 5.44, None), (2, 1210, 10.8, 19.7, None)],
    "torchtitan": [(1, None, 8.1309, 0.42, None), (10, 10000 / 9, 4.2046, 7.21, None)],
    "megatron-bridge": [(2, 9812.3, 11.9, 301.4, 512), (3, 8021.0, 11.8, 368.7, 512)],
}


def lines_of(path):
    return [tuple(getattr(i, name) for name in FIELDS) for i in scrape_log(path).iterations]


@pytest.mark.parametrize("name", EXPECTED)
def test_iterations_of_every_dialect_are_read(name):
    assert lines_of(DIALECTS / f"{name}.log") == EXPECTED[name]


def test_mlperf_log_states_batch_sequence_evaluation_and_end():
    (run,) = load_log(DIALECTS / "mlperf.log")
    assert (run.seq_length, run.global_batch_size) == (8192, 16)
    assert run.log.validation[0].losses == {"eval accuracy": 3.287}
    assert (run.status.status, run.log.generation.trainer) == (Status.OK, "MLPerf")


@pytest.mark.parametrize("lost", ["block_start", "global_batch_size"])
def test_block_without_beginning_or_batch_size_is_no_iteration(tmp_path, lost):
    lines = (DIALECTS / "mlperf-samples.log").read_text().splitlines(keepends=True)
    path = tmp_path / "a.log"
    path.write_text("".join(line for line in lines if f'"{lost}"' not in line))
    log = scrape_log(path)
    assert log.iterations == ()
    assert "looks like a log of MLPerf's results" in classify_log(log).reason


def mllog(key, value, **about):
    record = {"namespace": "", "time_ms": 7, "key": key, "value": value, "metadata": about}
    return f":::MLLOG {json.dumps(record)}\n"


def test_step_number_without_sample_count_is_an_iteration(tmp_path):
    """NVIDIA's Llama 3.1 405B of MLPerf 5.0 counts samples; its GPT-3 of MLPerf 4.1 counts tokens."""
    head = mllog("init_start", None) + mllog("global_batch_size", 4)
    head += mllog("max_sequence_length", 8)
    steps = "".join(mllog("tracked_stats", {"train_step_time": 0.5}, step=n) for n in (32, 64, 65))
    path = tmp_path / "a.log"
    for benchmark, numbers in (("llama31_405b", [8, 16]), ("gpt3", [1, 2])):
        path.write_text(head + mllog("submission_benchmark", benchmark) + steps)
        assert [iteration.iteration for iteration in scrape_log(path).iterations] == numbers


def test_time_printed_with_a_rate_is_the_mean_of_its_block(tmp_path):
    head = mllog("init_start", None) + mllog("global_batch_size", 4)
    means = [
        ({"throughput": 8.0, "train_step_time": time}, step) for time, step in ((0.5, 0), (0.6, 8))
    ]
    path = tmp_path / "a.log"
    path.write_text(
        head + "".join(mllog("tracked_stats", stats, step=step) for stats, step in means)
    )
    iterations = scrape_log(path).iterations
    assert [(iteration.iteration, iteration.elapsed_ms) for iteration in iterations] == [
        (1, 500.0),
        (3, 600.0),
    ]


def test_impossible_step_number_does_not_stop_reading(tmp_path):
    path = tmp_path / "a.log"
    text = (DIALECTS / "mlperf-samples.log").read_text()
    path.write_text(text.replace("1759966614209", "9" * 400))
    assert len(scrape_log(path).iterations) <= 2


def swift(number, mean, elapsed):
    return (
        f"{{'loss': 2.0, 'elapsed_time': '{elapsed}', 'train_speed(s/it)': {mean},"
        f" 'iteration': '{number}/99'}}"
    )


def test_mean_time_counts_from_the_resume(tmp_path):
    path = tmp_path / "a.log"
    steps = [(1, 20.0, "20s"), (2, 15.0, "30s"), (11, 40.0, "40s"), (12, 25.0, "50s")]
    path.write_text("".join(swift(*step) + "\n" for step in steps))
    iterations = scrape_log(path).iterations
    assert [iteration.elapsed_ms for iteration in iterations] == [
        20000.0,
        10000.0,
        40000.0,
        10000.0,
    ]


def test_elapsed_seconds_are_used_if_the_mean_is_rounded(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(swift(100, 10.0, "16m 40s") + "\n" + swift(101, 10.02, "16m 51s") + "\n")
    (_, second) = scrape_log(path).iterations
    # 10.02 times 101 is 1,012 s, while the printed elapsed time ends at 1,011 s: half a second remains.
    assert second.elapsed_ms == 11_500.0


def test_steps_printed_in_a_single_line_keep_their_numbers():
    first, second = find_iterations(swift(1, 20.0, "20s") + swift(2, 15.0, "30s"))
    assert (first.iteration, second.iteration) == (1, 2)
    torn, whole = (
        "step:3 - actor/grad_norm:0.5 - timing_s/gen:3",
        "step:4 - timing_s/step:7.5 - a/b:1\n",
    )
    (iteration,) = find_iterations(torn + whole)
    assert (iteration.iteration, iteration.elapsed_ms, iteration.grad_norm) == (4, 7500.0, None)
    assert find_iterations("step:4 - timing_s/step:7") == [], "a digit may be missing"


def test_policy_loss_is_not_read_as_language_model_loss():
    (first, _) = scrape_log(DIALECTS / "verl.log").iterations
    assert first.extra_metrics["actor/pg_loss"] == -0.0125
    assert (first.grad_norm, first.learning_rate) == (0.9375, 1e-6)
    line = "iteration 1/ 10 | consumed samples: 8 | loss: 0.5 | reward: 0.25 | kl: 0.01 |"
    (iteration,) = find_iterations(line)
    assert (iteration.lm_loss, iteration.extra_metrics["loss"]) == (None, 0.5)


def test_new_epoch_is_no_restart(tmp_path):
    line = (
        "Training epoch {}, iteration {}/1 | lr: 1.0e-06 | global_batch_size: 8 | global_step: {}"
        " | reduced_train_loss: 1.315 | train_step_timing in s: 2.5{}6"
    )
    steps = [(epoch, i, 2 * epoch + i) for epoch in range(3) for i in range(2)]
    path = tmp_path / "a.log"
    path.write_text("\n".join([*(line.format(*step, step[2]) for step in steps), ""]))
    (log,) = scrape_runs(path)
    assert [iteration.iteration for iteration in log.iterations] == [0, 1, 2, 3, 4, 5]
    assert log.restarts == ()
    assert [iteration.elapsed_ms for iteration in log.iterations][:2] == [2506.0, 2516.0]


@pytest.mark.parametrize(("end", "norm"), [("0.114", 0.114), ("0.11", None), ("0.114 |", 0.114)])
def test_last_number_without_separator_counts_if_complete(end, norm):
    line = f"iteration 1/ 10 | consumed samples: 8 | lm loss: 1.5E+00 | grad norm: {end}"
    (iteration,) = find_iterations(line)
    assert (iteration.lm_loss, iteration.grad_norm) == (1.5, norm)


def test_arguments_under_another_heading_and_in_a_notebook_are_read(tmp_path):
    lines = [
        "------------------------ MindSpeed-LLM Arguments ------------------------",
        '      "  num_layers ...................................... 24\\n",',
        "  hidden_size ..................................... 1024",
        "-------------------- end of MindSpeed-LLM Arguments ---------------------",
        "  seq_length ...................................... 9",
        " successfully saved checkpoint at iteration   20000 to ckpt",
    ]
    path = tmp_path / "a.log"
    path.write_text("\n".join([*lines, iteration_line(1), ""]))
    log = scrape_log(path)
    assert log.arguments == {"num_layers": "24", "hidden_size": "1024"}
    assert [event.iteration for event in log.checkpoints] == [20000]


def test_unreadable_argument_loses_only_itself(tmp_path):
    whole = (DIALECTS / "megatron-deepspeed.log").read_text()
    more = [
        "  deepspeed ....................................... True",
        "  num_experts ..................................... [1]",
        "  num_key_value_heads ............................. 8",
        "  profile_step_start .............................. 2,3",
    ]
    path = tmp_path / "a.log"
    path.write_text(whole.replace("  hidden_size .", "\n".join([*more, "  hidden_size ."]), 1))
    (run,) = load_log(path)
    assert run.spec is not None
    assert (run.spec.shape.experts, run.spec.shape.query_groups) == (0, 8)
    assert run.spec.parallelism.data == 24
    assert run.notes == ("profile_step_start 2,3 cannot be read",)


def test_argument_list_without_a_size_defines_no_model(tmp_path):
    whole = (DIALECTS / "megatron-deepspeed.log").read_text()
    more = [f"  filler_{n} ".ljust(51, ".") + " 1" for n in range(100)]
    sizes = "  kv_channels ..................................... 128\n{}  hidden_size ."
    path = tmp_path / "a.log"
    for ffn, known in (("", False), ("  ffn_hidden_size ................. 5440\n", True)):
        text = whole.replace("  hidden_size .", sizes.format(ffn), 1)
        path.write_text(text.replace("  bf16 .", "\n".join([*more, "  bf16 ."]), 1))
        (run,) = load_log(path)
        assert (run.spec is not None) == known
        assert run.seq_length == 4096


def test_gpt_neox_world_size_is_the_number_of_gpus_set_later(tmp_path):
    path = tmp_path / "a.log"
    text = (DIALECTS / "gpt-neox.log").read_text()
    assert "global_num_gpus" in text
    path.write_text(
        text.replace("  global_num_gpus", "  world_size ..... None\n  global_num_gpus", 1)
    )
    (run,) = load_log(path)
    assert run.spec == load_log(DIALECTS / "gpt-neox.log")[0].spec


def test_other_numbers_of_a_line_keep_their_names():
    (first, _) = scrape_log(DIALECTS / "bigscience.log").iterations
    assert first.grad_norm == 0.114
    assert (first.skipped_iterations, first.consumed_samples) == (0, 14243840)
    assert first.extra_metrics == {"consumed tokens": 29171384320.0, "samples per second": 91.621}


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("lm-loss: 1.5E+00", 1.5),
        ("lm_loss: 1.5E+00", 1.5),
        ("loss: 1.5E+00", 1.5),
        ("loss: 9.5E+00 | lm loss: 1.5E+00", 1.5),
        ("sop loss: 1.5E+00", None),
    ],
)
def test_a_loss_is_read_under_each_of_its_names(text, loss):
    line = f"iteration= 1/ 10 | consumed samples: 8 | {text} | global batch size: 8 |"
    (iteration,) = find_iterations(line)
    assert (iteration.iteration, iteration.total_iterations, iteration.lm_loss) == (1, 10, loss)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("elapsed time per iteration (s): 0.4383", 438.3),
        ("elapsed time per iteration (ms): 13100.0/13240.9", 13100.0),
        ("elapsed time per iteration (ms): 346.3 (avg 340.8)", 346.3),
        ("elapsed time per iteration (ms): 13100.0/", None),
        ("elapsed time per iteration (ms): 1e300", None),
        ("elapsed time per iteration (min): 3.0", None),
    ],
)
def test_time_is_read_in_its_unit_and_iteration_time_has_precedence(text, ms):
    (iteration,) = find_iterations(f"iteration 1/ 10 | consumed samples: 8 | {text} |")
    assert iteration.elapsed_ms == ms


def test_old_argument_names_define_model_and_strategy():
    (run,) = load_log(DIALECTS / "megatron-1.log")
    assert run.spec is not None
    assert (run.spec.parallelism.tensor, run.spec.parallelism.data) == (2, 2)
    assert (run.spec.batch.micro_batch_size, run.global_batch_size) == (4, None)
    assert (run.spec.dtype, run.spec.shape.layers) == ("fp16", 24)


def test_gpt_neox_arguments_are_read_without_their_suffix():
    (run,) = load_log(DIALECTS / "gpt-neox.log")
    assert run.spec is not None
    split = run.spec.parallelism
    assert (split.tensor, split.pipeline, split.data) == (2, 2, 2)
    assert split.sharding is Sharding.ZERO1
    assert (run.spec.batch.micro_batch_size, run.global_batch_size) == (4, 64)
    assert (run.spec.dtype, run.spec.shape.positions, run.spec.shape.tied_embeddings) == (
        "fp16",
        0,
        False,
    )


def test_zero_stage_is_read_from_the_deepspeed_configuration():
    (run,) = load_log(DIALECTS / "megatron-deepspeed.log")
    assert run.strategy == "dp24-zero2"
    assert run.spec is not None
    assert run.spec.backend == "deepspeed"


@pytest.mark.parametrize(("zero_stage", "strategy"), [("1", "dp24-zero1"), ("1.0", "dp24")])
def test_zero_stage_without_deepspeed_configuration_is_that_of_the_argument(
    tmp_path, zero_stage, strategy
):
    text = (
        (DIALECTS / "megatron-deepspeed.log").read_text().replace("zero_optimization_stage", "zos")
    )
    section = f"  deepspeed ...... True\n  zero_stage ..... {zero_stage}\n  hidden_size ."
    path = tmp_path / "a.log"
    path.write_text(text.replace("  hidden_size .", section, 1))
    (run,) = load_log(path)
    assert run.spec is not None
    assert (run.strategy, run.spec.backend) == (strategy, "deepspeed")


def test_list_of_layers_is_not_reported_as_unreadable_argument():
    arguments = {"moe_layer_freq": "[0, 1, 1, 1]", "num_layers": "4.5"}
    assert drop_unreadable_values(arguments) == (arguments, ["num_layers 4.5"])


def test_timers_in_a_single_line_are_read_but_truncated_ones_are_not():
    timers = {timer.name: timer for timer in scrape_log(DIALECTS / "megatron-1.log").timers}
    assert (timers["forward"].count, timers["forward"].max_ms) == (2, (31.57 + 31.61) / 2)
    assert timers["batch generator"].max_ms == 4.10
    assert timers["batch generator"].count == 1


def test_memory_in_gigabytes_is_kept_in_mebibytes():
    (reading,) = scrape_log(DIALECTS / "megatron-bridge.log").memory
    assert (reading.rank, reading.after_iterations) == (1, 2)
    assert reading.max_allocated_mib == pytest.approx(153.4e9 / 2**20)
    assert reading.reserved_mib == pytest.approx(182.2e9 / 2**20)


@pytest.mark.parametrize(
    ("line", "trainer"),
    [
        (
            '0: :::MLLOG {"time_ms": 1, "event_type": "POINT_IN_TIME", "key": "tracked_stats", '
            '"value": {"throughput": 1.93}, "metadata": {"lineno": 161, "step": 3072}}',
            "MLPerf's results",
        ),
    ],
)
def test_lines_without_an_iterations_time_name_their_trainer(tmp_path, line, trainer):
    path = tmp_path / "a.log"
    path.write_text(line + "\n")
    assert f"looks like a log of {trainer}" in classify_log(scrape_log(path)).reason


def docker(text: str) -> str:
    lines = text.splitlines(keepends=True)
    times = (f"2026-01-01T00:00:{n % 60:02d}.{n:09d}Z" for n in range(len(lines)))
    rows = (
        {"log": line, "stream": "stdout", "time": t} for line, t in zip(lines, times, strict=True)
    )
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["0.14", "0.18.2", "f4fa7d6b"])
@pytest.mark.parametrize("width", [80, 132, 200])
def test_folded_log_gives_the_same_values_as_the_original(tmp_path, name, width):
    text = (LOGS / f"megatron-{name}.log").read_text()
    pieces = []
    for line in text.splitlines():
        pieces += [line[n : n + width] for n in range(0, len(line), width)] or [""]
    folded = tmp_path / "a.log"
    folded.write_text("\n".join([*pieces, ""]))
    mine, whole = scrape_log(folded), scrape_log(LOGS / f"megatron-{name}.log")
    for field in ("iterations", "parameters", "memory", "validation", "arguments", "exit_reason"):
        assert getattr(mine, field) == getattr(whole, field), field


def test_fold_that_only_loses_last_numbers_is_detected(tmp_path):
    text = (DIALECTS / "megatron-1.log").read_text()
    folded = tmp_path / "a.log"
    pieces = [line[n : n + 100] for line in text.splitlines() for n in range(0, len(line), 100)]
    folded.write_text("\n".join(pieces))
    assert lines_of(folded) == EXPECTED["megatron-1"]


@pytest.mark.parametrize("name", ["0.14", "0.18.2", "f4fa7d6b"])
@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("blanks", ["kept", "dropped"])
def test_log_folded_between_words_gives_the_same_values(tmp_path, name, width, blanks):
    text, folded = (LOGS / f"megatron-{name}.log").read_text(), tmp_path / "a.log"
    if blanks == "kept":
        fold = ["fold", "-s", "-w", str(width)]
        folded.write_text(subprocess.run(fold, input=text, text=True, stdout=-1, check=True).stdout)
    else:
        filled = textwrap.TextWrapper(width, break_on_hyphens=False).fill
        folded.write_text("\n".join(map(filled, text.splitlines())))
    mine, whole = scrape_log(folded), scrape_log(LOGS / f"megatron-{name}.log")
    for field in ("iterations", "parameters", "memory", "validation", "arguments", "exit_reason"):
        assert getattr(mine, field) == getattr(whole, field), field


@pytest.mark.parametrize("name", ["0.14", "0.18.2"])
def test_json_log_of_a_container_gives_all_values(tmp_path, name):
    path = tmp_path / "a.log"
    path.write_text(docker((LOGS / f"megatron-{name}.log").read_text()))
    mine, whole = scrape_log(path), scrape_log(LOGS / f"megatron-{name}.log")
    for field in ("iterations", "parameters", "memory", "timers", "arguments", "exit_reason"):
        assert getattr(mine, field) == getattr(whole, field), field


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_compressed_log_is_unpacked_regardless_of_its_name(tmp_path, pack):
    path = tmp_path / "a.log"
    path.write_bytes(pack((LOGS / "megatron-0.14.log").read_bytes()))
    assert scrape_log(path).iterations == scrape_log(LOGS / "megatron-0.14.log").iterations
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) // 2] + b"\0" * 20)
    scrape_log(path)


def test_lines_repeated_verbatim_count_as_a_single_restart(tmp_path):
    lines = [iteration_line(n, 100.0 + n, 10 - n / 10) for n in range(1, 11)]
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines + 10 * lines[5:] + [iteration_line(11, 111.0, 9.0)]))
    (log,) = scrape_runs(path)
    assert log.restarts == (6,)
    assert [i.iteration for i in log.iterations] == list(range(1, 12))

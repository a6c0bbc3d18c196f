"""Public logs of other trainers: every figure of them as a person reads it, also when lines are folded or torn."""

import math
from pathlib import Path

import pytest

from parakit.artifacts.run import Status
from parakit.logs.diagnosis import classify_log
from parakit.logs.dialects import find_iterations
from parakit.logs.runs import load_log
from parakit.logs.scrape import scrape_log

PUBLIC = Path(__file__).parent / "public"
NAN = math.nan
DEVICE, ALL = "tokens/s/device", "tokens/s"
# Iteration, milliseconds, loss, gradient norm, TFLOP/s and printed throughput of every step.
EXPECTED = {
    "alcf": [
        (1, 108893.2, 11.133188, None, 49.66, (DEVICE, 1203.674)),
        (2, 8457.2, 11.164009, 6.271, 70.98, (DEVICE, 15498.234)),
    ],
    "hf-trainer": [
        (1, None, 4.75, 98.5, None, None),
        (2, None, 2.0312, 59.5, None, None),
        (3, None, 0.8984, 45.0, None, None),
    ],
    "litgpt": [
        (961, 529.46, 1.062, None, None, None),
        (962, 503.53, 0.937, None, None, None),
        (963, 522.10, 0.971, None, None, None),
        (964, 115.27, 0.902, None, None, None),
        (965, 743.31, 1.182, None, None, None),
    ],
    "litgpt-early": [
        (76, 197.87, 10.8259, None, None, None),
        (77, 214.40, 10.8259, None, None, None),
        (78, 198.00, 10.8259, None, None, None),
    ],
    "llm-c": [
        (61, 44.57, 3.208939, 1.48, None, (ALL, 91886)),
        (62, 44.57, 3.464926, 1.3662, None, (ALL, 91886)),
        (63, 44.58, 3.402215, 1.3542, None, (ALL, 91886)),
        (64, 44.57, 3.407495, 1.2991, None, (ALL, 91887)),
    ],
    "llm-foundry": [
        (1, None, 10.9736, None, None, None),
        (2, None, 10.9724, None, None, None),
        (3, None, 10.9745, None, None, None),
    ],
    "maxtext-2023": [
        (15107, 2167, 2.191, None, 36.722, None),
        (15108, 2164, 2.173, None, 36.771, None),
        (15109, 2166, 2.191, None, 36.739, None),
    ],
    "maxtext-2026": [
        (1, 631, 12.979, None, 5688.282, (DEVICE, 311629.521)),
        (2, 10228, 12.980, None, 350.869, (DEVICE, 19222.175)),
        (3, 10344, 12.979, None, 346.932, (DEVICE, 19006.461)),
    ],
    # Rank 0 prints the throughput before the last rank's line; the first line's was not published.
    "megatron-bridge-2025-10": [
        (10, 13212.7, 4.474437, 0.704, None, None),
        (20, 14260.3, 0.08797448, 0.170, 58.2, None),
    ],
    "megatron-bridge-2025-12": [(1, 7037.3, 6.700717, 117.718, 24.7, None)],
    # Differences of the training time so far; the evaluation's is not the step's.
    "modded-nanogpt": [
        (1322, None, None, None, None, None),
        (1323, 66, None, None, None, None),
        (1324, 68, None, None, None, None),
        (1325, 66, None, None, None, None),
    ],
    # Means of ten steps between evaluations.
    "modded-nanogpt-evaluations": [
        (3010, None, None, None, None, None),
        (3020, 187.2, None, None, None, None),
        (3030, 188.2, None, None, None, None),
        (3040, 187.7, None, None, None, None),
    ],
    "nanochat": [
        (4, 989.44, 8.893647, None, None, (ALL, 529882)),
        (5, 991.09, 8.530593, None, None, (ALL, 529000)),
        (6, 992.91, 8.227555, None, None, (ALL, 528029)),
    ],
    "nanogpt": [
        (2980, 1099.18, 3.8993, None, None, None),
        (2990, 1096.65, 3.8853, None, None, None),
        (3000, 35392.33, 4.2490, None, None, None),
        (3010, 1019.95, NAN, None, None, None),
    ],
    "nanogpt-early": [
        (1631, 561.94, 4.0863, None, None, None),
        (1632, 563.15, 3.7441, None, None, None),
        (1633, 562.11, 3.9848, None, None, None),
    ],
    "nanotron": [
        (327281, 11500, 2.38, None, 38.3, (DEVICE, 11400)),
        (327282, 11500, 2.35, None, 38.3, (DEVICE, 11400)),
        (327283, 11500, 2.51, None, 38.3, (DEVICE, 11400)),
        (327284, 11500, 2.36, None, 38.3, (DEVICE, 11400)),
    ],
    "nemo-1": [(795, None, 3.09, None, None, None)],
    "nemo-automodel": [
        (9, None, 0.6974, 1.5436, None, (DEVICE, 1409.82)),
        (10, None, 0.8534, 1.5040, None, (DEVICE, 1718.28)),
        (11, None, 0.6172, 1.4094, None, (DEVICE, 1226.04)),
    ],
    "slime": [(2, 14182.998418807983, None, None, 3.7153212981452874, None)],
    # The loss is a policy's.
    "slime-steps": [
        (1, None, None, 2955012562.8240876, None, None),
        (28, None, None, 2217390918.482301, None, None),
    ],
    # Ten steps from 11:10:37.109 to 11:10:40.777, and nine before.
    "torchtitan-2024": [
        (1, None, 12.2365, None, None, (DEVICE, 5380)),
        (10, 3298 / 9, 12.1951, None, None, (DEVICE, 111770)),
        (20, 366.8, 11.9455, None, None, (DEVICE, 111714)),
        (30, 365.1, 11.0407, None, None, (DEVICE, 112194)),
        (40, 365.5, 9.9520, None, None, (DEVICE, 112109)),
    ],
    "torchtitan-2025": [
        (200, None, 6.1384, None, 339.16, (DEVICE, 5856)),
        (210, 1464.8, 6.0388, None, 323.92, (DEVICE, 5593)),
        (220, 1396.4, 6.0348, None, 339.82, (DEVICE, 5868)),
        (230, 1396.1, 5.9670, None, 339.88, (DEVICE, 5869)),
        (240, 1397.4, 5.8311, None, 339.59, (DEVICE, 5864)),
        (250, 1397.7, 5.8383, None, 339.48, (DEVICE, 5862)),
    ],
    # Five ranks wrote step 4.
    "torchtitan-ranks": [
        (4, None, 7.62585, 26.625, 314.71, (DEVICE, 10050)),
        (5, 1637, 7.07623, 46.5, 313.36, (DEVICE, 10007)),
    ],
    "verl-2025-04": [(2, 96551, None, 0.069, None, None)],
    # The critic warms up, so the actor has no norm. The critic's is not the model's.
    "verl-2026-01": [(4, 161077.7970990166, None, None, None, (DEVICE, 413.3872029493165))],
    "verl-sft": [
        (1, 14796.027898788452, 0.8078852891921997, None, None, None),
        (2, 7293.778896331787, 0.7787683010101318, None, None, None),
        (3, 6083.798885345459, 0.7899439334869385, None, None, None),
    ],
}


def read_figures(path):
    """Return the figures of every step of a log, in the order of EXPECTED."""
    rows = []
    for iteration in scrape_log(path).iterations:
        metrics = iteration.extra_metrics or {}
        rows.append(
            (
                iteration.iteration,
                iteration.elapsed_ms,
                iteration.lm_loss,
                iteration.grad_norm,
                iteration.throughput_tflops_per_gpu,
                metrics.get(DEVICE, metrics.get(ALL)),
            )
        )
    return rows


@pytest.mark.parametrize("name", EXPECTED)
def test_every_figure_of_a_public_log_is_read(name):
    rows = read_figures(PUBLIC / f"{name}.log")
    expected = [(*row[:5], row[5] and row[5][1]) for row in EXPECTED[name]]
    assert len(rows) == len(expected)
    for row, figures in zip(rows, expected, strict=True):
        for value, true_value in zip(row, figures, strict=True):
            is_known = true_value is not None
            assert (value is not None) == is_known
            assert not is_known or value == pytest.approx(true_value, rel=1e-9, nan_ok=True)


def test_every_public_log_is_checked():
    assert {path.stem for path in PUBLIC.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_public_log_is_said_to_be_of_no_trainer(name):
    log = scrape_log(PUBLIC / f"{name}.log")
    status = classify_log(log)
    assert status.status is not Status.NO_LOG
    assert log.generation.trainer
    assert log.other_trainer is None


def figures_of(iteration):
    """Return the printed figures of a step, without times that follow from other lines."""
    metrics = iteration.extra_metrics or {}
    return {
        "ms": iteration.elapsed_ms,
        "loss": iteration.lm_loss,
        "norm": iteration.grad_norm,
        "tflops": iteration.throughput_tflops_per_gpu,
        DEVICE: metrics.get(DEVICE),
        ALL: metrics.get(ALL),
    }


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "llm-foundry"])
def test_a_line_that_is_cut_or_spliced_gives_no_false_figure(name):
    lines = (PUBLIC / f"{name}.log").read_text().splitlines()
    known = {}
    for step in (step for line in lines for step in find_iterations(line)):
        # Dictionaries of the Hugging Face Trainer have no numbers of their steps, and ranks round differently.
        for figure, value in figures_of(step).items():
            known.setdefault((step.iteration, figure), set()).add(value)
    for line in lines:
        for position in range(1, len(line), 3):
            for inserted in ("\n", "\nNCCL WARN 12.5\n", f"\n{lines[-1]}\n", lines[-1]):
                text = f"{line[:position]}{inserted}{line[position:]}"
                steps = [step for part in text.split("\n") for step in find_iterations(part)]
                for step in steps:
                    for figure, value in figures_of(step).items():
                        is_nan = value is not None and math.isnan(value)
                        true_values = known.get((step.iteration, figure), ())
                        # A number that is cut after its fifteenth digit is the same measurement.
                        is_true = value is not None and any(
                            math.isclose(value, true_value, rel_tol=1e-14)
                            for true_value in true_values
                            if true_value is not None
                        )
                        assert value is None or is_nan or is_true, text


def test_batch_and_sequence_of_torchtitan_give_its_tokens_per_second():
    (run,) = load_log(PUBLIC / "torchtitan-2024.log")
    assert (run.global_batch_size, run.seq_length) == (20, 8192)
    assert run.status.status is Status.INCOMPLETE


def test_learning_rate_that_verl_rounded_to_zero_is_unknown():
    (rounded,) = scrape_log(PUBLIC / "verl-2025-04.log").iterations
    assert rounded.learning_rate is None
    first = scrape_log(PUBLIC / "verl-sft.log").iterations[0]
    assert first.learning_rate == pytest.approx(0.0002702702702702703e-3, rel=1e-12)


def test_evaluation_of_verl_fine_tuning_is_read(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(
        "step:1 - train/loss:2.5 - train/grad_norm:4.0 - train/lr:5e-07 - train/global_tokens:6\n"
        "step:62 - val/loss:0.019425522536039352\n"
    )
    log = scrape_log(path)
    (step,) = log.iterations
    assert (step.iteration, step.lm_loss, step.grad_norm, step.learning_rate) == (1, 2.5, 4.0, 5e-7)
    (evaluation,) = log.validation
    assert (evaluation.iteration, evaluation.losses) == (62, {"lm loss": 0.019425522536039352})


def test_line_of_verl_with_another_line_inside_it_has_no_false_number():
    (line,) = (PUBLIC / "verl-2025-04.log").read_text().splitlines()
    inner = line.replace("step:2 ", "step:3 ").replace("96.551", "12.5").replace("0.069", "0.5")
    position = line.index("timing_s/gen")
    steps = find_iterations(f"{line[:position]}{inner}{line[position:]}")
    # Step 3 has two times, of which one is that of step 2.
    assert [step.iteration for step in steps] == []


def rollout(number, step_time="'perf/step_time': 60.0"):
    return (
        f"perf {number}: {{'perf/train_wait_time': 41.5, 'perf/train_time': 18.5, {step_time}}}\n"
    )


def training_step(number, loss="'train/pg_loss': 0.25, 'train/loss': 0.25"):
    return (
        f"step {number}: {{{loss}, 'train/grad_norm': np.float64(0.5), 'train/lr-pg_0': 1e-06}}\n"
    )


def read_slime(tmp_path, text):
    path = tmp_path / "a.log"
    path.write_text(text)
    return [
        (step.iteration, step.elapsed_ms, step.lm_loss, step.grad_norm, step.learning_rate)
        for step in scrape_log(path).iterations
    ]


def test_rollout_of_slime_has_the_numbers_of_its_training_step(tmp_path):
    text = training_step(0) + rollout(0) + training_step(1) + rollout(1)
    assert read_slime(tmp_path, text) == [(n, 60000.0, None, 0.5, 1e-6) for n in (0, 1)]


def test_rollout_of_slime_with_several_training_steps_has_none_of_their_numbers(tmp_path):
    text = training_step(0) + training_step(1) + rollout(0)
    assert read_slime(tmp_path, text) == [(0, 60000.0, None, None, None)]


def test_loss_of_slime_without_a_policy_is_a_language_model_loss(tmp_path):
    loss = "'train/loss': 2.25"
    assert read_slime(tmp_path, training_step(7, loss)) == [(7, None, 2.25, 0.5, 1e-6)]
    both = training_step(7, loss) + rollout(7)
    assert read_slime(tmp_path, both) == [(7, 60000.0, 2.25, 0.5, 1e-6)]


def test_time_of_slime_before_november_2025_is_read(tmp_path):
    text = rollout(3, "'perf/total_train_time': 287.25")
    assert read_slime(tmp_path, text) == [(3, 287250.0, None, None, None)]


def test_critic_of_slime_is_not_the_model(tmp_path):
    text = training_step(0) + "critic-step 0: {'train/critic-loss': 9.0, 'train/loss': 9.0}\n"
    assert read_slime(tmp_path, text) == [(0, None, None, 0.5, 1e-6)]


def test_steps_of_the_hugging_face_trainer_are_those_of_its_bar(tmp_path):
    path = tmp_path / "a.log"
    step = "{'loss': %s, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.5}"
    path.write_text(
        "\r  4%|▍         | 10/250 [00:10<04:00,  1.00s/it]\n" + step % 2.5 + "\n"
        "\r  8%|▊         | 20/250 [00:20<03:50,  1.00s/it]" + step % 2.25 + "\n"
        "100%|██████████| 8/8 [00:01<00:00]\n" + step % 9.0 + "\n"
        "\r 12%|█▏        | 30/250 [00:30<03:40,  1.00s/it]\n" + step % 2.0 + "\n"
    )
    losses = [(row[0], row[2]) for row in read_figures(path)]
    # The third dictionary follows the bar of an evaluation, so its step is not known.
    assert losses == [(10, 2.5), (20, 2.25), (30, 2.0)]

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
                        assert value is None or is_nan or value in true_values, text


def test_batch_and_sequence_of_torchtitan_give_its_tokens_per_second():
    (run,) = load_log(PUBLIC / "torchtitan-2024.log")
    assert (run.global_batch_size, run.seq_length) == (20, 8192)
    assert run.status.status is Status.INCOMPLETE


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

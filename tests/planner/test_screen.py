"""The first screen of `make plan` answers what to run, how long it takes, how sure that is, and what to do next."""

from math import ceil

import pytest

from parakit.config.model import model_names
from tests.planner.printed import WIDTH, print_plan

MOST_LINES = 25
SMALL = "--model gpt2-large --gpus 2"
PUBLISHED = "--model llama2-7b --gpus 8 --gpu h100"
"""Question on a model of which the kit has no file."""


@pytest.mark.parametrize(
    "arguments",
    [
        "--model llama3-8b --gpus 4 --nodes 2 --gpu h100",
        "--model mixtral-8x7b --gpus 16 --gpu h100",
        PUBLISHED,
        SMALL,
    ],
)
def test_first_screen_has_at_most_twenty_five_lines(arguments: str) -> None:
    lines = print_plan(arguments).strip().splitlines()
    # Commands are not wrapped by the kit, so the terminal wraps them.
    assert sum(ceil(len(line) / WIDTH) for line in lines) <= MOST_LINES
    names = ["Use", "Time", "Memory", "Why", "How sure", "Changes it", "Run it"]
    assert [line for name in names for line in lines if line.startswith(name)] == [
        line for line in lines if line.startswith(tuple(names))
    ]
    assert any(line.startswith(("As good", "Next best")) for line in lines)


def test_first_screen_says_what_twice_the_batch_would_change() -> None:
    screen = " ".join(print_plan(SMALL).split())
    changes = screen.partition("Changes it")[2].partition("Run it")[0]
    assert "a quarter of nvlink4's rate" in changes
    assert "twice the global batch" in changes


def test_smaller_batch_is_tried_if_nobody_stated_the_batch() -> None:
    assert "a global batch of 256" in " ".join(print_plan(PUBLISHED).split())


def test_nearest_measurement_comes_with_dtype_and_source() -> None:
    screen = " ".join(print_plan(SMALL).split())
    assert "0.77B on 2 H200 in fp16 (examples/gpt3/published.yaml): 0.4372 s" in screen


def test_screen_has_the_kits_command_and_torchrun_with_the_planned_flags() -> None:
    screen = print_plan(f"{SMALL} --nodes 2")
    commands = [line.strip() for line in screen.partition("Run it\n")[2].splitlines()]
    assert commands[0].startswith("parakit train-")
    assert "torchrun --nnodes 2 " in commands[1]
    assert "pretrain_gpt.py $MODEL_FLAGS --" in commands[1]


def test_a_published_model_without_data_has_no_warning_on_its_vocabulary() -> None:
    assert "llama2-7b" not in model_names()
    screen = print_plan(PUBLISHED)
    assert "GPT-2" not in screen
    assert "parakit train-" not in screen, "the kit has no file of the model"
    assert "pretrain_gpt.py $MODEL_FLAGS --" in screen


def test_for_and_launcher_replace_the_command() -> None:
    assert "[parallelism]" in print_plan(f"{SMALL} --for torchtitan")
    script = print_plan(f"{SMALL} --launcher slurm").partition("Run it\n")[2]
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=gpt2-large\n")

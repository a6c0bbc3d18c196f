"""The last lines of a run that ended well."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import NO_OPTIONS
from parakit.launch.train import format_result_lines
from tests.reporting.factory import log_text, run_record, write_run

TIMES = [300.0, 200.0, 100.0, 100.0, 100.0]


def lines(tmp_path: Path, target: str, resume_point: object = None) -> list[str]:
    job = parse_target(target, NO_OPTIONS)
    folder = write_run(tmp_path, run_record("run", job.strategy), log_text(TIMES))
    launch = SimpleNamespace(job=job, resume_point=resume_point)
    return format_result_lines(cast(Launch, launch), folder)


def test_a_run_ends_with_the_report_s_figures_and_the_next_commands(tmp_path: Path) -> None:
    assert lines(tmp_path, "train-tp2-gpt2-tiny-2cpu") == [
        # The first of five lines does not count; 8 samples of 64 tokens in 100 ms.
        "Loss 10.760000 in iteration 5, 100.0 ms/iteration (median of 4), 5,120 tokens/s.",
        "Next: 'make report' compares this run with the others there; 'make verify-tp2-gpt2-tiny-2cpu' "
        "compares its tensors with the baseline's.",
    ]


@pytest.mark.parametrize(
    ("target", "resumed"),
    [
        ("train-baseline-gpt2-tiny-1cpu", None),
        ("train-tp2-gpt2-tiny-2gpu", None),
        ("train-tp2-gpt2-tiny-2cpu", "a checkpoint"),
    ],
)
def test_only_what_can_be_verified_as_it_is_named_is_said_to_be(
    tmp_path: Path, target: str, resumed: str | None
) -> None:
    last = lines(tmp_path, target, resumed)[-1]
    assert last == "Next: 'make report' compares this run with the others there."

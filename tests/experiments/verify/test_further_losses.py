"""Losses that a model has beside its main one, whose gradients are captured apart to explain a wrong one."""

from __future__ import annotations

import pytest

from parakit.experiments.verify.command import list_further_losses
from parakit.launch import Options, compose_job, parse_target


@pytest.mark.parametrize(
    ("model", "extra", "losses"),
    [
        ("gpt2-tiny", (), []),
        ("gpt2-tiny", ("--mtp-num-layers", "1"), ["MTP loss"]),
        ("moe-tiny", (), ["auxiliary loss", "z loss"]),
        ("moe-tiny", ("--moe-z-loss-coeff", "0"), ["auxiliary loss"]),
        ("moe-tiny", ("--moe-aux-loss-coeff", "0"), ["z loss"]),
    ],
)
def test_losses_beside_the_main_one_follow_from_the_flags(
    model: str, extra: tuple[str, ...], losses: list[str]
) -> None:
    job = parse_target(f"train-tp2-{model}-2cpu", Options(extra=extra))
    assert list(list_further_losses(compose_job(job))) == losses

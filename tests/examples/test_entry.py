"""The entry of the kit, and the entry of a checkout if MEGATRON_LM names one."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from parakit.artifacts.run import Status
from parakit.config.files import ROOT
from parakit.config.strategy import PUBLISHED_STRATEGIES
from parakit.launch.code import find_entry
from tests.examples.runs import Run, Trainer

CHECKOUTS = [Path(text) for text in os.environ.get("MEGATRON_LM_CHECKOUTS", "").split(":") if text]
NO_CHECKOUT = pytest.mark.skipif(
    not CHECKOUTS, reason="MEGATRON_LM_CHECKOUTS names no Megatron-LM checkouts (colon-separated)"
)


def test_entry_refuses_options_that_it_does_not_support(refused: Run) -> None:
    assert refused.status.status is Status.CRASHED
    text = (refused.folder / "log.txt").read_text()
    sentence = "--check-for-spiky-loss is not covered by this entry; set MEGATRON_LM"
    assert sentence in text
    assert sentence in refused.status.reason
    assert refused.log.iterations == ()


def test_every_refusal_names_an_option_that_megatron_knows() -> None:
    source = (ROOT / "examples/gpt3/pretrain_gpt.py").read_text()
    names = re.findall(r'^    "(\w+)",$', source, re.MULTILINE)
    spec = importlib.util.find_spec(
        "megatron"
    )  # The package is located without an import, because its warnings would fail the test.
    assert spec is not None
    folder = next(
        Path(location) for location in spec.submodule_search_locations or () if "site" in location
    )
    files = [
        folder / "training" / "arguments.py",
        *(folder / "training" / "config").rglob("*.py"),
        folder / "core" / "transformer" / "transformer_config.py",
    ]
    text = "".join(file.read_text() for file in files)
    unknown = [name for name in names if name not in text and name.replace("_", "-") not in text]
    assert unknown == []


@NO_CHECKOUT
@pytest.mark.slow
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_entry_of_a_checkout_trains_six_strategies_with_equal_losses(
    train: Trainer, baseline: Run, checkout: Path
) -> None:
    runs = {
        name: train(
            f"train-{name}-gpt2-tiny-{1 if name == 'baseline' else 2}cpu", megatron_lm=checkout
        )
        for name in PUBLISHED_STRATEGIES
    }
    assert {run.status.status for run in runs.values()} == {Status.OK}
    for run in runs.values():
        assert run.losses == pytest.approx(runs["baseline"].losses, abs=1.1e-5)
    if find_entry(checkout).megatron_version.startswith("0.19."):
        assert runs["baseline"].losses == baseline.losses
    assert runs["dp2"].record.entry.megatron_commit

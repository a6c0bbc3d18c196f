from pathlib import Path

import pytest

from parakit.config.run import Backend, OptimizerName
from parakit.launch.options import Options, options_from_texts


def test_nothing_set_means_the_defaults() -> None:
    assert options_from_texts({}) == Options()


def test_every_variable_arrives(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    environment = {
        "ITERS": "7",
        "EXTRA": "--lr '1 e'",
        "MICRO_BATCH": "2",
        "GLOBAL_BATCH": "8",
        "SEED": "5",
        "DROPOUT": "0.1",
        "DATA": "owt-ds/mine",
        "SHARED_START": "0",
        "DRY_RUN": "1",
        "MEGATRON_LM": str(tmp_path),
        "ALLOW_UNKNOWN_MEGATRON": "1",
        "RUNS": "elsewhere",
        "OPTIMIZER": "muon",
        "BACKEND": "native",
        "CALIBRATE": "1",
    }
    assert options_from_texts(environment) == Options(
        iterations=7,
        extra=("--lr", "1 e"),
        micro_batch_size=2,
        global_batch_size=8,
        seed=5,
        dropout=0.1,
        data="owt-ds/mine",
        shared_start=False,
        dry_run=True,
        megatron_lm=tmp_path.resolve(),
        allow_unknown_megatron=True,
        runs=Path("elsewhere"),
        optimizer=OptimizerName.MUON,
        backend=Backend.NATIVE,
        calibrate=True,
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("ITERS", "0", "a whole number above 0"),
        ("MICRO_BATCH", "two", "a whole number above 0"),
        ("DROPOUT", "1", "a number from 0 up to"),
        ("DRY_RUN", "yes", "0 or 1"),
        ("CALIBRATE", "yes", "0 or 1"),
        ("BACKEND", "jax", "megatron, native, deepspeed, bare or transformers"),
        ("EXTRA", "'open", "flags with closed quotes"),
        ("MEGATRON_LM", "/nowhere", "a folder with pretrain_gpt.py; give the folder of a clone"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} is not {wanted}"):
        options_from_texts({name: value})

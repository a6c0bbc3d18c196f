"""The native backend without a process group: schedule, flags, batches, first weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from parakit.data.split import Split, split_documents
from parakit.native.batches import SplitSamples
from parakit.native.model import GPT, initialise
from parakit.native.optimizer import learning_rate
from parakit.native.settings import unknown_flags
from tests.native.small_model import REQUIRED, settings


def test_learning_rate_starts_at_zero_and_follows_warm_up_and_decay() -> None:
    rates = [learning_rate(settings(), updates) for updates in (0, 5, 10, 55, 100, 101)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4])


def test_error_names_a_flag_that_is_not_implemented() -> None:
    assert unknown_flags((*REQUIRED, "--qk-layernorm", "--log-throughput")) == ["--qk-layernorm"]
    with pytest.raises(SystemExit, match="--qk-layernorm is not implemented by the native backend"):
        settings("--qk-layernorm")


def test_labels_are_the_tokens_shifted_by_one_position(sample_prefix: Path) -> None:
    samples = SplitSamples(sample_prefix, "1,0,0", samples=4, seq_length=64, seed=7)
    first, second = samples.batch(0, 2)
    assert first.shape == second.shape == (2, 64)
    assert torch.equal(first[:, 1:], second[:, :-1])


def test_training_part_has_the_first_documents_of_the_data_set() -> None:
    assert np.array_equal(split_documents("949,50,1", 1000), np.arange(949))
    assert np.array_equal(split_documents("949,50,1", 1000, Split.TEST), [999])


def test_initial_std_is_smaller_for_matrices_that_write_into_the_residual_stream() -> None:
    model = GPT(settings("--init-method-std", "0.5"))
    initialise(model, settings("--init-method-std", "0.5"))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert float(parameters["blocks.0.mlp.fc1.weight"].std()) == pytest.approx(0.5, rel=0.1)
    assert float(parameters["blocks.0.mlp.fc2.weight"].std()) == pytest.approx(0.25, rel=0.1)
    assert torch.all(parameters["blocks.1.norm1.weight"] == 1)
    assert torch.all(parameters["blocks.1.attention.qkv.bias"] == 0)

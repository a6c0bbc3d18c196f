"""The program that serves a model with transformers: what it says about modules."""

import re

import torch

from parakit.convert.hf.serve import _describe_module


def test_source_of_a_module_begins_with_the_folder_of_its_package() -> None:
    module = _describe_module(torch.nn.Embedding(2, 2))
    assert re.fullmatch(r"torch/nn/modules/sparse.py:\d+", module.source)

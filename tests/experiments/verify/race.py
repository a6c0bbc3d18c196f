"""A race as a patch file: layer 1's norm changes after iteration 1, but only in the first run of the strategy."""

import os
from pathlib import Path

from megatron.core import parallel_state
from megatron.training import training

original = training.train_step
MARKER = Path(os.environ["RACE_MARKER"])


def train_step(forward_step, data, model, *args, **kwargs):
    result = original(forward_step, data, model, *args, **kwargs)
    marker = MARKER.with_suffix(f".{os.environ['RANK']}")
    if parallel_state.get_tensor_model_parallel_world_size() > 1 and not marker.exists():
        marker.touch()
        for name, parameter in model[0].named_parameters():
            if "layers.1.input_layernorm.weight" in name:
                parameter.data.add_(0.01)
    return result


training.train_step = train_step

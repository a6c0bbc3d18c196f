"""Cures sharded-optimizer-in-plain-run: an optimizer loads what the distributed optimizer saved of its groups."""

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer

load = FP32Optimizer.load_state_dict


def of_shards(self, state_dict):
    sharded = state_dict.pop("optimizer", None)
    if sharded is not None:
        step = torch.tensor(float(sharded["param_groups"][0]["step"]))
        state_dict["state"].setdefault("common_step", step)
        settings = self.optimizer.param_groups  # The scheduler sets rates anew.
        state_dict["param_groups"] = [
            {**mine, **loaded}
            for mine, loaded in zip(settings, state_dict["param_groups"], strict=True)
        ]
    load(self, state_dict)


FP32Optimizer.load_state_dict = of_shards

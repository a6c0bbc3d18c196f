"""Let Megatron's distributed optimizer load what it saved of torch's Adam.

Targets: `DistributedOptimizer.__init__`, and `HAVE_APEX_OR_TE` and `USING_APEX_OPTIMIZER` of its module. The
distributed optimizer saves and loads what Apex's and Transformer Engine's Adam hold: two moments per parameter, and
one step count per parameter group. torch's Adam has a step count per parameter, in a tensor. Without the patch,
loading would fail (`assert len(steps) == 1`), because there is no count before the first step. After loading, all
parameters would share one tensor, which would count each step many times. With the patch, torch's Adam has its
count in the parameter groups and lends it to the parameters for the duration of a step. The two names let Megatron
treat torch's Adam as Apex's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.context import RuntimeContext
from megatron_patches.registry import Patch, Replacement, wrap_original

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def count_steps_by_group(optimizer: torch.optim.Optimizer) -> None:
    """Register hooks that keep the number of steps in `param_groups[…]["step"]`, as Apex's FusedAdam."""
    optimizer.register_step_pre_hook(_lend_counts)
    optimizer.register_step_post_hook(_take_counts_back)
    # torch's Adam refuses to load states without a step count.
    optimizer.register_load_state_dict_pre_hook(_add_zero_counts)
    optimizer.register_load_state_dict_post_hook(_drop_counts)


def _lend_counts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Store the step count of the group in the state of each of its parameters, before a step of the optimizer.

    Parameters without a state are left out.
    """
    for group in optimizer.param_groups:
        # A parameter with an empty state gets no count: torch would then not initialise its moments.
        parameters = [parameter for parameter in group["params"] if optimizer.state.get(parameter)]
        # The fused kernel reads the counts on the device. One allocation holds all of them.
        device = torch.device("cpu")
        if parameters and group.get("fused"):
            device = parameters[0].device
        counts = torch.full((len(parameters),), float(group.get("step", 0)), device=device)
        for parameter, count in zip(parameters, counts.unbind(), strict=True):
            optimizer.state[parameter]["step"] = count


def _take_counts_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add 1 to each group's step count and remove the parameters' counts, after a step."""
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0) + 1
    _drop_counts(optimizer)


def _add_zero_counts(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the loaded state dict with a step count of 0 per parameter; `_drop_counts` removes it."""
    states = {key: {**state, "step": torch.tensor(0.0)} for key, state in loaded["state"].items()}
    return {**loaded, "state": states}


def _drop_counts(optimizer: torch.optim.Optimizer) -> None:
    """Remove the step counts of all parameters."""
    for state in optimizer.state.values():
        state.pop("step", None)


@wrap_original
def _count_by_group(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a distributed optimizer, and count steps per group if its optimizer is torch's Adam."""
    original(self, *args, **kwargs)
    if isinstance(self.optimizer, torch.optim.Adam):
        count_steps_by_group(self.optimizer)


def _uses_torch_adam(context: RuntimeContext) -> bool:
    """Return True if neither Transformer Engine nor Apex is here, so that Megatron takes torch's Adam."""
    return not context.has_transformer_engine and importlib.util.find_spec("apex") is None


PATCH = Patch(
    name="adam_step",
    reason="the distributed optimizer cannot load what it saved of torch's Adam",
    needed=_uses_torch_adam,
    replacements=(
        Replacement(f"{_MODULE}:DistributedOptimizer.__init__", _count_by_group),
        # With the count in the groups, Megatron's code for Apex's Adam fits torch's Adam.
        Replacement(f"{_MODULE}:HAVE_APEX_OR_TE", lambda _: True),
        Replacement(f"{_MODULE}:USING_APEX_OPTIMIZER", lambda _: True),
    ),
)

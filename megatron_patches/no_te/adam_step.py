"""torch's Adam under Megatron's distributed optimizer, so that its checkpoints can be loaded.

Megatron's distributed optimizer saves and loads what Apex's and Transformer Engine's Adam hold: two
moments a parameter, and one step count a parameter group. torch's Adam counts in a tensor a parameter:
there is none before the first step, so loading fails (`assert len(steps) == 1`), and after loading all
parameters share one tensor, which then counts each step many times. Here torch's Adam keeps its count
in the parameter groups and passes it to torch's kernels for the length of a step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.context import RuntimeContext
from megatron_patches.registry import Patch, Replacement, around

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def count_steps_by_group(optimizer: torch.optim.Optimizer) -> None:
    """Keep the number of steps in `param_groups[…]["step"]`, as Apex's FusedAdam does."""
    optimizer.register_step_pre_hook(_lend_counts)
    optimizer.register_step_post_hook(_take_counts_back)
    # torch's Adam does not load states without one.
    optimizer.register_load_state_dict_pre_hook(_with_any_count)
    optimizer.register_load_state_dict_post_hook(_drop_counts)


def _lend_counts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        # Not one whose state was asked for and is empty: torch would take it for begun.
        known = [parameter for parameter in group["params"] if optimizer.state.get(parameter)]
        # The fused kernel reads the counts on the device; one allocation serves them all.
        device = known[0].device if known and group.get("fused") else torch.device("cpu")
        counts = torch.full((len(known),), float(group.get("step", 0)), device=device)
        for parameter, count in zip(known, counts.unbind(), strict=True):
            optimizer.state[parameter]["step"] = count


def _take_counts_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0) + 1
    _drop_counts(optimizer)


def _with_any_count(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    states = {key: {**state, "step": torch.tensor(0.0)} for key, state in loaded["state"].items()}
    return {**loaded, "state": states}


def _drop_counts(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state.pop("step", None)


@around
def _counting_by_group(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if isinstance(self.optimizer, torch.optim.Adam):
        count_steps_by_group(self.optimizer)


def _only_torch_has_adam(context: RuntimeContext) -> bool:
    return not context.has_transformer_engine and importlib.util.find_spec("apex") is None


PATCH = Patch(
    name="adam_step",
    reason="the distributed optimizer cannot load what it saved of torch's Adam",
    needed=_only_torch_has_adam,
    replacements=(
        Replacement(f"{_MODULE}:DistributedOptimizer.__init__", _counting_by_group),
        # Megatron may now treat torch's Adam as Apex's.
        Replacement(f"{_MODULE}:HAVE_APEX_OR_TE", lambda _: True),
        Replacement(f"{_MODULE}:USING_APEX_OPTIMIZER", lambda _: True),
    ),
)

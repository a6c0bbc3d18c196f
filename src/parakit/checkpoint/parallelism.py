"""Convert the common state of a torch_dist checkpoint from one strategy to another.

The common state is the part of a torch_dist checkpoint that is identical on all ranks. Tensors are stored in full in
this format, so the strategy shows only in the common state. It shows in the arguments and in the form of the
optimizer's entry. By the arguments Megatron decides what it loads (`training/checkpointing.py: load_checkpoint`).

* Without a distributed optimizer the entry holds `param_groups` and one `common_step`, a tensor. The main
  weights of a half-precision model are stored as `optimizer.state.fp32_param.…`. An fp32 model has no main
  weights in addition to its weights.
* With a distributed optimizer (`fully_reshardable`) the entry holds `param_groups`, which contain the step,
  and a `param_state_sharding_type`, which `content_metadata` repeats. Main weights are stored as
  `optimizer.state.param.…`, also those of fp32 models.
* Under EP, experts have an optimizer of their own, so there are two entries, 0 and 1. Without EP the groups
  of experts are in the only entry.
"""

from __future__ import annotations

import struct
from typing import Any

from parakit.artifacts.pickles import SavedStorage, StandIn, make_stand_in
from parakit.config.strategy import Parallelism, Sharding

RESHARDABLE, MULTIPLE = "fully_reshardable", "make_vocab_size_divisible_by"
_METADATA_KEYS = (
    "distrib_optim_sharding_type",
    "distrib_optim_fully_reshardable_mem_efficient",
)
_STEP_KEY = "step"


def parallelism_arguments(parallelism: Parallelism) -> dict[str, Any]:
    """Return Megatron's arguments that define a strategy, by argument name."""
    virtual_stages = parallelism.virtual_stages if parallelism.virtual_stages > 1 else None
    expert_tensor = parallelism.effective_expert_tensor
    is_distributed = parallelism.sharding is not Sharding.NONE
    return {
        "tensor_model_parallel_size": parallelism.tensor,
        "tensor_parallel_num_weight_shards": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "transformer_pipeline_model_parallel_size": parallelism.pipeline,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "num_virtual_stages_per_pipeline_rank": virtual_stages,
        "num_layers_per_virtual_pipeline_stage": None,
        "sequence_parallel": parallelism.sequence_parallel,
        "context_parallel_size": parallelism.context,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": expert_tensor,
        "expert_tensor_parallel_num_weight_shards": expert_tensor,
        "world_size": parallelism.world_size,
        "data_parallel_size": parallelism.data,
        "use_distributed_optimizer": is_distributed,
        "dist_ckpt_optim_fully_reshardable": is_distributed,
    }


def padding_multiple(
    multiple: int, vocabulary_rows: int, new: Parallelism, old: Parallelism
) -> int:
    """Return the value of `--make-vocab-size-divisible-by` with which the new strategy pads to the same rows.

    Padding rows take part in the softmax, so a vocabulary with another number of rows is another model.

    Args:
        multiple: The flag's value under the old strategy. Megatron multiplies it by TP.
        vocabulary_rows: Rows of the padded vocabulary.
        new: The strategy to convert to.
        old: The strategy to convert from.
    """
    padded_to = multiple * old.tensor
    if padded_to % new.tensor:
        return vocabulary_rows // new.tensor
    return padded_to // new.tensor


def convert_common_state(
    common: dict[str, Any], new: Parallelism, old: Parallelism, vocabulary_rows: int
) -> None:
    """Convert the common state in place: arguments, RNG state and the optimizer's entries.

    Args:
        common: The common state as `rewrite_saved` passes it. Objects of Megatron's classes are `StandIn`s.
        new: The strategy to convert to.
        old: The strategy to convert from.
        vocabulary_rows: Rows of the padded vocabulary; 0 if unknown, which keeps the padding's flag.
    """
    arguments = common["args"].state
    for name, value in parallelism_arguments(new).items():
        if name in arguments:
            arguments[name] = value
    multiple = arguments.get(MULTIPLE)
    if vocabulary_rows and multiple:
        arguments[MULTIPLE] = padding_multiple(multiple, vocabulary_rows, new, old)
    if changes_model_parallel_ranks(new, old):
        # Dropout masks are drawn per rank. With this flag Megatron does not look for stored RNG states
        # and keeps those that it has seeded.
        arguments["no_save_rng"] = True
    if rerun_state_sizes(new) != rerun_state_sizes(old):
        # The rerun state machine has one entry per rank. Megatron ignores it for other numbers of ranks.
        common.pop("rerun_state_machine", None)
    if "optimizer" in common:
        _convert_optimizer(common, new, old)


def _convert_optimizer(common: dict[str, Any], new: Parallelism, old: Parallelism) -> None:
    """Convert the optimizer's entries of the common state in place."""
    arguments = common["args"].state
    entries = _list_entries(common["optimizer"])
    changes_expert_parallelism = (new.expert > 1) != (old.expert > 1)
    if arguments.get("num_experts") and changes_expert_parallelism:
        if new.expert > 1:
            has_biases = bool(arguments.get("add_bias_linear"))
            entries = _split_off_experts(entries[0], has_biases)
        else:
            entries = entries[:1]
    if new.sharding != old.sharding:
        metadata = common["content_metadata"]
        for name in _METADATA_KEYS:
            metadata.pop(name, None)
        if new.sharding is Sharding.NONE:
            is_half_precision = bool(arguments.get("fp16") or arguments.get("bf16"))
            entries = [_to_plain_entry(entry, is_half_precision) for entry in entries]
        else:
            entries = [_to_distributed_entry(entry) for entry in entries]
            values = (RESHARDABLE, False)
            metadata |= dict(zip(_METADATA_KEYS, values, strict=True))
    common["optimizer"] = entries[0] if len(entries) == 1 else dict(enumerate(entries))


def changes_model_parallel_ranks(new: Parallelism, old: Parallelism) -> bool:
    """Return True if TP or PP changes, so that Megatron ignores the stored RNG states."""
    return (new.tensor, new.pipeline) != (old.tensor, old.pipeline)


def rerun_state_sizes(parallelism: Parallelism) -> tuple[int, ...]:
    """Return the world size, TP, PP and DP.

    Megatron compares the four before it loads the states of its rerun machine, one state per rank.
    """
    return parallelism.world_size, parallelism.tensor, parallelism.pipeline, parallelism.data


def _list_entries(optimizer: Any) -> list[dict[str, Any]]:
    """Return the entries of a chained optimizer, or the only entry of another one, as a list."""
    if isinstance(optimizer, list):
        return optimizer
    is_chained = 0 in optimizer
    return list(optimizer.values()) if is_chained else [optimizer]


def _inner_optimizer(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer, which half-precision and distributed optimizers wrap."""
    inner: dict[str, Any] = entry.get("optimizer", entry)
    return inner


def _split_off_experts(entry: dict[str, Any], has_biases: bool) -> list[dict[str, Any]]:
    """Split an optimizer entry into two: the entry itself, and an entry for the optimizer of experts.

    The entry of experts has copies of the parameter groups. Groups without weight decay hold biases and norms,
    so they are copied only if the model has biases.
    """
    inner = _inner_optimizer(entry)
    expert_groups = [
        {**group, "is_expert_parallel": True}
        for group in inner["param_groups"]
        if has_biases or group.get("wd_mult", 1)
    ]
    expert_inner = {**inner, "param_groups": expert_groups}
    if "state" in inner:
        # Megatron merges the states of parameters into this dictionary, so the two must not share one.
        expert_inner["state"] = dict(inner["state"])
    expert_entry = {**entry, "optimizer": expert_inner} if "optimizer" in entry else expert_inner
    return [entry, expert_entry]


def _to_distributed_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert an optimizer entry to the form of the distributed optimizer, which has the step in each group."""
    inner = _inner_optimizer(entry)
    step = inner.get("state", {}).get("common_step")
    step_of_group = {} if step is None else {"step": int(_read_scalar(step))}
    groups = [{**group, **step_of_group} for group in inner["param_groups"]]
    return _grad_scaler_of_entry(entry) | {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": RESHARDABLE,
    }


def _to_plain_entry(entry: dict[str, Any], is_half_precision: bool) -> dict[str, Any]:
    """Convert an optimizer entry to the form of an optimizer that is not distributed.

    PyTorch's Adam is recognised by the key `maximize` in its groups, and gets the step as `common_step`.
    Transformer Engine's Adam keeps the step in its groups.
    """
    groups = [dict(group) for group in _inner_optimizer(entry)["param_groups"]]
    inner: dict[str, Any] = {"param_groups": groups}
    if "maximize" in groups[0]:
        steps = {group.pop("step") for group in groups}
        inner["state"] = {"common_step": _make_scalar(float(steps.pop()))}
    if not is_half_precision:
        return inner
    return {**_grad_scaler_of_entry(entry), "optimizer": inner}


def _grad_scaler_of_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the gradient scaler of an entry under its key; empty if the entry has none."""
    return {key: value for key, value in entry.items() if key == "grad_scaler"}


def _read_scalar(tensor: Any) -> float:
    """Return the value of a stand-in for a tensor of one fp32 element, or of a number."""
    if not isinstance(tensor, StandIn):
        return float(tensor)
    (value,) = struct.unpack("<f", tensor.arguments[0].data[:4])
    return float(value)


def _make_scalar(value: float) -> StandIn:
    """Return a stand-in that pickles as a tensor with the fp32 element `value`.

    It names the same classes and functions as a pickle of `torch.save`, so torch need not be imported.
    """
    storage_class = make_stand_in("torch", "FloatStorage")
    storage = SavedStorage(
        ("storage", storage_class, _STEP_KEY, "cpu", 1), struct.pack("<f", value)
    )
    hooks = make_stand_in("collections", "OrderedDict")()
    return make_stand_in("torch._utils", "_rebuild_tensor_v2")(storage, 0, (), (), False, hooks)

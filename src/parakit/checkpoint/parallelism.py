"""What a strategy is in the state that all ranks of a torch_dist checkpoint have alike.

Tensors are whole there, so a strategy is in this state alone: in the arguments, by which Megatron
decides what it loads (`training/checkpointing.py: load_checkpoint`), and in the form of the optimizer's
part.

* Without a distributed optimizer that part is `param_groups` and one `common_step`, a tensor; a half
  precision's main weights are `optimizer.state.fp32_param.…`, an fp32 model's are its weights.
* With one (`fully_reshardable`) it has `param_groups` that hold the step and a
  `param_state_sharding_type`, which stands in `content_metadata` too; main weights are
  `optimizer.state.param.…`, of fp32 models as well.
* Experts under EP have an optimizer of their own, so there are two such parts, 0 and 1. Without EP
  their groups are among the others.
"""

from __future__ import annotations

import struct
from typing import Any

from parakit.artifacts.pickles import SavedStorage, StandIn, make_stand_in
from parakit.config.strategy import Parallelism, Sharding

RESHARDABLE, MULTIPLE = "fully_reshardable", "make_vocab_size_divisible_by"
_METADATA = ("distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient")
_STEP_KEY = "step"


def parallelism_arguments(parallelism: Parallelism) -> dict[str, Any]:
    """Arguments that say a strategy, by Megatron's names."""
    stages = parallelism.virtual_stages if parallelism.virtual_stages > 1 else None
    experts = parallelism.effective_expert_tensor
    return {
        "tensor_model_parallel_size": parallelism.tensor,
        "tensor_parallel_num_weight_shards": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "transformer_pipeline_model_parallel_size": parallelism.pipeline,
        "virtual_pipeline_model_parallel_size": stages,
        "num_virtual_stages_per_pipeline_rank": stages,
        "num_layers_per_virtual_pipeline_stage": None,
        "sequence_parallel": parallelism.sequence_parallel,
        "context_parallel_size": parallelism.context,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": experts,
        "expert_tensor_parallel_num_weight_shards": experts,
        "world_size": parallelism.world_size,
        "data_parallel_size": parallelism.data,
        "use_distributed_optimizer": parallelism.sharding is not Sharding.NONE,
        "dist_ckpt_optim_fully_reshardable": parallelism.sharding is not Sharding.NONE,
    }


def padding_multiple(multiple: int, rows: int, new: Parallelism, old: Parallelism) -> int:
    """`--make-vocab-size-divisible-by` with which TP keeps its rows: padding takes part in the softmax.

    Args:
        multiple: That of the old strategy, which Megatron multiplies by its TP.
        rows: Of the padded vocabulary.
        new: The strategy that gets it.
        old: The other.
    """
    whole = multiple * old.tensor
    return (rows if whole % new.tensor else whole) // new.tensor


def convert_common_state(
    common: dict[str, Any], new: Parallelism, old: Parallelism, rows: int
) -> None:
    """Change what `rewritten` gives of the common state to another strategy."""
    arguments = common["args"].state
    known = parallelism_arguments(new)
    arguments.update({name: value for name, value in known.items() if name in arguments})
    if rows and (multiple := arguments.get(MULTIPLE)):
        arguments[MULTIPLE] = padding_multiple(multiple, rows, new, old)
    if changes_model_parallel_ranks(new, old):
        # Masks of dropout are drawn per rank. Without it Megatron keeps the states that it has seeded.
        arguments["no_save_rng"] = True
    if rerun_state_sizes(new) != rerun_state_sizes(old):
        # As many entries as ranks; Megatron ignores them then.
        common.pop("rerun_state_machine", None)
    if "optimizer" not in common:
        return
    parts = _parts(common["optimizer"])
    if arguments.get("num_experts") and (new.expert > 1) != (old.expert > 1):
        parts = (
            _split(parts[0], bool(arguments.get("add_bias_linear")))
            if new.expert > 1
            else parts[:1]
        )
    if new.sharding != old.sharding:
        half = bool(arguments.get("fp16") or arguments.get("bf16"))
        to_zero = new.sharding is not Sharding.NONE
        parts = [_sharded(part) if to_zero else _whole(part, half) for part in parts]
        for name in _METADATA:
            common["content_metadata"].pop(name, None)
        if to_zero:
            common["content_metadata"] |= dict(zip(_METADATA, (RESHARDABLE, False), strict=True))
    common["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))


def changes_model_parallel_ranks(new: Parallelism, old: Parallelism) -> bool:
    """Whether a rank of TP and PP is another one, so that Megatron ignores its random states."""
    return (new.tensor, new.pipeline) != (old.tensor, old.pipeline)


def rerun_state_sizes(parallelism: Parallelism) -> tuple[int, ...]:
    """What Megatron compares before it loads one state a rank."""
    return parallelism.world_size, parallelism.tensor, parallelism.pipeline, parallelism.data


def _parts(optimizer: Any) -> list[dict[str, Any]]:
    """Of a chained optimizer, which has one for each number."""
    if isinstance(optimizer, list):
        return optimizer
    return list(optimizer.values()) if 0 in optimizer else [optimizer]


def _inner(part: dict[str, Any]) -> dict[str, Any]:
    """What torch's optimizer says, which a half precision and a distributed one wrap."""
    found: dict[str, Any] = part.get("optimizer", part)
    return found


def _split(part: dict[str, Any], biased: bool) -> list[dict[str, Any]]:
    """One optimizer as two, the experts' with groups of its own; without decay are biases and norms."""
    inner = _inner(part)
    groups = inner["param_groups"]
    experts = [{**group, "is_expert_parallel": True} for group in groups]
    experts = [group for group in experts if biased or group.get("wd_mult", 1)]
    # A dict of their own: Megatron merges into it what each optimizer has of its parameters.
    state = {"state": dict(inner["state"])} if "state" in inner else {}
    own = {**inner, **state, "param_groups": experts}
    return [part, {**part, "optimizer": own} if "optimizer" in part else own]


def _sharded(part: dict[str, Any]) -> dict[str, Any]:
    """As the distributed optimizer has it."""
    inner = _inner(part)
    step = inner.get("state", {}).get("common_step")
    at = {} if step is None else {"step": int(_value(step))}
    rest = {k: v for k, v in part.items() if k == "grad_scaler"}
    groups = [{**group, **at} for group in inner["param_groups"]]
    return rest | {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": RESHARDABLE,
    }


def _whole(part: dict[str, Any], half: bool) -> dict[str, Any]:
    """As an optimizer that is not distributed has it."""
    groups = [dict(group) for group in _inner(part)["param_groups"]]
    inner: dict[str, Any] = {"param_groups": groups}
    if "maximize" in groups[0]:  # PyTorch's; Transformer Engine's keeps the step in its groups.
        steps = {group.pop("step") for group in groups}
        inner["state"] = {"common_step": _scalar(float(steps.pop()))}
    rest = {k: v for k, v in part.items() if k == "grad_scaler"}
    return {**rest, "optimizer": inner} if half else inner


def _value(tensor: Any) -> float:
    """Of a tensor of one fp32 element, or a number."""
    if not isinstance(tensor, StandIn):
        return float(tensor)
    (found,) = struct.unpack("<f", tensor.arguments[0].data[:4])
    return float(found)


def _scalar(value: float) -> StandIn:
    """A tensor of one fp32 element, as `torch.save` names it."""
    storage = make_stand_in("torch", "FloatStorage")
    data = SavedStorage(("storage", storage, _STEP_KEY, "cpu", 1), struct.pack("<f", value))
    hooks = make_stand_in("collections", "OrderedDict")()
    return make_stand_in("torch._utils", "_rebuild_tensor_v2")(data, 0, (), (), False, hooks)

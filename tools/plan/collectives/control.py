"""Small reductions that every iteration makes: the loss, the gradient norm, and who may go on."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.collectives.call import CollectiveCall, Megatron
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group, group_ranks
from tools.spec.run import RunSpec
from tools.spec.strategy import Sharding

_SCALAR_BYTES = 4
_LOGGED_TIMERS = 24
"""Names in `timers_to_log` of `training_log` at f4fa7d6b."""


def control_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: Megatron
) -> Iterator[CollectiveCall]:
    """Reductions of a few numbers; with a log line every iteration and gradient clipping on."""
    parallelism = spec.parallelism
    yield _call(spec, Group.WORLD, "does any rank want to rerun", "rerun_state_machine.py")
    yield from _gradient_statistics(spec)
    yield _call(
        spec,
        Group.MODEL,
        "was the update made everywhere",
        "training: logical_and_across_model_parallel_group",
    )
    yield _call(
        spec,
        Group.MODEL,
        "gradient norm, and learning rate, for ranks that have none",
        "training: reduce_max_stat_across_model_parallel_group",
        calls=2,
    )
    if pipeline_rank == parallelism.pipeline - 1:
        yield _call(
            spec,
            Group.DATA_CONTEXT,
            "loss and its token count",
            "training/training.py: train_step",
            numbers=2,
        )
    if spec.shape.experts:
        yield from _router_losses(spec, megatron)
    if megatron is Megatron.F4FA7D6B:
        yield _timers(spec)


def _gradient_statistics(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Norm, and under fp16 the overflow flag, over all ranks that hold different gradients.

    With expert parallelism two optimizers are chained; each reduces its own, unless both are
    distributed ones, whose norms have a group in common (`ChainedOptimizer.get_grad_norm`).
    """
    parallelism = spec.parallelism
    groups = [Group.MODEL] + ([Group.EXPERT_MODEL] if parallelism.expert > 1 else [])
    if (
        parallelism.sharding is Sharding.FSDP2
    ):  # Its gradients are DTensors, summed over their mesh.
        groups = [Group.DATA_CONTEXT, Group.MODEL]
    elif parallelism.sharding is not Sharding.NONE:
        groups = [Group.WORLD]
    for group in groups:
        norm = "optimizer/clip_grads.py: get_grad_norm_fp32"
        yield _call(spec, group, "squared gradient norm", norm)
        if spec.dtype == "fp16":
            source = "optimizer/optimizer.py: _unscale_main_grads_and_check_for_nan"
            yield _call(spec, group, "overflow flag", source)


def _router_losses(spec: RunSpec, megatron: Megatron) -> Iterator[CollectiveCall]:
    """The routers' losses of every layer, for the log; f4fa7d6b averages the z-loss over DP alone.

    The load-balancing loss is logged, as 0, also where it is no part of the loss.
    """
    everywhere = (Group.PIPELINE, Group.DATA_CONTEXT)
    own = (Group.TENSOR_CONTEXT,) if spec.shape.load_balancing else ()
    logged = [("load-balancing loss of each layer", (*own, *everywhere))]
    if spec.shape.router_z_loss:
        stage = () if megatron is Megatron.F4FA7D6B else (Group.TENSOR_DATA_CONTEXT,)
        logged.append(("z-loss of each layer", (*stage, *everywhere)))
    source, numbers = "transformer/moe: logging of auxiliary losses", spec.shape.layers
    for what, groups in logged:
        for group in groups:
            yield _call(spec, group, what, source, numbers=numbers)


def _timers(spec: RunSpec) -> CollectiveCall:
    """f4fa7d6b gathers its list of timers at every log line, whether or not they run."""
    ranks = spec.parallelism.world_size
    return CollectiveCall(
        Group.WORLD,
        ranks,
        Operation.ALL_GATHER,
        Phase.OPTIMIZER,
        "timers",
        1,
        ranks * _LOGGED_TIMERS * _SCALAR_BYTES,
        "timers.py: _get_elapsed_time_all_ranks",
    )


def _call(
    spec: RunSpec,
    group: Group,
    what: str,
    source: str,
    *,
    numbers: int = 1,
    calls: int = 1,
) -> CollectiveCall:
    ranks = group_ranks(spec.parallelism, group)
    payload = numbers * _SCALAR_BYTES
    return CollectiveCall(
        group, ranks, Operation.ALL_REDUCE, Phase.OPTIMIZER, what, calls, payload, source
    )

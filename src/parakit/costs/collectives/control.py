"""Small reductions of every iteration: the loss, the gradient norm, and the ranks' agreements."""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group
from parakit.config.run import RunSpec
from parakit.costs.collectives.call import CollectiveCall, MegatronVersion, collective
from parakit.costs.operations import Operation, Phase

_NUMBER_BYTES = 4
_LOGGED_TIMERS = 24
"""Names in `timers_to_log` of `training_log` at f4fa7d6b."""

_NORM = "optimizer/clip_grads.py: get_grad_norm_fp32"
_OVERFLOW = "optimizer/optimizer.py: _unscale_main_grads_and_check_for_nan"
_MAXIMUM = "training: reduce_max_stat_across_model_parallel_group"
_RERUN, _AGREED = "rerun_state_machine.py", "training: logical_and_across_model_parallel_group"
_AHEAD = "multi_token_prediction.py: MTPLossLoggingHelper.reduce_metrics_in_tracker"
_ROUTER = "transformer/moe: logging of auxiliary losses"


def control_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """Reductions of a few numbers; with a log line every iteration and gradient clipping on."""
    yield _reduced(spec, Group.WORLD, "does any rank want to rerun", _RERUN)
    yield from _gradient_statistics(spec)
    yield _reduced(spec, Group.MODEL, "was the update made everywhere", _AGREED)
    statistics = "gradient norm, and learning rate, for ranks that have none"
    yield _reduced(spec, Group.MODEL, statistics, _MAXIMUM, calls=2)
    if pipeline_rank == spec.parallelism.pipeline - 1:
        step, loss = "training/training.py: train_step", "loss and its token count"
        yield _reduced(spec, Group.DATA_CONTEXT, loss, step, numbers=2)
        if depths := spec.shape.total_mtp_layers:
            ahead = "losses, right and all guesses of tokens ahead"
            yield _reduced(spec, Group.DATA_CONTEXT, ahead, _AHEAD, numbers=depths, calls=3)
    if spec.shape.experts:
        yield from _router_losses(spec, megatron)
    if megatron is MegatronVersion.F4FA7D6B:
        yield _timers(spec)


def _gradient_statistics(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Norm, and under fp16 the overflow flag, over all ranks that hold different gradients.

    With expert parallelism two optimizers are chained; each reduces its own, unless both are
    distributed ones, whose norms have a group in common (`ChainedOptimizer.get_grad_norm`).
    """
    sharding = spec.parallelism.sharding
    groups = [Group.MODEL] + ([Group.EXPERT_MODEL] if spec.parallelism.expert > 1 else [])
    if sharding.is_torch_fsdp:  # Its gradients are DTensors, summed over their mesh.
        groups = [Group.DATA_CONTEXT, Group.MODEL]
    elif sharding:
        groups = [Group.WORLD]
    for group in groups:
        yield _reduced(spec, group, "squared gradient norm", _NORM)
        if spec.dtype == "fp16":
            yield _reduced(spec, group, "overflow flag", _OVERFLOW)


def _router_losses(spec: RunSpec, megatron: MegatronVersion) -> Iterator[CollectiveCall]:
    """The routers' losses of every layer, for the log; f4fa7d6b averages the z-loss over DP alone.

    The load-balancing loss is logged, as 0, also where it is no part of the loss.
    """
    everywhere = (Group.PIPELINE, Group.DATA_CONTEXT)
    layers = (spec.shape.layers + spec.shape.mtp_layers) * max(1, len(spec.shape.blocks))
    own = (Group.TENSOR_CONTEXT,) if spec.shape.load_balancing else ()
    logged = [("load-balancing loss of each layer", (*own, *everywhere))]
    if spec.shape.router_z_loss:
        stage = () if megatron is MegatronVersion.F4FA7D6B else (Group.TENSOR_DATA_CONTEXT,)
        logged.append(("z-loss of each layer", (*stage, *everywhere)))
    for what, groups in logged:
        for group in groups:
            yield _reduced(spec, group, what, _ROUTER, numbers=layers)


def _timers(spec: RunSpec) -> CollectiveCall:
    """f4fa7d6b gathers its list of timers at every log line, whether or not they run."""
    return collective(
        spec,
        Group.WORLD,
        Operation.ALL_GATHER,
        Phase.OPTIMIZER,
        "timers",
        1,
        spec.parallelism.world_size * _LOGGED_TIMERS * _NUMBER_BYTES,
        "timers.py: _get_elapsed_time_all_ranks",
    )


def _reduced(
    spec: RunSpec, group: Group, what: str, source: str, *, numbers: int = 1, calls: int = 1
) -> CollectiveCall:
    payload, reduce = numbers * _NUMBER_BYTES, Operation.ALL_REDUCE
    return collective(spec, group, reduce, Phase.OPTIMIZER, what, calls, payload, source)

"""Small reductions of every iteration: the loss, the gradient norm, and decisions of all ranks."""

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
    """Yield one pipeline rank's collectives of a few numbers per iteration.

    They carry the gradient norm, the overflow flag, the losses of the log line, and agreements between ranks.
    A log line per iteration is assumed. Only the last pipeline rank reduces the loss.
    """
    yield _all_reduce_numbers(spec, Group.WORLD, "does any rank want to rerun", _RERUN)
    yield from _gradient_statistics(spec)
    yield _all_reduce_numbers(spec, Group.MODEL, "was the update made everywhere", _AGREED)
    statistics = "gradient norm, and learning rate, for ranks that have none"
    yield _all_reduce_numbers(spec, Group.MODEL, statistics, _MAXIMUM, calls=2)
    if pipeline_rank == spec.parallelism.pipeline - 1:
        step, loss = "training/training.py: train_step", "loss and its token count"
        yield _all_reduce_numbers(spec, Group.DATA_CONTEXT, loss, step, numbers=2)
        mtp_layers = spec.shape.total_mtp_layers
        if mtp_layers:
            ahead = "losses, right and all guesses of tokens ahead"
            yield _all_reduce_numbers(
                spec, Group.DATA_CONTEXT, ahead, _AHEAD, numbers=mtp_layers, calls=3
            )
    if spec.shape.experts:
        yield from _router_losses(spec, megatron)
    if megatron is MegatronVersion.F4FA7D6B:
        yield _timers(spec)


def _gradient_statistics(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the reductions of the gradient norm and, under fp16, of the overflow flag.

    With expert parallelism Megatron chains two optimizers. Each of them reduces the norm of its own gradients.
    Two distributed optimizers share one reduction over all ranks (`ChainedOptimizer.get_grad_norm`).
    """
    sharding = spec.parallelism.sharding
    groups = [Group.MODEL] + ([Group.EXPERT_MODEL] if spec.parallelism.expert > 1 else [])
    if sharding.is_torch_fsdp:
        # FSDP2's gradients are DTensors, whose norm is summed over the ranks of their mesh.
        groups = [Group.DATA_CONTEXT, Group.MODEL]
    elif sharding:
        groups = [Group.WORLD]
    for group in groups:
        yield _all_reduce_numbers(spec, group, "squared gradient norm", _NORM)
        if spec.dtype == "fp16":
            yield _all_reduce_numbers(spec, group, "overflow flag", _OVERFLOW)


def _router_losses(spec: RunSpec, megatron: MegatronVersion) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of the routers' losses for the log.

    Megatron logs the load-balancing loss even if it is not part of the loss. The logged value is then 0. The
    z-loss is yielded only if the model has a z-loss. Megatron f4fa7d6b does not reduce the z-loss over the
    tensor-parallel ranks.
    """
    layers = (spec.shape.layers + spec.shape.mtp_layers) * max(1, len(spec.shape.blocks))
    balancing_groups = [Group.PIPELINE, Group.DATA_CONTEXT]
    if spec.shape.load_balancing:
        balancing_groups.insert(0, Group.TENSOR_CONTEXT)
    groups_by_loss = {"load-balancing loss of each layer": balancing_groups}
    if spec.shape.router_z_loss:
        z_groups = [Group.PIPELINE, Group.DATA_CONTEXT]
        if megatron is not MegatronVersion.F4FA7D6B:
            z_groups.insert(0, Group.TENSOR_DATA_CONTEXT)
        groups_by_loss["z-loss of each layer"] = z_groups
    for description, groups in groups_by_loss.items():
        for group in groups:
            yield _all_reduce_numbers(spec, group, description, _ROUTER, numbers=layers)


def _timers(spec: RunSpec) -> CollectiveCall:
    """Return the all-gather of timers, which Megatron f4fa7d6b calls at every log line even if no timer runs."""
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


def _all_reduce_numbers(
    spec: RunSpec, group: Group, description: str, source: str, *, numbers: int = 1, calls: int = 1
) -> CollectiveCall:
    """Return all-reduces of a few numbers over a group."""
    payload, reduce = numbers * _NUMBER_BYTES, Operation.ALL_REDUCE
    return collective(spec, group, reduce, Phase.OPTIMIZER, description, calls, payload, source)

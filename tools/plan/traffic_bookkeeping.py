"""Small reductions that every iteration makes: the loss, the gradient norm, and who may go on."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.megatron import Megatron
from tools.plan.wire import Traffic
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group, group_ranks
from tools.spec.run import RunSpec
from tools.spec.strategy import Sharding

_SCALAR_BYTES = 4
_LOGGED_TIMERS = 24
"""Names in `timers_to_log` of `training_log` at f4fa7d6b."""


def bookkeeping_traffic(
    configuration: RunSpec, pipeline_rank: int, megatron: Megatron
) -> Iterator[Traffic]:
    """Reductions of a few numbers; with a log line every iteration and gradient clipping on."""
    parallelism = configuration.parallelism
    yield _call(configuration, Group.WORLD, "does any rank want to rerun", "rerun_state_machine.py")
    yield from _gradient_statistics(configuration)
    yield _call(
        configuration,
        Group.MODEL,
        "was the update made everywhere",
        "training: logical_and_across_model_parallel_group",
    )
    yield _call(
        configuration,
        Group.MODEL,
        "gradient norm, and learning rate, for ranks that have none",
        "training: reduce_max_stat_across_model_parallel_group",
        calls=2,
    )
    if pipeline_rank == parallelism.pipeline - 1:
        yield _call(
            configuration,
            Group.DATA_CONTEXT,
            "loss and its token count",
            "training/training.py: train_step",
            numbers=2,
        )
    if configuration.shape.experts:
        yield from _router_losses(configuration, megatron)
    if megatron is Megatron.F4FA7D6B:
        yield _timers(configuration)


def _gradient_statistics(configuration: RunSpec) -> Iterator[Traffic]:
    """Norm, and under fp16 the overflow flag, over all ranks that hold different gradients.

    With expert parallelism two optimizers are chained; each reduces its own, unless both are
    distributed ones, whose norms have a group in common (`ChainedOptimizer.get_grad_norm`).
    """
    parallelism = configuration.parallelism
    groups = [Group.MODEL] + ([Group.EXPERT_MODEL] if parallelism.expert > 1 else [])
    if (
        parallelism.sharding is Sharding.FSDP2
    ):  # Its gradients are DTensors, summed over their mesh.
        groups = [Group.DATA_CONTEXT, Group.MODEL]
    elif parallelism.sharding is not Sharding.NONE:
        groups = [Group.WORLD]
    for group in groups:
        norm = "optimizer/clip_grads.py: get_grad_norm_fp32"
        yield _call(configuration, group, "squared gradient norm", norm)
        if configuration.dtype == "fp16":
            source = "optimizer/optimizer.py: _unscale_main_grads_and_check_for_nan"
            yield _call(configuration, group, "overflow flag", source)


def _router_losses(configuration: RunSpec, megatron: Megatron) -> Iterator[Traffic]:
    """The routers' losses of every layer, for the log; f4fa7d6b averages the z-loss over DP alone.

    The load-balancing loss is logged, as 0, also where it is no part of the loss.
    """
    everywhere = (Group.PIPELINE, Group.DATA_CONTEXT)
    own = (Group.TENSOR_CONTEXT,) if configuration.shape.load_balancing else ()
    logged = [("load-balancing loss of each layer", (*own, *everywhere))]
    if configuration.shape.router_z_loss:
        stage = () if megatron is Megatron.F4FA7D6B else (Group.TENSOR_DATA_CONTEXT,)
        logged.append(("z-loss of each layer", (*stage, *everywhere)))
    source, numbers = "transformer/moe: logging of auxiliary losses", configuration.shape.layers
    for what, groups in logged:
        for group in groups:
            yield _call(configuration, group, what, source, numbers=numbers)


def _timers(configuration: RunSpec) -> Traffic:
    """f4fa7d6b gathers its list of timers at every log line, whether or not they run."""
    ranks = configuration.parallelism.world_size
    return Traffic(
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
    configuration: RunSpec,
    group: Group,
    what: str,
    source: str,
    *,
    numbers: int = 1,
    calls: int = 1,
) -> Traffic:
    ranks = group_ranks(configuration.parallelism, group)
    payload = numbers * _SCALAR_BYTES
    return Traffic(
        group, ranks, Operation.ALL_REDUCE, Phase.OPTIMIZER, what, calls, payload, source
    )

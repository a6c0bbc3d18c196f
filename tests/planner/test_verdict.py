from dataclasses import replace

import pytest

from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.memory import estimate_rank_memory
from parakit.costs.tensors import rank_parameters
from parakit.formatting.units import gib
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.execution import Execution
from parakit.planner.verdict import Fit, explain_close_fit, judge_fit_on_cluster
from tests.costs.test_memory import tiny


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [(Fp8Recipe.DELAYED, (4, 2)), (Fp8Recipe.MXFP8, (4.06, 2.06)), (Fp8Recipe.NVFP4, (3.12, 3.12))],
)
def test_fp8_weights_replace_the_bf16_weights_if_only_they_are_stored(
    recipe: Fp8Recipe, bytes_each: tuple[float, float]
) -> None:
    plain = replace(tiny(), dtype="bf16")
    parameters = rank_parameters(plain)
    linear = parameters.attention + parameters.dense_mlp
    for kept, bytes_per_weight in zip((False, True), bytes_each, strict=True):
        spec = replace(plain, fp8_recipe=recipe, quantised_weights=kept)
        more = estimate_rank_memory(spec).weights - estimate_rank_memory(plain).weights
        assert more == pytest.approx((bytes_per_weight - 2) * linear, abs=1)


def test_gathered_weights_store_no_fp8_copies() -> None:
    sharded = tiny(Parallelism(data=4, sharding=Sharding.ZERO3))
    spec = replace(sharded, fp8_recipe=Fp8Recipe.DELAYED)
    assert estimate_rank_memory(spec).weights == estimate_rank_memory(sharded).weights


def test_reclaimable_memory_is_freed_before_a_run_is_out_of_memory() -> None:
    spec = replace(tiny(), dtype="fp16")
    memory = estimate_rank_memory(spec)
    logits = spec.micro_batch_tokens * spec.padded_vocabulary
    assert memory.total - memory.needed == 4 * rank_parameters(spec).total + 2 * logits


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.89, Fit.FITS), (0.91, Fit.CLOSE), (0.99, Fit.CLOSE), (1.01, Fit.DOES_NOT_FIT)],
)
def test_a_run_is_close_from_nine_tenths_of_a_device_to_all_of_it(
    share: float, verdict: Fit
) -> None:
    assert _verdict(replace(tiny(), dtype="fp32"), share) is verdict


def test_run_that_fits_only_without_reclaimable_memory_is_close() -> None:
    spec, cluster = replace(tiny(), dtype="fp16"), usual_cluster("h100", 8)
    memory = estimate_rank_memory(spec)
    within = replace(memory, reclaimable=memory.total // 5)
    for share, verdict in ((1.02, Fit.CLOSE), (1.2, Fit.CLOSE), (1.26, Fit.DOES_NOT_FIT)):
        device = replace(cluster.device, memory_bytes=int(within.total / share))
        assert judge_fit_on_cluster(spec, within, replace(cluster, device=device)) is verdict
    reason = explain_close_fit(spec, within, int(within.total / 1.02))
    assert reason.startswith(
        f"{gib(within.reclaimable)} GiB are blocks that PyTorch gives back only when"
    )


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.84, Fit.FITS), (0.87, Fit.CLOSE), (1.11, Fit.CLOSE), (1.13, Fit.DOES_NOT_FIT)],
)
def test_reclaimable_memory_of_sharded_weights_may_be_overestimated(
    share: float, verdict: Fit
) -> None:
    assert _verdict(tiny(Parallelism(data=4, sharding=Sharding.ZERO3)), share) is verdict


def _verdict(spec: RunSpec, share: float) -> Fit:
    """Return the verdict of a run that is predicted to need this fraction of its device."""
    cluster, memory = usual_cluster("h100", 8), estimate_rank_memory(spec)
    device = replace(cluster.device, memory_bytes=int(memory.needed / share))
    return judge_fit_on_cluster(spec, memory, replace(cluster, device=device))


def _judge_mixture(fraction: float, load: float = 1.0) -> Fit:
    """Return the verdict on a mixture that is predicted to need this fraction of its device."""
    shape = replace(
        tiny().shape, experts=8, experts_per_token=2, expert_ffn_hidden=4096, bias=False
    )
    split = Parallelism(data=8, expert=8, sharding=Sharding.ZERO1)
    spec = replace(tiny(split), shape=shape, batch=Batch(65536, 524288), dtype="bf16")
    spec = replace(spec, expert_load=replace(spec.expert_load, imbalance=load))
    cluster, memory = usual_cluster("h100", 8), estimate_rank_memory(spec)
    device = replace(cluster.device, memory_bytes=int(memory.needed / fraction))
    return judge_fit_on_cluster(spec, memory, replace(cluster, device=device))


def test_a_mixture_is_close_if_uneven_experts_would_fill_the_device() -> None:
    assert _judge_mixture(0.7) is Fit.FITS
    assert _judge_mixture(0.88) is Fit.CLOSE
    # The stated imbalance is part of the prediction, so nothing is added to it.
    assert _judge_mixture(0.88, load=1.2) is Fit.FITS


def test_a_run_with_cuda_graphs_is_close_if_their_pools_would_fill_the_device() -> None:
    spec, cluster = replace(tiny(), dtype="fp32"), usual_cluster("h100", 8)
    memory = estimate_rank_memory(spec)
    device = replace(cluster.device, memory_bytes=int(memory.needed / 0.8))
    graphs = replace(cluster, device=device, execution=Execution(graphs=True))
    assert judge_fit_on_cluster(spec, memory, replace(graphs, execution=Execution())) is Fit.FITS
    assert judge_fit_on_cluster(spec, memory, graphs) is Fit.CLOSE

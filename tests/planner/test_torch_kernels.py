"""A GPU without Transformer Engine and Apex uses PyTorch's kernels unless a patch fuses them."""

from dataclasses import replace

import pytest

from parakit.config.files import ROOT, read_args_file
from parakit.config.flags import Flags, drop_flags
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import load_model
from parakit.config.run import RunSpec, spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.readings.reading_to_spec import parse_execution
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.compute import head_seconds, layer_seconds, optimizer_seconds
from parakit.planner.time.execution import Execution
from parakit.planner.time.host import iteration_host_seconds
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.rates import DeviceRates, compute_device_rates
from parakit.planner.time.traffic import layer_bytes

HOST = read_args_file(ROOT / "src" / "parakit" / "launch" / "runtimes" / "host.args")
"""Flags of a host without Transformer Engine."""
LARGE = load_model("gpt2-large")
HIDDEN = 32 * 1024 * 1280
"""Elements of a hidden state of a micro batch."""


def run(*fused: str, dtype: str = "fp16") -> RunSpec:
    spec = spec_from_model(LARGE, Parallelism(), Batch(32, 32))
    return replace(spec, dtype=dtype, fused=fused)


def cluster(flags: tuple[str, ...] | list[str] = HOST, key: str = "h200") -> Cluster:
    device = device_by_key(key)
    link = link_by_key(device.link)
    return Cluster(device, 1, 1, link, link, execution=parse_execution(Flags(flags)))


def rate(flags: tuple[str, ...] | list[str] = HOST) -> DeviceRates:
    return compute_device_rates(cluster(flags), "fp16")


def additional_bytes(*fused: str) -> tuple[int, int]:
    """Return the bytes that an unfused layer moves forward and backward beyond those of a fused layer."""
    bare, whole = layer_bytes(run(*fused), rate()), layer_bytes(run(), rate([]))
    return bare.forward - whole.forward, bare.backward - whole.backward


def test_host_without_transformer_engine_is_recognised_by_its_flags() -> None:
    assert parse_execution(Flags(HOST)) == Execution(
        grouped_experts=False, torch_kernels=True, unfused_gradients=True, unfused_rotary=True
    )
    assert not parse_execution(Flags(["--transformer-impl", "local"])).torch_kernels
    assert not parse_execution(Flags(["--no-persist-layer-norm"])).torch_kernels
    sharded = ["--no-gradient-accumulation-fusion", "--use-megatron-fsdp"]
    assert not parse_execution(Flags(sharded)).unfused_gradients


def test_unfused_layer_moves_additional_bytes_for_norms_bias_and_qkv_gradients() -> None:
    norms = 2 * 0.9 * 2 * 2 * HIDDEN, 2 * 2.5 * 3 * 2 * HIDDEN
    projected = 3 * 2 * HIDDEN
    assert additional_bytes() == pytest.approx((norms[0] + 2 * projected, norms[1] + 2 * projected))
    assert additional_bytes("norm") == pytest.approx((2 * projected, 2 * projected))
    assert additional_bytes("norm", "bias_gemm") == pytest.approx((0, 2 * projected))
    wide = 2 * 32 * 1024 * 5120
    assert additional_bytes("norm", "bias_gemm", "bias_gelu") == pytest.approx(
        (0, 2 * projected - wide)
    )


def test_unfused_rotary_positions_take_a_dozen_memory_passes() -> None:
    spec = run()
    spec = replace(spec, shape=replace(spec.shape, positions=0))
    fused, split = layer_bytes(spec, rate([])), layer_bytes(spec, rate(["--no-rope-fusion"]))
    turned = 2 * 2 * 2 * HIDDEN
    assert split.forward - fused.forward == 5 * turned
    assert split.backward - fused.backward == 6 * turned


def test_unfused_optimizer_moves_80_bytes_per_parameter_instead_of_28() -> None:
    bare = rate()
    more = optimizer_seconds(run(), bare, 0) - optimizer_seconds(run("adamw"), bare, 0)
    assert more == pytest.approx(52 * 774_090_240 / bare.bytes_per_second)
    assert optimizer_seconds(run("adamw"), bare, 0) == optimizer_seconds(run(), rate([]), 0)


@pytest.mark.parametrize(("dtype", "moved"), [("fp16", 6), ("bf16", 10)])
def test_unfused_gradient_accumulation_reads_and_adds_the_gradient(dtype: str, moved: int) -> None:
    alone, fused = ["--no-gradient-accumulation-fusion"], compute_device_rates(cluster([]), dtype)
    bare = compute_device_rates(cluster(alone), dtype)
    spec = run(dtype=dtype)
    weights = 12 * 1280**2
    more = layer_seconds(spec, bare).backward_memory - layer_seconds(spec, fused).backward_memory
    assert more == pytest.approx(moved * weights / bare.bytes_per_second)
    of_head = head_seconds(spec, bare)[1] - head_seconds(spec, fused)[1]
    assert of_head == pytest.approx(moved * 50304 * 1280 / bare.bytes_per_second)


def test_gradient_norms_per_tensor_cost_launches() -> None:
    bare = cluster()
    layer = bare.constants.layer_launch_seconds
    more = iteration_host_seconds(run(), bare, 0.0)
    fewer = iteration_host_seconds(run("multi_tensor"), bare, 0.0)
    assert more - fewer == pytest.approx(36 * 0.18 * layer)


def test_cpu_core_uses_the_kernels_of_its_measurement() -> None:
    rates = compute_device_rates(cluster(key="cpu"), "fp32")
    host = rates.execution
    assert [host.torch_kernels, host.unfused_gradients, host.unfused_rotary] == 3 * [False]


def test_runs_of_the_kit_without_transformer_engine_are_predicted_within_12_percent() -> None:
    # examples/gpt3/no_te.md, and an H100's 306 ms (docs/planner.md); no term was fitted to them. The H200's host left
    # its device idle for 55 to 84 ms, and 24 to 33 are predicted. Attention and products are predicted too slow.
    fused = ("bias_gelu", "bias_gemm", "norm", "cross_entropy", "adamw", "multi_tensor")
    tuned = run(*fused, dtype="bf16")
    published, best = cluster(), cluster(drop_flags(HOST, ("--no-gradient-accumulation-fusion",)))
    half = replace(run(), batch=Batch(16, 16))
    for spec, where, measured in (
        (run(), published, 463.1),
        (tuned, best, 378.8),
        (half, cluster(key="h100"), 306.0),
    ):
        took = 1e3 * iteration_seconds(spec, where).total
        assert took == pytest.approx(measured, rel=0.12)

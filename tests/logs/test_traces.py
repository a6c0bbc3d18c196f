import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parakit.logs.traces import (
    GAPS,
    GROUPS,
    EventArguments,
    TraceEvent,
    classify_kernel,
    milliseconds_by_group,
    read_trace_events,
)


def event(
    cat: str, name: str, ts: float, dur: float, correlation: int = -1, tid: int = 1
) -> TraceEvent:
    return TraceEvent("X", cat, name, 1, tid, ts, dur, EventArguments(correlation))


def step(number: int, ts: float, dur: float) -> TraceEvent:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def test_groups_get_the_time_of_their_kernels_and_gaps_the_remaining_time() -> None:
    events = [
        step(5, 0, 1000),
        step(6, 1000, 1000),
        event("gpu_user_annotation", "ProfilerStep#5", 0, 9999, tid=7),
        event("kernel", "nvjet_hsh_256x128_64x4_1x2_h_bz_TNT", 0, 600, 1, 7),
        event("kernel", "pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel", 600, 200, 2, 7),
        event(
            "kernel", "void at::native::vectorized_layer_norm_kernel<c10::Half>", 1000, 100, 3, 7
        ),
        event("gpu_memcpy", "Memcpy DtoD", 1200, 50, 4, 7),
        event("kernel", "outside", 5000, 50, 5, 7),
    ]
    assert milliseconds_by_group(events) == {
        "attention": 0.1,
        "GEMM": 0.3,
        "layer norm": 0.05,
        "copies": 0.025,
        GAPS: 0.525,
    }


def test_kernel_that_runs_beyond_the_last_step_is_counted_up_to_its_end() -> None:
    events = [step(1, 0, 1000), event("kernel", "nvjet_hsh", 900, 400, 1, 7)]
    assert milliseconds_by_group(events) == {"GEMM": 0.1, GAPS: 0.9}


def test_real_gpu_trace_is_split_without_remainder() -> None:
    """The trace is of gpt2-tiny on an H200 (torch 2.11), whose device mostly waits for the host."""
    events = read_trace_events(Path(__file__).parent / "h200_gpt2_tiny.json.gz")
    milliseconds = milliseconds_by_group(events)
    assert {group: round(ms, 3) for group, ms in milliseconds.items()} == {
        "attention": 0.11,
        "GEMM": 0.502,
        "cross entropy": 0.204,
        "layer norm": 0.075,
        "GELU and bias": 0.07,
        "embedding": 0.025,
        "gradient handling": 0.189,
        "optimizer": 0.14,
        "copies": 0.228,
        "other": 0.125,
        GAPS: 114.608,
    }
    steps = [e.dur for e in events if e.name.startswith("ProfilerStep#") and e.tid == e.pid]
    on_device = [e.dur for e in events if e.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy = sum(milliseconds.values()) - milliseconds[GAPS]
    assert busy == pytest.approx(sum(on_device) / 2000, rel=0.001)
    assert sum(milliseconds.values()) == pytest.approx(sum(steps) / 2000, rel=0.001)


def test_elementwise_kernels_are_identified_by_the_operators_around_their_launch() -> None:
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>"
    events = [
        step(1, 0, 1000),
        event("user_annotation", "Optimizer.step#AdamW.step", 10, 100),
        event("cpu_op", "aten::_foreach_add_", 20, 30),
        event("cuda_runtime", "cudaLaunchKernel", 25, 5, 1),
        event(
            "cpu_op", "autograd::engine::evaluate_function: GeLUFunctionBackward", 200, 50, tid=2
        ),
        event("cpu_op", "aten::mul", 210, 20, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 212, 5, 2, tid=2),
        event("cpu_op", "aten::add", 300, 20),
        event("cuda_runtime", "cudaLaunchKernel", 301, 5, 3),
        event("cpu_op", "aten::_foreach_norm", 400, 20),
        event("cuda_driver", "cuLaunchKernel", 401, 5, 4),
        *(event("kernel", kernel, 100.0 * n, 10.0 * n, n, 7) for n in (1, 2, 3, 4)),
    ]
    assert milliseconds_by_group(events) == {
        "optimizer": 0.01,
        "GELU and bias": 0.02,
        "other": 0.03,
        "gradient handling": 0.04,
        GAPS: 0.9,
    }


@pytest.mark.parametrize(
    ("name", "around", "group"),
    [
        # The names are from traces of H100 and H200 with torch 2.6 to 2.11.
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", (), "GEMM"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", ("aten::mm",), "GEMM"),
        ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", (), "GEMM"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN", (), "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float>", (), "GEMM"),
        ("void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024>", (), "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128>", (), "GEMM"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
            (),
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1",
            (),
            "attention",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(...)", (), "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<1>", (), "attention"),
        (
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 64, 128>>",
            (),
            "attention",
        ),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96>>", (), "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", (), "attention"),
        ("triton_poi_fused_add_gelu_0", (), "GELU and bias"),
        ("triton_red_fused_add_gelu_gelu_backward_sum_1", (), "GELU and bias"),
        (
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::Half>>",
            ("LinearWithGradAccumulationAndAsyncCommunicationBackward", "aten::sum"),
            "GELU and bias",
        ),
        ("triton_poi_fused_add_native_dropout_1", (), "dropout"),
        ("triton_red_fused_native_dropout_backward_sum_view_0", (), "dropout"),
        (
            "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::Half>",
            (),
            "dropout",
        ),
        ("triton_red_fused_add_mean_mul_rsqrt_sub_2", (), "layer norm"),
        (
            "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float, "
            "float, false>(float const*, float const*)",
            (),
            "layer norm",
        ),
        (
            "void (anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>",
            (),
            "layer norm",
        ),
        ("void cuComputeGradInput<c10::Half, float>", (), "layer norm"),
        ("triton_red_fused_logsumexp_3", (), "cross entropy"),
        (
            "elementwise_kernel",
            ("_VocabParallelCrossEntropyBackward", "aten::mul"),
            "cross entropy",
        ),
        ("elementwise_kernel", ("ChunkedCrossEntropy", "aten::exp"), "cross entropy"),
        ("fused_adamw_kernel", (), "optimizer"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
            "namespace)::FusedOptimizerTensorListMetadata<4>>",
            ("Optimizer.step#FusedAdamW.step", "aten::_fused_adamw_"),
            "optimizer",
        ),
        ("void multi_tensor_apply_kernel", ("aten::_foreach_copy_",), "gradient handling"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", "aten::add_"),
            "gradient handling",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::"
            "OpaqueType<2u>, unsigned int, 3, 128, 1, 16, 8>",
            (),
            "copies",
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda",
            (),
            "copies",
        ),
        ("Memset (Device)", (), "copies"),
        ("Memcpy DtoD (Device -> Device)", (), "copies"),
        (
            "void at::native::(anonymous namespace)::embedding_backward_feature_kernel",
            (),
            "embedding",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            (),
            "communication",
        ),
    ],
)
def test_kernels_are_grouped_by_their_names_in_torch_and_its_libraries(
    name: str, around: tuple[str, ...], group: str
) -> None:
    assert classify_kernel(name, around) == group


@pytest.mark.parametrize(
    ("events", "reason"),
    [([], "no profiled step"), ([step(1, 0, 10)], "nothing that ran")],
)
def test_trace_without_kernels_is_refused(events: list[TraceEvent], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        milliseconds_by_group(events)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=20))
def test_gaps_are_the_time_that_no_kernel_covers(kernels: list[tuple[int, int]]) -> None:
    events = [step(1, 0, 1000)]
    events += [event("kernel", "x", ts, dur, n, 7) for n, (ts, dur) in enumerate(kernels)]
    covered = {us for ts, dur in kernels for us in range(ts, min(ts + dur, 1000))}
    milliseconds = milliseconds_by_group(events)
    assert milliseconds.get(GAPS, 0.0) == pytest.approx((1000 - len(covered)) / 1000)
    assert set(milliseconds) <= set(GROUPS)


def test_real_cpu_trace_is_split_by_self_time_of_operators(tmp_path: Path) -> None:
    norm, linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256)
    x = torch.randn(128, 64)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(tmp_path / "trace.json.gz")),
    ) as profiler:
        for _ in range(3):
            torch.nn.functional.gelu(linear(norm(x))).sum().backward()
            profiler.step()
    milliseconds = milliseconds_by_group(read_trace_events(tmp_path / "trace.json.gz"))
    assert {"GEMM", "layer norm", "GELU and bias"} <= set(milliseconds)
    assert all(ms > 0 for ms in milliseconds.values())


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"other": 1}))
    with pytest.raises(ValueError, match="traceEvents"):
        read_trace_events(tmp_path / "a.json")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parakit.config.run import Backend, Transport
from parakit.config.strategy import Batch
from parakit.launch import preflight_gpu
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.preflight_gpu import (
    fused_problems,
    gpu_memory_problems,
    gpu_problems,
    sharing_problems,
)
from parakit.launch.run_folder import find_host
from parakit.launch.runtime import ON_HOST, Runtime
from parakit.launch.train import compose_job
from tests.launch.fake_nvml import FakeGpu, FakeNvml, machine_with

Composer = Callable[..., Launch]


@pytest.fixture
def one_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield from machine_with(monkeypatch, FakeGpu())


@pytest.fixture
def composed(tmp_path: Path) -> Composer:
    def compose_named(name: str, runtime: Runtime = ON_HOST, **changes: object) -> Launch:
        options = Options(data="owt-ds/any", runs=tmp_path / "runs", **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        return compose_job(target.with_options(options), runtime)

    return compose_named


def test_nothing_is_fused_or_shared_unless_asked_for(composed: Composer) -> None:
    launch = composed("train-baseline-gpt2-large-1gpu")
    assert not {"KIT_FUSED", "KIT_SHARE_GPU"} & set(launch.environment)
    assert "--no-gradient-accumulation-fusion" in launch.flags
    assert "--distributed-backend" not in launch.flags


def test_names_reach_the_patches_and_the_flags_that_would_undo_them_go(composed: Composer) -> None:
    launch = composed("train-baseline-gpt2-large-1gpu", fused=("adamw", "gradient_gemm"))
    assert launch.environment["KIT_FUSED"] == "adamw,gradient_gemm"
    assert "--no-gradient-accumulation-fusion" not in launch.flags
    assert "--no-masked-softmax-fusion" in launch.flags


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"FUSED=gelu is not a list with commas of bias_gelu, "):
        options_from_texts({"FUSED": "gelu"})


@pytest.mark.parametrize(
    ("name", "changes", "runtime", "wanted"),
    [
        ("train-baseline-gpt2-large-1gpu", {}, Runtime(transformer_engine=True), "Transformer"),
        ("train-baseline-gpt2-large-1gpu", {"backend": Backend.NATIVE}, ON_HOST, "BACKEND=native"),
        ("train-zero2-gpt2-large-2gpu", {}, ON_HOST, "buffers that zero2 does not have"),
    ],
)
def test_patches_that_do_not_fit_are_refused(
    composed: Composer, name: str, changes: dict[str, object], runtime: Runtime, wanted: str
) -> None:
    launch = composed(name, runtime, fused=("gradient_gemm",), **changes)
    (problem,) = fused_problems(launch)
    assert wanted in problem


def test_the_flash_kernel_alone_is_refused_where_a_mask_is_needed(composed: Composer) -> None:
    launch = composed("train-cp2-gpt2-large-2gpu", fused=("attention_flash",))
    assert "takes no mask, and cp2 masks by position" in next(fused_problems(launch))
    assert list(fused_problems(composed("train-dp2-gpt2-large-2gpu", fused=("adamw",)))) == []


def test_two_ranks_share_the_one_gpu_over_nccl(composed: Composer, one_h200: FakeNvml) -> None:
    launch = composed("train-tp2-gpt2-large-2gpu", share_gpu=True)
    assert list(sharing_problems(launch)) == []
    assert list(gpu_problems(launch)) == []
    assert launch.environment["KIT_SHARE_GPU"] == "1"
    assert launch.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "--distributed-backend" not in launch.flags
    assert launch.spec.transport is Transport.NCCL


def test_each_rank_names_the_gpu_it_shares(composed: Composer, one_h200: FakeNvml) -> None:
    launch = composed("train-tp2-gpt2-large-2gpu", share_gpu=True)
    devices = find_host(launch).devices
    assert devices == ("NVIDIA H200", "NVIDIA H200")


def test_what_two_ranks_need_must_fit_the_one_gpu(composed: Composer, one_h200: FakeNvml) -> None:
    launch = composed("train-tp2-gpt2-large-2gpu", share_gpu=True)
    assert launch.spec.batch == Batch(64, 64)
    (problem,) = gpu_memory_problems(launch)
    assert "GiB per rank" in problem
    assert "70 per rank" in problem
    smaller = composed(
        "train-tp2-gpt2-large-2gpu", share_gpu=True, micro_batch_size=16, global_batch_size=64
    )
    assert list(gpu_memory_problems(smaller)) == []


def test_sharing_is_refused_with_one_rank_or_on_cpu_ranks(
    composed: Composer, one_h200: FakeNvml
) -> None:
    (problem,) = sharing_problems(composed("train-baseline-gpt2-large-1gpu", share_gpu=True))
    assert "this run has one rank" in problem
    (cpu,) = sharing_problems(composed("train-tp2-gpt2-tiny-2cpu", share_gpu=True))
    assert "leave it out for CPU ranks" in cpu


def test_sharing_is_refused_with_an_nccl_that_knows_no_sharing(
    composed: Composer, one_h200: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = composed("train-tp2-gpt2-large-2gpu", share_gpu=True)
    for version, refused in (("2.29.7", True), ("2.30.3", False)):
        monkeypatch.setattr(preflight_gpu, "_find_nccl_version", lambda version=version: version)
        problems = list(sharing_problems(launch))
        assert (f"needs NCCL 2.30, found {version}" in "".join(problems)) == refused


def test_sharing_is_refused_where_there_are_two_gpus_or_none(
    composed: Composer, two_h200: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = composed("train-tp2-gpt2-large-2gpu", share_gpu=True)
    assert "one visible GPU, found 2;" in next(sharing_problems(launch))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "found 0 (CUDA_VISIBLE_DEVICES=);" in next(sharing_problems(launch))

import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.cluster.container.docker import Container
from parakit.cluster.container.image import find_pair
from parakit.config.errors import LaunchError
from parakit.config.strategy import PUBLISHED_STRATEGIES
from parakit.costs.memory import estimate_rank_memory, placeholder_bytes
from parakit.launch import devices, preflight_gpu
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Wandb
from parakit.launch.preflight import check_launch
from parakit.launch.preflight_gpu import (
    compiler_problem,
    gpu_memory_problems,
    gpu_memory_warning,
    gpu_problems,
    predict_peak_bytes,
    torch_problem,
)
from parakit.launch.runtime import Runtime, container_runtime
from parakit.launch.train import compose_job
from tests.launch.fake_nvml import GIB, FakeNvml
from tests.machines import FakeDocker

EQUIPPED = Runtime(transformer_engine=True, apex=True)
PUBLISHED_MIB = {
    "baseline": 80161,
    "dp2": 80543,
    "tp2": 85969,
    "sp2": 71571,
    "cp2": 81917,
    "pp2": 88299,
}
Composer = Callable[..., Launch]


@pytest.fixture
def composed(sample_prefix: Path, tmp_path: Path) -> Composer:
    def compose_named(strategy: str, runtime: Runtime = EQUIPPED, **changes: object) -> Launch:
        name = f"train-{strategy}-gpt2-large-{1 if strategy == 'baseline' else 2}gpu"
        options = Options(data=str(sample_prefix), runs=tmp_path / "runs", **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        # The sample's documents leave the published test split empty, which is not what is tested here.
        options = replace(options, extra=("--split", "90,9,1"))
        return compose_job(target.with_options(options), runtime)

    return compose_named


@pytest.mark.parametrize("strategy", PUBLISHED_STRATEGIES)
def test_the_published_runs_pass_on_the_published_machine(
    composed: Composer, two_h200: FakeNvml, tmp_path: Path, strategy: str
) -> None:
    launch = composed(strategy)
    check_launch(launch)
    spec = replace(launch.spec, fused_attention=True)
    shown = max(estimate_rank_memory(spec, rank).total for rank in range(spec.parallelism.pipeline))
    assert shown / 2**20 == pytest.approx(PUBLISHED_MIB[strategy], rel=0.03)
    # The allocator gives some of that back before memory runs out.
    assert predict_peak_bytes(launch, spec.batch) < shown


def test_one_gpu_where_two_are_needed_is_said_with_what_to_run_instead(
    composed: Composer, two_h200: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert list(gpu_problems(composed("tp2"))) == [
        "Needs 2 GPUs, found 1 (CUDA_VISIBLE_DEVICES=1); run 'make "
        "train-tp2-gpt2-tiny-2cpu' to see the strategy on CPU ranks, or 'make plan' for what it would "
        "need."
    ]


def test_a_busy_gpu_is_named_with_its_processes_and_the_free_ones(
    composed: Composer, two_h200: FakeNvml
) -> None:
    two_h200.gpus[0].used_bytes = 40 * GIB
    two_h200.gpus[0].processes = (4711,)
    assert list(gpu_problems(composed("baseline"))) == [
        "GPU 0 (NVIDIA H200) is busy: 40.0 GiB are in use by process 4711; wait for it or end it, or "
        "choose others with CUDA_VISIBLE_DEVICES=1."
    ]


def test_a_desktops_gpu_is_not_busy(composed: Composer, two_h200: FakeNvml) -> None:
    two_h200.gpus[0].used_bytes = 1 * GIB
    assert list(gpu_problems(composed("baseline"))) == []


def test_a_named_run_that_is_close_is_allowed_with_a_warning(
    composed: Composer, two_h200: FakeNvml
) -> None:
    launch = composed("baseline")
    assert gpu_memory_warning(launch) == ""
    for gpu in two_h200.gpus:
        gpu.memory_bytes = 82 * GIB
    devices.all_gpus.cache_clear()
    assert list(gpu_memory_problems(launch)) == []
    warning = gpu_memory_warning(launch)
    assert warning.startswith("Memory is close: baseline is predicted to hold 7")
    assert "% of what a rank has of GPU 0 (NVIDIA H200); " in warning


@pytest.mark.parametrize(
    ("memory_gib", "strategy", "way"),
    [
        (70, "pp2", "MICRO_BATCH=32 fits, with the global batch of 64 in more steps."),
        (60, "baseline", "MICRO_BATCH=16 fits, with the global batch of 32 in more steps."),
        (24, "baseline", "MICRO_BATCH=4 fits, with the global batch of 32 in more steps."),
        (8, "baseline", "not even a micro batch of 1 fits, so use more GPUs"),
    ],
)
def test_a_gpu_too_small_for_the_batch_is_refused_with_the_batch_that_fits(
    composed: Composer, two_h200: FakeNvml, memory_gib: int, strategy: str, way: str
) -> None:
    two_h200.gpus[0].memory_bytes = memory_gib * GIB
    devices.all_gpus.cache_clear()
    (problem,) = gpu_memory_problems(composed(strategy))
    assert way in problem
    assert f"GPU 0 (NVIDIA H200) has {memory_gib}" in problem


def test_the_batch_that_is_said_to_fit_does(composed: Composer, two_h200: FakeNvml) -> None:
    for gpu in two_h200.gpus:
        gpu.memory_bytes = 60 * GIB
    devices.all_gpus.cache_clear()
    assert list(gpu_memory_problems(composed("baseline", micro_batch_size=16))) == []


@pytest.mark.parametrize("strategy", ["baseline", "cp2"])
def test_the_kits_attention_keeps_no_scores_either(composed: Composer, strategy: str) -> None:
    engine, host = composed(strategy), composed(strategy, Runtime())
    # Only Transformer Engine keeps placeholders of gradients.
    kept = placeholder_bytes(engine.spec, 0)
    needed = predict_peak_bytes(engine, engine.spec.batch)
    assert predict_peak_bytes(host, host.spec.batch) == needed - kept < 90e9


def test_an_image_that_is_not_built_stops_a_run_before_anything_is_written(
    composed: Composer, docker: FakeDocker, two_h200: FakeNvml, tmp_path: Path
) -> None:
    docker.answer("image inspect", "", "No such image\n", 1)
    launch = composed("tp2", container_runtime(find_pair(None)))
    with pytest.raises(
        LaunchError, match=r"25.06-py3-f4fa7d6b is not built; run 'make image IMAGE=25"
    ):
        check_launch(launch)
    assert not (tmp_path / "runs").exists()


def test_the_published_data_set_is_asked_for_by_its_own_target(
    composed: Composer, two_h200: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.launch.compose.ROOT", tmp_path)
    launch = replace(composed("dp2"), data="owt-ds/openwebtext-10k_text_document")
    with pytest.raises(LaunchError, match="run 'make prepare-ds-openwebtext-10k'"):
        check_launch(launch)


def test_a_checkout_that_asks_nvcc_is_refused_where_there_is_none(
    composed: Composer, two_h200: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "mlm/megatron/legacy/fused_kernels"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    launch = composed("baseline")
    entry = replace(launch.entry, path=str(tmp_path / "mlm/pretrain_gpt.py"))
    monkeypatch.setattr(preflight_gpu, "CUDA_FOLDER", tmp_path / "no-cuda")
    monkeypatch.setattr(preflight_gpu.shutil, "which", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"asks nvcc for its version.*CUDA_HOME"):
        check_launch(replace(launch, entry=entry))
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    check_launch(replace(launch, entry=entry))


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_wandb_needs_its_package_and_tensorboards(
    composed: Composer,
    two_h200: FakeNvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    launch = composed("baseline", wandb=Wandb())
    check_launch(launch)
    monkeypatch.setattr(
        "parakit.launch.preflight.importlib.util.find_spec",
        lambda name: None if name == package else object(),
    )
    with pytest.raises(LaunchError, match=f"WANDB=1 needs the package {package}"):
        check_launch(launch)
    in_image = replace(launch, runtime=replace(EQUIPPED, container=Container("i", "1:1")))
    check_launch(in_image)  # the image has its own


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler, triton, and Python's headers in one folder of Debian's two."""
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "Python.h").touch()
    monkeypatch.setattr(preflight_gpu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(preflight_gpu.shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    folders = {"posix_prefix": "prefix", "posix_local": "local"}
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / folders[scheme])}
    )
    return tmp_path


def test_debians_own_python_has_its_headers_where_triton_looks(everything: Path) -> None:
    assert compiler_problem() is None


def test_missing_headers_are_named_with_the_package_that_brings_them(everything: Path) -> None:
    (everything / "prefix" / "Python.h").unlink()
    assert "install python3-dev" in (compiler_problem() or "")


def test_a_missing_compiler_is_named(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_gpu.shutil, "which", lambda name: None)
    assert "needs a C compiler" in (compiler_problem() or "")


@pytest.mark.parametrize(("version", "fits"), [("2.8.1", False), ("2.9.0+cu130", True)])
def test_an_old_torch_is_refused(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_gpu.importlib.metadata, "version", lambda name: version)
    assert (torch_problem() is None) == fits

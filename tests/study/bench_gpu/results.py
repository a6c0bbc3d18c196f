"""Results of a bench that was never run, for tests."""

from tools.records.gpu_bench import BenchRun, Ceilings, GpuBench, SettingResult


def result(name: str, *medians_ms: float, reason: str = "") -> SettingResult:
    runs = tuple(
        BenchRun(
            f"run{n}", (ms - 1, ms, ms + 1), 60.0, 70 << 30, 80 << 30, (9.5, 9.25), {"GEMM": 200}
        )
        for n, ms in enumerate(medians_ms)
    )
    return SettingResult(name, "fp16", ("norm",) if "+" in name else (), (), runs, reason)


def bench(*settings: SettingResult) -> GpuBench:
    return GpuBench(
        created_utc="2026-01-01T00:00:00Z",
        device="NVIDIA H200",
        driver="580",
        software={"torch": "2.15.0"},
        kit_commit="abc",
        model_flops_per_iteration=1.6e14,
        ceilings=Ceilings(8e14, 4e12),
        settings=settings,
    )

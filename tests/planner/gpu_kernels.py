"""Matrix products and attention by shape on one GPU, and what the planner says of them.

python -m tests.planner.gpu_kernels measure OUT.json     on the GPU: half a minute, 5 GB
python -m tests.planner.gpu_kernels compare tests/planner/h200_kernels.json h200
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import ModelShape
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.compute import layer_seconds, product_seconds
from parakit.planner.time.rates import compute_device_rates

BF16 = (
    *((16384, 16384, 16384), (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048)),
    *((1024, 1024, 1024), (8192, 128, 8192), (8192, 256, 8192), (8192, 512, 8192)),
    *((8192, 1024, 8192), (8192, 2048, 8192), (8192, 4096, 8192), (8192, 8192, 128)),
    *((8192, 8192, 1024), (1024, 8192, 8192), (512, 8192, 8192), (128, 8192, 8192)),
    *((32768, 1280, 3840), (32768, 1280, 5120), (32768, 5120, 1280), (1280, 32768, 5120)),
    *((32768, 1280, 50304), (1280, 32768, 50304), (16384, 1280, 5120), (4096, 1280, 5120)),
    *((8192, 8192, 2048), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 4096, 6144)),
    *((2048, 4096, 28672), (8192, 4096, 1792), (2176, 4096, 4096), (4224, 4096, 4096)),
    (4352, 4096, 4096),
)
FP8 = (
    *((16384, 16384, 16384), (8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 14336)),
    *((8192, 14336, 4096), (8192, 1024, 8192)),
)
ATTENTION = tuple(
    (n, width) for n in (512, 1024, 2048, 4096, 8192, 16384) for width in (64, 80, 128)
)
KINDS = ("mm_bf16", "mm_fp8", "CUDNN_ATTENTION", "FLASH_ATTENTION")
_SECONDS, _PARTS = 0.2, 5


def heads_of(length: int, width: int) -> int:
    """Return a number of heads for which a call takes at least a millisecond."""
    return max(8, (1 << 19) // length * 64 // width // 8 * 8)


def measure() -> dict[str, dict[str, float]]:
    """Return seconds per call of each kernel. Attention is causal and runs forward and backward."""
    import torch
    from torch.nn.attention import SDPBackend

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def calls(count: int) -> float:
            begin.record()
            for _ in range(count):
                work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / count

        count = max(1, int(_SECONDS / calls(1) / _PARTS))
        return statistics.median(calls(count) for _ in range(_PARTS))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    seconds_by_kernel: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for rows, inner, columns in BF16:
        a, b = normal(rows, inner), normal(inner, columns)
        seconds_by_kernel["mm_bf16"][f"{rows}x{inner}x{columns}"] = seconds(partial(torch.mm, a, b))
    scale = torch.ones((), device="cuda")
    for rows, inner, columns in FP8:
        a = normal(rows, inner).to(torch.float8_e4m3fn)
        b = normal(columns, inner).to(torch.float8_e4m3fn).t()
        seconds_by_kernel["mm_fp8"][f"{rows}x{inner}x{columns}"] = seconds(
            partial(torch._scaled_mm, a, b, scale, scale, out_dtype=torch.bfloat16)
        )
    for kind in KINDS[2:]:
        for length, width in ATTENTION:
            heads = heads_of(length, width)
            inputs = [normal(1, heads, length, width).requires_grad_() for _ in range(3)]
            upstream = normal(1, heads, length, width)

            attend = partial(_attend, getattr(SDPBackend, kind), inputs, upstream)
            seconds_by_kernel[kind][f"both {heads}h {length} w{width}"] = seconds(attend)
    return seconds_by_kernel


def _attend(backend: Any, inputs: list[Any], upstream: Any) -> object:
    import torch
    from torch.nn.attention import sdpa_kernel

    query, key, value = inputs
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, inputs, upstream)


def compare(measured: dict[str, dict[str, float]], key: str) -> list[tuple[str, float, float]]:
    """Return kernel and shape, measured seconds, and the relative error of the prediction."""
    device = device_by_key(key)
    link = link_by_key(device.link)
    rate = compute_device_rates(Cluster(device, 1, 1, link, link), "bf16", Fp8Recipe.TENSORWISE)
    rows = []
    for kind in KINDS:
        for name, took in measured[kind].items():
            if kind.startswith("mm"):
                rows_, inner, columns = map(int, name.split("x"))
                few = kind == "mm_fp8"
                predicted = product_seconds(rows_, inner, columns, 2, rate, quantized=few)
            elif name.startswith("both"):
                heads, length, width = (int(word.strip("hw")) for word in name.split()[1:])
                shape = ModelShape(1, heads * width, heads, heads, width, 0, length, 0)
                run = RunSpec(shape, Parallelism(), Batch(1, 1), dropout=0.0)
                layer = layer_seconds(run, rate)
                predicted = layer.forward_attention + layer.backward_attention
            else:
                continue
            rows.append((f"{kind} {name}", took, predicted / took - 1))
    return rows


if __name__ == "__main__":
    task, file, *device_keys = sys.argv[1:]
    if task == "measure":
        Path(file).write_text(json.dumps(measure(), indent=1) + "\n")
    else:
        for case, took, error in compare(json.loads(Path(file).read_text()), *device_keys):
            print(f"{case:40} {1e6 * took:9.1f} µs  {error:+.1%}")

"""What a device reaches: its rates in a dtype, of its datasheet, its generation's constants and what was
measured on it. Figures that say "measured" are of an H200 (../readings/README.md: an H200).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from parakit.config.hardware import Device, HostRates
from parakit.config.run import Fp8Recipe
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.execution import Execution

_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of the result that one processor computes at once, and what of the best tile's rate:
smaller ones read their operands more often (NVIDIA's guide to matrix products, "tile quantization")."""
_LATER_TILES = (*_TILES, (320, 128, 1.0), (192, 192, 1.0))
"""And since Hopper (the names of cuBLAS's kernels in a trace)."""


class NoPeakError(ValueError):
    """The device has no rate for this dtype, or its host none that is known."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRates:
    """Achieved rates of one device in one dtype; compared by identity."""

    flops: float
    quantised_flops: float
    """Of products in fewer bits; those of the dtype where there are none."""
    attention_flops: float
    narrow_heads: bool
    """Whether attention is slower on heads narrower than 128."""
    portable_share: float
    """Of `attention_flops`, what attention written for Ampere reaches on heads that the device's own
    kernels do not take."""
    wide_heads: bool
    """Whether the device's own kernels train heads wider than 128."""
    bytes_per_second: float
    fill: float
    """Inner dimension that a tile's start and end are worth (`Constants.product_fill`)."""
    processors: int
    """Tiles that are computed at once."""
    tiles: tuple[tuple[int, int, float], ...]
    """Rows, columns and share of the best one's rate of each kind of tile."""
    compiled: bool
    """Whether torch.compile writes the fused elementwise kernels."""
    fp8_recipe: Fp8Recipe
    elementwise: float
    """Times that elementwise kernels move what fused ones move."""
    transposes: bool
    """Whether a product in fewer bits takes its operands in one layout only, so that each is written
    transposed as well."""
    host: HostRates | None
    execution: Execution
    measured: Calibration
    """What was measured in place of counting bytes."""
    core_fraction: float
    """Of the device, on which the measured times are longer by that much."""

    @property
    def known_host(self) -> HostRates:
        """The host that something is offloaded to.

        Raises:
            NoPeakError: What joins the device to it is not known.
        """
        if self.host is None:
            raise NoPeakError(
                "The rates of this GPU's host are not known; plan without --optimizer-cpu-offload and "
                "without offload of activations."
            )
        return self.host


_UNFUSED_KERNELS = 2.0
"""Times that PyTorch's own kernels take for what fused ones take for a norm, an activation and a
residual (measured: a norm 1.9 forward and 3.5 backward, an addition 1.2, an activation 1.0, together
1.5), and for autocast's copies between precisions (an estimate)."""

_ONE_SCALE = (Fp8Recipe.DELAYED, Fp8Recipe.TENSORWISE)
"""With scales of blocks the transposed operand has others; without, Blackwell multiplies any layout
(Transformer Engine, `utils.py: is_non_tn_fp8_gemm_supported`)."""
_USUAL = {
    "volta": (300, 80, 125e12),
    "ampere": (400, 108, 312e12),
    "hopper": (700, 132, 989.5e12),
    "blackwell": (1000, 148, 2250e12),
}
"""Watts, processors and half-precision peak of a generation's usual device."""
_PORTABLE_SHARE = {"volta": 0.8, "ampere": 0.8, "hopper": 0.54, "blackwell": 0.35}
"""Attention written for Ampere against the generation's own: FlashAttention 2 reaches 54% of what cuDNN
does on Hopper (measured, 128 wide, 512 to 16,384 keys), Triton less of an A100 than CUDA."""


@lru_cache(maxsize=256)
def compute_device_rates(
    cluster: Cluster, dtype: str, fp8_recipe: Fp8Recipe = Fp8Recipe.NONE
) -> DeviceRates:
    """Achieved rates.

    Raises:
        NoPeakError: The device has no matrix rate in this dtype.
    """
    device, constants, share = cluster.device, cluster.constants, cluster.core_fraction
    peak = device.peak_flops(dtype)
    if peak is None:
        raise NoPeakError(
            f"{device.name} has no {dtype} rate; its rates are of {', '.join(device.peak_tflops)}: set "
            f"DTYPE={next(iter(device.peak_tflops))}."
        )
    before_hopper = device.generation in ("volta", "ampere")
    execution = cluster.execution
    if device.key == "cpu":  # A core's constants are measured with the kernels it has.
        execution = replace(
            execution, torch_kernels=False, unfused_gradients=False, unfused_rotary=False
        )
    portable = _PORTABLE_SHARE.get(device.generation, 1.0)
    already = execution.portable_attention
    # No clock lifts a device above its peak: processors with smaller tensor cores reach all of it.
    power = min(_power_share(device), 1 / constants.matmul)
    peak *= power * share
    fewer = peak * constants.matmul
    if fp8_recipe:
        name = "nvfp4" if fp8_recipe is Fp8Recipe.NVFP4 else "fp8"
        found = device.peak_flops(name)
        if found is None:
            raise NoPeakError(
                f"{device.name} has no {name} rate; plan the model without --{name[-3:]}-format, or on "
                "another GPU."
            )
        fewer = found * power * constants.matmul_fp8
    return DeviceRates(
        flops=peak * constants.matmul,
        quantised_flops=fewer,
        attention_flops=peak * constants.attention * (portable if already else 1.0),
        narrow_heads=not already,
        portable_share=portable,
        wide_heads=already or device.generation != "blackwell",
        bytes_per_second=device.memory_bytes_per_second * constants.memory * share,
        fill=constants.product_fill,
        processors=device.processors,
        tiles=_TILES if before_hopper else _LATER_TILES,
        compiled=not before_hopper,
        fp8_recipe=fp8_recipe,
        elementwise=_UNFUSED_KERNELS if execution.unfused else 1.0,
        transposes=device.generation != "blackwell" or fp8_recipe not in _ONE_SCALE,
        host=device.host,
        execution=execution,
        measured=cluster.calibration,
        core_fraction=share,
    )


def _power_share(device: Device) -> float:
    """Of its own datasheet's peak, what a device's tensor cores reach beside its generation's usual one.

    Under their load the power limit sets the clock, and a processor's power grows with the square to
    cube of it: the rate goes with the root of power times processors, at whatever clock the peak was
    stated.
    """
    peak, usual = device.peak_flops("fp16"), _USUAL.get(device.generation)
    if usual is None or peak is None:
        return 1.0
    watts, processors, usual_peak = usual
    clocked = device.power_watts * device.processors / (watts * processors)
    return float(clocked**0.5 * usual_peak / peak)

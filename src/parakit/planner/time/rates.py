"""Rates that a device achieves in a dtype.

They follow from the device's datasheet, the constants of its generation, and what was measured on the machine.
Figures that are called "measured" were measured on an H200 (../readings/README.md, "What an H200 showed").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from parakit.config.hardware import Device, HostRates
from parakit.config.run import Fp8Recipe
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.execution import Execution

_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Tiles of a matrix product's result that one processor computes at once: rows, columns, and rate relative to the best
tile. Smaller tiles read their operands more often (NVIDIA's guide to matrix products, "tile quantization")."""
_LATER_TILES = (*_TILES, (320, 128, 1.0), (192, 192, 1.0))
"""Tiles since Hopper (from the names of cuBLAS's kernels in a trace)."""


class NoPeakError(ValueError):
    """Error of a device without a rate in the dtype, or of a host without known rates."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRates:
    """Rates that one device achieves in one dtype. Two objects are equal only if they are one object."""

    flops: float
    quantised_flops: float
    """Rate of products in fewer bits; that of the dtype if the run has none."""
    attention_flops: float
    narrow_heads: bool
    """True if attention is slower on heads narrower than 128."""
    portable_share: float
    """Rate of attention that was written for Ampere, as a fraction of `attention_flops`. It applies to heads that the
    device's own kernels do not take."""
    flash_attention_2_flops: Mapping[int, float]
    """Rate of FlashAttention 2 by width of a head, forward and backward together. Runs with dropout use it. It is
    empty without `--attention-backend flash`, and on generations on which it was not measured."""
    wide_heads: bool
    """True if the device's own kernels train heads wider than 128."""
    bytes_per_second: float
    fill: float
    """Inner dimension that takes as long as start and end of a tile (`Constants.product_fill`)."""
    processors: int
    """Number of tiles that are computed at once."""
    tiles: tuple[tuple[int, int, float], ...]
    """Kinds of tiles: rows, columns and rate relative to the best kind."""
    compiled: bool
    """True if torch.compile writes the fused elementwise kernels."""
    fp8_recipe: Fp8Recipe
    elementwise: float
    """Traffic of elementwise kernels over that of fused ones."""
    transposes: bool
    """True if a product in fewer bits takes its operands in one layout only, so that each operand is also written
    transposed."""
    host: HostRates | None
    execution: Execution
    measured: Calibration
    """Measurements that replace counted bytes."""
    core_fraction: float
    """Fraction of a core per rank, by which measured times are divided; 1 for GPUs."""

    @property
    def known_host(self) -> HostRates:
        """Copy and compute rates of the host, which offloading needs.

        Raises:
            NoPeakError: The rates of the host are unknown.
        """
        if self.host is None:
            raise NoPeakError(
                "The rates of this GPU's host are not known; plan without --optimizer-cpu-offload and "
                "without offload of activations."
            )
        return self.host


_UNFUSED_KERNELS = 2.0
"""Time of PyTorch's own kernels for a norm, an activation and a residual, over that of fused ones. Measured: a norm 1.9
forward and 3.5 backward, an addition 1.2, an activation 1.0, together 1.5. Autocast's copies between precisions are
added by an estimate."""

_ONE_SCALE_RECIPES = (Fp8Recipe.DELAYED, Fp8Recipe.TENSORWISE)
"""Recipes with one scale per tensor. For these Blackwell multiplies operands in any layout; with scales per block the
transposed operand has other scales (Transformer Engine, `utils.py: is_non_tn_fp8_gemm_supported`)."""
_USUAL_DEVICES = {
    "volta": (300, 80, 125e12),
    "ampere": (400, 108, 312e12),
    "hopper": (700, 132, 989.5e12),
    "blackwell": (1000, 148, 2250e12),
}
"""Watts, processors and half-precision peak of the usual device of a generation."""
_PORTABLE_FRACTION = {"volta": 0.8, "ampere": 0.8, "hopper": 0.54, "blackwell": 0.35}
"""Rate of attention written for Ampere over that of the generation's own: FlashAttention 2 reaches 54% of cuDNN's rate
on Hopper (measured, 128 wide, 512 to 16,384 keys), and Triton reaches less of an A100 than CUDA."""

_FLASH_ATTENTION_2_FRACTION = {"hopper": {64: 0.292, 96: 0.281, 128: 0.321}}
"""Fraction of the dense peak that FlashAttention 2 reaches by width of a head, forward and backward together (measured
at widths of 64, 80 and 128 with 512 to 16,384 keys; a head 80 wide is padded to 96)."""


@lru_cache(maxsize=256)
def compute_device_rates(
    cluster: Cluster, dtype: str, fp8_recipe: Fp8Recipe = Fp8Recipe.NONE
) -> DeviceRates:
    """Return the rates that a cluster's device achieves in `dtype`, and in the bits of the fp8 recipe.

    Without a recipe, the rate for quantised products is that of `dtype`.

    Raises:
        NoPeakError: The device has no peak rate for this dtype, or for the recipe.
    """
    device, constants = cluster.device, cluster.constants
    core_fraction = cluster.core_fraction
    peak = device.peak_flops(dtype)
    if peak is None:
        raise NoPeakError(
            f"{device.name} has no {dtype} rate; its rates are of {', '.join(device.peak_tflops)}: set "
            f"DTYPE={next(iter(device.peak_tflops))}."
        )
    is_before_hopper = device.generation in ("volta", "ampere")
    execution = cluster.execution
    if device.key == "cpu":
        # A core's constants are measured with the kernels that the core runs.
        execution = replace(
            execution, torch_kernels=False, unfused_gradients=False, unfused_rotary=False
        )
    portable_fraction = _PORTABLE_FRACTION.get(device.generation, 1.0)
    is_portable = execution.portable_attention
    # No clock lifts a device above its peak: processors with smaller tensor cores reach all of it.
    power = min(_power_fraction(device), 1 / constants.matmul)
    peak *= power * core_fraction
    quantised_flops = peak * constants.matmul
    if fp8_recipe:
        quantised_peak = _quantised_peak_flops(device, fp8_recipe)
        quantised_flops = quantised_peak * power * constants.matmul_fp8
    return DeviceRates(
        flops=peak * constants.matmul,
        quantised_flops=quantised_flops,
        attention_flops=peak * constants.attention * (portable_fraction if is_portable else 1.0),
        narrow_heads=not is_portable,
        portable_share=portable_fraction,
        flash_attention_2_flops={
            width: peak * fraction
            for width, fraction in _FLASH_ATTENTION_2_FRACTION.get(device.generation, {}).items()
            if execution.flash_attention
        },
        wide_heads=is_portable or device.generation != "blackwell",
        bytes_per_second=device.memory_bytes_per_second * constants.memory * core_fraction,
        fill=constants.product_fill,
        processors=device.processors,
        tiles=_TILES if is_before_hopper else _LATER_TILES,
        compiled=not is_before_hopper,
        fp8_recipe=fp8_recipe,
        elementwise=_UNFUSED_KERNELS if execution.unfused else 1.0,
        transposes=device.generation != "blackwell" or fp8_recipe not in _ONE_SCALE_RECIPES,
        host=device.host,
        execution=execution,
        measured=cluster.calibration,
        core_fraction=core_fraction,
    )


def _quantised_peak_flops(device: Device, fp8_recipe: Fp8Recipe) -> float:
    """Return a device's peak FLOP/s in the type of a recipe: the NVFP4 peak for the recipe NVFP4, else the FP8 peak.

    Raises:
        NoPeakError: The datasheet has no such rate.
    """
    name = "nvfp4" if fp8_recipe is Fp8Recipe.NVFP4 else "fp8"
    peak = device.peak_flops(name)
    if peak is None:
        raise NoPeakError(
            f"{device.name} has no {name} rate; plan the model without --{name[-3:]}-format, or on "
            "another GPU."
        )
    return peak


def _power_fraction(device: Device) -> float:
    """Return the fraction of its peak that a device reaches under its power limit.

    The fraction is relative to the usual device of the generation, for which it is 1. Under load of the tensor cores
    the power limit sets the clock, and a processor's power grows with the square to cube of the clock. The rate is
    therefore taken to be proportional to the root of power times processors. The result is 1 if the generation has no
    usual device.
    """
    peak, usual = device.peak_flops("fp16"), _USUAL_DEVICES.get(device.generation)
    if usual is None or peak is None:
        return 1.0
    watts, processors, usual_peak = usual
    power_and_processors = device.power_watts * device.processors / (watts * processors)
    return float(power_and_processors**0.5 * usual_peak / peak)

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from megatron_patches.cpu.no_dynamo import not_compiled

MEGATRON_WITHOUT_A_COMPILER = """
import sys, warnings
from packaging.version import Version
warnings.simplefilter("ignore")
from megatron_patches.cpu import no_dynamo
from megatron_patches.registry import apply_patches
from megatron_patches.context import RuntimeContext
apply_patches([no_dynamo.PATCH], RuntimeContext("cpu", Version("0.19.0"), False, False, {fused}))
import megatron.core.fusions.fused_bias_swiglu as fused
print("torch._inductor.lowering" in sys.modules, fused.swiglu.__name__)
"""


def megatron(fused: tuple[str, ...]) -> list[str]:
    command = (sys.executable, "-c", MEGATRON_WITHOUT_A_COMPILER.format(fused=fused))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_a_function_stays_what_it_is_called_or_decorated() -> None:
    assert not_compiled(len) is len
    assert not_compiled(mode="max-autotune")(len) is len


def test_megatron_loads_no_compiler_unless_a_fused_patch_may_need_it() -> None:
    with ThreadPoolExecutor(2) as pool:
        without, with_fused = pool.map(megatron, [(), ("bias_gelu",)])
    assert without == ["False", "swiglu"]
    assert with_fused[0] == "True"

"""The stages that pipeline communication waits for, compared with the installed Megatron's source."""

import ast
from importlib.util import find_spec
from pathlib import Path

from parakit.hang.waits import AWAITED_STAGES, NEXT_STAGE, PREVIOUS_STAGE

STAGES_OF_ARGUMENTS = {
    "tensor_send_prev": PREVIOUS_STAGE,
    "recv_prev": PREVIOUS_STAGE,
    "tensor_send_next": NEXT_STAGE,
    "recv_next": NEXT_STAGE,
}


def read_stages_of_megatron() -> dict[str, set[int]]:
    """Return the stages that each function of P2PCommunicator sends to or receives from."""
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "pipeline_parallel/p2p_communication.py"
    stages: dict[str, set[int]] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
            continue
        for call in ast.walk(function):
            is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if is_call and call.func.attr == "_communicate":
                stages[function.name] = {
                    STAGES_OF_ARGUMENTS[keyword.arg]
                    for keyword in call.keywords
                    if keyword.arg in STAGES_OF_ARGUMENTS
                    and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                }
    return stages


def test_each_function_waits_for_the_stages_of_megatrons_source() -> None:
    stages = read_stages_of_megatron()
    assert len(stages) == 9
    assert stages == {name: AWAITED_STAGES[name] for name in stages}

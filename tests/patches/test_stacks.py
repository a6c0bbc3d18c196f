import pickle
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401 - what is asked has loaded it
from torch._C import _distributed_c10d as c10d

from megatron_patches.stacks import _recorded_calls, _recorder_variables


def test_gloo_and_nccl_calls_are_dumped_in_order_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dumping(*times: int) -> bytes:
        entries = [{"record_id": at, "time_created_ns": time} for at, time in enumerate(times)]
        return pickle.dumps({"entries": entries})

    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda: dumping(10, 40))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: dumping(20, 30), raising=False)
    entries = _recorded_calls()["entries"]
    assert [(entry["record_id"], entry["time_created_ns"]) for entry in entries] == [
        (0, 10),
        (1, 20),
        (2, 30),
        (3, 40),
    ]


def test_watchdog_of_nccl_dumps_calls_into_the_run_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIT_DEVICE", "cpu")
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in _recorder_variables(Path("stacks/watchdog-rank"))
    monkeypatch.setenv("KIT_DEVICE", "gpu")
    variables = _recorder_variables(Path("stacks/watchdog-rank"))
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == "stacks/watchdog-rank"
    assert (variables["TORCH_NCCL_DUMP_ON_TIMEOUT"], variables["TORCH_INCLUDE_ONLY_ACTIVE"]) == (
        "1",
        "0",
    )


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.8.1", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.11.0+cu130", "TORCH_FR_BUFFER_SIZE")],
)
def test_recorder_variables_have_the_names_of_this_torch(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert name in _recorder_variables(Path("any"))

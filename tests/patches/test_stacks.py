import pickle
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401 - what is asked has loaded it
from torch._C import _distributed_c10d as c10d

from megatron_patches.stacks import _recorded_calls, _recorder_variables


def test_calls_of_gloo_and_of_nccl_are_dumped_in_the_order_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dumping(*times: int) -> bytes:
        entries = [{"record_id": at, "time_created_ns": time} for at, time in enumerate(times)]
        return pickle.dumps({"entries": entries})

    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda: dumping(10, 40))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: dumping(20, 30), raising=False)
    entries = _recorded_calls()["entries"]
    assert [(one["record_id"], one["time_created_ns"]) for one in entries] == [
        (0, 10),
        (1, 20),
        (2, 30),
        (3, 40),
    ]


def test_nccls_watchdog_dumps_every_call_into_the_runs_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIT_DEVICE", "cpu")
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in _recorder_variables(Path("stacks/watchdog-rank"))
    monkeypatch.setenv("KIT_DEVICE", "gpu")
    found = _recorder_variables(Path("stacks/watchdog-rank"))
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "stacks/watchdog-rank"
    assert (found["TORCH_NCCL_DUMP_ON_TIMEOUT"], found["TORCH_INCLUDE_ONLY_ACTIVE"]) == ("1", "0")


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.8.1", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.11.0+cu130", "TORCH_FR_BUFFER_SIZE")],
)
def test_recorder_variables_have_the_names_of_this_torch(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert name in _recorder_variables(Path("any"))

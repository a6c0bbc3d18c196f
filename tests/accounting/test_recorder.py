import time
from pathlib import Path

import msgspec
import pytest
import torch

from parakit.accounting import recorder as recorder_module
from parakit.accounting.collect import RankRecord
from parakit.accounting.communication import Call, ObservedCall
from parakit.accounting.recorder import MEMORY_ITERATION, Recorder
from parakit.artifacts.measurements import MemoryCategory
from parakit.costs.operations import Operation, Phase


def measured_at(folder: Path, skipped: int, iterations: int) -> tuple[list[int], int]:
    """Return the iterations with measured memory, and the bytes of optimizer state of the last measurement."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(folder, 0)
    seen: list[int] = []
    for iteration in range(1, iterations + 1):
        recorder.begin_iteration([model], optimizer)
        model(torch.ones(1, 8)).sum().backward()
        if iteration > skipped:
            optimizer.step()
        recorder.end_step()
        result = recorder.memory.result
        if result is not None and result.iteration not in seen:
            seen.append(result.iteration)
    assert result is not None
    return seen, result.categories[MemoryCategory.OPTIMIZER_STATE]


def test_memory_is_measured_once_after_the_first_update_creates_optimizer_state(
    tmp_path: Path,
) -> None:
    seen, state = measured_at(tmp_path, 0, 8)
    assert seen == [MEMORY_ITERATION]
    assert state >= 2 * 8 * 8 * 4


def test_memory_is_measured_again_while_fp16_skips_updates(
    tmp_path: Path,
) -> None:
    seen, state = measured_at(tmp_path, 5, 9)
    assert seen == [MEMORY_ITERATION, 7]
    assert state >= 2 * 8 * 8 * 4


def test_run_with_only_skipped_updates_keeps_the_first_measurement(tmp_path: Path) -> None:
    assert measured_at(tmp_path, 9, 9) == ([MEMORY_ITERATION], 0)


def test_three_iterations_are_enough_for_exact_calls(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(tmp_path, 0)
    reduce = Call("tp", 2, Operation.ALL_REDUCE, Phase.FORWARD, "float32", 400, None)
    only_first = reduce._replace(group="mp", payload_bytes=4)
    for made in ([reduce, only_first], [reduce], [reduce]):
        recorder.begin_iteration([model], optimizer)
        recorder._communication.observed_calls += [ObservedCall(call, 0, 1) for call in made]
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        recorder.end_step()
    recorder._write()
    ledger = msgspec.json.decode((tmp_path / "rank0.json").read_bytes(), type=RankRecord)
    assert [call.group for call in ledger.communication.calls] == ["tp"]
    assert (ledger.communication.steady_iterations, ledger.communication.other_iterations) == (1, 1)
    assert (
        ledger.time.iteration_seconds == 0
    )  # The memory measurement slowed the only counted iteration.
    assert recorder.last is None
    recorder.begin_iteration([model], optimizer)
    assert recorder.last is not None
    assert recorder.last.sent_bytes == 400


def test_processor_time_is_recorded_per_steady_iteration_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0.0]  # The time is that of this thread, so waiting does not add to it.
    monkeypatch.setattr(recorder_module.time, "thread_time", lambda: spent[0])
    recorder = Recorder(tmp_path, 0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        recorder.begin_iteration([model], optimizer)
        spent[0] += 0.25
        time.sleep(0.05)
        recorder.end_step()
    recorder._write()
    ledger = msgspec.json.decode((tmp_path / "rank0.json").read_bytes(), type=RankRecord)
    # The first iteration has no time, the second measures memory, and the last has not ended.
    assert ledger.time.processor_seconds == (0.25, 0.25)
    assert ledger.time.iteration_seconds >= 0.05

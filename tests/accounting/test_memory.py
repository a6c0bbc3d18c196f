"""Categories of a rank's live bytes, on tensors of a few elements."""

import torch

from parakit.accounting.memory import MemoryAccounting
from parakit.accounting.timeline import Timeline
from parakit.artifacts.measurements import MemoryCategory, RankMemory
from parakit.native.pipelines import StageModules

WEIGHT_BYTES, BUFFER_BYTES = 4 * 4 * 4, 4 * 1024


def followed(action: object) -> RankMemory:
    model = torch.nn.Linear(4, 4, bias=False)
    ledger = MemoryAccounting(Timeline())
    ledger.start(0, 2, [model], torch.optim.SGD(model.parameters()))
    assert callable(action)
    action(model, ledger)
    ledger.stop()
    assert ledger.result is not None
    return ledger.result


def test_received_bytes_count_as_communication_buffer() -> None:
    def receive(model: torch.nn.Linear, ledger: MemoryAccounting) -> None:
        buffer = torch.empty(1024)
        ledger.note_received([buffer])

    categories = followed(receive).categories
    assert categories[MemoryCategory.COMMUNICATION] == BUFFER_BYTES
    assert categories[MemoryCategory.WEIGHTS] == WEIGHT_BYTES
    assert categories[MemoryCategory.TEMPORARY] == 0


def test_received_message_counts_as_activation_while_autograd_stores_it() -> None:
    def receive(model: torch.nn.Linear, ledger: MemoryAccounting) -> None:
        buffer = torch.empty(256, 4)
        ledger.note_received([buffer])
        kept = model(buffer).sum()
        del kept
        torch.empty(10**5)

    categories = followed(receive).categories
    assert categories[MemoryCategory.ACTIVATIONS] == 0
    assert categories[MemoryCategory.COMMUNICATION] == BUFFER_BYTES
    assert categories[MemoryCategory.TEMPORARY] == 4 * 10**5

    def keep(model: torch.nn.Linear, ledger: MemoryAccounting) -> None:
        buffer = torch.empty(256, 4)
        ledger.note_received([buffer])
        kept = model(buffer)
        torch.empty(10**5)
        del kept

    assert followed(keep).categories[MemoryCategory.ACTIVATIONS] == BUFFER_BYTES


def test_weights_count_as_weights_after_a_gather_into_them() -> None:
    def gather(model: torch.nn.Linear, ledger: MemoryAccounting) -> None:
        ledger.note_received([model.weight.detach()])

    categories = followed(gather).categories
    assert categories[MemoryCategory.WEIGHTS] == WEIGHT_BYTES
    assert categories[MemoryCategory.COMMUNICATION] == 0


def test_logits_stored_for_backward_stay_logits() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output_layer = torch.nn.Linear(2, 7, bias=False)

    model = Tied()
    ledger = MemoryAccounting(Timeline())
    ledger.start(0, 2, [model], torch.optim.SGD(model.parameters()))
    logits = model.output_layer(torch.ones(3, 2))
    kept = torch.nn.functional.relu(logits)
    del logits
    ledger.stop()
    assert ledger.result is not None
    assert ledger.result.categories[MemoryCategory.LOGITS] == 2 * 4 * 3 * 7
    assert kept.shape == (3, 7)


def test_every_stored_weight_version_of_a_pipeline_is_counted_once() -> None:
    stages = StageModules([torch.nn.Linear(4, 4, bias=False)])
    newest = [parameter.data for parameter in stages.parameters()]
    stages.weight_versions = [newest, [torch.empty_like(weight) for weight in newest]]
    ledger = MemoryAccounting(Timeline())
    ledger.start(0, 2, [stages], torch.optim.SGD(stages.parameters()))
    ledger.note_received([torch.empty(1024)])  # These tensors raise the peak.
    ledger.stop()
    assert ledger.result is not None
    assert ledger.result.categories[MemoryCategory.WEIGHTS] == 2 * WEIGHT_BYTES

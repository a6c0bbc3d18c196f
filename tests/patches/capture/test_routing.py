"""The choice of routers is captured, and another choice can be forced, with and without replay."""

import sys
from types import ModuleType

import pytest
import torch

from megatron_patches.capture.routing import capture_routing
from parakit.artifacts.capture import CHOICE, SCORES

SCORED = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.4]])


class OlderRouter(torch.nn.Module):
    """Router that chooses like that of Megatron 0.15, and a second time for its loss."""

    topk = 1
    routing_type = "aux_loss"

    def routing(self, scores):
        utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
        if self.topk == 2:
            values, chosen = utils.group_limited_topk(scores=scores, topk=2, num_groups=3)
        else:
            values, chosen = torch.topk(scores, k=1, dim=1)
        return values, chosen, torch.topk(scores, k=1, dim=1)[1]


class Sink:
    """Sink that stores captured tensors and answers every choice with `forced`."""

    def __init__(self, forced=None):
        self.seen, self._forced = {}, forced

    def write(self, site, tensor):
        self.seen[site.slot, site.micro_batch] = tensor

    def choose(self, site, chosen):
        self.write(site, chosen)
        return self._forced


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    """Provide a fake `moe_utils`, because importing the real module takes seconds."""
    utils = ModuleType("moe_utils")
    utils.group_limited_topk = lambda scores, topk, num_groups: torch.topk(scores, topk, dim=-1)
    package = "megatron.core.transformer.moe"
    for name in ("megatron", "megatron.core", "megatron.core.transformer", package):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[package].moe_utils = utils
    monkeypatch.setitem(sys.modules, f"{package}.moe_utils", utils)


@pytest.mark.parametrize("topk", [1, 2])
def test_first_choice_of_a_router_without_replay_is_captured(topk):
    router, sink, best = OlderRouter(), Sink(), torch.topk
    router.topk = topk
    with capture_routing([router], [{"": "router"}], sink):
        plain = router.routing(SCORED)
        router.routing(SCORED + 1)
    assert torch.equal(sink.seen[SCORES, 0], SCORED)
    assert sink.seen[CHOICE, 0].sum(1).tolist() == [topk, topk]
    assert sorted(sink.seen) == sorted(
        (slot, batch) for slot in (SCORES, CHOICE) for batch in (0, 1)
    )
    assert plain[1][:, 0].tolist() == [1, 0]
    assert (torch.topk, "routing" in vars(router)) == (best, False)


def test_forced_choice_replaces_only_the_first_choice():
    router = OlderRouter()
    forced = torch.tensor([[True, False, False], [False, False, True]])
    with capture_routing([router], [{"": "router"}], Sink(forced)):
        values, chosen, again = router.routing(SCORED)
    assert chosen.tolist() == [[0], [2]]
    assert values.tolist() == [[SCORED[0, 0]], [SCORED[1, 2]]]
    assert again.tolist() == [[1], [0]]


def test_sinkhorn_routing_is_unchanged():
    router, sink = OlderRouter(), Sink()
    router.routing_type = "sinkhorn"
    with capture_routing([router], [{"": "router"}], sink):
        router.routing(SCORED)
    assert sink.seen == {}

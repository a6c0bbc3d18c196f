"""Pipelines of three stages over gloo, compared with the same updates in a single process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from parakit.config.strategy import PipelineSchedule
from parakit.native.model import GPT, mean_loss
from parakit.native.optimizer import build_adamw, clip_gradients, learning_rate
from parakit.native.settings import Settings
from tests.examples.runs import SharedRuns
from tests.native.pipeline_rank import (
    ITERATIONS,
    TIED,
    batches,
    chosen,
    whole_model,
)
from tests.native.pipelined import STAGES

ROUNDING = 1e-4
"""A hundredth of an update. Adam makes full-size updates from gradients that consist of rounding errors."""

Trained = Mapping[tuple[str, bool], list[Any]]
"""Losses, weights, versions and logits of each rank, by schedule and whether embeddings are tied."""


@pytest.fixture(scope="module")
def pipelines(shared_runs: SharedRuns) -> Trained:
    """Return the trained pipelines, which run concurrently with other tests."""
    folder = Path(shared_runs.scenario("pipelines"))
    of_rank = [torch.load(folder / f"rank{rank}.pt") for rank in range(STAGES)]
    return {key: [results[key] for results in of_rank] for key in of_rank[0]}


def stage_of(name: str) -> int:
    """Return which of three stages of two layers holds a parameter of the full model."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) // 2
    return 0 if "embeddings" in name else STAGES - 1


def train_alone(of: Settings, schedule: PipelineSchedule) -> tuple[list[float], GPT]:
    """Train in a single process, with the weights of every stage as old as in the schedule.

    The loss of batch n and its gradients are those of the weights after max(0, n − staleness) updates,
    stage by stage; the gradients change the newest weights.
    """
    model = whole_model(of)
    newest = dict(model.named_parameters())
    optimizer = build_adamw(model.parameters(), of)
    versions = [{name: p.detach().clone() for name, p in newest.items()}]
    losses = []
    for batch in range(ITERATIONS):
        used = {}
        for name in newest:
            age = schedule.staleness(STAGES, stage_of(name))
            used[name] = versions[max(0, batch - age)][name].clone().requires_grad_()
        parts = batches(of, batch)
        loss = torch.stack(
            [mean_loss(functional_call(model, used, (tokens,)), labels) for tokens, labels in parts]
        ).mean()
        loss.backward()
        for name, parameter in newest.items():
            parameter.grad = used[name].grad
        if of.clip_grad:
            clip_gradients(model.parameters(), of.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(of, batch)
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in newest.items()})
        losses.append(loss.item())
    return losses, model


def joined(ranks: list[Any]) -> dict[str, Tensor]:
    """Return the parameters of the full model from its stages, chunk by chunk."""
    chunks = [
        chunk
        for chunk_index in range(len(ranks[0][1]))
        for chunk in (r[1][chunk_index] for r in ranks)
    ]
    layers = 6 // len(chunks)
    return {
        _renumbered(name, number * layers): value
        for number, chunk in enumerate(chunks)
        for name, value in chunk.items()
    }


def _renumbered(name: str, first: int) -> str:
    """Return the name in the full model of a stage's parameter."""
    if not name.startswith("blocks."):
        return name
    _, layer, suffix = name.split(".", 2)
    return f"blocks.{first + int(layer)}.{suffix}"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TIED)
def test_pipeline_with_flushes_trains_the_same_model_as_one_process(
    pipelines: Trained, schedule: str
) -> None:
    ranks = pipelines[schedule, True]
    losses, model = train_alone(chosen(schedule, tied=True), PipelineSchedule(schedule))
    assert ranks[-1][0] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(joined(ranks), dict(model.state_dict()), rtol=1e-3, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_pipeline_without_flushes_uses_weights_with_the_schedules_staleness(
    pipelines: Trained, schedule: str
) -> None:
    ranks = pipelines[schedule, False]
    asynchronous = PipelineSchedule(schedule)
    losses, model = train_alone(chosen(schedule, tied=False), asynchronous)
    assert ranks[-1][0] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(joined(ranks), dict(model.state_dict()), rtol=1e-3, atol=ROUNDING)
    fresh, _ = train_alone(chosen(schedule, tied=False), PipelineSchedule.ONE_F_ONE_B)
    assert ranks[-1][0][:2] != pytest.approx(fresh[:2], rel=1e-4), "age must make a difference here"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "versions"), [("pipedream", [3, 2, 1]), ("pipedream-2bw", [2, 2, 2])]
)
def test_stage_has_one_buffer_per_weight_version(
    pipelines: Trained, schedule: str, versions: list[int]
) -> None:
    assert [len(kept) for _, _, kept, _ in pipelines[schedule, False]] == versions


@pytest.mark.slow
def test_every_rank_gets_the_logits_of_the_full_model(pipelines: Trained) -> None:
    for schedule in TIED:
        of = chosen(schedule, tied=True)
        _, model = train_alone(of, PipelineSchedule(schedule))
        expected = model(batches(of, 0)[0][0]).detach()
        for *_, logits in pipelines[schedule, True]:
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)

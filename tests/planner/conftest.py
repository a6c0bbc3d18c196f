from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import ModelShape, load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.dryrun.job import DryRunner
from parakit.planner.readings.residual import Residuals, compute_residuals
from parakit.planner.readings.table import read_measurements
from parakit.planner.search import Plan, Request, search_configurations
from parakit.planner.time.cluster import Cluster

MakeRequest = Callable[..., Request]

TINY = ModelShape(
    layers=4,
    hidden=8,
    heads=4,
    query_groups=4,
    head_width=2,
    ffn_hidden=32,
    seq_length=16,
    positions=16,
    vocabulary=100,
    vocabulary_multiple=8,
)
"""Model shape that is small enough to count by hand."""


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """Return a function that builds a request for a model on some devices."""

    def build(name: str, devices: int, gpu: str, global_batch: int, per_node: int = 8) -> Request:
        model, device = load_model(name), device_by_key(gpu)
        cluster = Cluster(
            device, devices, per_node, link_by_key(device.link), link_by_key(device.network)
        )
        template = spec_from_model(model, Parallelism(), Batch(1, global_batch))
        return Request(model, cluster, global_batch, replace(template))

    return build


@pytest.fixture(scope="session")
def published_residuals() -> Residuals:
    """Return all published measurements with their predictions."""
    return compute_residuals(*read_measurements())


@pytest.fixture(scope="session")
def plan_of_175b(make_request: MakeRequest) -> Plan:
    """Return the plan of a model that no single kind of parallelism can hold."""
    return search_configurations(make_request("gpt3-175b", 128, "a100", 128))


@pytest.fixture(scope="session")
def plan_of_gpt2_large(make_request: MakeRequest) -> Plan:
    """Return the plan of a model that one device holds."""
    return search_configurations(make_request("gpt2-large", 2, "h200", 64))


@pytest.fixture(scope="session")
def dry_runner() -> Iterator[DryRunner]:
    """Provide a process that has imported torch and Megatron for all dry runs of the session."""
    with DryRunner() as runner:
        yield runner


@pytest.fixture(scope="session", autouse=True)
def _early_dry_runner(request: pytest.FixtureRequest) -> None:
    """Start importing Megatron while the first tests of this folder run, if a test needs it."""
    if any("dry_runner" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("dry_runner")

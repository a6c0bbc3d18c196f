import pytest

from parakit.cluster.nodes import Nodes, Rendezvous, parse_nodes
from parakit.config.settings import NODE_SETTINGS
from parakit.launch.compose import torchrun_command
from tests.given import read_of

TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize("environment", [{}, {"NNODES": "1"}, {"MASTER_ADDR": "10.0.0.1"}])
def test_run_without_nnodes_is_on_a_single_machine(environment: dict[str, str]) -> None:
    assert parse_nodes(read_of(NODE_SETTINGS, environment)) is None


def test_a_node_gets_the_address_of_the_first_one() -> None:
    assert parse_nodes(read_of(NODE_SETTINGS, TWO)) == Nodes(
        2, 1, "10.0.0.1", 29500, Rendezvous.STATIC
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"NODE_RANK": ""}, "NNODES=2 needs NODE_RANK=, 0 to 1"),
        ({"MASTER_ADDR": ""}, "needs NODE_RANK=.*and MASTER_ADDR="),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 is not a whole number from 0 to 1"),
        ({"NNODES": "two"}, "NNODES=two is not a whole number from 1"),
        ({"MASTER_PORT": "80"}, "MASTER_PORT=80 is not a whole number from 1024 to 65535"),
        ({"RENDEZVOUS": "etcd"}, "RENDEZVOUS=etcd is not static or c10d"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nodes(read_of(NODE_SETTINGS, TWO | change))


def test_torchrun_starts_only_the_ranks_of_this_node_and_joins_the_other_nodes() -> None:
    nodes = Nodes(2, 1, "10.0.0.1", 29501)
    assert torchrun_command(4, "python", nodes)[3:] == (
        *("--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29501"),
    )


@pytest.mark.parametrize(("rank", "opens"), [(0, "is_host=1"), (1, "is_host=0")])
def test_node_0_opens_the_c10d_store_regardless_of_its_name(rank: int, opens: str) -> None:
    flags = Nodes(2, rank, "10.0.0.1", 29501, Rendezvous.C10D).torchrun_flags(1)
    assert flags[4:] == (
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29501"),
        *("--rdzv-id", "29501", "--rdzv-conf", opens),
    )

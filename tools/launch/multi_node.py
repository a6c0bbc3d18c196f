"""One node's share of a run over several machines: `NNODES=2 NODE_RANK=0 MASTER_ADDR=… make train-…`."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.cluster.container.versions import installed_versions
from tools.cluster.nodes import Nodes, node_folder
from tools.dataset.indexed import DatasetError, open_dataset
from tools.launch.compose import Launch
from tools.launch.devices import visible_gpus
from tools.launch.execute import execute, run_ranks
from tools.launch.preflight import check
from tools.launch.progress import RunProgress
from tools.launch.rendezvous.coordinator import Coordinator
from tools.launch.rendezvous.messages import NodeRecord
from tools.launch.rendezvous.worker import Worker
from tools.launch.start import ensure_start_checkpoint
from tools.records.run import LOG_FILE, StatusRecord
from tools.spec.errors import LaunchError
from tools.spec.files import from_root
from tools.spec.run import DeviceKind
from tools.spec.variables import INTERFACES
from tools.text.units import plural


def train_first(
    launch: Launch, nodes: Nodes, console: Console, title: str
) -> tuple[Path, StatusRecord]:
    """Node 0: wait for the others, train, record the run; its folder and how it ended.

    Each node reports what stops it to the others, so nothing is checked before.

    Raises:
        LaunchError: A node is missing, differs, or cannot run its share; nothing was written.
    """
    with Coordinator(nodes, node_record(launch, nodes.count)) as coordinator:
        try:
            check(launch)
        except LaunchError as error:
            coordinator.gather()
            coordinator.refuse(f"Node 0: {error}")
        console.print(
            f"{title}: waiting for {plural(nodes.count - 1, 'more node')}", highlight=False
        )
        launch = _among(launch, coordinator.gather())
        try:
            ensure_start_checkpoint(launch, console)
        except LaunchError as error:
            coordinator.refuse(f"Node 0: {error}")
        return execute(launch, launch.job.options.runs, console, title, coordinator)


def train_other(launch: Launch, nodes: Nodes, console: Console, title: str) -> bool:
    """Any other node: join node 0's run, train this share; True if it ended well.

    Raises:
        LaunchError: Node 0 was not reached or refuses, or this machine cannot run its share.
    """
    own = node_record(launch, nodes.count)
    try:
        check(launch)
    except LaunchError as error:
        own = replace(own, problem=str(error))
    console.print(f"{title}: waiting for node 0 at {nodes.address}", highlight=False)
    with Worker(nodes, own) as worker:
        folder, nodes = worker.join()
        mine = node_folder(folder, nodes.rank)
        mine.mkdir(parents=True, exist_ok=True)
        launch = _among(launch, nodes)
        with RunProgress(console, title, launch.iterations) as progress:
            code = run_ranks(launch, mine / LOG_FILE, progress, worker, folder)
    console.print(f"node {nodes.rank} ended with {code} → {from_root(folder)}", highlight=False)
    return code == 0


def node_record(launch: Launch, nodes: int) -> NodeRecord:
    """This node, with what must be the same on all."""
    try:
        data = open_dataset(launch.data_path).bin_sha256 or "without a record"
    except DatasetError:
        data = "missing"
    entry = launch.entry
    patch_file = launch.spec.patch_file
    flags = hashlib.sha256("\0".join(launch.flags).encode()).hexdigest()[:12]
    has = {
        "NNODES=": str(nodes),
        "the kit's code": f"{launch.code.kit} (a hash)",
        "Megatron": f"{entry.megatron_version} {entry.megatron_commit or ''}".strip(),
        "torch": installed_versions().get("torch", "none"),
        "flags": f"{flags} (a hash)",
        "data set": data,
        "PATCH_FILE=": patch_file.sha256[:12] if patch_file else "none",
        "its first iteration after": str(
            launch.resume_point.iteration if launch.resume_point else 0
        ),
    }
    if launch.spec.device is DeviceKind.GPU:
        names = [gpu.name for gpu in visible_gpus()[: launch.local_devices]]
        has["GPUs"] = ", ".join(names) or "none"
    return NodeRecord(platform.node(), has)


def _among(launch: Launch, nodes: Nodes) -> Launch:
    """The launch with gloo on the interface that joins the nodes, unless the caller has chosen one.

    gloo would take the address of the machine's name, which is often 127.0.1.1.
    """
    if nodes.interface is None:
        return replace(launch, nodes=nodes)
    chosen = {name: os.environ.get(name) or nodes.interface for name in INTERFACES}
    return replace(launch, nodes=nodes, environment={**launch.environment, **chosen})

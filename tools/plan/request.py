"""From options to a request: defaults, units, and one sentence for what cannot be."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import replace

from tools.plan.calibration import load_calibration
from tools.plan.memory import PRECISIONS
from tools.plan.parser import RequestError
from tools.plan.readings.own import OwnRuns, own_runs
from tools.plan.search import Request
from tools.plan.time.cluster import Cluster
from tools.spec.flags import Flags
from tools.spec.hardware import device_by_key, link_by_key
from tools.spec.model import BLOCKS, ModelShape, changed_model, hybrid_shape, model_of
from tools.spec.run import RunSpec, spec_of_model
from tools.spec.strategy import Batch, Parallelism, batch_for

USUAL_NODE = 8
MOST_DEVICES = 262_144


def request_from_options(options: Namespace) -> Request:
    """Build the request.

    Raises:
        RequestError: Contradictory or impossible numbers.
        UnknownModelError: No such model.
        UnknownHardwareError: No such device or link.
        ReadingsError: The file of one's own readings is none.
    """
    extra = shlex.split(options.extra or "")
    model = changed_model(model_of(options.model), extra)
    devices, per_node = _devices_and_node(options)
    device = device_by_key(options.gpu)
    dtype = options.dtype or model.dtype
    if dtype not in PRECISIONS:
        raise RequestError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    batch = (
        options.global_batch or batch_for(model.batch, Parallelism(data=devices)).global_batch_size
    )
    if batch < 1:
        raise RequestError(f"The global batch is {batch}; use 1 or more.")
    template = with_sequence(spec_of_model(model, Parallelism(), Batch(1, batch)), options.seq)
    template = replace(template, shape=_hybrid(template.shape, Flags([*model.flags, *extra])))
    cluster = Cluster(
        device=device,
        devices=devices,
        per_node=per_node,
        intra=link_by_key(options.intra or device.link),
        inter=link_by_key(options.inter or device.network),
        calibration=load_calibration(options.calibration),
    )
    if options.readings and not options.readings.is_file():
        raise RequestError(
            f"There are no readings in {options.readings}; 'make report' writes readings/mine.csv, "
            "which plans use by themselves."
        )
    own = own_runs(options.readings, cluster) if options.readings else OwnRuns()
    return Request(model, cluster, batch, replace(template, dtype=dtype), own)


def _hybrid(shape: ModelShape, flags: Flags) -> ModelShape:
    """The shape with the blocks that a pattern lays out.

    Raises:
        RequestError: It has a block that the formulas do not know.
    """
    found = hybrid_shape(shape, flags)
    if strange := sorted(set(found.blocks) - set(BLOCKS)):
        raise RequestError(
            f"--hybrid-layer-pattern {found.blocks} has the block '{strange[0]}', which is not planned; "
            f"use blocks of {' '.join(BLOCKS)}."
        )
    return found


def with_sequence(spec: RunSpec, seq_length: int | None) -> RunSpec:
    """The run with another sequence length, and as many learned positions as it needs.

    Raises:
        RequestError: The length is below 1.
    """
    if seq_length is None:
        return spec
    shape = spec.shape
    if seq_length < 1:
        raise RequestError(f"The sequence length is {seq_length}; use 1 or more.")
    positions = max(shape.positions, seq_length) if shape.positions else 0
    return replace(spec, shape=replace(shape, seq_length=seq_length, positions=positions))


def _devices_and_node(options: Namespace) -> tuple[int, int]:
    """Devices in all and in a node, from any two of the three options."""
    for name in ("gpus", "nodes", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name.replace('_', '-')} is {value}; use 1 or more.")
    devices, nodes, per_node = options.gpus, options.nodes, options.gpus_per_node
    if devices is None:
        devices = (nodes or 1) * (per_node or (USUAL_NODE if nodes else 1))
    if devices > MOST_DEVICES:
        raise RequestError(f"{devices:,} GPUs are more than any cluster has; use {MOST_DEVICES:,}.")
    if per_node is None:
        per_node = -(-devices // nodes) if nodes else min(devices, USUAL_NODE)
    if nodes is not None and nodes * per_node != devices:
        raise RequestError(
            f"{nodes} node(s) of {per_node} have {nodes * per_node} GPUs, not {devices}; leave one of "
            "--gpus, --nodes and --gpus-per-node out."
        )
    return devices, per_node

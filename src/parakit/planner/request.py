"""From options to a request: defaults, units, and one sentence for what cannot be."""

from __future__ import annotations

import shlex
from dataclasses import replace

from parakit.config.experts import max_imbalance, parse_expert_load
from parakit.config.flag_table import FLAGS, flags_planned_as, flags_with_role
from parakit.config.flags import Flags, drop_flags, merge_flags, refuse_misspelled_flags
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import (
    BLOCKS,
    LINEAR,
    Model,
    ModelShape,
    apply_flags_to_model,
    find_model,
    training_flags,
)
from parakit.config.run import DeviceKind, RunSpec, adapt_to_cpu_ranks, spec_from_flags
from parakit.config.strategy import Batch, Parallelism, scale_batch
from parakit.costs import PRECISIONS
from parakit.formatting.units import plural
from parakit.planner.calibration import calibrate_from_stated_products, load_calibration
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.local_readings import load_own_runs
from parakit.planner.readings.reading_to_spec import parse_execution
from parakit.planner.search import Request
from parakit.planner.time.cluster import Cluster

MOST_DEVICES = 262_144
EXPERT_TENSOR = "--expert-tensor-parallel-size"


def build_request(options: PlanOptions) -> Request:
    """Build the request.

    Raises:
        RequestError: Contradictory or impossible numbers.
        UnknownModelError: No such model.
        UnknownHardwareError: No such device or link.
        MeasurementsError: The file of one's own measurements is none.
    """
    extra = _words_of(options.extra)
    model = apply_flags_to_model(find_model(options.model), extra, flags_planned_as("counted"))
    refuse_misspelled_flags((*model.flags, *extra))
    if LINEAR in (blocks := model.shape.blocks):
        raise RequestError(
            f"--hybrid-layer-pattern {blocks} has linear attention ({LINEAR}), which is not planned; "
            f"use blocks of {' '.join(BLOCKS)}."
        )
    device = device_by_key(options.gpu)
    devices, per_node = resolve_device_counts(options, device.domain)
    on_cpu = device.key == "cpu"
    dtype = options.dtype or ("fp32" if on_cpu else model.dtype)
    if dtype not in PRECISIONS:
        raise RequestError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    batch = options.global_batch
    if not batch:
        # A user's own file says it; the kit's models state one device's, which grows with them.
        whole = model.source and Flags(model.flags).has("--global-batch-size")
        grown = scale_batch(model.batch, Parallelism(data=devices))
        batch = (model.batch if whole else grown).global_batch_size
    if batch < 1:
        raise RequestError(f"The global batch is {batch}; use 1 or more.")
    imbalance = options.imbalance
    if imbalance is not None:
        if not model.shape.experts:
            raise RequestError(f"IMBALANCE={imbalance:g} is of experts and the model is dense.")
        refuse_imbalance(imbalance, model.shape, model.shape.experts)
    words = merge_flags(training_flags(model.family), model.flags, extra)
    flags = Flags(words)
    expert_tensor = parse_expert_tensor(flags, model)
    alone = spec_from_flags(
        drop_flags(words, flags_with_role("parallelism")), 1, DeviceKind.GPU, model.name
    )
    template = replace(
        replace_sequence_length(replace(alone, shape=model.shape), options.seq),
        parallelism=Parallelism(expert_tensor=expert_tensor),
        batch=Batch(1, batch),
        dropout=flags.number("--hidden-dropout"),
        expert_load=parse_expert_load(flags, 1.0 if imbalance is None else imbalance),
        fused_attention=flags.text("--attention-backend") != "unfused",
    )
    if on_cpu:
        template = adapt_to_cpu_ranks(template)
    cluster = Cluster(
        device=device,
        devices=devices,
        per_node=per_node,
        intra=link_by_key(options.intra or device.link),
        inter=link_by_key(options.inter or device.network),
        calibration=load_calibration(options.calibration),
        # The kit's own flags group experts where they can be (launch/flags.py).
        execution=replace(parse_execution(flags), grouped_experts=True),
        nics=options.nics or 0,
        oversubscription=options.oversubscription or 1.0,
    )
    if options.calibrate:
        stated = calibrate_from_stated_products(options.calibrate, cluster, dtype)
        cluster = replace(cluster, calibration=stated)
    if options.readings and not options.readings.is_file():
        raise RequestError(
            f"There are no measurements in {options.readings}; 'make report' writes readings/mine.csv, "
            "which plans use by themselves."
        )
    own = load_own_runs(options.readings, cluster)
    return Request(model, cluster, batch, replace(template, dtype=dtype), own, tuple(extra))


def parse_stated_expert_tensor(options: PlanOptions) -> int:
    """Return the ETP that the flags of the model's file or of EXTRA state; 0 if they state none.

    Raises:
        RequestError: The model is dense, or the degree is below 1.
    """
    model = find_model(options.model)
    return parse_expert_tensor(Flags(merge_flags(model.flags, _words_of(options.extra))), model)


def parse_expert_tensor(flags: Flags, model: Model) -> int:
    """Return the ETP that these flags state for a model; 0 if they state none.

    Raises:
        RequestError: The model is dense, or the degree is below 1.
    """
    if not flags.has(EXPERT_TENSOR):
        return 0
    degree = flags.integer(EXPERT_TENSOR)
    if not model.shape.experts:
        raise RequestError(
            f"{EXPERT_TENSOR} {degree} is of experts and {model.name} is dense; leave it out."
        )
    if degree < 1:
        raise RequestError(f"{EXPERT_TENSOR} is {degree}; use 1 or more.")
    return degree


def list_ignored_flags(request: Request, laid: bool) -> tuple[str, ...]:
    """Flags of the model's file and of EXTRA that no prediction knows; `laid` if a strategy was
    given."""
    known = (
        flags_planned_as("counted", "neither", "one strategy")
        if laid
        else flags_planned_as("counted", "neither")
    )
    words = merge_flags(
        drop_flags(request.model.flags, flags_planned_as("MICRO_BATCH=", "GLOBAL_BATCH=")),
        request.extra,
    )
    return tuple(word for word in drop_flags(words, known) if word.startswith("--"))


def explain_ignored_flag(name: str) -> str:
    """Why no prediction of this request knows a flag."""
    flag = FLAGS.get(name)
    if flag is None:
        return "not known to this kit"
    if flag.planned == "one strategy":
        return "a search chooses it; STRATEGY= takes it"
    return f"{flag.planned} says it" if flag.planned.endswith("=") else "no formula has it"


def _words_of(extra: str | None) -> list[str]:
    """Refuses what are no flags, contradict one another, or are said by another variable."""
    try:
        words = shlex.split(extra or "")
    except ValueError as error:
        raise RequestError(f"EXTRA cannot be split into words: {error}.") from None
    if words and not words[0].startswith("--"):
        raise RequestError(
            f"EXTRA begins with {words[0]}, which is no flag; use --flags of Megatron."
        )
    flags = Flags(words)
    if flags.has("--fp16") and flags.has("--bf16"):
        raise RequestError("EXTRA has --fp16 and --bf16; leave one of them out.")
    for flag in FLAGS.values():
        if flag.planned.endswith("=") and flags.has(flag.name):
            raise RequestError(
                f"EXTRA has {flag.name}, which {flag.planned} says here; leave it out."
            )
    return words


def refuse_imbalance(imbalance: float, shape: ModelShape, ranks: int) -> None:
    """Refuse what no rank of so many can receive.

    Raises:
        RequestError: It says what the busiest can.
    """
    most = max_imbalance(shape, ranks)
    if imbalance > most:
        raise RequestError(
            f"IMBALANCE={imbalance:g} is more than a rank of EP {ranks} can receive with "
            f"{shape.experts_per_token} of {shape.experts} experts a token; use 1 to {most:g}."
        )


def replace_sequence_length(spec: RunSpec, seq_length: int | None) -> RunSpec:
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


def resolve_device_counts(options: PlanOptions, domain: int) -> tuple[int, int]:
    """Devices in all and in a node, from any two of the three options; a node is an NVLink domain."""
    for name in ("gpus", "nodes", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RequestError(f"{name.upper()}= is {value}; use 1 or more.")
    devices, nodes, per_node = options.gpus, options.nodes, options.gpus_per_node
    if devices is None:
        devices = (nodes or 1) * (per_node or (domain if nodes else 1))
    if devices > MOST_DEVICES:
        raise RequestError(f"{devices:,} GPUs are more than any cluster has; use {MOST_DEVICES:,}.")
    if per_node is None:
        per_node = -(-devices // nodes) if nodes else min(devices, domain)
    if nodes is not None and nodes * per_node != devices:
        raise RequestError(
            f"{plural(nodes, 'node')} of {per_node} have {nodes * per_node} GPUs, not {devices}; leave "
            "one of GPUS=, NODES= and --gpus-per-node out."
        )
    return devices, per_node

"""Conversion of the options of `plan` to a request of the search, with one sentence for what is refused."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from parakit.config.batch import choose_samples
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
    training_flags,
)
from parakit.config.peft import LORA_TARGETS, Lora, parse_peft
from parakit.config.run import DeviceKind, RunSpec, adapt_to_cpu_ranks, spec_from_flags
from parakit.config.strategy import Batch, Parallelism
from parakit.costs import PRECISIONS, list_adapted_linears, total_parameters
from parakit.formatting.units import joined, plural
from parakit.planner.calibration import calibrate_from_text, load_calibration
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.local_readings import load_own_runs
from parakit.planner.readings.models import find_planned_model
from parakit.planner.readings.reading_to_spec import parse_execution
from parakit.planner.search import Request
from parakit.planner.time.cluster import Cluster

MOST_DEVICES = 262_144
EXPERT_TENSOR = "--expert-tensor-parallel-size"
USUAL_BATCH_TOKENS = 2**22
"""Tokens of a batch if nothing states one: 4 million, as Llama 2 was trained with (arXiv:2307.09288 §2.2)."""


def build_request(options: PlanOptions) -> Request:
    """Return the search request that the options describe. Options that are not set have defaults.

    Raises:
        RequestError: Options contradict one another or are impossible.
        UnknownModelError: There is no such model.
        UnknownHardwareError: There is no such device or link.
        MeasurementsError: The file of the user's own measurements is no table.
    """
    extra = _parse_extra(options.extra)
    model = apply_flags_to_model(
        find_planned_model(options.model), extra, flags_planned_as("counted")
    )
    refuse_misspelled_flags((*model.flags, *extra))
    _refuse_linear_attention(model.shape)
    lora = _parse_lora(options, model)
    seq_length = options.seq or model.shape.seq_length
    document_length = _parse_document_length(options, extra, seq_length)
    device = device_by_key(options.gpu)
    devices, per_node = resolve_device_counts(options, device.domain)
    is_cpu = device.key == "cpu"
    dtype = options.dtype or ("fp32" if is_cpu else model.dtype)
    _refuse_unknown_dtype(dtype)
    global_batch, batch_origin = _resolve_global_batch(options, model, devices)
    template = _build_template(options, model, extra, global_batch)
    if is_cpu:
        template = adapt_to_cpu_ranks(template)
    flags = Flags(merge_flags(training_flags(model.family), model.flags, extra))
    cluster = Cluster(
        device=device,
        devices=devices,
        per_node=per_node,
        intra=link_by_key(options.intra or device.link),
        inter=link_by_key(options.inter or device.network),
        calibration=load_calibration(options.calibration),
        # The kit's own flags group experts where Megatron can (launch/flags.py).
        execution=replace(
            parse_execution(flags),
            grouped_experts=True,
            document_length=document_length,
            # Commands of plans avoid a large mask (training_command.py).
            copies_attention_mask=False,
        ),
        nics=options.nics or 0,
        oversubscription=options.oversubscription or 1.0,
    )
    if options.calibrate:
        calibration = calibrate_from_text(options.calibrate, cluster, dtype)
        cluster = replace(cluster, calibration=calibration)
    if options.readings and not options.readings.is_file():
        raise RequestError(
            f"There are no measurements in {options.readings}; 'make report' writes readings/mine.csv, "
            "which plans use by themselves."
        )
    own_runs = load_own_runs(options.readings, cluster)
    template = replace(template, dtype=dtype, lora=lora)
    if lora and lora.has_nf4_weights and template.fp8_recipe:
        raise RequestError(
            "Weights in NF4 are converted to half precision for each product, so FP8 computes none of them; leave "
            "the flags of FP8 or weights=nf4 out."
        )
    return Request(
        model,
        cluster,
        global_batch,
        template,
        own_runs=own_runs,
        extra=tuple(extra),
        batch_origin=batch_origin,
    )


def _refuse_linear_attention(shape: ModelShape) -> None:
    """Raise an error if a model has layers or blocks of linear attention.

    Raises:
        RequestError: The model has such a layer. The message says how many, and what of the model is counted.
    """
    if LINEAR in shape.blocks:
        raise RequestError(
            f"--hybrid-layer-pattern {shape.blocks} has linear attention ({LINEAR}), which is not planned; "
            f"use blocks of {' '.join(BLOCKS)}."
        )
    if shape.linear_layers:
        raise RequestError(
            f"{len(shape.linear_layers)} of {shape.layers} layers have linear attention, for whose time and memory "
            "the planner has no formulas, so the model is not planned: of these layers only the parameters are known "
            f"({total_parameters(shape) / 1e9:.1f} billion in all layers). Plan a model with full attention."
        )


def _parse_lora(options: PlanOptions, model: Model) -> Lora | None:
    """Return the adapters that PEFT= states for a model; None without PEFT=.

    Raises:
        RequestError: The text cannot be read, or no formula covers LoRA for this model, device or option.
    """
    if options.peft is None:
        return None
    try:
        lora = parse_peft(options.peft)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if lora is None:
        return None
    if options.gpu == "cpu":
        raise RequestError("LoRA is planned on GPUs alone; give GPU= another device.")
    if options.verify:
        raise RequestError("VERIFY= runs Megatron-LM's own model, which has no LoRA; leave it out.")
    if model.shape.blocks:
        raise RequestError(
            f"{model.name} has blocks of several kinds, and LoRA is planned for layers of attention with an MLP or "
            "experts; plan another model."
        )
    if not any(list_adapted_linears(kind, lora) for kind, _ in model.shape.layer_kinds):
        every_target = replace(lora, targets=LORA_TARGETS)
        names = {
            linear.name: None
            for kind, _ in model.shape.layer_kinds
            for linear in list_adapted_linears(kind, every_target)
        }
        raise RequestError(
            f"{model.name} has none of LoRA's targets {joined(list(lora.targets))}; use some of {joined(list(names))}."
        )
    return lora


def _parse_document_length(options: PlanOptions, extra: list[str], seq_length: int) -> int:
    """Return the mean tokens of packed documents; 0 if each sample is one document.

    Raises:
        RequestError: The documents are longer than a sample. Or flags pack samples, and nobody states the length.
    """
    length = options.document_length
    if length is None:
        if Flags(extra).has("--sft"):
            raise RequestError(
                "--sft packs documents into a sample, and attention stays inside documents; state their mean number "
                "of tokens with --document-length."
            )
        return 0
    if length > seq_length:
        raise RequestError(
            f"Documents of {length:,} tokens do not fit into a sample of {seq_length:,}; use a larger SEQ= or "
            "shorter documents."
        )
    return length


def _refuse_unknown_dtype(dtype: str) -> None:
    """Raise an error if the planner does not know a dtype.

    Raises:
        RequestError: There is no such dtype.
    """
    if dtype in PRECISIONS:
        return
    remedy = f"use {', '.join(PRECISIONS)}."
    if dtype.startswith("fp8"):
        remedy = 'fp8 is a recipe on top of bf16: use EXTRA="--fp8-format hybrid".'
    raise RequestError(f"There is no dtype '{dtype}'; {remedy}")


def _resolve_global_batch(options: PlanOptions, model: Model, devices: int) -> tuple[int, str]:
    """Return the global batch, and a phrase that says where an assumed batch comes from.

    The phrase is empty if the options state the batch. Otherwise the batch is that of the model's file, if the file
    states one. The batch of a user's own file is not changed. That of a file of the kit is rounded up to a multiple of
    the devices, and one sample states nothing. Without a stated batch, `usual_batch` is taken.

    Raises:
        RequestError: The batch is below 1.
    """
    if options.global_batch is not None:
        if options.global_batch < 1:
            raise RequestError(f"The global batch is {options.global_batch}; use 1 or more.")
        return options.global_batch, ""
    stated = model.batch.global_batch_size
    if model.source and Flags(model.flags).has("--global-batch-size"):
        return stated, "the batch of the model's file"
    if stated > 1 or options.gpu == "cpu":
        batch = choose_samples(model, devices)
        rounded = "" if batch == stated else ", rounded up to a multiple of the devices"
        return batch, f"the batch of the model's file{rounded}"
    seq_length = options.seq or model.shape.seq_length
    return usual_batch(seq_length, devices), "about 4 million tokens, which is assumed"


def usual_batch(seq_length: int, devices: int) -> int:
    """Return the number of sequences in a batch of about `USUAL_BATCH_TOKENS` tokens.

    The number is a multiple of the number of devices, if there are at least as many sequences as devices. Then every
    degree of data parallelism divides the batch.
    """
    sequences = max(1, round(USUAL_BATCH_TOKENS / max(1, seq_length)))
    if sequences < devices:
        return sequences
    return devices * round(sequences / devices)


def _build_template(
    options: PlanOptions, model: Model, extra: list[str], global_batch: int
) -> RunSpec:
    """Return the run that a search splits: it has no parallelism, runs on GPUs and has the model's dtype.

    Raises:
        RequestError: The model cannot have the imbalance of IMBALANCE=, the expert-tensor-parallel size, or the
            sequence length.
    """
    imbalance = options.imbalance
    if imbalance is not None:
        if not model.shape.experts:
            raise RequestError(f"IMBALANCE={imbalance:g} is of experts and the model is dense.")
        refuse_imbalance(imbalance, model.shape, model.shape.experts)
    arguments = merge_flags(training_flags(model.family), model.flags, extra)
    flags = Flags(arguments)
    expert_tensor = parse_expert_tensor(flags, model)
    single_device = spec_from_flags(
        drop_flags(arguments, flags_with_role("parallelism")), 1, DeviceKind.GPU, model.name
    )
    return replace(
        replace_sequence_length(replace(single_device, shape=model.shape), options.seq),
        parallelism=Parallelism(expert_tensor=expert_tensor),
        batch=Batch(1, global_batch),
        dropout=flags.number("--hidden-dropout"),
        expert_load=parse_expert_load(flags, 1.0 if imbalance is None else imbalance),
        fused_attention=flags.text("--attention-backend") != "unfused",
    )


def parse_stated_expert_tensor(options: PlanOptions) -> int:
    """Return the expert-tensor-parallel size that the model's file or EXTRA= states, or 0 if neither does.

    Raises:
        RequestError: The model is dense, or the degree is below 1.
    """
    model = find_planned_model(options.model)
    return parse_expert_tensor(Flags(merge_flags(model.flags, _parse_extra(options.extra))), model)


def parse_expert_tensor(flags: Flags, model: Model) -> int:
    """Return the expert-tensor-parallel size that these flags state for a model, or 0 if they state none.

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


def list_ignored_flags(request: Request, is_one_strategy: bool) -> tuple[str, ...]:
    """Return the names of the flags in the model's file and in EXTRA= that do not change the prediction.

    Args:
        is_one_strategy: True if STRATEGY= names a strategy. Some flags change only such a prediction.
    """
    kinds = ("counted", "neither", "one strategy") if is_one_strategy else ("counted", "neither")
    model_flags = drop_flags(request.model.flags, flags_planned_as("MICRO_BATCH=", "GLOBAL_BATCH="))
    arguments = drop_flags(merge_flags(model_flags, request.extra), flags_planned_as(*kinds))
    return tuple(argument for argument in arguments if argument.startswith("--"))


def explain_ignored_flag(name: str) -> str:
    """Return a phrase with the reason why a flag does not change the prediction, such as "no formula counts it"."""
    flag = FLAGS.get(name)
    if flag is None:
        return "not known to this kit"
    if flag.planned == "one strategy":
        return "a search chooses it; STRATEGY= takes it"
    return f"{flag.planned} sets it" if flag.planned.endswith("=") else "no formula counts it"


def _parse_extra(extra: str | None) -> list[str]:
    """Split the text of EXTRA= into arguments. None gives no arguments.

    Raises:
        RequestError: EXTRA= does not begin with a flag, has flags that contradict each other, or has a flag that a
            variable of make sets.
    """
    try:
        arguments = shlex.split(extra or "")
    except ValueError as error:
        raise RequestError(f"EXTRA cannot be split into words: {error}.") from None
    if arguments and not arguments[0].startswith("--"):
        raise RequestError(
            f"EXTRA begins with {arguments[0]}, which is no flag; use --flags of Megatron."
        )
    flags = Flags(arguments)
    if flags.has("--fp16") and flags.has("--bf16"):
        raise RequestError("EXTRA has --fp16 and --bf16; leave one of them out.")
    for flag in FLAGS.values():
        if flag.planned.endswith("=") and flags.has(flag.name):
            raise RequestError(
                f"EXTRA has {flag.name}, which {flag.planned} says here; leave it out."
            )
    return arguments


def refuse_imbalance(imbalance: float, shape: ModelShape, ranks: int) -> None:
    """Raise an error if the load of experts cannot be as uneven as IMBALANCE= states.

    Args:
        imbalance: Tokens of the busiest rank, divided by the mean.
        shape: The model's shape.
        ranks: Number of expert-parallel ranks.

    Raises:
        RequestError: The imbalance is too large. The message has the largest possible imbalance.
    """
    largest = max_imbalance(shape, ranks)
    if imbalance > largest:
        raise RequestError(
            f"IMBALANCE={imbalance:g} is more than a rank of EP {ranks} can receive with "
            f"{shape.experts_per_token} of {shape.experts} experts per token; use 1 to {largest:g}."
        )


def replace_sequence_length(spec: RunSpec, seq_length: int | None) -> RunSpec:
    """Return a run with another sequence length, and as many learned positions as the length needs.

    If `seq_length` is None, the run is returned unchanged.

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
    """Return the number of devices, and the number of devices per node.

    Both numbers follow from the options GPUS, NODES and GPUS_PER_NODE. By default a node has `domain` devices, as many
    as an NVLink domain. Without GPUS and NODES there is one node, with GPUS_PER_NODE devices or with one device.

    Raises:
        RequestError: The numbers contradict one another, are below 1, or exceed `MOST_DEVICES`.
    """
    for name in ("gpus", "nodes", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RequestError(f"{name.upper()}= is {value}; use 1 or more.")
    devices, nodes, per_node = options.gpus, options.nodes, options.gpus_per_node
    if devices is None:
        default_per_node = domain if nodes else 1
        devices = (nodes or 1) * (per_node or default_per_node)
    if devices > MOST_DEVICES:
        raise RequestError(f"{devices:,} GPUs are more than any cluster has; use {MOST_DEVICES:,}.")
    if per_node is None:
        # Rounded up, so that a number of devices that the nodes cannot share evenly is refused below.
        per_node = math.ceil(devices / nodes) if nodes else min(devices, domain)
    if nodes is not None and nodes * per_node != devices:
        raise RequestError(
            f"{plural(nodes, 'node')} of {per_node} have {nodes * per_node} GPUs, not {devices}; leave "
            "one of GPUS=, NODES= and --gpus-per-node out."
        )
    return devices, per_node

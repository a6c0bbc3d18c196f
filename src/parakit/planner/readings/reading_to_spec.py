"""Convert a published measurement to the input of the planner's formulas: a run, its cluster and its execution.

Facts that the measurement does not state come from its "source", the publication or repository that it was taken from:
`sources.yaml` has them by name, and the functions here get them as the mapping `source`.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from parakit.config.experts import ExpertLoad
from parakit.config.flag_table import flags_in_group
from parakit.config.flags import Flags
from parakit.config.hardware import Link, UnknownHardwareError, device_by_key, link_by_key
from parakit.config.model import GPT2_VOCABULARY, ModelShape
from parakit.config.offload import Offload
from parakit.config.peft import Lora, parse_peft
from parakit.config.recompute import RECOMPUTED_MODULES, Recompute
from parakit.config.run import (
    DeviceKind,
    Fp8Recipe,
    RunSpec,
    StateTypes,
    TokenDispatcher,
    spec_from_flags,
)
from parakit.config.stages import (
    EVEN_SPLIT,
    StageSplit,
    even_layout,
    front_loaded_layout,
    virtual_degrees,
)
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs import DEEP_EP_NVLINK_PEERS, NEWEST, divisors, find_violations
from parakit.planner.readings.facts import (
    container_release,
    facts_for_fields,
    model_facts,
    source_facts,
)
from parakit.planner.readings.table import PublishedMeasurement
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.execution import Execution

_CASE = re.compile(r"test_cases/(.+?)/golden_values")
_WORDS_IN_BRACKETS = re.compile(r"\s*\(.*\)")
_GATED_COLUMNS = 64
_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp4")
_RECOMPUTED = ("none", "full", "selective", "per-op")
"""Beginnings of the column `recompute`, unless it has a list of modules."""
_SHORT_MODULES = {"norm": "layernorm", "act": "moe_act"}
"""Megatron's names of modules, by the names in one source's tables."""
_BLOCKS_ON_STAGES = "{} has layers of several kinds, and PP or CP"
MICRO, VIRTUAL = "micro batch", "virtual stages"
_LARGEST_MICRO_BATCH = 8
"""Largest micro batch that is tried for a row that states none."""


class RefusedError(ValueError):
    """Error of a measurement that cannot be predicted; the message says why."""


@dataclass(frozen=True)
class MeasuredRun:
    """Published measurement, with the run and the cluster that were measured."""

    measurement: PublishedMeasurement
    spec: RunSpec
    cluster: Cluster
    unstated: tuple[str, ...] = ()
    """Sizes that the source leaves out although times depend on them: `MICRO`, `VIRTUAL`. In `spec` they are 1."""

    def candidate_runs(self) -> Iterator[MeasuredRun]:
        """Yield every run that the source may have measured.

        Sizes that the source does not state, such as the micro batch, take all possible values. If the source states
        all sizes, one run is yielded.
        """
        spec, split = self.spec, self.spec.parallelism
        for size, (virtual, stages) in product(
            self._possible_micro_batches(), self._possible_schedules()
        ):
            batch = Batch(size, spec.batch.global_batch_size)
            parallelism = replace(split, virtual_stages=virtual)
            run = replace(spec, batch=batch, parallelism=parallelism, stages=stages)
            if virtual == 1 or run.microbatches % split.pipeline == 0:
                yield replace(self, spec=run, unstated=())

    def _possible_micro_batches(self) -> list[int]:
        """Return the micro batch sizes that the run may have had: only the stated size, if there is one.

        Without a stated size, return all sizes up to _LARGEST_MICRO_BATCH that divide the samples per data-parallel
        rank and iteration. If the global batch is not known either, return only the size of `spec`.
        """
        global_batch = self.measurement.gbs
        if MICRO in self.unstated and global_batch:
            return divisors(global_batch // self.spec.parallelism.data, _LARGEST_MICRO_BATCH)
        return [self.spec.batch.micro_batch_size]

    def _possible_schedules(self) -> list[tuple[int, StageSplit]]:
        """Return the possible numbers of virtual stages, each with the placement of layers on stages.

        If the source states the number, the result has only this number. Otherwise it has every number into which
        the layers can be split.
        """
        spec, split = self.spec, self.spec.parallelism
        if VIRTUAL not in self.unstated:
            return [(split.virtual_stages, spec.stages)]
        layers = spec.shape.layers
        degrees: Iterable[int] = range(1, -(-layers // split.pipeline) + 1)
        if layers % split.pipeline == 0:
            degrees = virtual_degrees(EVEN_SPLIT, layers, split.pipeline)
        return [
            (degree, _stages_of_recipe(spec.shape, split.pipeline * degree)) for degree in degrees
        ]


@lru_cache(maxsize=4096)
def convert_measurement(measurement: PublishedMeasurement) -> MeasuredRun:
    """Return the run and the cluster that a published measurement describes.

    The flags in the measurement's column `flags` define the run. If the column is empty and a test case of Megatron was
    measured, the flags of the test case define the run. Otherwise the measurement's columns and the facts of its source
    do.

    Raises:
        RefusedError: The measurement states too little, contradicts itself, or trains what the formulas do not cover.
    """
    if measurement.metric == "matmul_tflops":
        return _matrix_product_run(measurement)
    source = source_facts(measurement)
    _refuse_unpredictable(measurement, source)
    try:
        own_flags = shlex.split(measurement.flags)
    except ValueError as error:
        raise RefusedError(f"its flags cannot be read: {error}") from None
    case_flags = [] if own_flags else _find_case_flags(measurement)
    unstated: tuple[str, ...] = ()
    if case_flags:
        spec, execution = _golden_spec(measurement, case_flags), parse_execution(Flags(case_flags))
    elif own_flags:
        spec = _spec_of_flags(measurement, own_flags)
        execution = parse_execution(Flags(own_flags))
    else:
        complete = complete_measurement(measurement, source)
        spec, execution = _stated_spec(complete, source), _stated_execution(complete, source)
        unstated = _list_unstated_sizes(complete, source, spec)
    if not case_flags:
        _refuse_illegal(spec)
    cluster = _build_cluster(
        measurement.gpu,
        measurement.gpus or 1,
        source.get("network_gb_per_second"),
        source.get("per_node"),
        execution,
    )
    return MeasuredRun(measurement, spec, cluster, unstated)


def _find_case_flags(measurement: PublishedMeasurement) -> list[str]:
    """Return the flags of the test case of Megatron that was measured; empty if none was."""
    case = _CASE.search(measurement.where)
    if case is None:
        return []
    return _read_cases().get(case[1], "").split()


def _list_unstated_sizes(
    measurement: PublishedMeasurement, source: dict[str, Any], spec: RunSpec
) -> tuple[str, ...]:
    """Return which of the micro batch and the virtual stages a measurement and its source leave open."""
    unstated: list[str] = []
    if not measurement.mbs:
        unstated.append(MICRO)
    states_virtual = measurement.vpp or source["says_virtual"]
    if spec.parallelism.pipeline > 1 and not states_virtual:
        unstated.append(VIRTUAL)
    return tuple(unstated)


def _matrix_product_run(measurement: PublishedMeasurement) -> MeasuredRun:
    """Return a placeholder run for the measured rate of one matrix product; only its dtype and device matter."""
    shape = ModelShape(1, 16384, 128, 128, 128, 16384, 8192, 0)
    spec = RunSpec(shape, Parallelism(), Batch(1, 1), dtype=measurement.dtype.lower() or "bf16")
    return MeasuredRun(measurement, spec, _build_cluster(measurement.gpu, 1))


def _refuse_unpredictable(measurement: PublishedMeasurement, source: dict[str, Any]) -> None:
    """Raise an error for a measurement that cannot be predicted.

    Raises:
        RefusedError: The source's facts state a reason. Or the notes hold flags, as files of older versions do. Or the
            notes say `packed`, and the length of the packed documents is not known.
    """
    refused = source.get("refused")
    if refused:
        raise RefusedError(f"{measurement.model}: {refused}")
    if measurement.notes.startswith("flags: "):
        raise RefusedError(
            "its notes hold flags, which have a column of their own: remove the row, and 'make report' "
            "writes it anew"
        )
    if "packed" in measurement.notes.split() and not source.get("document_length"):
        raise RefusedError(
            "its samples pack documents, and attention stays inside documents: state their mean number of "
            "tokens in the column document_length"
        )


def _refuse_illegal(spec: RunSpec) -> None:
    """Raise an error if the newest Megatron refuses a run.

    Test cases of Megatron are not checked, because they ran with flags that their case does not list.

    Raises:
        RefusedError: Megatron refuses the run. The message is the first reason.
    """
    # Today's Megatron gives experts biases, which not every published run had.
    bias = spec.shape.bias and not spec.shape.experts
    unbiased = replace(spec, shape=replace(spec.shape, bias=bias))
    problems = find_violations(unbiased, NEWEST)
    if problems:
        raise RefusedError(problems[0])


@cache
def _read_cases() -> dict[str, str]:
    """Return the flags of Megatron's functional tests by name of the test (core_v0.19 line, d98e8a64dd)."""
    packed = Path(__file__).with_name("megatron_cases.json.gz").read_bytes()
    return dict(json.loads(gzip.decompress(packed)))


def complete_measurement(
    measurement: PublishedMeasurement, source: dict[str, Any]
) -> PublishedMeasurement:
    """Return the measurement with missing sizes filled in from the facts about its model.

    If the facts of the source state a parallel size or the micro batch, they replace even stated values of the
    measurement.
    """
    sizes = facts_for_fields(PublishedMeasurement, model_facts(measurement.model))
    missing = {name: size for name, size in sizes.items() if getattr(measurement, name) is None}
    degrees = ("tp", "pp", "vpp", "ep", "mbs")
    return replace(
        measurement, **missing, **{name: source[name] for name in degrees if name in source}
    )


@cache
def _build_cluster(
    gpu: str,
    gpus: int,
    network: float | None = None,
    per_node: int | None = None,
    execution: Execution = Execution(),  # noqa: B008  frozen
) -> Cluster:
    """Return a cluster of GPUs. By default it has the GPU's usual network and number of GPUs per node.

    Args:
        gpu: Name of the GPU as the source writes it.
        gpus: Number of GPUs.
        network: Bandwidth between nodes in GB per second. None means the GPU's usual network.
        per_node: GPUs per node. None means the GPU's usual number.
        execution: How the run is executed.

    Raises:
        RefusedError: The planner does not know the GPU.
    """
    try:
        device = device_by_key(_WORDS_IN_BRACKETS.sub("", gpu).replace(" ", "-").replace("_", "-"))
    except UnknownHardwareError as error:
        raise RefusedError(str(error)) from None
    inter = link_by_key(device.network)
    if network is not None:
        inter = Link("network", "as its source states", network * 1e9, inter.latency_seconds, "")
    per_node, intra = per_node or device.domain, link_by_key(device.link)
    return Cluster(device, gpus, per_node, intra, inter, execution=execution)


def _stated_spec(measurement: PublishedMeasurement, source: dict[str, Any]) -> RunSpec:
    """Return the run that a measurement's columns and its source's facts describe.

    Raises:
        RefusedError: The columns state too little or contradict one another.
    """
    shape, facts = build_shape(measurement, source), model_facts(measurement.model)
    parallelism, batch = _stated_strategy(measurement, source)
    groups, groups_per_token = source.get("groups") or facts.get("groups", (1, 1))
    capacity = source["capacity"] or None
    dtype = _stated_dtype(measurement)
    stated = facts_for_fields(RunSpec, source)
    fp8_recipe = _parse_fp8_recipe(measurement.dtype, source)
    stated["recompute"] = _parse_recompute(
        measurement.recompute or stated["recompute"], stated["fused_attention"]
    )
    if shape.blocks and (parallelism.pipeline > 1 or parallelism.context > 1):
        raise RefusedError(_BLOCKS_ON_STAGES.format(measurement.model))
    return RunSpec(
        **stated,
        shape=shape,
        parallelism=parallelism,
        batch=batch,
        dtype=dtype,
        fp8_recipe=fp8_recipe,
        unquantised_blocks=facts.get("half_blocks", {}).get(fp8_recipe.value, ""),
        offload=Offload(source["offload_layers"], tuple(source["offload_modules"].split())),
        state_types=_state_types(source, parallelism.sharding),
        stages=_stages_of_recipe(shape, parallelism.pipeline * parallelism.virtual_stages),
        expert_load=ExpertLoad(
            capacity=capacity,
            pads_to_capacity=capacity is not None,
            groups=groups,
            groups_per_token=groups_per_token,
        ),
        token_dispatcher=_choose_dispatcher(measurement, source),
        lora=_stated_lora(measurement, source),
        model=measurement.model,
    )


def _stated_dtype(measurement: PublishedMeasurement) -> str:
    """Return `fp16`, `fp32` or `bf16`, the dtype of a measured run without its FP8 recipe. The usual one is bf16.

    Raises:
        RefusedError: The measurement has a dtype that is not known.
    """
    text = measurement.dtype.lower()
    if text and not any(known in text for known in _DTYPES):
        raise RefusedError(f"its dtype '{measurement.dtype}' is none of {', '.join(_DTYPES)}")
    if text.startswith("fp16"):
        return "fp16"
    return "fp32" if text == "fp32" else "bf16"


def _choose_dispatcher(
    measurement: PublishedMeasurement, source: dict[str, Any]
) -> TokenDispatcher:
    """Return the token dispatcher with which a measured run sent tokens to experts.

    If the source's facts state that a token is sent only once to each rank (`deduplicated`), the dispatcher is
    HybridEP or DeepEP. It is HybridEP if the notes name it, or if NVLink joins more devices than DeepEP supports.
    In all other cases, and if the notes begin with A2A, it is the dispatcher that the facts name.
    """
    if not source["deduplicated"] or measurement.notes.startswith("A2A"):
        return TokenDispatcher(source["dispatcher"])
    is_hybrid = (
        _build_cluster(measurement.gpu, 1).per_node > DEEP_EP_NVLINK_PEERS
        or "HybridEP" in measurement.notes
    )
    return TokenDispatcher.HYBRID_EP if is_hybrid else TokenDispatcher.DEEP_EP


def _state_types(source: dict[str, Any], sharding: Sharding) -> StateTypes:
    """Return the dtypes of gradients and optimizer states that a source states."""
    gradients = "bf16" if source["half_gradients"] else ""
    if not sharding:
        return StateTypes(gradients)
    moments = "bf16" if source["half_moments"] else ""
    return StateTypes(gradients, "", moments, moments, precision_aware=bool(source["aware"]))


def _stages_of_recipe(shape: ModelShape, stages: int) -> StageSplit:
    """Return the assumed placement of layers on stages, for a run whose source does not state the placement.

    The stages have equally many layers as far as possible. With multi-token prediction the placement is that of
    Megatron-Bridge's recipe for DeepSeek V3 (`recipes/deepseek/deepseek_v3.py: layout_map`).

    Args:
        stages: Number of virtual stages of all pipeline ranks together.
    """
    if shape.mtp_layers and stages > 1:
        return front_loaded_layout(shape.layers, stages, shape.mtp_layers)
    return even_layout(shape.layers, stages) if shape.layers % stages else EVEN_SPLIT


def build_shape(measurement: PublishedMeasurement, source: dict[str, Any]) -> ModelShape:
    """Return the model of a measurement from its columns and the facts about the model.

    Raises:
        RefusedError: A size is missing, or the facts refuse the model.
    """
    facts = model_facts(measurement.model)
    refused = facts.get("refused")
    if refused:
        raise RefusedError(f"{measurement.model} {refused}")
    sizes = {name: getattr(measurement, name) for name in ("layers", "hidden", "heads", "seq")}
    if "blocks" in facts:
        sizes["layers"] = facts.get("layers", 1)  # Repetitions of the blocks.
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise RefusedError(f"the source does not state {', '.join(missing)}")
    if measurement.expert_ffn and "experts" not in facts:
        raise RefusedError(f"how many experts {measurement.model} has is not known")
    seq, hidden, heads = sizes.pop("seq"), sizes["hidden"], sizes["heads"]
    gated_ffn = int(4 * hidden * 2 / 3) // _GATED_COLUMNS * _GATED_COLUMNS
    defaults = {
        "query_groups": heads,
        "head_width": hidden // heads,
        "ffn_hidden": measurement.ffn or (gated_ffn if facts.get("gated") else 4 * hidden),
        "seq_length": seq,
        "positions": 0 if facts.get("rotary") else seq,
        "vocabulary": measurement.vocab or source.get("vocab") or GPT2_VOCABULARY,
        "expert_ffn_hidden": measurement.expert_ffn or 0,
    }
    return msgspec.convert(
        defaults | facts_for_fields(ModelShape, facts, source) | sizes, ModelShape
    )


def _stated_strategy(
    measurement: PublishedMeasurement, source: dict[str, Any]
) -> tuple[Parallelism, Batch]:
    """Return the strategy and the batch that a measurement's columns and its source's facts state.

    Raises:
        RefusedError: A size is missing, or sizes contradict the number of GPUs or the global batch.
    """
    gpus = measurement.gpus
    if gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    sharding = Sharding(source["sharding"])
    if re.search(r"FSDP=[1-9]|FSDP on|MaxText FSDP", measurement.notes):
        sharding = Sharding.ZERO3
    tensor, pipeline = _stated_tensor_and_pipeline(measurement, source, sharding)
    context, expert = measurement.cp or 1, measurement.ep or 1
    ranks = tensor * pipeline * context
    if gpus % ranks:
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} does not divide {gpus} GPUs: wrong as published"
        )
    data = gpus // ranks
    if not {"tp", "pp"} & source.keys():
        _refuse_wrong_data(measurement, gpus, tensor, pipeline)
    batch = _stated_batch(measurement, data, pipeline)
    virtual_stages = measurement.vpp or 1
    expert_tensor = source.get("expert_tensor", 1 if expert > 1 else tensor)
    parallelism = Parallelism(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        virtual_stages=virtual_stages if pipeline > 1 else 1,
        sequence_parallel=bool(source["sequence_parallel"]) and tensor > 1,
        sharding=sharding if data * context > 1 else Sharding.NONE,
    )
    return parallelism.with_expert_tensor(expert_tensor), batch


def _refuse_wrong_data(
    measurement: PublishedMeasurement, gpus: int, tensor: int, pipeline: int
) -> None:
    """Raise an error if the product of the stated parallel sizes is not the number of GPUs.

    Some sources count the expert-parallel ranks in the data-parallel size, and others do not. Both products are
    therefore accepted. Nothing is checked if the source states no data-parallel size.

    Raises:
        RefusedError: Neither product is the number of GPUs.
    """
    if measurement.dp is None:
        return
    context = measurement.cp or 1
    devices = tensor * pipeline * context * measurement.dp
    if gpus not in (devices, devices * (measurement.ep or 1)):
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} x DP {measurement.dp} is not {gpus} GPUs: "
            "wrong as published"
        )


def _stated_tensor_and_pipeline(
    measurement: PublishedMeasurement, source: dict[str, Any], sharding: Sharding
) -> tuple[int, int]:
    """Return the tensor- and pipeline-parallel sizes of a measurement.

    If data parallelism shards weights, a missing size is 1. Known misprints of the pipeline-parallel size are
    corrected.

    Raises:
        RefusedError: A size is missing and weights are not sharded.
    """
    tensor, pipeline = measurement.tp, measurement.pp
    misprints = source.get("misprinted_pipeline", {})
    pipeline = misprints.get(f"{measurement.where} {pipeline}", pipeline)
    if sharding.shards_weights:
        tensor, pipeline = tensor or 1, pipeline or 1
    missing = [name for name, value in (("TP", tensor), ("PP", pipeline)) if value is None]
    if tensor is None or pipeline is None:
        raise RefusedError(f"the source does not state {' and '.join(missing)}")
    return tensor, pipeline


def _stated_batch(measurement: PublishedMeasurement, data: int, pipeline: int) -> Batch:
    """Return the micro batch and the global batch of a measurement.

    A micro batch that is not stated is 1. A global batch that is not stated is one micro batch per data-parallel rank.

    Args:
        measurement: The measurement.
        data: Data-parallel size.
        pipeline: Pipeline-parallel size.

    Raises:
        RefusedError: The source does not state the global batch although the run has a pipeline or the metric is the
            time of a step. Or the global batch cannot be divided into micro batches.
    """
    micro, global_batch = measurement.mbs or 1, measurement.gbs
    if global_batch is None:
        if pipeline > 1:
            raise RefusedError("the source does not state the global batch of a pipeline")
        if measurement.metric == "step_time_s":
            raise RefusedError(
                "the source does not state the global batch that a step's time is of"
            )
        global_batch = micro * data
    if global_batch % (micro * data):
        raise RefusedError(
            f"a global batch of {global_batch} is no multiple of micro batch {micro} x DP {data}"
        )
    return Batch(micro, global_batch)


def _parse_recompute(stated: str, fused: bool) -> Recompute:
    """Return the recomputation that a measurement's column `recompute` states.

    The column has `none`, `full`, `selective`, `per-op`, or a list of modules as Megatron names them. Selective
    recomputation with fused attention is none, because fused attention stores no scores that could be recomputed.
    Recomputation per operator counts as none, too: the formulas do not cover it.

    Args:
        stated: Text of the column.
        fused: True if attention is fused.

    Raises:
        RefusedError: The text has none of these forms.
    """
    text = stated.lower()
    modules = [_SHORT_MODULES.get(name, name) for name in text.replace(",", " ").split()]
    if modules and RECOMPUTED_MODULES.issuperset(modules):
        return Recompute(frozenset(modules))
    if text and not text.startswith(_RECOMPUTED):
        known = ", ".join((*_RECOMPUTED, *sorted(RECOMPUTED_MODULES)))
        raise RefusedError(f"its recompute '{stated}' is none of {known}")
    if text.startswith("full"):
        with suppress(ValueError):
            return Recompute.parse(text)
        raise RefusedError(
            f"its recompute '{stated}' is neither full nor full uniform 2 or full block 2"
        )
    return Recompute.SELECTIVE if text == "selective" and not fused else Recompute.NONE


def _parse_fp8_recipe(dtype: str, source: dict[str, Any]) -> Fp8Recipe:
    """Return the fp8 or fp4 recipe that the dtype of a published measurement names, such as `FP8-MX`.

    A 16-bit or 32-bit dtype gives `NONE`. An empty dtype means that the measurement states none. Then the source's fact
    `unstated_bits` is read in its place. A plain `FP8` gives the recipe that the source's fact `fp8` names.
    """
    text = (dtype or source["unstated_bits"]).lower()
    # "CS" stands for current scaling, which has one scale per tensor. `FP8-CS (FP8-MX)` names the recipe of
    # the measurement first, and another in brackets.
    has_current_scaling = "cs" in text
    if "fp4" in text:
        return Fp8Recipe.NVFP4
    if "fp8" not in text:
        return Fp8Recipe.NONE
    if has_current_scaling or "tensorwise" in text:
        return Fp8Recipe.TENSORWISE
    if "mx" in text:
        return Fp8Recipe.MXFP8
    if "block" in text or "rowwise" in text:
        return Fp8Recipe.BLOCKWISE
    return Fp8Recipe(source["fp8"])


def _stated_execution(measurement: PublishedMeasurement, source: dict[str, Any]) -> Execution:
    """Return the execution options of a measured run, such as overlapped communication and CUDA graphs.

    They come from the facts of the source and the notes of the measurement, which has no flags.
    """
    stated, is_eager = facts_for_fields(Execution, source), source["eager"]
    notes = measurement.notes.lower()
    has_graphs = container_release(measurement, source) >= source["graphs_since"]
    has_graphs = has_graphs and model_facts(measurement.model).get("whole_graph", True)
    switches = {
        "overlap_gradients": source["overlap"],
        "overlap_parameters": source["overlap"],
        "overlap_tensor": stated["overlap_tensor"] or "async" in notes,
        "graphs": source.get("graphs", has_graphs),
        "portable_attention": is_eager,
        "unfused": is_eager and "compile" not in measurement.notes,
        "deduplicated": stated["deduplicated"] and not measurement.notes.startswith("A2A"),
    }
    return Execution(**stated | switches)


def _stated_lora(measurement: PublishedMeasurement, source: dict[str, Any]) -> Lora | None:
    """Return the adapters that a measured run trains; None if it trains all weights.

    The measurement's column `peft` states them. Without this column, a run trains adapters if its notes or its path
    say so. They are then those of the source's fact `peft`.

    Raises:
        RefusedError: The column or the fact cannot be read.
    """
    is_lora = "lora" in measurement.notes.lower() or re.search(r"[/ ]peft", measurement.where)
    text = dict(measurement.facts).get("peft", source["peft"] if is_lora else "none")
    try:
        return parse_peft(str(text))
    except ValueError as error:
        raise RefusedError(f"its column peft: {error}") from None


def _spec_of_flags(measurement: PublishedMeasurement, arguments: list[str]) -> RunSpec:
    """Return the run that flags of Megatron train on the measurement's devices.

    Raises:
        RefusedError: The number of devices is not stated, or the flags give no run on them.
    """
    if measurement.gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    kind = DeviceKind.CPU if measurement.gpu == "cpu" else DeviceKind.GPU
    try:
        spec = spec_from_flags(arguments, measurement.gpus, kind, measurement.model)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    return replace(spec, fused=tuple(filter(None, measurement.fused.split(","))))


def _golden_spec(measurement: PublishedMeasurement, case: list[str]) -> RunSpec:
    """Return the run of a functional test of Megatron.

    Args:
        measurement: The measurement of the test.
        case: The test's flags.

    Raises:
        RefusedError: The planner has no formula for the model of the test, or the flags describe no possible run.
    """
    flags = Flags(case)
    pattern = flags.text("--hybrid-layer-pattern")
    for flag, description in (
        *(() if pattern else (("--spec", "layers of its own"),)),
        ("--experimental-attention-variant", "an experimental attention"),
        ("--linear-attention-freq", "linear attention layers"),
        ("--encoder-num-layers", "an encoder"),
        ("--use-checkpoint-args", "a shape that only its checkpoint states"),
    ):
        if flags.has(flag):
            raise RefusedError(f"{measurement.model} has {description}")
    if measurement.model.startswith("bert"):
        raise RefusedError(f"{measurement.model} is BERT: two kinds of loss, no causal mask")
    spec = _spec_of_flags(measurement, case)
    if pattern and max(spec.parallelism.pipeline, spec.parallelism.context) > 1:
        raise RefusedError(_BLOCKS_ON_STAGES.format(measurement.model))
    is_local = flags.text("--transformer-impl") == "local"
    is_unfused = is_local or flags.text("--attention-backend") == "unfused"
    batch = spec.batch
    if batch.global_batch_size % (batch.micro_batch_size * spec.parallelism.data):
        raise RefusedError(
            f"its global batch of {batch.global_batch_size} is no multiple of its steps"
        )
    return replace(spec, fused_attention=not is_unfused)


def parse_execution(flags: Flags) -> Execution:
    """Return the execution options that Megatron's flags choose, such as overlapped communication and CUDA graphs."""
    execution_flags = flags_in_group("execution")
    switches = dict.fromkeys((flag.field for flag in execution_flags), False)
    for flag in execution_flags:
        switches[flag.field] |= flags.has(flag.name) and flags.text(flag.name) != "none"
    # Megatron's own layers take Apex's norms if they can, and PyTorch's only without persistent kernels.
    is_local = flags.text("--transformer-impl") == "local"
    uses_torch_kernels = is_local and flags.has("--no-persist-layer-norm")
    if flags.has("--use-megatron-fsdp"):
        # Megatron-FSDP's own passes over gradients are counted with its communication.
        switches["unfused_gradients"] = False
    return Execution(
        **switches,
        torch_kernels=uses_torch_kernels,
        flash_attention=flags.text("--attention-backend") == "flash",
        copies_attention_mask=not flags.has("--no-create-attention-mask-in-dataloader"),
    )

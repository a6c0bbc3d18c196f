"""A reading as what the planner's formulas take: a run, its cluster and how it was executed."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
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
"""What a recomputation begins with that is no list of modules."""
_SHORT_MODULES = {"norm": "layernorm", "act": "moe_act"}
"""As one source's tables call them; its launch scripts have Megatron's names."""
_UNLAID = "{} has layers of several kinds, and PP or CP"
MICRO, VIRTUAL = "micro batch", "virtual stages"
_MICRO_BATCHES = 8
"""The largest of a row that states none."""


class RefusedError(ValueError):
    """A reading that cannot be predicted; the message says why."""


@dataclass(frozen=True)
class MeasuredRun:
    """A reading in the planner's terms."""

    measurement: PublishedMeasurement
    spec: RunSpec
    cluster: Cluster
    unstated: tuple[str, ...] = ()
    """What a time depends on and the source leaves out: `MICRO`, `VIRTUAL`; in `spec` it is 1."""

    def candidate_runs(self) -> Iterator[MeasuredRun]:
        """The runs that it may have been, each as if all of it were stated."""
        spec, split, whole = self.spec, self.spec.parallelism, self.measurement.gbs
        sizes, layers = [spec.batch.micro_batch_size], spec.shape.layers
        if MICRO in self.unstated:
            sizes = divisors(whole // split.data, _MICRO_BATCHES) if whole else sizes
        ways = [(split.virtual_stages, spec.stages)]
        if VIRTUAL in self.unstated:
            is_even = layers % split.pipeline == 0
            each = range(1, -(-layers // split.pipeline) + 1)
            degrees = virtual_degrees(EVEN_SPLIT, layers, split.pipeline) if is_even else each
            ways = [(v, _stages_of_recipe(spec.shape, split.pipeline * v)) for v in degrees]
        for size, (virtual, stages) in product(sizes, ways):
            batch = Batch(size, spec.batch.global_batch_size)
            parallelism = replace(split, virtual_stages=virtual)
            laid = replace(spec, batch=batch, parallelism=parallelism, stages=stages)
            if virtual == 1 or laid.microbatches % split.pipeline == 0:
                yield replace(self, spec=laid, unstated=())


def convert_measurement(measurement: PublishedMeasurement) -> MeasuredRun:
    """The run that a reading measured.

    Raises:
        RefusedError: The source states too little, contradicts itself, or trains what no formula knows.
    """
    if measurement.metric == "matmul_tflops":
        shape = ModelShape(1, 16384, 128, 128, 128, 16384, 8192, 0)
        spec = RunSpec(shape, Parallelism(), Batch(1, 1), dtype=measurement.dtype.lower() or "bf16")
        return MeasuredRun(measurement, spec, _cluster(measurement.gpu, 1))
    source = source_facts(measurement)
    if refused := source.get("refused"):
        raise RefusedError(f"{measurement.model}: {refused}")
    if measurement.notes.startswith("flags: "):
        raise RefusedError(
            "its notes hold flags, which have a column of their own: remove the row, and 'make report' "
            "writes it anew"
        )
    try:
        own = shlex.split(measurement.flags)
    except ValueError as error:
        raise RefusedError(f"its flags cannot be read: {error}") from None
    golden = _CASE.search(measurement.where)
    case = _cases().get(golden[1], "").split() if golden and not own else []
    ran = _complete_measurement(measurement, source)
    if own or case:
        execution = parse_execution(Flags(own or case))
        spec = _golden_spec(measurement, case) if case else _spec_of_flags(measurement, own)
    else:
        spec, execution = _stated_spec(ran, source), _stated_execution(ran, source)
    # What a test of Megatron's ran is possible, by flags that its case does not list here. The rules
    # are those of every Megatron, and today's gives experts biases.
    bias = spec.shape.bias and not spec.shape.experts
    unbiased = replace(spec, shape=replace(spec.shape, bias=bias))
    if not case and (problems := find_violations(unbiased, NEWEST)):
        raise RefusedError(problems[0])
    links = (source.get("network_gb_per_second"), source.get("per_node"))
    cluster = _cluster(measurement.gpu, measurement.gpus or 1, *links, execution)
    interleaves = spec.parallelism.pipeline > 1 and not (ran.vpp or source["says_virtual"])
    blanks = ((MICRO, not ran.mbs), (VIRTUAL, interleaves))
    unstated = () if own or case else tuple(name for name, is_blank in blanks if is_blank)
    return MeasuredRun(measurement, spec, cluster, unstated)


@cache
def _cases() -> dict[str, str]:
    """Megatron's functional tests by name, with the flags of each (core_v0.19 line, d98e8a64dd)."""
    packed = Path(__file__).with_name("megatron_cases.json.gz").read_bytes()
    return dict(json.loads(gzip.decompress(packed)))


def _complete_measurement(
    measurement: PublishedMeasurement, source: dict[str, Any]
) -> PublishedMeasurement:
    """With its model's sizes where it states none, and the degrees that its source says it had."""
    sizes = facts_for_fields(PublishedMeasurement, model_facts(measurement.model))
    lacking = {name: size for name, size in sizes.items() if getattr(measurement, name) is None}
    degrees = ("tp", "pp", "vpp", "ep", "mbs")
    return replace(
        measurement, **lacking, **{name: source[name] for name in degrees if name in source}
    )


@cache
def _cluster(
    gpu: str,
    gpus: int,
    network: float | None = None,
    per_node: int | None = None,
    execution: Execution = Execution(),  # noqa: B008  frozen
) -> Cluster:
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
    shape, facts = _shape(measurement, source), model_facts(measurement.model)
    parallelism, batch = _layout(measurement, source)
    groups, taken = source.get("groups") or facts.get("groups", (1, 1))
    capacity = source["capacity"] or None
    dtype = measurement.dtype.lower()
    if dtype and not any(known in dtype for known in _DTYPES):
        raise RefusedError(f"its dtype '{measurement.dtype}' is none of {', '.join(_DTYPES)}")
    said, fp8_recipe = facts_for_fields(RunSpec, source), _fp8_recipe(measurement.dtype, source)
    said["recompute"] = _recompute(
        measurement.recompute or said["recompute"], said["fused_attention"]
    )
    if shape.blocks and (parallelism.pipeline > 1 or parallelism.context > 1):
        raise RefusedError(_UNLAID.format(measurement.model))
    return RunSpec(
        **said,
        shape=shape,
        parallelism=parallelism,
        batch=batch,
        dtype="fp16" if dtype.startswith("fp16") else "fp32" if dtype == "fp32" else "bf16",
        fp8_recipe=fp8_recipe,
        unquantised_blocks=facts.get("half_blocks", {}).get(fp8_recipe.value, ""),
        offload=Offload(source["offload_layers"], tuple(source["offload_modules"].split())),
        state_types=_state_types(source, parallelism.sharding),
        stages=_stages_of_recipe(shape, parallelism.pipeline * parallelism.virtual_stages),
        expert_load=ExpertLoad(
            capacity=capacity,
            pads_to_capacity=capacity is not None,
            groups=groups,
            groups_per_token=taken,
        ),
        token_dispatcher=_dispatcher(measurement, source),
        model=measurement.model,
    )


def _dispatcher(measurement: PublishedMeasurement, source: dict[str, Any]) -> TokenDispatcher:
    """Of those that send a token once to a rank, HybridEP where a row says so or NVLink joins more than
    DeepEP knows, else DeepEP."""
    if not source["deduplicated"] or measurement.notes.startswith("A2A"):
        return TokenDispatcher(source["dispatcher"])
    is_hybrid = (
        _cluster(measurement.gpu, 1).per_node > DEEP_EP_NVLINK_PEERS
        or "HybridEP" in measurement.notes
    )
    return TokenDispatcher.HYBRID_EP if is_hybrid else TokenDispatcher.DEEP_EP


def _state_types(source: dict[str, Any], sharding: Sharding) -> StateTypes:
    gradients = "bf16" if source["half_gradients"] else ""
    if not sharding:
        return StateTypes(gradients)
    moments = "bf16" if source["half_moments"] else ""
    return StateTypes(gradients, "", moments, moments, precision_aware=bool(source["aware"]))


def _stages_of_recipe(shape: ModelShape, stages: int) -> StageSplit:
    """How layers are laid where a source does not say: with depths of multi-token prediction as in
    Megatron-Bridge's recipe of DeepSeek V3 (`recipes/deepseek/deepseek_v3.py: layout_map`)."""
    if shape.mtp_layers and stages > 1:
        return front_loaded_layout(shape.layers, stages, shape.mtp_layers)
    return even_layout(shape.layers, stages) if shape.layers % stages else EVEN_SPLIT


def _shape(measurement: PublishedMeasurement, source: dict[str, Any]) -> ModelShape:
    facts = model_facts(measurement.model)
    if refused := facts.get("refused"):
        raise RefusedError(f"{measurement.model} {refused}")
    sizes = {name: getattr(measurement, name) for name in ("layers", "hidden", "heads", "seq")}
    if "blocks" in facts:
        sizes["layers"] = facts.get("layers", 1)  # Repetitions of the blocks.
    if missing := [name for name, value in sizes.items() if value is None]:
        raise RefusedError(f"the source does not state {', '.join(missing)}")
    if measurement.expert_ffn and "experts" not in facts:
        raise RefusedError(f"how many experts {measurement.model} has is not known")
    seq, hidden, heads = sizes.pop("seq"), sizes["hidden"], sizes["heads"]
    gated = int(4 * hidden * 2 / 3) // _GATED_COLUMNS * _GATED_COLUMNS
    usual = {
        "query_groups": heads,
        "head_width": hidden // heads,
        "ffn_hidden": measurement.ffn or (gated if facts.get("gated") else 4 * hidden),
        "seq_length": seq,
        "positions": 0 if facts.get("rotary") else seq,
        "vocabulary": measurement.vocab or source.get("vocab") or GPT2_VOCABULARY,
        "expert_ffn_hidden": measurement.expert_ffn or 0,
    }
    return msgspec.convert(usual | facts_for_fields(ModelShape, facts, source) | sizes, ModelShape)


def _layout(measurement: PublishedMeasurement, source: dict[str, Any]) -> tuple[Parallelism, Batch]:
    gpus = measurement.gpus
    if gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    tensor: Any = measurement.tp
    pipeline: Any = measurement.pp
    context = measurement.cp or 1
    pipeline = source.get("misprinted_pipeline", {}).get(
        f"{measurement.where} {pipeline}", pipeline
    )
    sharding = Sharding(source["sharding"])
    if re.search(r"FSDP=[1-9]|FSDP on|MaxText FSDP", measurement.notes):
        sharding = Sharding.ZERO3
    if sharding.shards_weights:
        tensor, pipeline = tensor or 1, pipeline or 1
    missing = [name for name, value in (("TP", tensor), ("PP", pipeline)) if value is None]
    if missing:
        raise RefusedError(f"the source does not state {' and '.join(missing)}")
    ranks = tensor * pipeline * context
    if gpus % ranks:
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} does not divide {gpus} GPUs: wrong as published"
        )
    data, expert = gpus // ranks, measurement.ep or 1
    if (
        measurement.dp is not None
        and not {"tp", "pp"} & source.keys()
        and measurement.dp * ranks != gpus
        and measurement.dp * ranks * expert != gpus
    ):
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} x DP {measurement.dp} is not {gpus} GPUs: "
            "wrong as published"
        )
    micro = measurement.mbs or 1
    batch = measurement.gbs
    if batch is None:
        if pipeline > 1:
            raise RefusedError("the source does not state the global batch of a pipeline")
        if measurement.metric == "step_time_s":
            raise RefusedError(
                "the source does not state the global batch that a step's time is of"
            )
        batch = micro * data
    if batch % (micro * data):
        if measurement.mbs or batch % data:
            raise RefusedError(
                f"a global batch of {batch} is no multiple of micro batch {micro} x DP {data}"
            )
        micro = 1
    virtual = measurement.vpp or 1
    expert_tensor = source.get("expert_tensor", 1 if expert > 1 else tensor)
    parallelism = Parallelism(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        virtual_stages=virtual if pipeline > 1 else 1,
        sequence_parallel=bool(source["sequence_parallel"]) and tensor > 1,
        sharding=sharding if data * context > 1 else Sharding.NONE,
    )
    return parallelism.with_expert_tensor(expert_tensor), Batch(micro, batch)


def _recompute(stated: str, fused: bool) -> Recompute:
    """Lists of modules are Megatron's; operators that another trainer selects are not predicted."""
    words = stated.lower()
    modules = [_SHORT_MODULES.get(word, word) for word in words.replace(",", " ").split()]
    if modules and RECOMPUTED_MODULES.issuperset(modules):
        return Recompute(frozenset(modules))
    if words and not words.startswith(_RECOMPUTED):
        known = ", ".join((*_RECOMPUTED, *sorted(RECOMPUTED_MODULES)))
        raise RefusedError(f"its recompute '{stated}' is none of {known}")
    if words.startswith("full"):
        with suppress(ValueError):
            return Recompute.parse(words)
        raise RefusedError(
            f"its recompute '{stated}' is neither full nor full uniform 2 or full block 2"
        )
    return Recompute.SELECTIVE if words == "selective" and not fused else Recompute.NONE


def _fp8_recipe(dtype: str, source: dict[str, Any]) -> Fp8Recipe:
    words = (dtype or source["unstated_bits"]).lower()
    if "fp4" in words:
        return Fp8Recipe.NVFP4
    if "fp8" not in words:
        return Fp8Recipe.NONE
    if "mx" in words and "cs" not in words:
        return Fp8Recipe.MXFP8
    if "block" in words or "rowwise" in words:
        return Fp8Recipe.BLOCKWISE
    tensorwise = "cs" in words or "tensorwise" in words
    return Fp8Recipe.TENSORWISE if tensorwise else Fp8Recipe(source["fp8"])


def _stated_execution(measurement: PublishedMeasurement, source: dict[str, Any]) -> Execution:
    stated, eager, notes = (
        facts_for_fields(Execution, source),
        source["eager"],
        measurement.notes.lower(),
    )
    return Execution(
        **stated
        | {
            "overlap_gradients": source["overlap"],
            "overlap_parameters": source["overlap"],
            "overlap_tensor": stated["overlap_tensor"] or "async" in notes,
            "graphs": container_release(measurement, source) >= source["graphs_since"]
            and model_facts(measurement.model).get("whole_graph", True),
            "frozen": "lora" in notes or re.search(r"[/ ]peft", measurement.where) is not None,
            "portable_attention": eager,
            "unfused": eager and "compile" not in measurement.notes,
            "deduplicated": stated["deduplicated"] and not measurement.notes.startswith("A2A"),
        }
    )


def _spec_of_flags(measurement: PublishedMeasurement, words: list[str]) -> RunSpec:
    """The run that flags train, and nothing else says.

    Raises:
        RefusedError: The number of devices is not stated, or the flags give no run on them.
    """
    if measurement.gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    kind = DeviceKind.CPU if measurement.gpu == "cpu" else DeviceKind.GPU
    try:
        spec = spec_from_flags(words, measurement.gpus, kind, measurement.model)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    return replace(spec, fused=tuple(filter(None, measurement.fused.split(","))))


def _golden_spec(measurement: PublishedMeasurement, case: list[str]) -> RunSpec:
    flags = Flags(case)
    pattern = flags.text("--hybrid-layer-pattern")
    for flag, what in (
        *(() if pattern else (("--spec", "layers of its own"),)),
        ("--experimental-attention-variant", "an experimental attention"),
        ("--linear-attention-freq", "linear attention layers"),
        ("--encoder-num-layers", "an encoder"),
        ("--use-checkpoint-args", "a shape that only its checkpoint states"),
    ):
        if flags.has(flag):
            raise RefusedError(f"{measurement.model} has {what}")
    if measurement.model.startswith("bert"):
        raise RefusedError(f"{measurement.model} is BERT: two kinds of loss, no causal mask")
    spec = _spec_of_flags(measurement, case)
    if pattern and max(spec.parallelism.pipeline, spec.parallelism.context) > 1:
        raise RefusedError(_UNLAID.format(measurement.model))
    local = flags.text("--transformer-impl") == "local"
    unfused = local or flags.text("--attention-backend") == "unfused"
    batch = spec.batch
    if batch.global_batch_size % (batch.micro_batch_size * spec.parallelism.data):
        raise RefusedError(
            f"its global batch of {batch.global_batch_size} is no multiple of its steps"
        )
    return replace(spec, fused_attention=not unfused)


def parse_execution(flags: Flags) -> Execution:
    """How Megatron's flags let a run be executed."""
    switched = dict.fromkeys((each.field for each in flags_in_group("execution")), False)
    for each in flags_in_group("execution"):
        switched[each.field] |= flags.has(each.name) and flags.text(each.name) != "none"
    # Megatron's own layers take Apex's norms if they can, and PyTorch's only without persistent kernels.
    bare = flags.text("--transformer-impl") == "local" and flags.has("--no-persist-layer-norm")
    # Megatron-FSDP's own passes over gradients are counted with what it sends.
    if flags.has("--use-megatron-fsdp"):
        switched["unfused_gradients"] = False
    return Execution(**switched, torch_kernels=bare)

"""A reading as what the planner's formulas take: a run, its cluster and how it was executed."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from tools.plan.constraints import NEWEST, violations
from tools.plan.readings.facts import model_facts, release_of, source_facts
from tools.plan.readings.table import Reading
from tools.plan.time.cluster import Cluster
from tools.plan.time.execution import Execution
from tools.spec.experts import ExpertLoad
from tools.spec.flag_table import of_group
from tools.spec.flags import Flags
from tools.spec.hardware import Link, UnknownHardwareError, device_by_key, link_by_key
from tools.spec.model import (
    GPT2_VOCABULARY,
    MAMBA,
    LatentAttention,
    Mamba,
    ModelShape,
)
from tools.spec.offload import Offload
from tools.spec.recompute import RECOMPUTED_MODULES, Recompute
from tools.spec.run import (
    DeviceKind,
    Fp8Recipe,
    RunSpec,
    StateTypes,
    TokenDispatcher,
    spec_of_flags,
)
from tools.spec.stages import EVEN, StageSplit, filled, spread
from tools.spec.strategy import Batch, Parallelism, Sharding

_HERE = Path(__file__).parent
_CASE = re.compile(r"test_cases/(.+?)/golden_values")
_WORDS_IN_BRACKETS = re.compile(r"\s*\(.*\)")
_GATED_COLUMNS = 64
_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp4")
_RECOMPUTED = ("none", "full", "selective", "per-op")
"""What a recomputation begins with that is no list of modules."""
_SHORT_MODULES = {"norm": "layernorm", "act": "moe_act"}
"""As one source's tables call them; its launch scripts have Megatron's names."""
_UNLAID = "{} has layers of several kinds, and PP or CP"


class RefusedError(ValueError):
    """A reading that cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Expressed:
    """A reading in the planner's terms."""

    reading: Reading
    spec: RunSpec
    cluster: Cluster


def express(reading: Reading) -> Expressed:
    """The run that a reading measured.

    Raises:
        RefusedError: The source states too little, contradicts itself, or trains what no formula knows.
    """
    if reading.metric == "matmul_tflops":
        return _product_alone(reading)
    source = source_facts(reading)
    if refused := source.get("refused"):
        raise RefusedError(f"{reading.model}: {refused}")
    own = flags_said(reading)
    case = _case(reading)
    if own is not None:
        spec, execution = _spec_of_flags(reading, own), execution_of_flags(Flags(own))
    elif case:
        spec, execution = _golden_spec(reading, case), execution_of_flags(Flags(case.split()))
    else:
        spec, execution = _stated_spec(reading, source), _stated_execution(reading, source)
    # What a test of Megatron's ran is possible, by flags that its case does not list here.
    if (own is not None or not case) and (
        problems := violations(_without_expert_biases(spec), NEWEST)
    ):
        raise RefusedError(problems[0])
    return Expressed(reading, spec, _cluster(reading, source, execution))


def flags_said(reading: Reading) -> list[str] | None:
    """The flags that a reading's column holds; None where it holds none."""
    if reading.notes.startswith("flags: "):
        raise RefusedError(
            "its notes hold flags, which have a column of their own: remove the row, and 'make report' "
            "writes it anew"
        )
    try:
        return shlex.split(reading.flags) or None
    except ValueError as error:
        raise RefusedError(f"its flags cannot be read: {error}") from None


def _without_expert_biases(spec: RunSpec) -> RunSpec:
    """For the rules, which are those of every Megatron: today's gives experts biases."""
    bias = spec.shape.bias and not spec.shape.experts
    return replace(spec, shape=replace(spec.shape, bias=bias))


@cache
def _cases() -> dict[str, str]:
    """Megatron's functional tests by name, with the flags of each (core_v0.19 line, d98e8a64dd)."""
    packed = (_HERE / "megatron_cases.json.gz").read_bytes()
    return dict(json.loads(gzip.decompress(packed)))


def _case(reading: Reading) -> str | None:
    found = _CASE.search(reading.where)
    return _cases().get(found[1]) if found else None


def _cluster(reading: Reading, source: dict[str, Any], execution: Execution) -> Cluster:
    assert reading.gpus is not None
    return _same_cluster(
        reading.gpu,
        reading.gpus,
        source.get("network_gb_per_second"),
        source.get("per_node"),
        execution,
    )


@cache
def _same_cluster(
    gpu: str, gpus: int, network: float | None, per_node: int | None, execution: Execution
) -> Cluster:
    try:
        device = device_by_key(_WORDS_IN_BRACKETS.sub("", gpu).replace(" ", "-").replace("_", "-"))
    except UnknownHardwareError as error:
        raise RefusedError(str(error)) from None
    inter = link_by_key(device.network)
    if network is not None:
        inter = Link("network", "as its source states", network * 1e9, inter.latency_seconds, "")
    return Cluster(
        device,
        gpus,
        per_node or device.domain,
        link_by_key(device.link),
        inter,
        execution=execution,
    )


def _product_alone(reading: Reading) -> Expressed:
    """One large matrix product on one device."""
    shape = ModelShape(1, 16384, 128, 128, 128, 16384, 8192, 0)
    spec = RunSpec(shape, Parallelism(), Batch(1, 1), dtype=reading.dtype.lower() or "bf16")
    return Expressed(reading, spec, _same_cluster(reading.gpu, 1, None, None, Execution()))


def _stated_spec(reading: Reading, source: dict[str, Any]) -> RunSpec:
    shape = _shape(reading, source)
    parallelism, batch = _layout(reading, source)
    virtual = parallelism.virtual_stages
    fused, fp8_recipe = bool(source["fused_attention"]), _fp8_recipe(reading.dtype, source)
    if shape.blocks and (parallelism.pipeline > 1 or parallelism.context > 1):
        raise RefusedError(_UNLAID.format(reading.model))
    return RunSpec(
        shape=shape,
        parallelism=parallelism,
        batch=batch,
        dtype=_dtype(reading),
        fp8_recipe=fp8_recipe,
        half_blocks=model_facts(reading.model).get("half_blocks", {}).get(fp8_recipe.value, ""),
        dropout=source["dropout"],
        quantised_weights=bool(source["quantised_weights"]),
        offload=Offload(source["offload_layers"], tuple(source["offload_modules"].split())),
        fused_loss=bool(source["fused_loss"]),
        loss_impl="te" if source["fused_loss"] == "te" else "native",
        state_types=_state_types(source, parallelism.sharding),
        recompute=_recompute(reading.recompute or source["recompute"], fused),
        fused_attention=fused,
        stages=_stages_of_recipe(shape, parallelism.pipeline * virtual),
        expert_load=_expert_load(reading.model, source),
        token_dispatcher=TokenDispatcher(source["dispatcher"]),
        model=reading.model,
    )


def _state_types(source: dict[str, Any], sharding: Sharding) -> StateTypes:
    gradients = "bf16" if source["half_gradients"] else ""
    if not sharding:
        return StateTypes(gradients)
    moments = "bf16" if source["half_moments"] else ""
    return StateTypes(gradients, "", moments, moments, aware=bool(source["aware"]))


def _stages_of_recipe(shape: ModelShape, stages: int) -> StageSplit:
    """How layers are laid where a source does not say: with depths of multi-token prediction as in
    Megatron-Bridge's recipe of DeepSeek V3 (`recipes/deepseek/deepseek_v3.py: layout_map`)."""
    if shape.mtp_depth and stages > 1:
        return filled(shape.layers, stages, shape.mtp_depth)
    return spread(shape.layers, stages) if shape.layers % stages else EVEN


def _expert_load(model: str, source: dict[str, Any]) -> ExpertLoad:
    groups, taken = source.get("groups") or model_facts(model).get("groups", (1, 1))
    capacity = source["capacity"] or None
    return ExpertLoad(
        capacity=capacity, padded=capacity is not None, groups=groups, groups_taken=taken
    )


def _shape(reading: Reading, source: dict[str, Any]) -> ModelShape:
    facts = model_facts(reading.model)
    if refused := facts.get("refused"):
        raise RefusedError(f"{reading.model} {refused}")

    def known(name: str) -> Any:
        stated = getattr(reading, name)
        return facts.get(name) if stated is None else stated

    layers, hidden, heads, seq = (known(name) for name in ("layers", "hidden", "heads", "seq"))
    if blocks := facts.get("blocks", ""):
        layers = facts.get("layers", 1)  # Repetitions of the blocks.
    missing = [
        name
        for name, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("seq", seq))
        if value is None
    ]
    if missing:
        raise RefusedError(f"the source does not state {', '.join(missing)}")
    experts = facts.get("experts", 0)
    if reading.expert_ffn and not experts:
        raise RefusedError(f"how many experts {reading.model} has is not known")
    gated = facts.get("gated", False)
    usual = int(4 * hidden * 2 / 3) // _GATED_COLUMNS * _GATED_COLUMNS if gated else 4 * hidden
    latent = facts.get("latent")
    width = facts.get("head_width") or hidden // heads
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=facts.get("query_groups") or heads,
        head_width=width if not latent else latent[2],
        ffn_hidden=known("ffn") or usual,
        seq_length=seq,
        positions=0 if facts.get("rotary") else seq,
        vocabulary=reading.vocab or facts.get("vocab") or source.get("vocab") or GPT2_VOCABULARY,
        gated=gated,
        bias=facts.get("bias", True),
        rms_norm=facts.get("rms_norm", False),
        tied_embeddings=facts.get("tied", True),
        experts=experts,
        experts_per_token=facts.get("experts_per_token", 0),
        expert_ffn_hidden=reading.expert_ffn or facts.get("expert_ffn", 0),
        shared_expert_ffn=facts.get("shared_ffn", 0),
        dense_layers=tuple(range(facts.get("dense_first", 0))),
        latent=LatentAttention(*latent) if latent else None,
        qk_norm=bool(latent),  # As every published model with latent attention.
        blocks=blocks,
        mamba=Mamba(*facts["mamba"]) if MAMBA in blocks else None,
        latent_experts=facts.get("latent_experts", 0),
        mtp_depth=source["mtp_depth"],
    )


def _layout(reading: Reading, source: dict[str, Any]) -> tuple[Parallelism, Batch]:
    gpus = reading.gpus
    if gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    tensor, pipeline = source.get("tensor", reading.tp), source.get("pipeline", reading.pp)
    context = reading.cp or 1
    pipeline = source.get("misprinted_pipeline", {}).get(f"{reading.where} {pipeline}", pipeline)
    sharding = _sharding(reading, source)
    if sharding.shards_weights:
        tensor, pipeline = tensor or 1, pipeline or 1
    if tensor is None or pipeline is None:
        missing = [name for name, value in (("TP", tensor), ("PP", pipeline)) if value is None]
        raise RefusedError(f"the source does not state {' and '.join(missing)}")
    ranks = tensor * pipeline * context
    if gpus % ranks:
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} does not divide {gpus} GPUs: wrong as published"
        )
    data, expert = gpus // ranks, source.get("expert", reading.ep) or 1
    if (
        reading.dp is not None
        and not {"tensor", "pipeline"} & source.keys()
        and reading.dp * ranks != gpus
        and reading.dp * ranks * expert != gpus
    ):
        raise RefusedError(
            f"TP {tensor} x PP {pipeline} x CP {context} x DP {reading.dp} is not {gpus} GPUs: "
            "wrong as published"
        )
    micro = source.get("micro", reading.mbs) or 1
    batch = reading.gbs
    if batch is None:
        if pipeline > 1:
            raise RefusedError("the source does not state the global batch of a pipeline")
        if reading.metric == "step_time_s":
            raise RefusedError(
                "the source does not state the global batch that a step's time is of"
            )
        batch = micro * data
    if batch % (micro * data):
        if reading.mbs or batch % data:
            raise RefusedError(
                f"a global batch of {batch} is no multiple of micro batch {micro} x DP {data}"
            )
        micro = 1
    virtual = source.get("virtual", reading.vpp) or 1
    sequence = bool(source["sequence_parallel"]) and tensor > 1
    expert_tensor = source.get("expert_tensor", 1 if expert > 1 else tensor)
    return (
        Parallelism(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=0 if expert_tensor == tensor else expert_tensor,
            virtual_stages=virtual if pipeline > 1 else 1,
            sequence_parallel=sequence,
            sharding=sharding if data * context > 1 else Sharding.NONE,
        ),
        Batch(micro, batch),
    )


def _sharding(reading: Reading, source: dict[str, Any]) -> Sharding:
    if re.search(r"FSDP=[1-9]|FSDP on|MaxText FSDP", reading.notes):
        return Sharding.ZERO3
    return Sharding(source["sharding"])


def _dtype(reading: Reading) -> str:
    words = reading.dtype.lower()
    if words and not any(known in words for known in _DTYPES):
        raise RefusedError(f"its dtype '{reading.dtype}' is none of {', '.join(_DTYPES)}")
    return "fp16" if words.startswith("fp16") else "fp32" if words == "fp32" else "bf16"


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
        try:
            return Recompute.parse(words)
        except ValueError:
            raise RefusedError(
                f"its recompute '{stated}' is neither full nor full uniform 2 or full block 2"
            ) from None
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
    return (
        Fp8Recipe.TENSORWISE if "cs" in words or "tensorwise" in words else Fp8Recipe(source["fp8"])
    )


def _stated_execution(reading: Reading, source: dict[str, Any]) -> Execution:
    stated = {
        each.name: bool(source[each.name]) for each in fields(Execution) if each.name in source
    }
    eager, notes = bool(source["eager"]), reading.notes.lower()
    return Execution(
        **stated
        | {
            "overlap_gradients": bool(source["overlap"]),
            "overlap_parameters": bool(source["overlap"]),
            "overlap_tensor": stated["overlap_tensor"] or "async" in notes,
            "graphs": release_of(reading, source) >= source["graphs_since"]
            and model_facts(reading.model).get("whole_graph", True),
            "frozen": "lora" in notes or re.search(r"[/ ]peft", reading.where) is not None,
            "portable_attention": eager,
            "unfused": eager and "compile" not in reading.notes,
            "deduplicated": stated["deduplicated"] and not reading.notes.startswith("A2A"),
        }
    )


def _spec_of_flags(reading: Reading, words: list[str]) -> RunSpec:
    """The run that flags train, and nothing else says.

    Raises:
        RefusedError: The number of devices is not stated, or the flags give no run on them.
    """
    if reading.gpus is None:
        raise RefusedError("the source does not state the number of GPUs")
    kind = DeviceKind.CPU if reading.gpu == "cpu" else DeviceKind.GPU
    try:
        spec = spec_of_flags(words, reading.gpus, kind, reading.model)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    return replace(spec, fused=tuple(filter(None, reading.fused.split(","))))


def _golden_spec(reading: Reading, case: str) -> RunSpec:
    flags = Flags(case.split())
    pattern = flags.text("--hybrid-layer-pattern")
    for flag, what in (
        *(() if pattern else (("--spec", "layers of its own"),)),
        ("--experimental-attention-variant", "an experimental attention"),
        ("--linear-attention-freq", "linear attention layers"),
        ("--encoder-num-layers", "an encoder"),
        ("--use-checkpoint-args", "a shape that only its checkpoint states"),
    ):
        if flags.has(flag):
            raise RefusedError(f"{reading.model} has {what}")
    if reading.model.startswith("bert"):
        raise RefusedError(f"{reading.model} is BERT: two kinds of loss, no causal mask")
    spec = _spec_of_flags(reading, case.split())
    if pattern and max(spec.parallelism.pipeline, spec.parallelism.context) > 1:
        raise RefusedError(_UNLAID.format(reading.model))
    pipeline, virtual = spec.parallelism.pipeline, spec.parallelism.virtual_stages
    unfused = flags.text("--attention-backend") == "unfused"
    unfused |= flags.text("--transformer-impl") == "local"
    batch = spec.batch
    if batch.global_batch_size % (batch.micro_batch_size * spec.parallelism.data):
        raise RefusedError(
            f"its global batch of {batch.global_batch_size} is no multiple of its steps"
        )
    stages = spec.stages
    if stages.problem(spec.shape.layers, pipeline, virtual):
        stages = _stages_of_recipe(spec.shape, pipeline * virtual)
    return replace(spec, fused_attention=not unfused, stages=stages)


def execution_of_flags(flags: Flags) -> Execution:
    """How Megatron's flags let a run be executed."""
    switches = of_group("execution")
    given = {
        each.field for each in switches if flags.has(each.name) and flags.text(each.name) != "none"
    }
    # Megatron's own layers take Apex's norms if they can, and PyTorch's only without persistent kernels.
    bare = flags.text("--transformer-impl") == "local" and flags.has("--no-persist-layer-norm")
    # Megatron-FSDP's own passes over gradients are counted with what it sends.
    if flags.has("--use-megatron-fsdp"):
        given.discard("unfused_gradients")
    switched = {each.field: each.field in given for each in switches}
    return Execution(**switched, torch_kernels=bare)

"""Combinations that Megatron refuses; each gives one sentence that names a fix.

The rules are those of `megatron/training/arguments.py: validate_args`, `TransformerConfig`, the
pipeline schedules and the FSDP adapters, at f4fa7d6b and core_v0.19.0. If the two differ, the
stricter rule counts and its sentence names the version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from parakit.config.model import BLOCKS, round_up
from parakit.config.recompute import Recompute
from parakit.config.run import Backend, DeviceKind, RunSpec
from parakit.config.stages import EVEN_SPLIT, find_uneven_split
from parakit.config.strategy import PipelineSchedule, strategy_name
from parakit.formatting.units import plural

CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
"""Context-parallel algorithms that the planner knows (`--cp-comm-type`)."""

_EXPERTS_IN_FP16 = (0, 16)
"""First release without `Expert parallelism is not supported with fp16 training`."""

_SHARED_GROUPS = (0, 16)
"""First release whose `num_query_groups` may divide TP instead of being divided by it."""

NEWEST = (0, 16)
"""The release from which on the fewest rules apply."""

_LARGEST_NAMED = 64


def find_violations(
    spec: RunSpec, release: tuple[int, int] | None = None, patched: bool = False
) -> tuple[str, ...]:
    """Return every reason why Megatron refuses a run, one sentence each; empty if it would train.

    Args:
        spec: The run.
        release: Megatron's major and minor version, so that only its rules apply; None applies the rules of all.
        patched: True if a patch file changes Megatron; errors that Megatron makes silently are then left out.
    """
    parallelism, batch, shape = spec.parallelism, spec.batch, spec.shape
    sizes = {
        "the number of layers": shape.layers,
        "hidden": shape.hidden,
        "the number of attention heads": shape.heads,
        "the number of query groups": shape.query_groups,
        "the width of an attention head": shape.head_width,
        "the sequence length": shape.seq_length,
        "DP": parallelism.data,
        "TP": parallelism.tensor,
        "PP": parallelism.pipeline,
        "CP": parallelism.context,
        "EP": parallelism.expert,
        "ETP": parallelism.effective_expert_tensor,
        "virtual stages": parallelism.virtual_stages,
        "micro batch": batch.micro_batch_size,
        "global batch": batch.global_batch_size,
    }
    if wrong := next((f"{name} is {size}" for name, size in sizes.items() if size < 1), None):
        return (f"{wrong}; use 1 or more.",)
    return (
        *_tensor_rules(spec, release),
        *_pipeline_rules(spec),
        *_context_rules(spec),
        *_batch_rules(spec),
        *_expert_rules(spec, release),
        *_sharding_rules(spec),
        *_recompute_rules(spec, patched),
        *(_offload_rules(spec) if spec.offload else ()),
    )


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Divisors of `number` up to `limit`, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = small + [number // d for d in reversed(small) if d * d != number]
    return [d for d in found if limit is None or d <= limit]


def _tensor_rules(spec: RunSpec, release: tuple[int, int] | None) -> Iterator[str]:
    """Yield why TP does not divide heads, columns or positions, one sentence per reason."""
    shape, parallelism, model = spec.shape, spec.parallelism, _model_name(spec)
    tensor = parallelism.tensor
    splits = {"attention heads": shape.heads, "MLP columns": shape.ffn_hidden}
    # From 0.16 on ranks may share a group, such as the one of multi-query attention.
    shared = release is not None and release >= _SHARED_GROUPS and tensor % shape.query_groups == 0
    if shape.query_groups != shape.heads and not shared:
        splits["query groups"] = shape.query_groups
    for dimension, value in splits.items():
        if value % tensor:
            degrees = _choices(_degrees(gcd(*splits.values())))
            yield (
                f"{model} has {value} {dimension}, which TP {tensor} does not divide; "
                f"use a TP of {degrees}."
            )
    part = shape.seq_length // parallelism.context
    if parallelism.sequence_parallel and part % tensor:
        yield (
            f"Sequence parallelism splits {part} positions a rank over TP {tensor} and leaves a "
            f"remainder; use a sequence length that is a multiple of {tensor * parallelism.context}."
        )


def _pipeline_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the model's layers do not fit the pipeline stages, one sentence per reason."""
    shape, parallelism, model = spec.shape, spec.parallelism, _model_name(spec)
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    if parallelism.schedule and spec.backend == Backend.MEGATRON:
        yield (
            f"{strategy_name(parallelism)} is trained by plain PyTorch, not by Megatron-LM; use "
            f"BACKEND=native, or pp{pipeline}."
        )
    if unknown := sorted(set(shape.blocks) - set(BLOCKS)):
        yield (
            f"{model} has the blocks {shape.blocks}, of which {', '.join(unknown)} is not planned; use "
            f"{_choices(BLOCKS)}."
        )
    if shape.blocks and pipeline > 1:
        yield (f"{model} has the blocks {shape.blocks}, whose stages are not planned; use PP 1.")
    elif virtual > 1 and pipeline == 1:
        yield (
            f"{virtual} virtual stages need more than one pipeline stage; use PP 2 or more, or one "
            "virtual stage."
        )
    elif problem := spec.stages.find_problem(shape.layers, pipeline, virtual):
        stages = f"PP {pipeline}" + (f" x {virtual} virtual stages" if virtual > 1 else "")
        ways = _choices([d for d in _degrees(shape.layers) if shape.layers % (d * virtual) == 0])
        # The pipelines of plain PyTorch lay layers evenly alone.
        uneven = (
            None if parallelism.schedule else find_uneven_split(shape.layers, pipeline, virtual)
        )
        flags = f", or {' '.join(uneven.flags)}" if uneven else ""
        if spec.stages == EVEN_SPLIT:
            problem = f"which {stages} does not divide"
        else:
            split = " ".join(spec.stages.flags) or "the most even split"
            problem = f"which {split} does not lay on {stages}: {problem}"
        yield f"{model} has {shape.layers} layers, {problem}; use a PP of {ways}{flags}."
    elif spec.stages.layout and spec.stages.mtp_layers_in_layout != shape.mtp_layers:
        yield (
            f"{' '.join(spec.stages.flags)} has {spec.stages.mtp_layers_in_layout} depths (m) of multi-token "
            f"prediction and {model} {shape.mtp_layers}; write as many as --mtp-num-layers says."
        )


def _context_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the sequence does not fit CP or the position table, one sentence per reason."""
    shape, model = spec.shape, _model_name(spec)
    context, cp_comm_type = spec.parallelism.context, spec.cp_comm_type
    if shape.blocks and context > 1:
        yield (
            f"{model} has the blocks {shape.blocks}, whose context parallelism is not planned; use CP 1."
        )
    if shape.positions and shape.seq_length > shape.positions:
        yield (
            f"The sequence length {shape.seq_length} exceeds {model}'s {shape.positions} learned "
            f"positions; use at most {shape.positions}, or raise --max-position-embeddings."
        )
    if shape.positions and shape.mtp_layers:
        yield "Multi-token prediction refuses learned positions; add --position-embedding-type rope."
    if context == 1:
        return
    if shape.seq_length % (2 * context):
        yield (
            f"The sequence length {shape.seq_length} is no multiple of {2 * context} (2 x CP "
            f"{context}); use {round_up(shape.seq_length, 2 * context)} or another CP."
        )
    if cp_comm_type not in CP_COMM_TYPES:
        yield (
            f"'{cp_comm_type}' is no context-parallel communication the kit knows; use "
            f"{_choices(CP_COMM_TYPES)}."
        )
    groups = shape.query_groups // spec.parallelism.tensor
    if cp_comm_type == "a2a" and groups % context:
        yield (
            f"{model} keeps {groups} key/value heads a TP rank, which all-to-all CP {context} does "
            f"not divide; use a CP of {_choices(_degrees(groups))}, or --cp-comm-type p2p."
        )


def _batch_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the global batch does not fit micro batch, DP and schedule, one sentence per
    reason.
    """
    parallelism, batch = spec.parallelism, spec.batch
    step = batch.micro_batch_size * parallelism.data
    if batch.global_batch_size % step:
        yield (
            f"The global batch of {batch.global_batch_size} is no multiple of {step} (micro batch "
            f"{batch.micro_batch_size} x DP {parallelism.data}); use "
            f"{round_up(batch.global_batch_size, step)} or a smaller micro batch."
        )
        return
    count = batch.global_batch_size // step
    if parallelism.virtual_stages > 1 and count % parallelism.pipeline:
        wanted = round_up(count, parallelism.pipeline) * step
        yield (
            f"The interleaved schedule runs {plural(count, 'micro batch')} a rank, which is no multiple "
            f"of PP {parallelism.pipeline}; use a global batch of {wanted} or a smaller micro batch."
        )
    if parallelism.schedule is PipelineSchedule.PIPEDREAM and count > 1:
        yield (
            f"PipeDream makes an update after each micro batch, and the global batch of "
            f"{batch.global_batch_size} is {count} of them; use a micro batch of "
            f"{batch.global_batch_size}, or pipedream{parallelism.pipeline}bw."
        )
    if parallelism.schedule is PipelineSchedule.PIPEDREAM_2BW and count < parallelism.pipeline:
        yield (
            f"PipeDream-2BW runs at least as many micro batches as its {parallelism.pipeline} stages "
            f"(arXiv:2006.09503 section 3.1), not {count}; use a global batch of "
            f"{parallelism.pipeline * step} or a smaller micro batch."
        )


def _expert_rules(spec: RunSpec, release: tuple[int, int] | None) -> Iterator[str]:
    """Yield why the experts do not fit EP, ETP and TP, one sentence per reason."""
    shape, expert, model = spec.shape, spec.parallelism.expert, _model_name(spec)
    yield from _expert_tensor_rules(spec)
    if not shape.experts:
        if expert > 1:
            yield f"EP {expert} needs experts and {model} is dense; use EP 1 or a model of examples/moe."
        return
    if shape.experts % expert:
        yield (
            f"{model} has {shape.experts} experts, which EP {expert} does not divide; use an EP of "
            f"{_choices(_degrees(shape.experts))}."
        )
    if not 1 <= shape.experts_per_token <= shape.experts:
        yield (
            f"{model} routes each token to {shape.experts_per_token} of {shape.experts} experts; use a "
            f"--moe-router-topk of 1 to {shape.experts}."
        )
    if shape.bias:
        yield "Experts have no biases (f4fa7d6b refuses them); add --disable-bias-linear."
    yield from _expert_layout_rules(spec)
    newer = release is not None and release >= _EXPERTS_IN_FP16
    if expert > 1 and spec.dtype == "fp16" and not newer:
        yield "EP refuses fp16 (up to 0.15, f4fa7d6b included); use --bf16, or Megatron 0.16."


def _expert_tensor_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why ETP does not divide a stage's ranks. Megatron makes expert groups for a dense model
    too.
    """
    parallelism, split = spec.parallelism, spec.parallelism.effective_expert_tensor
    ranks = parallelism.world_size // parallelism.pipeline
    if ranks % split:
        yield (
            f"ETP {split} lies inside DP x CP x TP = {ranks} and does not divide it; use an ETP of "
            f"{_choices(_degrees(ranks))}, or leave it out: it is then TP's {parallelism.tensor}."
        )


def _expert_layout_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why EP and ETP do not fit the experts or the ranks, one sentence per reason."""
    shape, parallelism, model = spec.shape, spec.parallelism, _model_name(spec)
    tensor, split = parallelism.tensor, parallelism.effective_expert_tensor
    if parallelism.tensor > 1 and not parallelism.sequence_parallel:
        yield f"Experts under TP {tensor} need --sequence-parallel; use sp{tensor}."
    if shape.expert_ffn_hidden % split:
        yield (
            f"{model}'s experts have {shape.expert_ffn_hidden} columns, which ETP {split} does not "
            f"divide; use an ETP of {_choices(_degrees(shape.expert_ffn_hidden))}."
        )
    ranks = parallelism.data * parallelism.context
    if ranks * tensor % split:
        return  # Which `_expert_tensor_rules` has a sentence for.
    ranks = ranks * tensor // split
    if ranks % parallelism.expert:
        inside = "DP x CP" if split == tensor else f"what ETP {split} leaves of DP x CP x TP"
        yield (
            f"EP {parallelism.expert} lies inside {inside} = {ranks} and does not divide it; use an EP "
            f"of {_choices([d for d in _degrees(ranks) if shape.experts % d == 0])}."
        )


def _sharding_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the sharding is impossible with the other choices, one sentence per reason."""
    parallelism = spec.parallelism
    sharding, pipeline = parallelism.sharding, parallelism.pipeline
    if spec.state_types.precision_aware and not sharding:
        yield "--use-precision-aware-optimizer needs the distributed optimizer; use zero1."
    if spec.state_types.offloaded_fraction and (not sharding or sharding.wraps_modules):
        yield "--optimizer-cpu-offload is planned for the distributed optimizer alone; use zero1."
    ranks, instances = parallelism.data * parallelism.context, spec.optimizer_instances
    if instances < 1 or ranks % instances:
        yield (
            f"{instances} instances of the distributed optimizer do not divide DP x CP {ranks}; use a "
            f"--num-distributed-optimizer-instances of {_choices(_degrees(ranks))}."
        )
    if sharding.is_megatron_fsdp and pipeline > 1:
        yield (
            f"Megatron-FSDP ({sharding}) builds its mesh from DP, CP and TP alone, so PP "
            f"{pipeline} breaks it; use zero1, or PP 1."
        )
    if not sharding.is_torch_fsdp:
        return
    if pipeline > 1:
        yield f"torch FSDP2 refuses PP {pipeline}; use zero1 with pipeline stages, or PP 1."
    if parallelism.expert > 1:
        yield f"torch FSDP2 refuses EP {parallelism.expert}; use zero1 with experts, or EP 1."
    if spec.dtype == "fp16":
        yield "torch FSDP2 refuses fp16; use --bf16."


def _recompute_rules(spec: RunSpec, patched: bool) -> Iterator[str]:
    # The checkpoint of an MLP returns its bias as well, so autograd makes the parameter a result of that
    # checkpoint, whose backward pass then asks for its own (`transformer_layer.py: recompute_mlp`).
    """Yield why the recomputation is impossible or not planned; `patched` allows Megatron's endless
    backward.
    """
    again = not spec.recompute.is_full and spec.recompute.recomputes("mlp")
    if again and spec.shape.bias and not spec.shape.experts and not patched:
        yield (
            "--recompute-modules mlp on layers with biases never ends in Megatron's backward pass; add "
            "--disable-bias-linear, or leave mlp out."
        )

    partly = spec.recompute.is_full and spec.recompute != Recompute.FULL
    if spec.shape.blocks and partly:
        yield (
            f"{_model_name(spec)} has the blocks {spec.shape.blocks}, some of which recomputed or several "
            "together are not planned; use --recompute-method uniform --recompute-num-layers 1."
        )
    if spec.shape.mtp_layers and partly:
        yield (
            f"{_model_name(spec)} predicts tokens ahead, whose layers Megatron recomputes one by one or not "
            "at all; use --recompute-method uniform --recompute-num-layers 1."
        )


def _offload_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the offload is impossible or not planned, one sentence per reason."""
    offload, recompute = spec.offload, spec.recompute
    whole, fine = "--cpu-offloading-num-layers", "--fine-grained-activation-offloading"
    flag = whole if offload.layers else fine
    if offload.layers and offload.modules:
        yield f"{fine} excludes {whole}; use one of them."
    if spec.device is DeviceKind.CPU or not spec.fused_norms:
        yield f"{flag} needs a GPU and Transformer Engine; leave it out here."
    if spec.shape.blocks:
        yield (
            f"{_model_name(spec)} has the blocks {spec.shape.blocks}, whose activations' offload is not "
            f"planned; leave {flag} out."
        )
    if offload.layers:
        if offload.layers >= spec.shape.layers:
            yield (
                f"{whole} {offload.layers} leaves none of {_model_name(spec)}'s {spec.shape.layers} layers; "
                f"use at most {spec.shape.layers - 1}."
            )
        if spec.parallelism.pipeline > 1:
            yield f"{whole} refuses PP {spec.parallelism.pipeline}; use {fine}, or PP 1."
        if recompute != Recompute.NONE:
            yield f"{whole} refuses recomputation; use {fine}, or no recomputation."
        return
    modules = set(offload.modules)
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "--offload-modules attn_proj needs core_attn, which keeps the same tensor; add it."
    experts = modules & {"expert_fc1", "moe_act"}
    if "fused_group_mlp" in modules and experts:
        yield (
            f"--offload-modules fused_group_mlp includes {_choices(sorted(experts))}; leave out either."
        )
    if recompute.is_full:
        # Its first pass saves nothing, and the second gives to the host what backward reads at once.
        yield f"{fine} with whole layers recomputed is not planned; recompute modules."
        return
    if recompute.recomputes("moe") and (inside := modules & {"fused_group_mlp"} | experts):
        yield (
            f"--recompute-modules moe makes {_choices(sorted(inside))} again, which --offload-modules "
            "then refuses; leave out either."
        )
    if recompute.recomputes("core_attn") and "core_attn" in modules:
        # Its checkpoint does not enter the group that the commit behind it looks for (`attention.py`).
        yield "core_attn is recomputed or offloaded, not both; leave out either."


def _degrees(number: int) -> list[int]:
    """Return the divisors of `number` that an error sentence may suggest as degrees."""
    return divisors(number, _LARGEST_NAMED)


def _model_name(spec: RunSpec) -> str:
    """Return the model's name, or 'the model' without one."""
    return spec.model or "the model"


def _choices(values: Sequence[object]) -> str:
    """Return the values as text: `1`, `1 or 5`, `1, 5 or 25`."""
    texts = [str(value) for value in values] or ["1"]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"

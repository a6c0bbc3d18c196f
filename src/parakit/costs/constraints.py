"""Combinations that Megatron refuses; each gives one sentence that names a fix.

The rules are those of `megatron/training/arguments.py: validate_args`, `TransformerConfig`, the
pipeline schedules and the FSDP adapters, at f4fa7d6b and core_v0.19.0. If the two differ, the
stricter rule counts and its sentence names the version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from parakit.config.model import BLOCKS, round_up
from parakit.config.peft import Lora
from parakit.config.recompute import Recompute
from parakit.config.run import Backend, DeviceKind, RunSpec
from parakit.config.stages import EVEN_SPLIT, find_uneven_split
from parakit.config.strategy import Batch, Parallelism, PipelineSchedule, strategy_name
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
    """Return every reason why a run cannot be trained or planned, one sentence per reason.

    The result is empty if the run would train. If a size is below 1, the result is only the sentence for that
    size.

    Args:
        spec: The run.
        release: Megatron's major and minor version, whose rules then apply. None means the strictest rules of
            all versions.
        patched: True if a patch file changes Megatron. A bug by which backward never ends is then no reason.
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
    for name, size in sizes.items():
        if size < 1:
            return (f"{name} is {size}; use 1 or more.",)
    return (
        *_tensor_rules(spec, release),
        *_pipeline_rules(spec),
        *_context_rules(spec),
        *_batch_rules(spec),
        *_expert_rules(spec, release),
        *_sharding_rules(spec),
        *_recompute_rules(spec, patched),
        *adapter_rules(spec.lora, parallelism),
        *(_offload_rules(spec) if spec.offload else ()),
    )


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of `number` up to `limit`, in order; None means no limit."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return [divisor for divisor in small + large if limit is None or divisor <= limit]


def _tensor_rules(spec: RunSpec, release: tuple[int, int] | None) -> Iterator[str]:
    """Yield why TP does not divide heads, columns or positions, one sentence per reason."""
    shape, parallelism, model = spec.shape, spec.parallelism, _model_name(spec)
    tensor = parallelism.tensor
    splits = {"attention heads": shape.heads, "MLP columns": shape.ffn_hidden}
    # From Megatron 0.16 on, several TP ranks may share one query group, as in multi-query attention.
    allows_sharing = release is not None and release >= _SHARED_GROUPS
    is_shared = allows_sharing and tensor % shape.query_groups == 0
    if shape.query_groups != shape.heads and not is_shared:
        splits["query groups"] = shape.query_groups
    for dimension, value in splits.items():
        if value % tensor:
            degrees = _choices(_degrees(gcd(*splits.values())))
            yield (
                f"{model} has {value} {dimension}, which TP {tensor} does not divide; "
                f"use a TP of {degrees}."
            )
    positions = shape.seq_length // parallelism.context
    if parallelism.sequence_parallel and positions % tensor:
        yield (
            f"Sequence parallelism splits {positions} positions per rank over TP {tensor}, which does not "
            f"divide them; use a sequence length that is a multiple of {tensor * parallelism.context}."
        )


def adapter_rules(lora: Lora | None, parallelism: Parallelism) -> Iterator[str]:
    """Yield why a run with LoRA cannot be split in this way, one sentence per reason.

    The layer A of an adapter is column-parallel for most layers, so TP splits its rank
    (`megatron/bridge/peft/utils.py: ParallelLinearAdapter`).
    """
    if lora is None:
        return
    tensor = parallelism.tensor
    if lora.rank % tensor:
        yield f"TP {tensor} does not divide LoRA's rank {lora.rank}; use a rank that is a multiple of {tensor}."
    expert_tensor = parallelism.effective_expert_tensor
    if lora.rank % expert_tensor and expert_tensor != tensor:
        yield (
            f"ETP {expert_tensor} does not divide LoRA's rank {lora.rank}; use a rank that is a multiple of "
            f"{expert_tensor}."
        )
    is_split = parallelism.world_size > parallelism.data or parallelism.expert > 1
    if lora.has_nf4_weights and (is_split or parallelism.sharding.wraps_modules):
        yield (
            "Weights in NF4 are planned with data parallelism alone, because bitsandbytes splits no 4-bit weight "
            "over TP, PP, CP, EP or ZeRO-3; use weights=bf16."
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
    unknown_blocks = sorted(set(shape.blocks) - set(BLOCKS))
    if unknown_blocks:
        yield (
            f"{model} has the blocks {shape.blocks}; the planner does not know "
            f"{', '.join(unknown_blocks)}; use {_choices(BLOCKS)}."
        )
    problem = spec.stages.find_problem(shape.layers, pipeline, virtual)
    if shape.blocks and pipeline > 1:
        yield (
            f"{model} has the blocks {shape.blocks}, which are not planned over pipeline stages; use "
            "PP 1."
        )
    elif virtual > 1 and pipeline == 1:
        yield (
            f"{virtual} virtual stages need more than one pipeline stage; use PP 2 or more, or one "
            "virtual stage."
        )
    elif problem:
        yield _explain_stage_problem(spec, problem)
    elif spec.stages.layout and spec.stages.mtp_layers_in_layout != shape.mtp_layers:
        yield (
            f"{' '.join(spec.stages.flags)} has {spec.stages.mtp_layers_in_layout} MTP layers (m) and "
            f"{model} has {shape.mtp_layers}; write as many as --mtp-num-layers states."
        )


def _explain_stage_problem(spec: RunSpec, problem: str) -> str:
    """Return the sentence for layers that cannot be placed on the stages because of `problem`.

    The sentence suggests PP degrees, and flags for unequal stages if these are possible.
    """
    parallelism, layers = spec.parallelism, spec.shape.layers
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    stages = f"PP {pipeline}"
    if virtual > 1:
        stages += f" x {virtual} virtual stages"
    possible = [degree for degree in _degrees(layers) if layers % (degree * virtual) == 0]
    remedy = f"use a PP of {_choices(possible)}"
    if not parallelism.schedule:
        # Pipelines of plain PyTorch place layers evenly only, so unequal stages are no way out there.
        uneven = find_uneven_split(layers, pipeline, virtual)
        if uneven:
            remedy += f", or {' '.join(uneven.flags)}"
    if spec.stages == EVEN_SPLIT:
        reason = f"which {stages} does not divide"
    else:
        split = " ".join(spec.stages.flags) or "the most even split"
        reason = f"which {split} cannot place on {stages}: {problem}"
    return f"{_model_name(spec)} has {layers} layers, {reason}; {remedy}."


def _context_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the sequence does not fit CP or the position table, one sentence per reason."""
    shape, model = spec.shape, _model_name(spec)
    context, cp_comm_type = spec.parallelism.context, spec.cp_comm_type
    if shape.blocks and context > 1:
        yield (
            f"{model} has the blocks {shape.blocks}, which are not planned under context parallelism; "
            "use CP 1."
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
            f"The kit does not know the context-parallel algorithm --cp-comm-type {cp_comm_type}; use "
            f"{_choices(CP_COMM_TYPES)}."
        )
    groups_per_rank = shape.query_groups // spec.parallelism.tensor
    if cp_comm_type == "a2a" and groups_per_rank % context:
        yield (
            f"{model} has {groups_per_rank} key/value heads per TP rank, which all-to-all CP {context} "
            f"does not divide; use a CP of {_choices(_degrees(groups_per_rank))}, or "
            "--cp-comm-type p2p."
        )


def _or_smaller(batch: Batch) -> str:
    """Return the second remedy of a batch that does not fit; empty if no micro batch is smaller."""
    return " or a smaller micro batch" if batch.micro_batch_size > 1 else ""


def _batch_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the global batch does not fit micro batch, DP and schedule, one sentence per
    reason.

    Nothing is said about the schedule if micro batch times DP does not divide the global batch.
    """
    parallelism, batch = spec.parallelism, spec.batch
    step = batch.micro_batch_size * parallelism.data
    if batch.global_batch_size % step:
        yield (
            f"The global batch of {batch.global_batch_size} is no multiple of {step} (micro batch "
            f"{batch.micro_batch_size} x DP {parallelism.data}); use "
            f"{round_up(batch.global_batch_size, step)}{_or_smaller(batch)}."
        )
        return
    count = batch.global_batch_size // step
    if parallelism.virtual_stages > 1 and count % parallelism.pipeline:
        divisible_batch = round_up(count, parallelism.pipeline) * step
        yield (
            f"The interleaved schedule runs {plural(count, 'micro batch')} per rank, which is no multiple "
            f"of PP {parallelism.pipeline}; use a global batch of {divisible_batch} or a smaller micro "
            "batch."
        )
    if parallelism.schedule is PipelineSchedule.PIPEDREAM and count > 1:
        yield (
            f"PipeDream updates the weights after each micro batch, and the global batch of "
            f"{batch.global_batch_size} has {count} micro batches; use a micro batch of "
            f"{batch.global_batch_size}, or pipedream{parallelism.pipeline}bw."
        )
    if parallelism.schedule is PipelineSchedule.PIPEDREAM_2BW and count < parallelism.pipeline:
        yield (
            f"PipeDream-2BW runs at least as many micro batches as its {parallelism.pipeline} stages "
            f"(arXiv:2006.09503 section 3.1), not {count}; use a global batch of "
            f"{parallelism.pipeline * step}{_or_smaller(batch)}."
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
    allows_fp16 = release is not None and release >= _EXPERTS_IN_FP16
    if expert > 1 and spec.dtype == "fp16" and not allows_fp16:
        yield "EP refuses fp16 (up to 0.15, f4fa7d6b included); use --bf16, or Megatron 0.16."


def _expert_tensor_rules(spec: RunSpec) -> Iterator[str]:
    """Yield a sentence if ETP does not divide the ranks of a pipeline stage.

    This rule holds for dense models too, because Megatron makes expert groups for every model.
    """
    parallelism, split = spec.parallelism, spec.parallelism.effective_expert_tensor
    ranks = parallelism.world_size // parallelism.pipeline
    if ranks % split:
        yield (
            f"ETP {split} lies inside DP x CP x TP = {ranks} and does not divide it; use an ETP of "
            f"{_choices(_degrees(ranks))}, or leave it out: it is then TP's {parallelism.tensor}."
        )


def _expert_layout_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why EP and ETP do not fit the experts or the ranks, one sentence per reason.

    One more reason is tensor parallelism without sequence parallelism.
    """
    shape, parallelism, model = spec.shape, spec.parallelism, _model_name(spec)
    tensor, split = parallelism.tensor, parallelism.effective_expert_tensor
    if parallelism.tensor > 1 and not parallelism.sequence_parallel:
        yield f"Experts under TP {tensor} need --sequence-parallel; use sp{tensor}."
    if shape.expert_ffn_hidden % split:
        yield (
            f"{model}'s experts have {shape.expert_ffn_hidden} columns, which ETP {split} does not "
            f"divide; use an ETP of {_choices(_degrees(shape.expert_ffn_hidden))}."
        )
    ranks_per_stage = parallelism.data * parallelism.context * tensor
    if ranks_per_stage % split:
        # `_expert_tensor_rules` has the sentence for this case.
        return
    ranks = ranks_per_stage // split
    if ranks % parallelism.expert:
        product = "DP x CP" if split == tensor else f"DP x CP x TP / ETP {split}"
        degrees = _choices([degree for degree in _degrees(ranks) if shape.experts % degree == 0])
        yield (
            f"EP {parallelism.expert} lies inside {product} = {ranks} and does not divide it; use an EP "
            f"of {degrees}."
        )


def _sharding_rules(spec: RunSpec) -> Iterator[str]:
    """Yield one sentence per reason why Megatron refuses the sharding (ZeRO or FSDP) together with the run's
    other options.
    """
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
    """Yield why the recomputation is impossible or not planned, one sentence per reason.

    With `patched`, recomputing an MLP with biases is no reason. Without a patch, Megatron's backward never ends
    there.
    """
    recomputes_mlp = not spec.recompute.is_full and spec.recompute.recomputes("mlp")
    if recomputes_mlp and spec.shape.bias and not spec.shape.experts and not patched:
        # The checkpoint of an MLP returns the MLP's bias too, so autograd takes the parameter for a
        # result of the checkpoint. The checkpoint's backward then waits for its own result
        # (`transformer_layer.py: recompute_mlp`).
        yield (
            "--recompute-modules mlp on layers with biases never ends in Megatron's backward pass; add "
            "--disable-bias-linear, or leave mlp out."
        )

    is_partial = spec.recompute.is_full and spec.recompute != Recompute.FULL
    if spec.shape.blocks and is_partial:
        yield (
            f"{_model_name(spec)} has the blocks {spec.shape.blocks}; recomputing only some of them, or "
            "several together, is not planned; use --recompute-method uniform --recompute-num-layers 1."
        )
    if spec.shape.mtp_layers and is_partial:
        yield (
            f"{_model_name(spec)} has MTP layers, which Megatron recomputes one by one or not at all; use "
            "--recompute-method uniform --recompute-num-layers 1."
        )


def _offload_rules(spec: RunSpec) -> Iterator[str]:
    """Yield why the offload is impossible or not planned, one sentence per reason."""
    offload, recompute = spec.offload, spec.recompute
    flag = _OFFLOAD_LAYERS if offload.layers else _OFFLOAD_MODULES
    if offload.layers and offload.modules:
        yield f"{_OFFLOAD_MODULES} excludes {_OFFLOAD_LAYERS}; use one of them."
    if spec.device is DeviceKind.CPU or not spec.fused_norms:
        yield f"{flag} needs a GPU and Transformer Engine; leave it out here."
    if spec.shape.blocks:
        yield (
            f"{_model_name(spec)} has the blocks {spec.shape.blocks}, whose activations are not planned on "
            f"the host; leave {flag} out."
        )
    if not offload.layers:
        yield from _offload_module_rules(set(offload.modules), recompute)
        return
    if offload.layers >= spec.shape.layers:
        yield (
            f"{_OFFLOAD_LAYERS} {offload.layers} offloads all of {_model_name(spec)}'s "
            f"{spec.shape.layers} layers; use at most {spec.shape.layers - 1}."
        )
    if spec.parallelism.pipeline > 1:
        yield (
            f"{_OFFLOAD_LAYERS} refuses PP {spec.parallelism.pipeline}; use {_OFFLOAD_MODULES}, or PP 1."
        )
    if recompute != Recompute.NONE:
        yield (
            f"{_OFFLOAD_LAYERS} refuses recomputation; use {_OFFLOAD_MODULES}, or no recomputation."
        )


_OFFLOAD_LAYERS = "--cpu-offloading-num-layers"
_OFFLOAD_MODULES = "--fine-grained-activation-offloading"


def _offload_module_rules(modules: set[str], recompute: Recompute) -> Iterator[str]:
    """Yield why these modules cannot be offloaded together or with this recomputation, one sentence
    per reason.
    """
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "--offload-modules attn_proj needs core_attn, which stores the same tensor; add it."
    expert_modules = modules & {"expert_fc1", "moe_act"}
    if "fused_group_mlp" in modules and expert_modules:
        yield (
            f"--offload-modules fused_group_mlp includes {_choices(sorted(expert_modules))}; leave one of "
            "them out."
        )
    if recompute.is_full:
        # The first forward of a recomputed layer stores nothing. The second forward would send to
        # the host what backward reads at once.
        yield (
            f"{_OFFLOAD_MODULES} with full layers recomputed is not planned; recompute modules instead."
        )
        return
    modules_inside_moe = modules & {"expert_fc1", "moe_act", "fused_group_mlp"}
    if recompute.recomputes("moe") and modules_inside_moe:
        yield (
            f"--recompute-modules moe also recomputes {_choices(sorted(modules_inside_moe))}, which "
            "--offload-modules then refuses; leave one of them out."
        )
    if recompute.recomputes("core_attn") and "core_attn" in modules:
        # The checkpoint of core_attn does not open the group of tensors that Megatron closes after
        # attention (`attention.py`).
        yield "core_attn is recomputed or offloaded, not both; leave one of them out."


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

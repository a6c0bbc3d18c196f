"""The grammar of strategies: `baseline`, or a product of degrees and optionally a sharding.

`tp2` · `sp2` (TP 2 with sequence parallelism) · `cp2` · `pp2` · `vpp2` (PP 2 with two virtual
stages per rank; `vpp2x3` has three) · `dp2` · `ep2` (inside data parallelism) · `tp2pp2dp2` ·
`dp2-zero1` · `zero3` (over all ranks). `tp2ep2-etp1` splits each expert over one TP rank. `-etp`
comes before a sharding; without it, experts are split as all other layers. Pipelines with other
schedules than Megatron's are names of their own, followed by the number of stages: `gpipe2` ·
`1f1b2` · `interleaved2` · `pipedream2` · `pipedream2bw` · `pipedream-flush2`. A strategy is
identified by its `Parallelism`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from parakit.config.errors import suggest_names
from parakit.config.flags import Flags, format_fields_as_flags, format_flags
from parakit.config.stages import parse_stage_split


class Sharding(StrEnum):
    """The sharding of the data-parallel part of a strategy."""

    NONE = ""
    ZERO1 = "zero1"
    """Megatron's distributed optimizer (`--use-distributed-optimizer`)."""
    ZERO2 = "zero2"
    """Megatron-FSDP's `optim_grads`."""
    ZERO3 = "zero3"
    """Megatron-FSDP's `optim_grads_params`."""
    FSDP2 = "fsdp2"
    """torch's `fully_shard` (`--use-torch-fsdp2`)."""

    @property
    def shards_gradients(self) -> bool:
        """True if each rank stores only its shard of the gradients."""
        return self.wraps_modules

    @property
    def shards_weights(self) -> bool:
        """True if each rank stores only its shard of the weights (`optim_grads_params`,
        `fully_shard`).
        """
        return self in (Sharding.ZERO3, Sharding.FSDP2)

    @property
    def wraps_modules(self) -> bool:
        """True if FSDP, Megatron's or torch's, replaces DDP; the distributed optimizer keeps DDP."""
        return self.is_megatron_fsdp or self.is_torch_fsdp

    @property
    def overlaps_by_default(self) -> bool:
        """True if collectives overlap with computation without a further flag, as in both FSDPs."""
        return self.wraps_modules

    @property
    def is_megatron_fsdp(self) -> bool:
        """True for `--use-megatron-fsdp`: weights and gradients in flat buffers, one bucket per
        layer.
        """
        return self in (Sharding.ZERO2, Sharding.ZERO3)

    @property
    def is_torch_fsdp(self) -> bool:
        """True for `--use-torch-fsdp2`: one DTensor per weight."""
        return self is Sharding.FSDP2

    @property
    def stage(self) -> int:
        """Stage of ZeRO (arXiv:1910.02054): 1 shards the optimizer, 2 also gradients, 3 also
        weights; 0 is none.
        """
        return bool(self) + self.shards_gradients + self.shards_weights


UNTIED = "--untie-embeddings-and-output-weights"
"""Megatron's flag for an output layer with its own matrix."""


class PipelineSchedule(StrEnum):
    """Schedule of a pipeline: the order of its passes, and the weights that each pass uses."""

    MEGATRON = ""
    """1F1B with a flush in each iteration; interleaved if a rank has several virtual stages."""
    GPIPE = "gpipe"
    """All forward passes, then all backward passes (arXiv:1811.06965)."""
    ONE_F_ONE_B = "1f1b"
    """1F1B with a flush in each iteration, run by plain PyTorch."""
    INTERLEAVED = "interleaved"
    PIPEDREAM = "pipedream"
    """1F1B without flushes: an update after each backward, with older weights stored
    (arXiv:1806.03377).
    """
    PIPEDREAM_2BW = "pipedream-2bw"
    """PipeDream with gradients accumulated over micro batches, and two weight versions
    (arXiv:2006.09503).
    """
    PIPEDREAM_FLUSH = "pipedream-flush"
    """1F1B under the name of arXiv:2006.09503 (section 3.2)."""

    @property
    def paper_name(self) -> str:
        """Name as the papers write it."""
        return _TITLES[self]

    @property
    def is_asynchronous(self) -> bool:
        """True if the pipeline is never flushed, so that gradients belong to older weights."""
        return self in (PipelineSchedule.PIPEDREAM, PipelineSchedule.PIPEDREAM_2BW)

    def staleness(self, stages: int, stage: int) -> int:
        """Return the weight delay of a stage, as a number of updates in a full pipeline.

        The stage computes a gradient with weights that are this many updates older than the weights to
        which the gradient is applied. The number is p − s − 1 for PipeDream (arXiv:1806.03377 section
        3.3). It is 1 on every stage for PipeDream-2BW with more than one stage (arXiv:2006.09503 section
        3.1), and 0 otherwise.
        """
        if self is PipelineSchedule.PIPEDREAM:
            return stages - stage - 1
        return 1 if self is PipelineSchedule.PIPEDREAM_2BW and stages > 1 else 0


_TITLES = {
    PipelineSchedule.MEGATRON: "Megatron's",
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "interleaved 1F1B",
    PipelineSchedule.PIPEDREAM: "PipeDream",
    PipelineSchedule.PIPEDREAM_2BW: "PipeDream-2BW",
    PipelineSchedule.PIPEDREAM_FLUSH: "PipeDream-Flush",
}


@dataclass(frozen=True)
class Parallelism:
    """Parallel sizes of a run in all dimensions. The world size is data·tensor·pipeline·context."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Expert parallelism. It lies inside data and context parallelism and adds no ranks."""
    expert_tensor: int = 0
    """Tensor parallelism inside each expert (ETP); 0 means the TP of all other layers."""
    virtual_stages: int = 1
    """Pipeline stages per rank; more than one means the interleaved schedule."""
    sequence_parallel: bool = False
    sharding: Sharding = Sharding.NONE
    schedule: PipelineSchedule = PipelineSchedule.MEGATRON

    def __hash__(self) -> int:
        """Return a cached hash over all fields: parallelisms are looked up more often than they are
        made.
        """
        return self._hash

    @cached_property
    def _hash(self) -> int:
        degrees = (self.data, self.tensor, self.pipeline, self.context, self.expert)
        inside = (self.expert_tensor, self.virtual_stages, self.sequence_parallel)
        return hash((*degrees, *inside, self.sharding, self.schedule))

    @property
    def world_size(self) -> int:
        """Number of ranks over all dimensions."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def effective_expert_tensor(self) -> int:
        """Number of ranks over which each expert's matrices are split (ETP)."""
        return self.expert_tensor or self.tensor

    @property
    def unties_embeddings(self) -> bool:
        """True if the strategy's flags give the output layer its own matrix.

        Torch FSDP2 needs it (`validate_args`). In a pipeline without flushes, the first and the
        last stage would update their copies of a tied matrix at different times.
        """
        return self.sharding.is_torch_fsdp or self.schedule.is_asynchronous

    @property
    def executed_schedule(self) -> PipelineSchedule:
        """The pipeline schedule that is executed.

        If the strategy names no schedule, Megatron runs 1F1B, or interleaved 1F1B with virtual stages.
        """
        if self.schedule:
            return self.schedule
        interleaves = self.virtual_stages > 1
        return PipelineSchedule.INTERLEAVED if interleaves else PipelineSchedule.ONE_F_ONE_B

    @property
    def needs_micro_batch_per_stage(self) -> bool:
        """True if the schedule needs at least as many micro batches as stages."""
        two_versions = self.schedule is PipelineSchedule.PIPEDREAM_2BW
        return self.pipeline > 1 and (self.virtual_stages > 1 or two_versions)

    def pipeline_rank(self, rank: int) -> int:
        """Return the pipeline stage of a global rank; PP is the outermost dimension of Megatron's
        rank order.
        """
        return rank // (self.world_size // self.pipeline)

    def weight_versions(self, stage: int) -> int:
        """Return the number of versions of the weights that a pipeline stage stores."""
        return self.schedule.staleness(self.pipeline, stage) + 1

    @property
    def expert_data(self) -> int:
        """Expert data parallelism: the number of ranks that hold the same part of the same experts."""
        return self.world_size // self.ranks_per_expert_copy

    @property
    def ranks_per_expert_copy(self) -> int:
        """Ranks that hold one copy of all experts. Megatron refuses a world size that they do not
        divide.
        """
        return self.effective_expert_tensor * self.expert * self.pipeline

    def with_expert_tensor(self, degree: int) -> Parallelism:
        """Return the parallelism with each expert split over `degree` ranks (ETP).

        With 0, Megatron chooses the degree, which is then the TP of all other layers
        (`megatron/training/arguments.py: validate_args`).
        """
        stored = 0 if degree == self.tensor else degree
        return self if stored == self.expert_tensor else replace(self, expert_tensor=stored)


@dataclass(frozen=True)
class Batch:
    """Micro batch and global batch of a run, in samples: per forward pass of a rank, and per optimizer step."""

    micro_batch_size: int
    global_batch_size: int

    def __str__(self) -> str:
        return f"{self.micro_batch_size}/{self.global_batch_size}"


PUBLISHED_STRATEGIES = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")
"""The six published strategies; each has its own launch script."""

EXPERT_STRATEGIES = ("baseline", "dp2", "ep2", "ep2dp2", "tp2ep2", "pp2ep2", "ep8")
"""Strategies of mixture-of-experts models that have their own launch script."""

EXAMPLE_STRATEGIES = (
    *PUBLISHED_STRATEGIES,
    "vpp2",
    *EXPERT_STRATEGIES[2:],
    "zero1",
    "zero2",
    "zero3",
    "fsdp2",
    "tp2pp2dp2",
    "dp2-zero1",
    "gpipe2",
    "1f1b2",
    "interleaved2",
    "pipedream2",
    "pipedream2bw",
    "pipedream-flush2",
)

_FACTOR = re.compile(r"(vpp|dp|tp|sp|cp|pp|ep)(\d+)(?:x(\d+))?")
_PRODUCT = re.compile(f"(?:{_FACTOR.pattern})+")
_SCHEDULED = re.compile(r"(gpipe|1f1b|interleaved|pipedream-flush|pipedream)(\d+)(bw)?(?:x(\d+))?")
_EXPERT_TENSOR = re.compile(r"etp(\d+)")
_SHARDED = tuple(s.value for s in Sharding if s)


class StrategyError(ValueError):
    """A strategy that is not in the grammar, or does not fit the number of devices."""


def parse_strategy(text: str, devices: int, expert_tensor: int = 0) -> Parallelism:
    """Parse a strategy's name into the degrees of parallelism on `devices` ranks.

    Args:
        text: The strategy's name.
        devices: Number of ranks, which must be the product of the degrees.
        expert_tensor: ETP for a name without `-etp`, from Megatron's flag. 0 means that no flag states it.

    Raises:
        StrategyError: The name has an unknown word or a repeated dimension, or its degrees do not multiply to
            `devices`.
    """
    parallelism = _parse_grammar(text, devices, expert_tensor)
    if parallelism.world_size != devices:
        needed = parallelism.world_size
        raise StrategyError(
            f"Strategy '{text}' needs {needed} {'device' if needed == 1 else 'devices'}, not {devices}; "
            f"use that number, or degrees whose product is {devices}."
        )
    return parallelism


def strategy_name(parallelism: Parallelism) -> str:
    """Return the name of a parallelism as a strategy, such as `tp2pp2dp2-zero1` or `baseline`.

    `parse_strategy` parses the name into the same parallelism, for the same number of devices.
    """
    if parallelism.schedule:
        return _name_scheduled_pipeline(parallelism.schedule, parallelism)
    expert = parallelism.expert
    product = ""
    if parallelism.tensor > 1:
        tensor_name = "sp" if parallelism.sequence_parallel else "tp"
        product += f"{tensor_name}{parallelism.tensor}"
    if parallelism.context > 1:
        product += f"cp{parallelism.context}"
    if parallelism.pipeline > 1:
        product += _name_pipeline(parallelism)
    if expert > 1:
        product += f"ep{expert}"
    # If EP does not divide DP, the name leaves DP out: it follows from the number of devices.
    if parallelism.data % expert == 0 and parallelism.data > expert:
        product += f"dp{parallelism.data // expert}"
    name = product or "baseline"
    if parallelism.expert_tensor:
        name += f"-etp{parallelism.expert_tensor}"
    if parallelism.sharding:
        name += f"-{parallelism.sharding}"
    return name


def _name_pipeline(parallelism: Parallelism) -> str:
    """Return the name of a pipeline, without the name of its schedule.

    `pp2` has two pipeline stages. `vpp2` has two pipeline stages with two virtual stages each. `vpp2x4` has two
    pipeline stages with four virtual stages each.
    """
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    if virtual == 1:
        return f"pp{pipeline}"
    if virtual == 2:
        return f"vpp{pipeline}"
    return f"vpp{pipeline}x{virtual}"


def _name_scheduled_pipeline(schedule: PipelineSchedule, parallelism: Parallelism) -> str:
    """Return the name of a pipeline with a schedule other than Megatron's, such as `gpipe2`."""
    stages, virtual = parallelism.pipeline, parallelism.virtual_stages
    if schedule is PipelineSchedule.PIPEDREAM_2BW:
        return f"pipedream{stages}bw"
    suffix = f"x{virtual}" if virtual > 2 else ""
    return f"{schedule}{stages}{suffix}"


def count_devices(text: str, otherwise: int = 1, expert_tensor: int = 0) -> int:
    """Return the number of ranks of a strategy: the product of the degrees in its name.

    Args:
        text: The strategy's name.
        otherwise: Number of available ranks. It is the result if the name leaves the number of ranks open: `zero1`
            has no degrees, and EP may be spread over the ranks of CP or TP.
        expert_tensor: ETP for a name without `-etp`, from Megatron's flag. 0 means that no flag states it.

    Raises:
        StrategyError: The name is not in the grammar.
    """
    return _parse_grammar(text, otherwise, expert_tensor).world_size


def strategy_flags(parallelism: Parallelism) -> tuple[str, ...]:
    """Return Megatron's flags for a parallelism.

    Data parallelism has no flag, because Megatron derives it from the number of ranks and the other sizes.
    """
    further_flags: dict[str, object] = dict(_SHARDING_FLAGS[parallelism.sharding])
    if parallelism.schedule.is_asynchronous:
        # A stage updates its weights before other stages have their gradients, so there is no
        # global gradient norm to clip by.
        further_flags = {UNTIED: True, "--clip-grad": 0} | further_flags
    return (
        *format_fields_as_flags(parallelism, "parallelism"),
        *format_flags(further_flags),
    )


def parallelism_from_flags(arguments: Sequence[str], devices: int) -> Parallelism:
    """Return the parallelism that Megatron derives from flags on `devices` ranks.

    Data parallelism is `devices` divided by the other degrees.

    Raises:
        StrategyError: The degrees do not divide `devices`.
    """
    flags = Flags(arguments)
    degrees = flags.fields("parallelism")
    tensor, pipeline, context = degrees["tensor"], degrees["pipeline"], degrees["context"]
    model_ranks = tensor * pipeline * context
    if model_ranks < 1 or devices % model_ranks:
        raise StrategyError(
            f"TP {tensor} × PP {pipeline} × CP {context} = {model_ranks} does not divide "
            f"{devices} devices; use a multiple of {model_ranks} devices."
        )
    degrees.setdefault("virtual_stages", _parse_virtual_stages(flags, pipeline))
    parallelism = Parallelism(
        **degrees,
        data=devices // model_ranks,
        sharding=_parse_sharding(flags),
    )
    return replace(
        parallelism.with_expert_tensor(parallelism.expert_tensor),
        # Without tensor parallelism, Megatron drops sequence parallelism silently.
        sequence_parallel=parallelism.sequence_parallel and tensor > 1,
        schedule=PipelineSchedule(parallelism.schedule),
    )


def _parse_virtual_stages(flags: Flags, pipeline: int) -> int:
    """Derive the number of virtual stages per rank, for flags that do not state it directly.

    The layers per virtual stage decide the number. Without them, the number is the one that Megatron prints in a log,
    or else the one of the pipeline's layout. Without any of these it is 1.
    """
    stages = parse_stage_split(flags)
    layers_per_virtual_stage = flags.integer("--num-layers-per-virtual-pipeline-stage")
    printed = flags.integer(
        "--virtual-pipeline-model-parallel-size", stages.virtual_stages_in_layout(pipeline)
    )
    if not layers_per_virtual_stage:
        return printed
    layers = flags.integer("--num-layers") + stages.counted_ends
    return layers // pipeline // layers_per_virtual_stage


_FSDP = {"--use-megatron-fsdp": True, "--ckpt-format": "fsdp_dtensor"}
_SHARDING_FLAGS: dict[Sharding, dict[str, object]] = {
    Sharding.NONE: {},
    Sharding.ZERO1: {"--use-distributed-optimizer": True},
    Sharding.ZERO2: {**_FSDP, "--data-parallel-sharding-strategy": "optim_grads"},
    Sharding.ZERO3: {**_FSDP, "--data-parallel-sharding-strategy": "optim_grads_params"},
    Sharding.FSDP2: {
        "--use-torch-fsdp2": True,
        UNTIED: True,
        "--no-gradient-accumulation-fusion": True,
    },
}


def _parse_sharding(flags: Flags) -> Sharding:
    """Return the sharding (ZeRO or FSDP) that the flags choose, or `Sharding.NONE`."""
    if flags.has("--use-torch-fsdp2"):
        return Sharding.FSDP2
    if flags.has("--use-megatron-fsdp") or flags.has("--use-custom-fsdp"):
        match flags.text("--data-parallel-sharding-strategy"):
            case "optim":
                return Sharding.ZERO1
            case "optim_grads":
                return Sharding.ZERO2
            case "optim_grads_params":
                return Sharding.ZERO3
        return Sharding.NONE
    return Sharding.ZERO1 if flags.has("--use-distributed-optimizer") else Sharding.NONE


def _parse_grammar(text: str, devices: int, expert_tensor: int) -> Parallelism:
    """Return the parallelism that the name of a strategy means.

    `devices` counts only if the name leaves the number of ranks open. That is so for a sharding alone, such as
    `zero1`, and for experts without a DP in the name.

    Raises:
        StrategyError: The name is not in the grammar.
    """
    scheduled_pipeline = _parse_scheduled_pipeline(text)
    if scheduled_pipeline:
        return scheduled_pipeline
    product, *suffixes = text.split("-")
    named_expert_tensor, sharding = _parse_suffixes(text, suffixes)
    if product in _SHARDED and not sharding:
        # A sharding alone, such as `zero3`, is over all devices.
        sharding = product
        product = f"dp{devices}" if devices > 1 else "baseline"
    factors = _NO_FACTORS if product == "baseline" else _parse_factors(product, text)
    degrees = factors.degrees
    tensor, expert = degrees.get("tp", 1), degrees.get("ep", 1)
    # Megatron refuses experts under tensor parallelism without sequence parallelism.
    needs_sequence_parallel = tensor > 1 and expert > 1
    parallelism = Parallelism(
        data=degrees.get("dp", 1) * expert,
        tensor=tensor,
        pipeline=degrees.get("pp", 1),
        context=degrees.get("cp", 1),
        expert=expert,
        virtual_stages=factors.virtual_stages,
        sequence_parallel=factors.has_sequence_parallel or needs_sequence_parallel,
        sharding=Sharding(sharding),
    ).with_expert_tensor(named_expert_tensor or expert_tensor)
    if "dp" in degrees:
        return parallelism
    return _fit_experts_to_devices(parallelism, devices)


def _parse_suffixes(text: str, suffixes: Sequence[str]) -> tuple[int, str]:
    """Return the ETP and the sharding that the suffixes of a strategy's name state.

    The ETP is 0 and the sharding is empty if no suffix states them.

    Raises:
        StrategyError: A suffix is neither an ETP nor a sharding, or the ETP stands after the sharding.
    """
    sharding_parts = list(suffixes)
    expert_tensor = None
    if suffixes:
        match = _EXPERT_TENSOR.fullmatch(suffixes[0])
        if match:
            expert_tensor = int(match[1])
            del sharding_parts[0]
    sharding = "-".join(sharding_parts)  # The name of a sharding may have a dash itself.
    if sharding and sharding not in _SHARDED:
        raise StrategyError(
            f"Strategy '{text}' ends in the invalid suffix '-{sharding}'; use -etp with a degree, -"
            f"{', -'.join(_SHARDED[:-1])} or -{_SHARDED[-1]}, with -etp before the sharding."
        )
    if expert_tensor == 0:
        raise StrategyError(f"Strategy '{text}' has a degree of 0; degrees start at 1.")
    return expert_tensor or 0, sharding


def _fit_experts_to_devices(parallelism: Parallelism, devices: int) -> Parallelism:
    """Choose between two meanings of a strategy with experts whose name has no DP.

    The name usually means a DP that is a multiple of EP: `sp2ep4` needs 8 ranks. The experts may also be spread over
    the ranks of CP and, if ETP is smaller than TP, of TP. DP is then what the other sizes leave of `devices`:
    `sp2ep4-etp1` on 4 ranks is EP 4 over TP 2 and DP 2. The second meaning is chosen if the experts fit on the ranks
    only in this way. Otherwise `parallelism` is returned unchanged.
    """
    model_ranks = parallelism.tensor * parallelism.pipeline * parallelism.context
    if devices < 1 or devices % model_ranks:
        return parallelism
    over_others = replace(parallelism, data=devices // model_ranks)
    if over_others.data % over_others.expert and devices % over_others.ranks_per_expert_copy == 0:
        return over_others
    return parallelism


def _parse_scheduled_pipeline(text: str) -> Parallelism | None:
    """Return the parallelism that a name such as `gpipe2` or `interleaved4x3` means.

    The numbers are the pipeline stages, and after the `x` the virtual stages per rank. The result is None if the name
    is not a schedule followed by a number of stages. It is also None if a schedule has a suffix that only another
    schedule can have.

    Raises:
        StrategyError: The name has fewer than 2 stages or virtual stages.
    """
    match = _SCHEDULED.fullmatch(text)
    if match is None:
        return None
    name, stages, double_buffered, virtual_stages = match.groups()
    if double_buffered and name != PipelineSchedule.PIPEDREAM:
        return None
    is_interleaved = name == PipelineSchedule.INTERLEAVED
    if virtual_stages and not is_interleaved:
        return None
    if int(stages) < 2:
        raise StrategyError(
            f"Strategy '{text}' has {_count_stages(stages, 'stage')}; use 2 or more, or baseline."
        )
    if virtual_stages and int(virtual_stages) < 2:
        raise StrategyError(
            f"Strategy '{text}' has {_count_stages(virtual_stages, 'virtual stage')} per rank; use 2 or more, "
            f"or 1f1b{stages}."
        )
    schedule = PipelineSchedule.PIPEDREAM_2BW if double_buffered else PipelineSchedule(name)
    num_virtual_stages = int(virtual_stages or 2) if is_interleaved else 1
    return Parallelism(pipeline=int(stages), virtual_stages=num_virtual_stages, schedule=schedule)


def _count_stages(digits: str, noun: str) -> str:
    """Return a number with its noun, such as `1 stage` or `0 stages`."""
    return f"{digits} {noun}" if int(digits) == 1 else f"{digits} {noun}s"


@dataclass(frozen=True)
class _Factors:
    """Factors of a strategy's name, such as those of `sp2vpp2dp2`."""

    degrees: Mapping[str, int]
    """Degrees by dimension: `tp`, `cp`, `pp`, `ep` and `dp`. A dimension that the name lacks is missing."""
    has_sequence_parallel: bool = False
    """True if the name has `sp`."""
    virtual_stages: int = 1


_NO_FACTORS = _Factors({})


def _parse_factors(product: str, text: str) -> _Factors:
    """Return the factors of a product such as `tp2pp2`. `text` is the full name, for error sentences.

    Raises:
        StrategyError: The product is not in the grammar, repeats a dimension, or has a degree of 0.
    """
    factors = _FACTOR.findall(product)
    # Only `vpp` may be followed by `x` and a number of virtual stages.
    has_wrong_stages = any(stages and name != "vpp" for name, _, stages in factors)
    if not _PRODUCT.fullmatch(product) or has_wrong_stages:
        raise StrategyError(_explain_inner_sharding(product) or _explain_unknown_strategy(text))
    degrees: dict[str, int] = {}
    has_sequence_parallel = False
    virtual_stages = 1
    for name, degree, stages in factors:
        dimension = {"sp": "tp", "vpp": "pp"}.get(name, name)
        if dimension in degrees:
            raise StrategyError(f"Strategy '{text}' names its {dimension.upper()} degree twice.")
        if int(degree) < 1 or stages == "0":
            raise StrategyError(f"Strategy '{text}' has a degree of 0; degrees start at 1.")
        degrees[dimension] = int(degree)
        if name == "sp":
            has_sequence_parallel = True
        if name == "vpp":
            virtual_stages = int(stages or 2)
    return _Factors(degrees, has_sequence_parallel, virtual_stages)


def _explain_unknown_strategy(text: str) -> str:
    """Return the error sentence for a name that is no strategy, with up to three similar strategies."""
    listing = "'make list' shows the strategies, and degrees multiply, as in tp2pp2"
    hint = suggest_names(text, EXAMPLE_STRATEGIES, listing)
    return f"Unknown strategy '{text}'; {hint}"


def _explain_inner_sharding(product: str) -> str:
    """Return an error sentence for a name such as `zero3tp2`, whose sharding stands among the sizes.

    The sentence has the right spelling. It is empty for other names.
    """
    shardings = [Sharding(name) for name in _SHARDED if name in product]
    if not shardings:
        return ""
    sharding = shardings[0]
    product_without_sharding = product.replace(sharding, "", 1)
    if not _FACTOR.match(product_without_sharding):
        return ""
    example = product_without_sharding
    if "dp" not in example:
        example += "dp2"
    explanation = f"'{product}' names its sharding between the degrees; the sharding comes last"
    if "pp" in product_without_sharding and sharding.wraps_modules:
        return f"{explanation}, and FSDP does not work with pipeline stages; use {example}-zero1."
    return f"{explanation}; use {example}-{sharding}."

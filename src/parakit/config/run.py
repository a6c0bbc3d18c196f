"""What a run is: `RunSpec`, and the codecs to Megatron's flags and printed arguments.

Launch composes one, records keep it in `run.json` (`src/parakit/artifacts/run.py`), the planner's closed forms
and the report compute from it. Two runs train the same thing if their specs are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache

from parakit.config.experts import BALANCED, ExpertLoad, parse_expert_load
from parakit.config.flag_table import flags_in_group
from parakit.config.flags import Flags, format_fields_as_flags, format_flags, refuse_unknown
from parakit.config.model import MTP, Model, ModelShape, parse_batch, parse_dtype, shape_from_flags
from parakit.config.offload import NO_OFFLOAD, Offload, offload_flags, parse_offload
from parakit.config.recompute import Recompute, parse_recompute, recompute_flags
from parakit.config.replacing import replace, replace_cached
from parakit.config.stages import EVEN_SPLIT, StageSplit, parse_stage_split
from parakit.config.strategy import (
    Batch,
    Parallelism,
    Sharding,
    parallelism_from_flags,
    strategy_flags,
    strategy_name,
)


class Backend(StrEnum):
    """The trainer; `bare` is forward and backward of the native model alone, as a reference.

    `transformers` is Hugging Face's own model of what was imported.
    """

    MEGATRON = "megatron"
    NATIVE = "native"
    DEEPSPEED = "deepspeed"
    BARE = "bare"
    TRANSFORMERS = "transformers"


class RuntimeName(StrEnum):
    """Where GPU ranks find torch and Megatron: in NVIDIA's container, or on this machine."""

    DOCKER = "docker"
    HOST = "host"


class OptimizerName(StrEnum):
    """What updates the weights; Muon leaves embeddings and norms to AdamW."""

    ADAMW = "adamw"
    MUON = "muon"
    """PyTorch's under `BACKEND=native`, Megatron's under Megatron."""
    MEGATRON_MUON = "megatron-muon"
    """Megatron's rule under both."""


class DeviceKind(StrEnum):
    """What the ranks run on; also the suffix of a target's device count (`2cpu`)."""

    CPU = "cpu"
    GPU = "gpu"


class Fp8Recipe(StrEnum):
    """Products of linear layers in fewer bits (`--fp8-recipe`, `--fp4-format`); attention, norms, the
    router, embeddings, the output layer, gradients and the optimizer stay as they are."""

    NONE = ""
    DELAYED = "delayed"
    """One scale a tensor, from its maxima in earlier iterations."""
    TENSORWISE = "tensorwise"
    """One scale a tensor, from its own maximum."""
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class StateTypes:
    """What holds gradients, the optimizer's weights and its moments, where it is not the usual of the
    run's dtype (empty): `fp32`, `fp16`, `bf16` or `fp8`."""

    gradients: str = ""
    main_parameters: str = ""
    first_moment: str = ""
    second_moment: str = ""
    precision_aware: bool = False
    """`--use-precision-aware-optimizer`: Adam reads gradients as they are, and keeps of fp32 weights
    what the half-precision ones lack."""
    offloaded_fraction: float = 0.0
    """Share of the parameters whose fp32 weights and moments the host has, which updates them
    (`--optimizer-cpu-offload`); what a device keeps of the others is then in fp32 too."""


class Transport(StrEnum):
    """The library that moves the bytes: it decides what an operation puts on the wire."""

    NCCL = "nccl"
    GLOO = "gloo"


class TokenDispatcher(StrEnum):
    """How tokens reach their experts (`--moe-token-dispatcher-type`, and the backend of its `flex`)."""

    ALL_TO_ALL = "alltoall"
    ALL_GATHER = "allgather"
    DEEP_EP = "deepep"
    HYBRID_EP = "hybridep"


@dataclass(frozen=True)
class PatchFile:
    """Python files that every rank executes before it trains (`PATCH_FILE=`), changes of Megatron.

    Two are equal if they hold the same.
    """

    path: str = field(compare=False)
    """From the repository's root, or absolute; several with commas between them."""
    sha256: str


@dataclass(frozen=True)
class RunSpec:
    """A model, how it is split, and every choice that changes losses, bytes or time."""

    shape: ModelShape
    parallelism: Parallelism
    batch: Batch
    dtype: str = "bf16"
    """`fp16`, `bf16` or `fp32`."""
    fp8_recipe: Fp8Recipe = Fp8Recipe.NONE
    unquantised_blocks: str = ""
    """Blocks of a hybrid that are not quantised (`--num-layers-at-end-in-bf16`), in any order."""
    state_types: StateTypes = StateTypes()
    quantised_weights: bool = False
    """Linear layers' weights are kept and gathered in eight bits, where products take such
    (`--fp8-param-gather`)."""
    fused_loss: bool = False
    """`--cross-entropy-loss-fusion`: few kernels read the logits and write their gradient."""
    loss_impl: str = "native"
    """`--cross-entropy-fusion-impl`: `te` writes it over them."""
    optimizer_instances: int = 1
    """Groups of data-parallel ranks that each shard a whole optimizer
    (`--num-distributed-optimizer-instances`; hybrid sharding)."""
    dropout: float = 0.1
    recompute: Recompute = Recompute.NONE
    offload: Offload = NO_OFFLOAD
    """Activations that wait for backward on the host."""
    fused_attention: bool = True
    """Flash or cuDNN attention; without it the scores of every head are kept."""
    fused_norms: bool = True
    """Transformer Engine's layers: a norm is part of the dense linear layer behind it."""
    cp_comm_type: str = "p2p"
    """Context parallelism's: `p2p` (ring), `a2a` or `all_gather`; empty before a search has chosen."""
    stages: StageSplit = EVEN_SPLIT
    """How layers are laid on pipeline stages."""
    token_dispatcher: TokenDispatcher = TokenDispatcher.ALL_TO_ALL
    expert_load: ExpertLoad = BALANCED
    optimizer: str = "adam"
    """As Megatron calls it; its `adam` is AdamW."""
    seed: int = 1234
    device: DeviceKind = DeviceKind.GPU
    backend: str = Backend.MEGATRON
    model: str = ""
    """Name of the `.args` file; empty where a log shows another shape than any of them."""
    fused: tuple[str, ...] = ()
    """Patches of `megatron_patches/fused` (`FUSED=`)."""
    link_bits_per_second: int | None = None
    """Limit of the link between the two halves of the ranks (`NET=`); None is none."""
    shares_gpu: bool = False
    """All ranks are on one GPU, over gloo: its times say nothing about the strategy."""
    patch_file: PatchFile | None = None
    strategy: str = field(default="", compare=False)
    """As it was asked for (`zero1`); what it is says `parallelism`, and `name` names it."""

    def __hash__(self) -> int:
        """Of what differs between the runs of a search, which looks them up more often than all else."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        chosen = (self.parallelism, self.batch, self.recompute, self.stages)
        return hash((self.shape, *chosen, self.cp_comm_type, self.dtype, self.fp8_recipe))

    @property
    def name(self) -> str:
        """The strategy's name: as asked for, else the grammar's."""
        return self.strategy or strategy_name(self.parallelism)

    @property
    def transport(self) -> Transport:
        """The library that moves the bytes."""
        return Transport.GLOO if self.device is DeviceKind.CPU else Transport.NCCL

    @property
    def flagged_parallelism(self) -> Parallelism:
        """Without virtual stages where a layout says how many there are: Megatron takes one of both."""
        return (
            replace(self.parallelism, virtual_stages=1) if self.stages.layout else self.parallelism
        )

    @property
    def trained_shape(self) -> ModelShape:
        """The shape that is trained: some strategies untie the output layer, and Megatron's own layers
        split latent attention otherwise than Transformer Engine's."""
        shape = self.shape
        if shape.latent and not self.fused_norms:
            shape = replace(shape, latent=replace(shape.latent, splits_down_projections=True))
        if self.parallelism.unties_embeddings:
            shape = replace(shape, tied_embeddings=False)
        return shape

    @property
    def block_specs(self) -> tuple[tuple[int, RunSpec], ...]:
        """How many of a layer's blocks are of each kind, with the run of such blocks alone."""
        shape = self.shape
        if len(shape.blocks) <= 1:
            return ((1, self),)
        found = []
        halves = Counter(self.unquantised_blocks)
        for blocks, fp8_recipe in (
            (Counter(shape.blocks) - halves, self.fp8_recipe),
            (halves, Fp8Recipe.NONE),
        ):
            for block, times in blocks.items():
                kind = replace(
                    self,
                    shape=shape.with_only_block(block),
                    fp8_recipe=fp8_recipe,
                    unquantised_blocks="",
                )
                found.append((times, kind))
        return tuple(found)

    @property
    def microbatches(self) -> int:
        """Micro batches that a rank runs in an iteration (floor; constraints check divisibility).

        0 where a foreign log names no micro batch, which is then 0 too.
        """
        together = self.batch.micro_batch_size * self.parallelism.data
        return self.batch.global_batch_size // together if together else 0

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro batch on one rank, before sequence parallelism splits them."""
        return self.shape.seq_length // self.parallelism.context * self.batch.micro_batch_size

    @property
    def expert_send_ratio(self) -> float:
        """Copies of its tokens that a rank sends, for each that a router without limit makes."""
        if self.expert_load == BALANCED:
            return 1.0
        return self.expert_load.send_ratio(
            self.shape, self.micro_batch_tokens // self.sequence_shards
        )

    @property
    def expert_receive_ratio(self) -> float:
        """Copies that the busiest rank of EP receives, for the mean of a router without limit."""
        if self.expert_load == BALANCED:
            return 1.0
        own, ranks = self.micro_batch_tokens // self.sequence_shards, self.parallelism.expert
        return self.expert_load.receive_ratio(self.shape, own, ranks)

    @property
    def tokens_per_iteration(self) -> int:
        """Global batch times sequence length."""
        return self.batch.global_batch_size * self.shape.seq_length

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding as trained, padding for TP included."""
        return self.shape.padded_vocabulary(self.parallelism.tensor)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or weight."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def sequence_shards(self) -> int:
        """Ranks over which sequence parallelism splits norms and dropouts."""
        return self.parallelism.tensor if self.parallelism.sequence_parallel else 1

    @property
    def layers_per_stage(self) -> int:
        """Layers on one pipeline rank, over its virtual stages; of uneven stages the fullest's."""
        return -(-self.shape.layers // self.parallelism.pipeline)

    def layers_per_chunk(self, pipeline_rank: int) -> tuple[int, ...]:
        """Layers of each virtual stage of a pipeline rank; depths ahead are the last one's."""
        return self._with_depths(range(self.shape.layers), pipeline_rank)

    def dense_layers_per_chunk(self, pipeline_rank: int) -> tuple[int, ...]:
        """Of the layers of each virtual stage of a pipeline rank those that are dense among experts'."""
        return self._with_depths(self.shape.dense_layers, pipeline_rank)

    def _with_depths(self, layers: Sequence[int], pipeline_rank: int) -> tuple[int, ...]:
        """These layers, and the depths ahead where they are alike: those are as the last layer is."""
        found, shape = self.count_layers_per_chunk(layers, pipeline_rank), self.shape
        is_last = pipeline_rank == self.parallelism.pipeline - 1
        if shape.mtp_layers and is_last and shape.layers - 1 in layers:
            return (*found[:-1], found[-1] + shape.mtp_layers)
        return found

    def count_layers_per_chunk(
        self, layers: Collection[int], pipeline_rank: int
    ) -> tuple[int, ...]:
        """How many of these layers, from 0, each virtual stage of a pipeline rank has."""
        split, all_layers = self.parallelism, self.shape.layers
        degrees = (split.pipeline, split.virtual_stages)
        if not layers:
            return (0,) * split.virtual_stages
        if len(layers) == all_layers:
            return self.stages.layers_per_chunk(all_layers, *degrees, pipeline_rank)
        return _laid(self.stages, all_layers, frozenset(layers), *degrees)[pipeline_rank]

    def num_layers_on_stage(self, pipeline_rank: int) -> int:
        """Layers on one pipeline rank, over its virtual stages."""
        return sum(self.layers_per_chunk(pipeline_rank))

    def num_recomputed_layers(self, pipeline_rank: int) -> int:
        """Layers of one pipeline rank that are computed again whole."""
        chunks = map(self.recompute.layers_per_checkpoint, self.layers_per_chunk(pipeline_rank))
        return sum(map(sum, chunks))

    @property
    def stage_layout_spec(self) -> RunSpec:
        """Its layers on its stages, and nothing else of it: for what depends on those alone."""
        split = self.parallelism
        return _on_stages(self.shape, self.stages, split.pipeline, split.virtual_stages)

    @cached_property
    def without_recompute(self) -> RunSpec:
        """A run that computes nothing again."""
        return replace(self, recompute=Recompute.NONE)

    @cached_property
    def without_cp_comm_type(self) -> RunSpec:
        """A run whose context-parallel algorithm is not chosen: for what does not depend on it."""
        return replace(self, cp_comm_type="") if self.cp_comm_type else self

    @cached_property
    def one_layer_per_stage(self) -> RunSpec:
        """The same micro batch with one layer a stage, recomputed if any is, and no more data
        parallelism than EP needs: what a layer takes and keeps depends on nothing else."""
        own, samples = self.parallelism, self.batch.micro_batch_size
        data = max(1, own.expert // own.context)
        one = replace_cached(
            own, data=data, pipeline=self.shape.layers, virtual_stages=1, sharding=Sharding.NONE
        )
        return replace(
            self,
            parallelism=one,
            batch=Batch(samples, samples * data),
            recompute=Recompute.FULL if self.recompute.is_full else self.recompute,
            stages=EVEN_SPLIT,
            offload=NO_OFFLOAD,
        )

    @cached_property
    def with_dense_layers(self) -> RunSpec:
        """A run whose layers are all as its dense ones are."""
        return replace(self, shape=self.shape.without_experts)

    def count_dense_layers(self, pipeline_rank: int) -> tuple[int, int]:
        """Of the layers of a pipeline rank, and of those computed again whole, the dense: in a virtual
        stage they come before the others."""
        if not self.shape.dense_layers:
            return 0, 0
        dense = self.dense_layers_per_chunk(pipeline_rank)
        chunks = map(self.recompute.layers_per_checkpoint, self.layers_per_chunk(pipeline_rank))
        return sum(dense), sum(map(min, dense, map(sum, chunks)))

    def uniform_stage_specs(self, pipeline_rank: int) -> tuple[RunSpec, ...]:
        """Even runs whose stages together have as many layers of each kind as this one's and compute as
        many again, in one virtual stage: for calls inside layers."""
        shape, some = self.shape, self.recompute.is_block_method
        if self.stages == EVEN_SPLIT and not (some or shape.mtp_layers or shape.dense_layers):
            return (self,)
        layers, again = (
            self.num_layers_on_stage(pipeline_rank),
            self.num_recomputed_layers(pipeline_rank),
        )
        dense, dense_again = self.count_dense_layers(pipeline_rank)
        kinds = [(self, layers - dense, again - dense_again)]
        if dense:
            kinds.append((self.with_dense_layers, dense, dense_again))
        return tuple(run._even(count, again) for run, count, again in kinds if count)

    def _even(self, layers: int, again: int) -> RunSpec:
        """A run with so many layers of one kind on every stage, of which so many are computed again."""
        whole = layers * self.parallelism.pipeline
        shape = replace(self.shape, layers=whole, mtp_layers=0, dense_layers=())
        found = replace(self, stages=EVEN_SPLIT, shape=shape)
        if not self.recompute.is_block_method:
            return found
        return replace(
            found,
            parallelism=replace(self.parallelism, virtual_stages=1),
            recompute=Recompute(method="block", layers=again) if again else Recompute.NONE,
        )

    @cached_property
    def mtp_joining_spec(self) -> RunSpec:
        """A run with one block a stage, that which a depth of multi-token prediction begins with."""
        shape = replace(
            self.shape.with_only_block(MTP), layers=self.parallelism.pipeline, mtp_layers=0
        )
        return replace(self, stages=EVEN_SPLIT, shape=shape)

    @property
    def shares_embedding_across_stages(self) -> bool:
        """Whether the first and the last of several stages hold one embedding, whose gradients they add:
        a tied one, or with multi-token prediction any (`setup_embeddings_and_output_layer`)."""
        shared = self.trained_shape.tied_embeddings or bool(self.shape.mtp_layers)
        return shared and self.parallelism.pipeline > 1


@lru_cache(maxsize=4096)
def _on_stages(shape: ModelShape, stages: StageSplit, pipeline: int, virtual: int) -> RunSpec:
    split = Parallelism(pipeline=pipeline, virtual_stages=virtual)
    return RunSpec(shape, split, Batch(1, 1), stages=stages)


@lru_cache(maxsize=4096)
def _laid(
    stages: StageSplit, layers: int, some: frozenset[int], pipeline: int, virtual: int
) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank how many of some layers each of its virtual stages has."""
    counts = [stages.layers_per_chunk(layers, pipeline, virtual, rank) for rank in range(pipeline)]
    found: list[list[int]] = [[] for _ in counts]
    first = 0
    for stage in range(virtual):
        for rank, chunks in enumerate(counts):
            behind = first + chunks[stage]
            found[rank].append(sum(first <= layer < behind for layer in some))
            first = behind
    return tuple(tuple(chunks) for chunks in found)


def spec_from_model(model: Model, parallelism: Parallelism, batch: Batch) -> RunSpec:
    """A model as its `.args` file has it, on GPUs: its dtype, dropout and recomputation."""
    return RunSpec(
        shape=model.shape,
        parallelism=parallelism,
        batch=batch,
        dtype=model.dtype,
        fp8_recipe=parse_fp8_recipe(Flags(model.flags)),
        dropout=model.dropout,
        recompute=parse_recompute(Flags(model.flags)),
        model=model.name,
    )


def spec_from_flags(
    words: Sequence[str], devices: int, device: DeviceKind, model: str = ""
) -> RunSpec:
    """What a command line, the model's own flags in it, makes Megatron train on so many ranks.

    Raises:
        ValueError: A flag that defines the shape is missing; the message names it.
        StrategyError: The degrees do not divide `devices`.
    """
    flags = Flags(words)
    parallelism = parallelism_from_flags(words, devices)
    # Of Megatron's own layers, for hosts without Transformer Engine, CPU ranks keep scores and
    # GPUs use SDPA; their context parallelism gathers K and V (megatron_patches/no_te).
    on_cpu = device is DeviceKind.CPU
    local = on_cpu or flags.text("--transformer-impl") == "local"
    return RunSpec(
        **flags.fields("run"),
        shape=shape_from_flags(model, flags),
        parallelism=parallelism,
        batch=parse_batch(flags, parallelism.data),
        dtype=parse_dtype(flags),
        fp8_recipe=parse_fp8_recipe(flags),
        state_types=parse_state_types(flags),
        dropout=max(flags.number(f"--{what}-dropout") for what in ("hidden", "attention")),
        recompute=parse_recompute(flags),
        offload=parse_offload(flags),
        fused_attention=not on_cpu or parallelism.context > 1,
        fused_norms=not local,
        cp_comm_type="all_gather" if local else _cp_comm_type(flags),
        stages=parse_stage_split(flags),
        token_dispatcher=parse_token_dispatcher(flags),
        expert_load=parse_expert_load(flags),
        device=device,
        model=model,
    )


def spec_from_printed_arguments(arguments: Mapping[str, str]) -> RunSpec | None:
    """What a log's printed arguments (`num_layers`) say; None where they do not define a model and its
    layout."""
    words = flags_from_printed_arguments(arguments)
    flags = Flags(words)
    degrees = flags.fields("parallelism")
    devices = flags.integer("--data-parallel-size", 1)
    devices *= degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    try:
        spec = spec_from_flags(words, flags.integer("--world-size", devices), DeviceKind.GPU)
    except (ValueError, ZeroDivisionError):
        return None
    # Somebody else's Megatron has no patches: its own layers keep the scores.
    local = flags.text("--transformer-impl") == "local" and spec.parallelism.context == 1
    return replace(spec, fused_attention=False) if local else spec


def flags_from_printed_arguments(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """Printed arguments as the flags that give them."""
    words: list[str] = []
    for name, value in arguments.items():
        if name == "add_bias_linear":
            words += ["--disable-bias-linear"] if value == "False" else []
        elif name == "num_query_groups" and arguments.get("group_query_attention") != "True":
            continue
        elif value not in ("None", "False", ""):
            flag = _FLAGS_OF.get(name, "--" + name.replace("_", "-"))
            words += [flag] if value == "True" else [flag, value]
    return tuple(words)


_FLAGS_OF = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
"""Of arguments that go by another name than their flags (`dest` in `arguments.py`)."""


def flags_from_spec(spec: RunSpec) -> tuple[str, ...]:
    """Megatron's flags for everything in a spec but the model's own shape and the device."""
    rest = {
        "--attention-dropout": spec.dropout,
        "--hidden-dropout": spec.dropout,
        f"--{spec.dtype}": spec.dtype != "fp32",
    }
    layout = (*strategy_flags(spec.flagged_parallelism), *searched_flags(spec))
    run = (
        *format_fields_as_flags(spec.batch, "batch"),
        *format_flags(rest),
        *format_fields_as_flags(spec, "run"),
    )
    return (*layout, *run, *_state_flags(spec.state_types), *offload_flags(spec.offload))


_OFFLOAD, _OFFLOADED = "--optimizer-cpu-offload", "--optimizer-offload-fraction"
_STATE_TYPES = ("fp32", "fp16", "bf16", "fp8")
_TORCHS_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}
"""As a log prints them; fp8 moments are bytes with scales beside them (`map_dtype`)."""


def _state_flags(types: StateTypes) -> tuple[str, ...]:
    if types.precision_aware:
        return (
            *format_fields_as_flags(types, "state_types"),
            *((_OFFLOAD,) if types.offloaded_fraction else ()),
        )
    return ("--grad-reduce-in-bf16",) if types.gradients == "bf16" else ()


def parse_state_types(flags: Flags) -> StateTypes:
    """What the flags store gradients and the optimizer in.

    Raises:
        ValueError: A type that Megatron does not have, or an offload that it refuses.
    """
    given = flags.fields("state_types")
    aware, offloaded = given["precision_aware"], given.get("offloaded_fraction", 0.0)
    if not 0 <= offloaded <= 1:
        raise ValueError(f"{_OFFLOADED} {offloaded:g} is no share of the optimizer; use 0 to 1.")
    if offloaded and not aware:
        raise ValueError(f"{_OFFLOAD} needs --use-precision-aware-optimizer; add it.")
    texts = (flag for flag in flags_in_group("state_types") if flag.kind == "text")
    for flag in (each for each in texts if each.field in given):
        kind = given[flag.field].removeprefix("torch.")
        kind = _TORCHS_NAMES.get(kind, kind)
        refuse_unknown(flag.name, [kind], _STATE_TYPES)
        given[flag.field] = kind if kind != "fp32" else ""
    if flags.has("--grad-reduce-in-bf16"):
        given["gradients"] = "bf16"
    return StateTypes(**given)


def searched_flags(spec: RunSpec) -> tuple[str, ...]:
    """Megatron's flags for what a search chooses and no strategy's name says: what is computed again,
    context parallelism's algorithm, and how layers are laid on stages."""
    differs = spec.parallelism.context > 1 and spec.cp_comm_type != "p2p"
    # CPU ranks gather keys and values whatever it says.
    is_said = differs and spec.device is DeviceKind.GPU
    context = ("--cp-comm-type", spec.cp_comm_type) if is_said else ()
    return (*recompute_flags(spec.recompute), *context, *spec.stages.flags)


def adapt_to_cpu_ranks(spec: RunSpec) -> RunSpec:
    """The run as this kit trains it on CPU ranks: in fp32, by PyTorch's own kernels."""
    return replace(
        spec, dtype="fp32", fused_attention=False, fused_norms=False, device=DeviceKind.CPU
    )


_FP8_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
"""Megatron's (`megatron/core/enums.py: Fp8Recipe`); what `Fp8Recipe` lacks is `tensorwise`."""


def parse_fp8_recipe(flags: Flags) -> Fp8Recipe:
    """How the flags quantise the products of linear layers; Megatron's own recipe is `delayed`."""
    if flags.has("--fp4-format"):
        return Fp8Recipe.NVFP4
    if not flags.has("--fp8-format"):
        return Fp8Recipe.NONE
    recipe = flags.text("--fp8-recipe")
    refuse_unknown("--fp8-recipe", [recipe], _FP8_RECIPES)
    return Fp8Recipe(recipe) if recipe in set(Fp8Recipe) else Fp8Recipe.TENSORWISE


def _cp_comm_type(flags: Flags) -> str:
    value = flags.text("--cp-comm-type").strip("[]' ")
    return value if value in {"p2p", "all_gather", "a2a"} else "p2p"


def parse_token_dispatcher(flags: Flags) -> TokenDispatcher:
    """How the flags route tokens; Megatron's own default is to gather."""
    value = flags.text("--moe-token-dispatcher-type")
    if value == "flex":
        value = flags.text("--moe-flex-dispatcher-backend")
    known = value in set(TokenDispatcher)
    return TokenDispatcher(value) if known else TokenDispatcher.ALL_TO_ALL

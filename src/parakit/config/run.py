"""The description of a run, `RunSpec`, read from and written as Megatron's flags and printed
arguments.

The launcher composes a spec, `run.json` stores what defines it (`src/parakit/artifacts/run.py`),
and the planner and the report compute from it. Two runs train the same model in the same way if
their specs are equal.
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
from parakit.config.peft import Lora
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
    """The program that trains a run.

    `bare` runs forward and backward of the native model without a trainer, as a reference. `transformers` runs
    Hugging Face's implementation of an imported model.
    """

    MEGATRON = "megatron"
    NATIVE = "native"
    DEEPSPEED = "deepspeed"
    BARE = "bare"
    TRANSFORMERS = "transformers"


class RuntimeName(StrEnum):
    """Software environment of GPU ranks: NVIDIA's image in a container of some program, or this machine's."""

    DOCKER = "docker"
    PODMAN = "podman"
    APPTAINER = "apptainer"
    HOST = "host"


class OptimizerName(StrEnum):
    """The optimizer. Muon leaves embeddings and norms to AdamW."""

    ADAMW = "adamw"
    MUON = "muon"
    """PyTorch's Muon under `BACKEND=native`, Megatron's under Megatron."""
    MEGATRON_MUON = "megatron-muon"
    """Megatron's Muon under both backends."""


class DeviceKind(StrEnum):
    """Kind of device that ranks run on, and the suffix of a target's device count (`2cpu`)."""

    CPU = "cpu"
    GPU = "gpu"


class Fp8Recipe(StrEnum):
    """Quantisation of the products of linear layers (`--fp8-recipe`, `--fp4-format`).

    Attention, norms, the router, embeddings, the output layer, gradients and the optimizer keep
    their types.
    """

    NONE = ""
    DELAYED = "delayed"
    """One scale per tensor, from the tensor's maxima in earlier iterations."""
    TENSORWISE = "tensorwise"
    """One scale per tensor, from the tensor's present maximum."""
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class StateTypes:
    """Types of gradients, main parameters and moments: `fp32`, `fp16`, `bf16` or `fp8`.

    Empty means the default type for the run's dtype.
    """

    gradients: str = ""
    main_parameters: str = ""
    first_moment: str = ""
    second_moment: str = ""
    precision_aware: bool = False
    """True for `--use-precision-aware-optimizer`: Adam reads gradients in their own type, and
    stores of fp32 weights only the bits that the half-precision weights lack.
    """
    offloaded_fraction: float = 0.0
    """Fraction of the parameters that the host stores and updates in fp32 with their moments
    (`--optimizer-cpu-offload`). The device's part of the optimizer is then in fp32 too.
    """


class Transport(StrEnum):
    """The communication library; it decides how many bytes an operation sends."""

    NCCL = "nccl"
    GLOO = "gloo"


class TokenDispatcher(StrEnum):
    """Algorithm that sends tokens to their experts (`--moe-token-dispatcher-type`, or the backend
    of its `flex`).
    """

    ALL_TO_ALL = "alltoall"
    ALL_GATHER = "allgather"
    DEEP_EP = "deepep"
    HYBRID_EP = "hybridep"


@dataclass(frozen=True)
class PatchFile:
    """Python files that every rank executes before training, to change Megatron (`PATCH_FILE=`).

    Two objects are equal if the contents of their files are equal.
    """

    path: str = field(compare=False)
    """Path from the repository's root, or absolute path; several are separated by commas."""
    sha256: str


@dataclass(frozen=True)
class RunSpec:
    """Complete description of a run: the model, its parallelism, and every choice that changes losses, bytes or
    time.
    """

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
    """True if linear layers' weights are stored and gathered in eight bits (`--fp8-param-gather`).
    """
    fused_loss: bool = False
    """True for `--cross-entropy-loss-fusion`: a few kernels read the logits and write their
    gradient.
    """
    loss_impl: str = "native"
    """Value of `--cross-entropy-fusion-impl`; `te` writes the gradient over the logits."""
    optimizer_instances: int = 1
    """Groups of data-parallel ranks, each of which shards a full optimizer
    (`--num-distributed-optimizer-instances`; hybrid sharding).
    """
    dropout: float = 0.1
    recompute: Recompute = Recompute.NONE
    offload: Offload = NO_OFFLOAD
    """Activations that are stored on the host until backward."""
    fused_attention: bool = True
    """True for Flash or cuDNN attention; without it the scores of every head are stored."""
    fused_norms: bool = True
    """True for Transformer Engine's layers, in which a norm is part of the following dense linear
    layer.
    """
    cp_comm_type: str = "p2p"
    """Algorithm of context parallelism: `p2p` (ring), `a2a` or `all_gather`; empty before a search
    chooses one.
    """
    stages: StageSplit = EVEN_SPLIT
    """Placement of layers on pipeline stages."""
    token_dispatcher: TokenDispatcher = TokenDispatcher.ALL_TO_ALL
    expert_load: ExpertLoad = BALANCED
    lora: Lora | None = None
    """Adapters that are trained while all other weights are frozen; None trains all weights."""
    optimizer: str = "adam"
    """Megatron's name of the optimizer; `adam` is AdamW."""
    seed: int = 1234
    device: DeviceKind = DeviceKind.GPU
    backend: str = Backend.MEGATRON
    model: str = ""
    """Name of the `.args` file; empty if a log shows a shape that no file has."""
    fused: tuple[str, ...] = ()
    """Patches of `megatron_patches/fused` (`FUSED=`)."""
    link_bits_per_second: int | None = None
    """Limit of the link between the two halves of the ranks (`NET=`); None means no limit."""
    shares_gpu: bool = False
    """True if all ranks are on one GPU, over gloo; the times then do not measure the strategy."""
    patch_file: PatchFile | None = None
    strategy: str = field(default="", compare=False)
    """Strategy as the user wrote it (`zero1`). `parallelism` holds the degrees, and `name` is the
    display name.
    """

    def __hash__(self) -> int:
        """Return a cached hash over the fields that differ within a search, which looks specs up
        very often.
        """
        return self._hash

    @cached_property
    def _hash(self) -> int:
        chosen = (self.parallelism, self.batch, self.recompute, self.stages)
        return hash((self.shape, *chosen, self.cp_comm_type, self.dtype, self.fp8_recipe))

    @property
    def name(self) -> str:
        """Name of the strategy: as the user wrote it, else as the grammar writes the parallelism."""
        return self.strategy or strategy_name(self.parallelism)

    @property
    def transport(self) -> Transport:
        """Communication library of the ranks: gloo on CPUs, NCCL on GPUs."""
        return Transport.GLOO if self.device is DeviceKind.CPU else Transport.NCCL

    @property
    def flagged_parallelism(self) -> Parallelism:
        """The parallelism for which Megatron's flags are written.

        If a pipeline layout states the virtual stages, this parallelism has 1 virtual stage. The reason is that
        Megatron refuses a layout together with a flag for virtual stages.
        """
        if self.stages.layout:
            return replace(self.parallelism, virtual_stages=1)
        return self.parallelism

    @property
    def trained_shape(self) -> ModelShape:
        """The shape that is trained.

        It differs from the model's shape in two cases. Some strategies untie the output layer from the embedding.
        Without Transformer Engine, TP splits the down-projections of latent attention.
        """
        shape = self.shape
        if shape.latent and not self.fused_norms:
            shape = replace(shape, latent=replace(shape.latent, splits_down_projections=True))
        if self.parallelism.unties_embeddings:
            shape = replace(shape, tied_embeddings=False)
        return shape

    @property
    def block_specs(self) -> tuple[tuple[int, RunSpec], ...]:
        """One pair per kind of block: how often it occurs in a layer, and a run whose model has this
        block alone.

        Quantised and unquantised blocks are different kinds. A run whose layers have at most one block gives a
        single pair of 1 and the run itself.
        """
        shape = self.shape
        if len(shape.blocks) <= 1:
            return ((1, self),)
        specs = []
        unquantised = Counter(self.unquantised_blocks)
        for blocks, fp8_recipe in (
            (Counter(shape.blocks) - unquantised, self.fp8_recipe),
            (unquantised, Fp8Recipe.NONE),
        ):
            for block, times in blocks.items():
                kind = replace(
                    self,
                    shape=shape.with_only_block(block),
                    fp8_recipe=fp8_recipe,
                    unquantised_blocks="",
                )
                specs.append((times, kind))
        return tuple(specs)

    @property
    def microbatches(self) -> int:
        """Micro batches per rank and iteration, rounded down; constraints check divisibility.

        0 if a foreign log states no micro batch size.
        """
        samples = self.batch.micro_batch_size * self.parallelism.data
        return self.batch.global_batch_size // samples if samples else 0

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro batch on one rank, before sequence parallelism splits them."""
        return self.shape.seq_length // self.parallelism.context * self.batch.micro_batch_size

    @property
    def expert_send_ratio(self) -> float:
        """Fraction of token copies that a rank sends to experts under the router's capacity.

        A router without capacity gives 1. With padding to the capacity the fraction may exceed 1.
        """
        if self.expert_load == BALANCED:
            return 1.0
        return self.expert_load.send_ratio(
            self.shape, self.micro_batch_tokens // self.sequence_shards
        )

    @property
    def expert_receive_ratio(self) -> float:
        """Load of the busiest expert-parallel rank, where 1 is the load of a balanced router.

        The load is the number of token copies that the rank receives.
        """
        if self.expert_load == BALANCED:
            return 1.0
        tokens, ranks = self.micro_batch_tokens // self.sequence_shards, self.parallelism.expert
        return self.expert_load.receive_ratio(self.shape, tokens, ranks)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens per iteration: global batch size times sequence length."""
        return self.batch.global_batch_size * self.shape.seq_length

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the trained embedding, with the padding for TP."""
        return self.shape.padded_vocabulary(self.parallelism.tensor)

    @property
    def element_bytes(self) -> int:
        """Bytes per element of an activation or weight."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def sequence_shards(self) -> int:
        """Number of ranks over which sequence parallelism splits norms and dropouts; 1 without it."""
        return self.parallelism.tensor if self.parallelism.sequence_parallel else 1

    @property
    def layers_per_stage(self) -> int:
        """Layers per pipeline rank over its virtual stages, rounded up."""
        return -(-self.shape.layers // self.parallelism.pipeline)

    def layers_per_chunk(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the layers of each virtual stage of a pipeline rank.

        Layers of multi-token prediction count for the last virtual stage of the last rank.
        """
        return self._add_mtp_layers(range(self.shape.layers), pipeline_rank)

    def dense_layers_per_chunk(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the dense layers of each virtual stage of a pipeline rank, in a model with
        experts.
        """
        return self._add_mtp_layers(self.shape.dense_layers, pipeline_rank)

    def _add_mtp_layers(self, layers: Sequence[int], pipeline_rank: int) -> tuple[int, ...]:
        """Return how many of `layers` each virtual stage of a pipeline rank has, with MTP layers added.

        Layers of multi-token prediction (MTP) have the shape of the last layer, and are on the last stage. They are
        added only if `layers` contains the last layer.

        Args:
            layers: Indices, from 0, of the layers of one kind.
        """
        counts, shape = self.count_layers_per_chunk(layers, pipeline_rank), self.shape
        is_last = pipeline_rank == self.parallelism.pipeline - 1
        if shape.mtp_layers and is_last and shape.layers - 1 in layers:
            return (*counts[:-1], counts[-1] + shape.mtp_layers)
        return counts

    def count_layers_per_chunk(
        self, layers: Collection[int], pipeline_rank: int
    ) -> tuple[int, ...]:
        """Return the number of layers in each virtual stage of a pipeline rank. Only `layers` count.

        Args:
            layers: Indices, from 0, of the layers that count, such as all dense layers.
        """
        split, all_layers = self.parallelism, self.shape.layers
        degrees = (split.pipeline, split.virtual_stages)
        if not layers:
            return (0,) * split.virtual_stages
        if len(layers) == all_layers:
            return self.stages.layers_per_chunk(all_layers, *degrees, pipeline_rank)
        counts_by_rank = _count_layers_per_chunk(
            self.stages, all_layers, frozenset(layers), *degrees
        )
        return counts_by_rank[pipeline_rank]

    def num_layers_on_stage(self, pipeline_rank: int) -> int:
        """Return the number of layers on one pipeline rank, over its virtual stages."""
        return sum(self.layers_per_chunk(pipeline_rank))

    def num_recomputed_layers(self, pipeline_rank: int) -> int:
        """Return the number of fully recomputed layers on one pipeline rank."""
        chunks = map(self.recompute.layers_per_checkpoint, self.layers_per_chunk(pipeline_rank))
        return sum(map(sum, chunks))

    @property
    def stage_layout_spec(self) -> RunSpec:
        """A minimal run with the same layers on the same stages, as a cache key for what depends on
        these alone.
        """
        split = self.parallelism
        return _on_stages(self.shape, self.stages, split.pipeline, split.virtual_stages)

    @cached_property
    def without_recompute(self) -> RunSpec:
        """This run without recomputation."""
        return replace(self, recompute=Recompute.NONE)

    @cached_property
    def without_cp_comm_type(self) -> RunSpec:
        """This run without a context-parallel algorithm, as a cache key for what does not depend on
        it.
        """
        return replace(self, cp_comm_type="") if self.cp_comm_type else self

    @cached_property
    def one_layer_per_stage(self) -> RunSpec:
        """This run with one layer per stage and the smallest data parallelism that EP allows.

        The time and the stored bytes of one layer are computed from this run and cached. All other choices get fixed
        values: no virtual stages, sharding or offloading, and one micro batch per replica. So runs with equal layers
        share one cached result. If the original run fully recomputes any layer, this run recomputes all layers.
        """
        split, samples = self.parallelism, self.batch.micro_batch_size
        data = max(1, split.expert // split.context)
        single_stage_split = replace_cached(
            split, data=data, pipeline=self.shape.layers, virtual_stages=1, sharding=Sharding.NONE
        )
        return replace(
            self,
            parallelism=single_stage_split,
            batch=Batch(samples, samples * data),
            recompute=Recompute.FULL if self.recompute.is_full else self.recompute,
            stages=EVEN_SPLIT,
            offload=NO_OFFLOAD,
        )

    @cached_property
    def with_dense_layers(self) -> RunSpec:
        """This run with dense layers only."""
        return replace(self, shape=self.shape.without_experts)

    def count_dense_layers(self, pipeline_rank: int) -> tuple[int, int]:
        """Return the number of dense layers of a pipeline rank, and how many of these are fully
        recomputed.

        Dense layers are counted only in models that also have layers with experts. In each virtual stage the
        dense layers are assumed to come first.
        """
        if not self.shape.dense_layers:
            return 0, 0
        dense_per_chunk = self.dense_layers_per_chunk(pipeline_rank)
        layers_per_chunk = self.layers_per_chunk(pipeline_rank)
        num_recomputed = 0
        for dense, layers in zip(dense_per_chunk, layers_per_chunk, strict=True):
            # Layers are recomputed from the first layer of the virtual stage on.
            recomputed = sum(self.recompute.layers_per_checkpoint(layers))
            num_recomputed += min(dense, recomputed)
        return sum(dense_per_chunk), num_recomputed

    def uniform_stage_specs(self, pipeline_rank: int) -> tuple[RunSpec, ...]:
        """Return runs with equal stages, whose stages together have the layers of this pipeline rank.

        There is one run for the layers with experts and one for the dense layers. Each run recomputes as many of
        its layers per stage as this rank does. The communication inside layers is computed from these runs.
        """
        shape, is_block_method = self.shape, self.recompute.is_block_method
        has_unequal_layers = is_block_method or shape.mtp_layers or shape.dense_layers
        if self.stages == EVEN_SPLIT and not has_unequal_layers:
            return (self,)
        layers = self.num_layers_on_stage(pipeline_rank)
        recomputed = self.num_recomputed_layers(pipeline_rank)
        dense, recomputed_dense = self.count_dense_layers(pipeline_rank)
        specs = []
        if layers > dense:
            specs.append(self._build_even_spec(layers - dense, recomputed - recomputed_dense))
        if dense:
            specs.append(self.with_dense_layers._build_even_spec(dense, recomputed_dense))
        return tuple(specs)

    def _build_even_spec(self, layers: int, recomputed: int) -> RunSpec:
        """Return a run with `layers` layers of one kind on every stage.

        If the method of recomputation is `block`, `recomputed` of these layers are recomputed. Otherwise the number
        is ignored.
        """
        total_layers = layers * self.parallelism.pipeline
        shape = replace(self.shape, layers=total_layers, mtp_layers=0, dense_layers=())
        even_spec = replace(self, stages=EVEN_SPLIT, shape=shape)
        if not self.recompute.is_block_method:
            return even_spec
        recompute = Recompute.NONE
        if recomputed:
            recompute = Recompute(method="block", layers=recomputed)
        parallelism = replace(self.parallelism, virtual_stages=1)
        return replace(even_spec, parallelism=parallelism, recompute=recompute)

    @cached_property
    def mtp_joining_spec(self) -> RunSpec:
        """Run from which the costs of one joining block of multi-token prediction (MTP) are estimated.

        Every MTP layer begins with a block that joins hidden states and embedding. The model of the returned run
        consists of such blocks only, one per pipeline stage.
        """
        shape = replace(
            self.shape.with_only_block(MTP), layers=self.parallelism.pipeline, mtp_layers=0
        )
        return replace(self, stages=EVEN_SPLIT, shape=shape)

    @property
    def shares_embedding_across_stages(self) -> bool:
        """True if the first and the last of several stages both hold the embedding and add up its
        gradients.

        Both stages hold the embedding if it is tied. With multi-token prediction they also hold an untied one
        (`setup_embeddings_and_output_layer`). With one stage the value is False.
        """
        shared = self.trained_shape.tied_embeddings or bool(self.shape.mtp_layers)
        return shared and self.parallelism.pipeline > 1


@lru_cache(maxsize=4096)
def _on_stages(shape: ModelShape, stages: StageSplit, pipeline: int, virtual: int) -> RunSpec:
    """Return a minimal run with this shape on these stages; equal arguments give the same object."""
    split = Parallelism(pipeline=pipeline, virtual_stages=virtual)
    return RunSpec(shape, split, Batch(1, 1), stages=stages)


@lru_cache(maxsize=4096)
def _count_layers_per_chunk(
    stages: StageSplit, layers: int, selected_layers: frozenset[int], pipeline: int, virtual: int
) -> tuple[tuple[int, ...], ...]:
    """Return the number of selected layers in each virtual stage: one tuple per pipeline rank.

    Args:
        layers: Number of all layers.
        selected_layers: Indices, from 0, of the layers that count.
    """
    chunks_by_rank = [
        stages.layers_per_chunk(layers, pipeline, virtual, rank) for rank in range(pipeline)
    ]
    counts_by_rank: list[list[int]] = [[] for _ in range(pipeline)]
    first = 0  # The first layer of the current virtual stage.
    # The model's layers are dealt to the first virtual stage of all ranks, then to the second, and so on.
    for virtual_stage in range(virtual):
        for rank in range(pipeline):
            end = first + chunks_by_rank[rank][virtual_stage]
            num_selected = sum(first <= layer < end for layer in selected_layers)
            counts_by_rank[rank].append(num_selected)
            first = end
    return tuple(map(tuple, counts_by_rank))


def spec_from_model(model: Model, parallelism: Parallelism, batch: Batch) -> RunSpec:
    """Return the run of a model on GPUs, with the dtype, dropout and recomputation of the model's
    flags.
    """
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
    arguments: Sequence[str], devices: int, device: DeviceKind, model: str = ""
) -> RunSpec:
    """Return the run that Megatron trains with these flags on `devices` ranks.

    Args:
        arguments: All flags, including the flags of the model.
        devices: Number of ranks.
        device: Kind of the devices. On CPU, Megatron runs its own layers without Transformer Engine.
        model: Name of the model, for error sentences and for the result.

    Raises:
        ValueError: A flag that defines the shape is missing. The message names the flag.
        StrategyError: The product of the parallel sizes does not divide `devices`.
    """
    flags = Flags(arguments)
    parallelism = parallelism_from_flags(arguments, devices)
    # Without Transformer Engine, Megatron runs its own layers. Their attention stores scores on CPU
    # ranks and uses PyTorch's SDPA on GPUs. Under context parallelism they gather K and V
    # (megatron_patches/no_te).
    on_cpu = device is DeviceKind.CPU
    has_own_layers = on_cpu or flags.text("--transformer-impl") == "local"
    return RunSpec(
        **flags.fields("run"),
        shape=shape_from_flags(model, flags),
        parallelism=parallelism,
        batch=parse_batch(flags, parallelism.data),
        dtype=parse_dtype(flags),
        fp8_recipe=parse_fp8_recipe(flags),
        state_types=parse_state_types(flags),
        dropout=max(flags.number(f"--{kind}-dropout") for kind in ("hidden", "attention")),
        recompute=parse_recompute(flags),
        offload=parse_offload(flags),
        fused_attention=not on_cpu or parallelism.context > 1,
        fused_norms=not has_own_layers,
        cp_comm_type="all_gather" if has_own_layers else _parse_cp_comm_type(flags),
        stages=parse_stage_split(flags),
        token_dispatcher=parse_token_dispatcher(flags),
        expert_load=parse_expert_load(flags),
        device=device,
        model=model,
    )


def spec_from_printed_arguments(arguments: Mapping[str, str]) -> RunSpec | None:
    """Return the run whose arguments Megatron has printed in a log.

    The result is None if the arguments are incomplete or describe no possible run. The run is taken to have been
    started on GPUs and outside the kit.

    Args:
        arguments: Printed values by name, such as `num_layers`.
    """
    printed_flags = flags_from_printed_arguments(arguments)
    flags = Flags(printed_flags)
    degrees = flags.fields("parallelism")
    devices = flags.integer("--data-parallel-size", 1)
    devices *= degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    try:
        spec = spec_from_flags(
            printed_flags, flags.integer("--world-size", devices), DeviceKind.GPU
        )
    except (ValueError, ZeroDivisionError):
        return None
    # Outside the kit, Megatron runs without the kit's patches, so Megatron's own layers store the
    # scores on GPUs too.
    has_own_layers = flags.text("--transformer-impl") == "local"
    if has_own_layers and spec.parallelism.context == 1:
        return replace(spec, fused_attention=False)
    return spec


def flags_from_printed_arguments(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """Return Megatron's flags for the arguments that Megatron prints in its log.

    Args:
        arguments: Printed values by name, such as `num_layers`. Arguments that are None, False or empty give no
            flag.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if name == "add_bias_linear":
            if value == "False":
                flags.append("--disable-bias-linear")
            continue
        if name == "num_query_groups" and arguments.get("group_query_attention") != "True":
            # Megatron prints a number of groups without grouped queries, too.
            continue
        if name == "add_qkv_bias" and arguments.get("add_bias_linear") == "True":
            # Megatron sets the narrower flag, too, if all linear layers have a bias.
            continue
        if value in ("None", "False", ""):
            continue
        flags.append(_FLAG_BY_ARGUMENT.get(name, "--" + name.replace("_", "-")))
        if value != "True":
            flags.append(value)
    return tuple(flags)


_FLAG_BY_ARGUMENT = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
"""Flags of arguments whose name differs from the flag's (`dest` in `arguments.py`)."""


def flags_from_spec(spec: RunSpec) -> tuple[str, ...]:
    """Return Megatron's flags for a run. Flags of the model's shape and of the device are not included."""
    precision_flags = {
        "--attention-dropout": spec.dropout,
        "--hidden-dropout": spec.dropout,
        f"--{spec.dtype}": spec.dtype != "fp32",
    }
    return (
        *strategy_flags(spec.flagged_parallelism),
        *searched_flags(spec),
        *format_fields_as_flags(spec.batch, "batch"),
        *format_flags(precision_flags),
        *format_fields_as_flags(spec, "run"),
        *_state_flags(spec.state_types),
        *offload_flags(spec.offload),
    )


_OFFLOAD, _OFFLOADED = "--optimizer-cpu-offload", "--optimizer-offload-fraction"
_STATE_TYPES = ("fp32", "fp16", "bf16", "fp8")
_TYPES_BY_TORCH_NAME = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}
"""Types as a log prints them. fp8 moments are bytes with separate scales (`map_dtype`)."""


def _state_flags(types: StateTypes) -> tuple[str, ...]:
    """Return Megatron's flags for the types of gradients and optimizer state, and for the
    optimizer's offloading.

    The result is empty for the usual types.
    """
    if not types.precision_aware:
        return ("--grad-reduce-in-bf16",) if types.gradients == "bf16" else ()
    flags = format_fields_as_flags(types, "state_types")
    return (*flags, _OFFLOAD) if types.offloaded_fraction else flags


def parse_state_types(flags: Flags) -> StateTypes:
    """Return the types of gradients and optimizer state that the flags choose.

    Raises:
        ValueError: Megatron does not have a type, or refuses the offload.
    """
    stated = flags.fields("state_types")
    offloaded_fraction = stated.get("offloaded_fraction", 0.0)
    if not 0 <= offloaded_fraction <= 1:
        raise ValueError(
            f"{_OFFLOADED} {offloaded_fraction:g} is no fraction of the optimizer; use 0 to 1."
        )
    if offloaded_fraction and not stated["precision_aware"]:
        raise ValueError(f"{_OFFLOAD} needs --use-precision-aware-optimizer; add it.")
    for flag in flags_in_group("state_types"):
        if flag.kind != "text" or flag.field not in stated:
            continue
        torch_name = stated[flag.field].removeprefix("torch.")
        state_type = _TYPES_BY_TORCH_NAME.get(torch_name, torch_name)
        refuse_unknown(flag.name, [state_type], _STATE_TYPES)
        stated[flag.field] = state_type if state_type != "fp32" else ""
    if flags.has("--grad-reduce-in-bf16"):
        stated["gradients"] = "bf16"
    return StateTypes(**stated)


def searched_flags(spec: RunSpec) -> tuple[str, ...]:
    """Return Megatron's flags for the choices that a search makes besides the strategy.

    These are recomputation, the algorithm of context parallelism, and the placement of layers on stages.
    """
    # CPU ranks gather keys and values whatever algorithm the flag names, so they need no flag.
    has_algorithm = spec.parallelism.context > 1 and spec.device is DeviceKind.GPU
    # `p2p` is Megatron's default.
    needs_flag = has_algorithm and spec.cp_comm_type != "p2p"
    context_flags = ("--cp-comm-type", spec.cp_comm_type) if needs_flag else ()
    return (*recompute_flags(spec.recompute), *context_flags, *spec.stages.flags)


def adapt_to_cpu_ranks(spec: RunSpec) -> RunSpec:
    """Return the run as the kit trains it on CPU ranks: in fp32, with PyTorch's own kernels."""
    return replace(
        spec, dtype="fp32", fused_attention=False, fused_norms=False, device=DeviceKind.CPU
    )


_FP8_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
"""Megatron's recipes (`megatron/core/enums.py: Fp8Recipe`). A recipe that `Fp8Recipe` lacks is
planned as `tensorwise`.
"""


def parse_fp8_recipe(flags: Flags) -> Fp8Recipe:
    """Return the quantisation that the flags choose.

    Without `--fp8-format` and `--fp4-format` it is `Fp8Recipe.NONE`. A recipe of Megatron that the enum does not
    have counts as `TENSORWISE`.

    Raises:
        ValueError: Megatron does not have the recipe.
    """
    if flags.has("--fp4-format"):
        return Fp8Recipe.NVFP4
    if not flags.has("--fp8-format"):
        return Fp8Recipe.NONE
    recipe = flags.text("--fp8-recipe")
    refuse_unknown("--fp8-recipe", [recipe], _FP8_RECIPES)
    return Fp8Recipe(recipe) if recipe in set(Fp8Recipe) else Fp8Recipe.TENSORWISE


def _parse_cp_comm_type(flags: Flags) -> str:
    """Return context parallelism's algorithm in the flags; `p2p` for algorithms that the kit does
    not know.
    """
    value = flags.text("--cp-comm-type").strip("[]' ")
    return value if value in {"p2p", "all_gather", "a2a"} else "p2p"


def parse_token_dispatcher(flags: Flags) -> TokenDispatcher:
    """Return the token dispatcher that the flags choose.

    For the dispatcher `flex` the result is its backend. A value that the kit does not know gives `alltoall`.
    """
    value = flags.text("--moe-token-dispatcher-type")
    if value == "flex":
        value = flags.text("--moe-flex-dispatcher-backend")
    known = value in set(TokenDispatcher)
    return TokenDispatcher(value) if known else TokenDispatcher.ALL_TO_ALL

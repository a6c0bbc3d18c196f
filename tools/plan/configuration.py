"""One way to train one model: everything that memory, communication and time follow from."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.legality import microbatches, violations
from tools.plan.parameters import shape_as_run
from tools.spec.model import Model, ModelShape
from tools.spec.run import Recompute, Transport
from tools.spec.strategy import Batch, Parallelism

ALL_TO_ALL, ALL_GATHER = "alltoall", "allgather"
"""Ways in which tokens reach their experts (`--moe-token-dispatcher-type`)."""


@dataclass(frozen=True)
class Configuration:
    """A model, how it is split, and the choices that change bytes or time."""

    shape: ModelShape
    parallelism: Parallelism
    batch: Batch
    dtype: str = "bf16"
    """`fp16`, `bf16` or `fp32`."""
    dropout: float = 0.1
    recompute: Recompute = Recompute.NONE
    fused_attention: bool = True
    """Flash or cuDNN attention; without it the scores of every head are kept."""
    cp_comm_type: str = "p2p"
    transport: Transport = Transport.NCCL
    """What moves the bytes: gloo on CPU ranks."""
    token_dispatcher: str = ALL_TO_ALL

    @property
    def trained_shape(self) -> ModelShape:
        """The shape after what the strategy itself changes."""
        return shape_as_run(self.shape, self.parallelism)

    @property
    def microbatches(self) -> int:
        """Micro batches a rank runs in an iteration."""
        return microbatches(self.parallelism, self.batch)

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on one rank, before sequence parallelism splits them."""
        length = self.shape.seq_length // self.parallelism.context
        return length * self.batch.micro_batch_size

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or weight."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def sequence_shards(self) -> int:
        """Ranks over which sequence parallelism splits norms and dropouts."""
        return self.parallelism.tensor if self.parallelism.sequence_parallel else 1

    @property
    def layers_a_stage(self) -> int:
        """Layers on one pipeline rank, over its virtual stages."""
        return self.shape.layers // self.parallelism.pipeline

    def violations(self, model: str = "the model") -> tuple[str, ...]:
        """Why Megatron refuses it; see `legality.violations`."""
        return violations(
            self.shape,
            self.parallelism,
            self.batch,
            model=model,
            dtype=self.dtype,
            cp_comm_type=self.cp_comm_type,
        )


def configuration_of(model: Model, parallelism: Parallelism, batch: Batch) -> Configuration:
    """A model as its `.args` file has it: its dtype, its dropout, no recomputation."""
    flags = set(model.flags)
    recompute = Recompute.FULL if "full" in flags else Recompute.NONE
    return Configuration(
        shape=model.shape,
        parallelism=parallelism,
        batch=batch,
        dtype=model.dtype,
        dropout=model.dropout,
        recompute=recompute,
    )

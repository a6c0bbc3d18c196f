"""Megatron's options for experts that a search uses where they are possible: DeepEP and overlapped communication.

Both change the time and the memory of an iteration, but not what is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parakit.config.replacing import replace
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.costs import supports_deep_ep
from parakit.planner.time.cluster import Cluster

DEEP_EP_FLAGS = (
    *("--moe-token-dispatcher-type", "flex"),
    *("--moe-flex-dispatcher-backend", "deepep"),
)
OVERLAP_FLAG = "--overlap-moe-expert-parallel-comm"
_OVERLAPPING_DISPATCHERS = frozenset(
    {TokenDispatcher.ALL_TO_ALL, TokenDispatcher.DEEP_EP, TokenDispatcher.HYBRID_EP}
)


@dataclass(frozen=True)
class ExpertOptions:
    """Options for experts that a run has, or that a search may use."""

    deep_ep: bool = False
    """The token dispatcher is DeepEP."""
    overlap: bool = False
    """`--overlap-moe-expert-parallel-comm`."""

    def __bool__(self) -> bool:
        return self.deep_ep or self.overlap

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags of these options."""
        deep_ep_flags = DEEP_EP_FLAGS if self.deep_ep else ()
        return (*deep_ep_flags, OVERLAP_FLAG) if self.overlap else deep_ep_flags

    def apply_to_spec(self, spec: RunSpec) -> RunSpec:
        """Return the run with DeepEP as its token dispatcher, if these options have DeepEP."""
        return replace(spec, token_dispatcher=TokenDispatcher.DEEP_EP) if self.deep_ep else spec

    def apply_to_cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster with an execution that has these options in addition."""
        return _add_to_execution(self, cluster) if self else cluster


NO_EXPERT_OPTIONS = ExpertOptions()


@lru_cache(maxsize=64)
def _add_to_execution(options: ExpertOptions, cluster: Cluster) -> Cluster:
    """Return the cluster with an execution that has these options in addition."""
    switches = {}
    if options.deep_ep:
        switches["deduplicated"] = True
    if options.overlap:
        switches["overlap_experts"] = True
    return replace(cluster, execution=replace(cluster.execution, **switches))


def choose_expert_options(
    spec: RunSpec, allowed: ExpertOptions, may_interleave: bool = False
) -> ExpertOptions:
    """Return those of the allowed options that a run can have.

    Args:
        spec: The run.
        allowed: The options that a search may use.
        may_interleave: True if the run stands for runs with several virtual stages too.
    """
    if not allowed:
        return NO_EXPERT_OPTIONS
    has_hybrid_ep = spec.token_dispatcher is TokenDispatcher.HYBRID_EP
    deep_ep = allowed.deep_ep and supports_deep_ep(spec) and not has_hybrid_ep
    overlap = allowed.overlap and not explain_refused_overlap(spec, may_interleave)
    return ExpertOptions(deep_ep, overlap)


def explain_refused_overlap(spec: RunSpec, may_interleave: bool = False) -> str:
    """Return the reason why Megatron refuses overlapped communication of experts, as a sentence; empty if it does not.

    Source: `megatron/core/transformer/transformer_config.py` of core_v0.19.0, `TransformerConfig.__post_init__`.

    Args:
        spec: The run.
        may_interleave: True if the run stands for runs with several virtual stages too.
    """
    parallelism = spec.parallelism
    interleaves = may_interleave or parallelism.virtual_stages > 1
    if parallelism.expert == 1:
        return f"{OVERLAP_FLAG} needs expert parallelism; use EP 2 or more, or leave it out."
    if parallelism.pipeline > 1 and not interleaves:
        return (
            f"{OVERLAP_FLAG} needs virtual stages with PP {parallelism.pipeline}; use "
            f"vpp{parallelism.pipeline}, or leave it out."
        )
    if spec.token_dispatcher not in _OVERLAPPING_DISPATCHERS:
        return f"{OVERLAP_FLAG} needs --moe-token-dispatcher-type alltoall or flex; add it."
    if spec.recompute.is_full or "moe" in spec.recompute.modules:
        return f"{OVERLAP_FLAG} refuses to recompute full layers or moe; recompute other modules."
    if spec.dtype == "fp32":
        return f"{OVERLAP_FLAG} needs half precision; use --bf16."
    return ""

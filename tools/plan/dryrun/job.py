"""What a dry run is asked and what it answers; no torch here, both sides of the process share it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from tools.plan.constraints import violations
from tools.records.measurements import RankCommunication, RankMemory
from tools.spec.files import ROOT, read_args_file
from tools.spec.flags import merge_flags
from tools.spec.model import Model
from tools.spec.run import RunSpec, flags_of_spec
from tools.spec.strategy import Sharding

_HALF = ("--fp16", "--bf16")
_FSDP = (Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2)

_WITHOUT_DEVICES = (
    "--fake-process-group",
    "--disable-gloo-process-groups",
    *("--dataloader-type", "external"),
    *("--train-iters", "1"),
    *("--eval-iters", "0"),
    *("--tokenizer-type", "NullTokenizer"),
)
"""Megatron has the fake group as a flag of its own; `external` lets the data come from the dry run."""


class DryRunError(ValueError):
    """A dry run that cannot be, or that Megatron refused; the message says which and why."""


@dataclass(frozen=True)
class Job:
    """One rank of one world."""

    flags: tuple[str, ...]
    """Megatron's arguments."""
    world_size: int
    rank: int


@dataclass(frozen=True)
class RankReport:
    """What one rank built, called and held in one steady iteration."""

    rank: int
    parameters: int
    communication: RankCommunication
    memory: RankMemory
    in_flight: int
    """Micro batches (of a virtual stage, if there are several) held between forward and backward."""
    seconds: float
    """Wall time of the dry run itself, without imports."""
    process_bytes: int
    """Largest resident size of the process that made it."""


class Answer(msgspec.Struct, frozen=True):
    """A line that the dry run's process writes back: one of the two."""

    report: RankReport | None = None
    error: str = ""


def as_dry_run(spec: RunSpec) -> RunSpec:
    """The configuration that runs where Transformer Engine is not.

    Megatron's own attention keeps its scores; under context parallelism the kit's gathers K and V,
    which sends the ring's bytes in other calls.
    """
    return replace(spec, fused_attention=False, cp_comm_type="all_gather")


def check(spec: RunSpec) -> None:
    """Refuse what a dry run cannot show.

    Raises:
        DryRunError: One sentence for each reason.
    """
    parallelism = spec.parallelism
    problems = list(violations(as_dry_run(spec)))
    if parallelism.sharding in _FSDP:
        problems.append(
            f"{parallelism.sharding} keeps its weights in DTensors that the dry run cannot fake; use "
            "zero1 or no sharding here, and 'make plan' for its closed form."
        )
    if spec.cp_comm_type == "a2a" and parallelism.context > 1:
        problems.append(
            "All-to-all context parallelism needs Transformer Engine; dry-run p2p or all_gather, "
            "and take 'make plan' for its closed form."
        )
    if problems:
        raise DryRunError("\n".join(problems))


def flags_of(model: Model, spec: RunSpec) -> tuple[str, ...]:
    """Megatron's arguments for a configuration, as `make train-…` would give them to CPU ranks.

    Precision is the configuration's own, because it decides bytes.
    """
    shape = spec.shape
    training = read_args_file(ROOT / "examples" / model.family / "training.args")
    on_host = read_args_file(ROOT / "tools" / "launch" / "runtimes" / "cpu.args")
    return merge_flags(
        tuple(flag for flag in (*training, *model.flags) if flag not in _HALF),
        flags_of_spec(replace(spec, cp_comm_type="p2p")),
        on_host,
        ("--seq-length", str(shape.seq_length)),
        ("--max-position-embeddings", str(max(shape.positions, shape.seq_length))),
        ("--vocab-size", str(shape.vocabulary)),
        ("--make-vocab-size-divisible-by", str(shape.vocabulary_multiple)),
        _WITHOUT_DEVICES,
    )


def ranks_named(text: str, spec: RunSpec) -> tuple[int, ...]:
    """Global ranks from `first,middle,last` (of the pipeline's stages) or numbers.

    Raises:
        DryRunError: A word that is neither, or a rank outside the world.
    """
    world, pipeline = spec.parallelism.world_size, spec.parallelism.pipeline
    named = {"first": 0, "middle": pipeline // 2 * (world // pipeline), "last": world - 1}
    ranks = []
    for word in text.split(","):
        if word not in named and not word.isdecimal():
            raise DryRunError(f"There is no rank '{word}'; use first, middle, last or a number.")
        rank = named.get(word, -1) if word in named else int(word)
        if rank >= world:
            raise DryRunError(f"Rank {rank} is outside the world of {world}; use 0 to {world - 1}.")
        ranks.append(rank)
    return tuple(dict.fromkeys(ranks))


def pipeline_rank(spec: RunSpec, rank: int) -> int:
    """The pipeline stage of a global rank: PP is the outermost dimension of Megatron's order."""
    parallelism = spec.parallelism
    return rank // (parallelism.world_size // parallelism.pipeline)

"""Jobs of a dry run: which can be run, their flags, and the process `parakit.dryrun` that runs them.

No torch here: only that process loads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Self

import msgspec

from parakit.artifacts.dry_run import RankAnswer, RankJob, RankReport
from parakit.config import variables
from parakit.config.files import PACKAGE, PYTHON_PATH, ROOT, read_args_file
from parakit.config.flags import format_flags, merge_flags
from parakit.config.model import Model, merge_training_flags
from parakit.config.run import RunSpec, flags_from_spec
from parakit.costs import find_violations

_WITHOUT_DEVICES = format_flags(
    {
        "--fake-process-group": True,
        "--disable-gloo-process-groups": True,
        "--dataloader-type": "external",
        "--train-iters": 1,
        "--eval-iters": 0,
        "--tokenizer-type": "NullTokenizer",
    }
)
"""Megatron has the fake group as a flag of its own; `external` lets the data come from the dry run."""


class DryRunError(ValueError):
    """A dry run that cannot be, or that Megatron refused; the message says which and why."""


def drop_transformer_engine(spec: RunSpec) -> RunSpec:
    """The run as it is without Transformer Engine.

    Megatron's own attention keeps its scores. Under context parallelism the kit's gathers K and V,
    which sends the ring's bytes in other calls, and keeps no scores.
    """
    gathered = spec.parallelism.context > 1
    return replace(spec, fused_attention=gathered, fused_norms=False, cp_comm_type="all_gather")


def refuse_unsupported(spec: RunSpec) -> None:
    """Refuse what a dry run cannot show.

    Raises:
        DryRunError: One sentence for each reason.
    """
    parallelism = spec.parallelism
    problems = list(find_violations(drop_transformer_engine(spec)))
    if parallelism.sharding.wraps_modules:
        problems.append(
            f"{parallelism.sharding} keeps its weights in DTensors that the dry run cannot fake; use "
            "zero1 or no sharding here, and 'make plan' for its closed form."
        )
    if spec.cp_comm_type == "a2a" and parallelism.context > 1:
        problems.append(
            "All-to-all context parallelism needs Transformer Engine; dry-run p2p or all_gather, "
            "and take 'make plan' for its closed form."
        )
    if spec.fp8_recipe:
        problems.append(
            "Products in fewer bits are Transformer Engine's, which the dry run computes without; leave "
            "--fp8-format out here, and take 'make plan' for its closed form."
        )
    if problems:
        raise DryRunError("\n".join(problems))


def encode_flags(model: Model, spec: RunSpec) -> tuple[str, ...]:
    """Megatron's arguments for a run, as `make train-…` would give them to CPU ranks.

    Precision is the run's own, because it decides bytes.
    """
    shape = spec.shape
    on_host = read_args_file(PACKAGE / "launch" / "runtimes" / "cpu.args")
    return merge_flags(
        merge_training_flags(model, in_half=False),
        flags_from_spec(replace(spec, cp_comm_type="p2p")),
        on_host,
        ("--seq-length", str(shape.seq_length)),
        ("--max-position-embeddings", str(max(shape.positions, shape.seq_length))),
        ("--vocab-size", str(shape.vocabulary)),
        ("--make-vocab-size-divisible-by", str(shape.vocabulary_multiple)),
        _WITHOUT_DEVICES,
    )


def parse_ranks(text: str, spec: RunSpec) -> tuple[int, ...]:
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
        rank = named[word] if word in named else int(word)
        if rank >= world:
            raise DryRunError(f"Rank {rank} is outside the world of {world}; use 0 to {world - 1}.")
        ranks.append(rank)
    return tuple(dict.fromkeys(ranks))


_DIED = "its process ended without an answer; --verbose shows what it printed."
_ENVIRONMENT = {
    "PYTHONPATH": PYTHON_PATH,
    variables.DEVICE: "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # What Megatron asks for with TP, and no JIT: it would compile.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class DryRunner:
    """Runs jobs one after another in a process of its own, for as long as the `with` block."""

    def __init__(self, *, verbose: bool = False) -> None:
        """`verbose` lets Megatron's own lines through to stderr."""
        self._verbose = verbose

    def __enter__(self) -> Self:
        # What would start a real run's ledger or weights is not handed on.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KIT_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "parakit.dryrun"],
            cwd=ROOT,
            env={**kept, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._verbose else subprocess.DEVNULL,
        )
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Closing its input ends the process; after an error it may be in the middle of a job.
        if kind is not None:
            self._process.kill()
        self._process.communicate()

    def run(self, job: RankJob) -> RankReport:
        """One rank.

        Raises:
            DryRunError: Megatron refused or failed; the message is its last one.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        answer = msgspec.json.decode(line, type=RankAnswer) if line else RankAnswer(error=_DIED)
        if answer.report is None:
            raise DryRunError(f"The dry run of rank {job.rank} failed: {answer.error}")
        return answer.report

"""Jobs of a dry run: which runs are possible, their flags, and the process `parakit.dryrun` that runs them.

Only that process loads torch.
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
"""Flags of Megatron for a run without devices; `external` lets the dry run provide the data."""


class DryRunError(ValueError):
    """Error of a dry run that is not possible, or that Megatron refused; the message says why."""


def drop_transformer_engine(spec: RunSpec) -> RunSpec:
    """Return the spec of a run as Megatron runs it without Transformer Engine, which a dry run does not have.

    Megatron's own attention stores its scores for backward. Under context parallelism the kit's attention replaces
    Megatron's. The kit's attention stores no scores. It gathers K and V, which sends as many bytes as a ring.
    """
    has_context = spec.parallelism.context > 1
    return replace(spec, fused_attention=has_context, fused_norms=False, cp_comm_type="all_gather")


def refuse_unsupported(spec: RunSpec) -> None:
    """Raise an error if a dry run cannot run this run.

    Raises:
        DryRunError: The run cannot be dry-run. The message has one sentence per reason.
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
            "Products of 8 and 4 bits need Transformer Engine, which the dry run does not have; leave --fp8-format "
            "out, or use 'make plan', which computes these products in closed form."
        )
    if problems:
        raise DryRunError("\n".join(problems))


def encode_flags(model: Model, spec: RunSpec) -> tuple[str, ...]:
    """Return Megatron's arguments for a run, as `make train-…` would give them to CPU ranks.

    The dtype stays the dtype of the run, because the number of bytes depends on it.
    """
    shape = spec.shape
    cpu_flags = read_args_file(PACKAGE / "launch" / "runtimes" / "cpu.args")
    return merge_flags(
        merge_training_flags(model, in_half=False),
        flags_from_spec(replace(spec, cp_comm_type="p2p")),
        cpu_flags,
        ("--seq-length", str(shape.seq_length)),
        ("--max-position-embeddings", str(max(shape.positions, shape.seq_length))),
        ("--vocab-size", str(shape.vocabulary)),
        ("--make-vocab-size-divisible-by", str(shape.vocabulary_multiple)),
        _WITHOUT_DEVICES,
    )


def parse_ranks(text: str, spec: RunSpec) -> tuple[int, ...]:
    """Return the global ranks that a text such as `first,last` or `0,7` names, each once, in the text's order.

    `first` is rank 0, `middle` is the first rank of the middle pipeline stage, and `last` is the last rank.

    Raises:
        DryRunError: A part of the text is neither a name nor a number, or a rank is outside the world.
    """
    world, pipeline = spec.parallelism.world_size, spec.parallelism.pipeline
    rank_by_name = {"first": 0, "middle": pipeline // 2 * (world // pipeline), "last": world - 1}
    ranks = []
    for part in text.split(","):
        if part not in rank_by_name and not part.isdecimal():
            raise DryRunError(f"There is no rank '{part}'; use first, middle, last or a number.")
        rank = rank_by_name[part] if part in rank_by_name else int(part)
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
    # Megatron asks for one connection with tensor parallelism. A JIT would compile kernels that nobody runs.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class DryRunner:
    """Process that runs dry-run jobs one after another. It ends with the `with` block."""

    def __init__(self, *, verbose: bool = False) -> None:
        """Create a runner; `verbose` prints Megatron's own lines to stderr."""
        self._verbose = verbose

    def __enter__(self) -> Self:
        # Variables of the kit would start a real run's communication log or load its weights.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("KIT_")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "parakit.dryrun"],
            cwd=ROOT,
            env={**inherited, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._verbose else subprocess.DEVNULL,
        )
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Closing its input ends the process, unless an error left it in the middle of a job.
        if kind is not None:
            self._process.kill()
        self._process.communicate()

    def run(self, job: RankJob) -> RankReport:
        """Run one rank and return its report.

        Raises:
            DryRunError: Megatron refused the job or failed. The message has Megatron's error.
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

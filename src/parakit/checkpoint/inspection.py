"""Inspect a checkpoint: describe it, find its faults, judge a strategy, compare it with another checkpoint.

The result, `CheckpointInspection`, is what `make inspect` prints and what `parakit.inspect_checkpoint` returns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.artifacts.torch_dist import DamagedCheckpointError
from parakit.checkpoint.checks import (
    CheckCoverage,
    LoadVerdict,
    describe_coverage,
    find_problems,
    judge_loading,
)
from parakit.checkpoint.contents import Contents, read_contents, tensor_kind
from parakit.config.strategy import strategy_name
from parakit.formatting.presented import PresentedTable
from parakit.formatting.terminal import say
from parakit.formatting.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from parakit.checkpoint.compare import TensorRelation


@dataclass(frozen=True, repr=False)
class CheckpointInspection(PresentedTable):
    """Result of an inspection: contents and faults of a checkpoint, a verdict on loading, and a comparison."""

    contents: Contents
    problems: tuple[str, ...]
    """A sentence for each fault of the checkpoint; empty if no fault was found."""
    coverage: CheckCoverage
    strategy: str | None = None
    """The strategy that `loading` judges."""
    loading: LoadVerdict | None = None
    """Whether `strategy` can load the checkpoint; None without a strategy."""
    relations: tuple[TensorRelation, ...] | None = None
    """The relation of each tensor to that of the other checkpoint.

    None if nothing was compared; empty if `other_problems` prevented the comparison.
    """
    other_problems: tuple[str, ...] = ()
    """A sentence for each reason why the comparison could not be made; empty without one."""

    @property
    def is_as_wanted(self) -> bool:
        """True if there is no fault, the strategy loads the checkpoint, and both checkpoints are one model."""
        is_same_model = all(relation.is_same for relation in self.relations or ())
        is_loadable = self.loading is None or self.loading.verdict.startswith("loads")
        has_problems = bool(self.problems or self.other_problems)
        return not has_problems and is_same_model and is_loadable

    @property
    def text(self) -> str:
        """Lines for a terminal: format, arguments, tensors by module, loading and comparison."""
        contents = self.contents
        lines = [*_describe_header(contents), *_describe_modules(contents)]
        num_optimizer_tensors = len(contents.stored.tensors) - len(contents.weights)
        lines.append(f"and {num_optimizer_tensors} tensors of the optimizer")
        if self.loading:
            lines += _describe_loading(self.loading)
        if self.relations:
            lines += _describe_relations(self.relations)
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print the text, then the problems; without problems, the parts that were checked."""
        say(console, self.text)
        problems = (*self.problems, *self.other_problems)
        for sentence in problems or (self.coverage.sentences,):
            say(console, sentence)

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as `parakit inspect --json` prints it."""
        description = _contents_to_dict(self.contents, self.problems) | asdict(self.coverage)
        if self.loading:
            description["loading"] = {"strategy": self.strategy, **asdict(self.loading)}
        if self.relations is not None:
            description["comparison"] = [asdict(relation) for relation in self.relations]
        return description

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return a row per tensor: name, shape, dtype and kind."""
        rows: Sequence[Mapping[str, Any]] = self.to_dict()["tensors"]
        return rows


def inspect_folder(
    folder: Path, *, compare: Path | None = None, strategy: str | None = None, verify: bool = False
) -> CheckpointInspection:
    """Inspect a checkpoint, and compare it with another checkpoint if both have no fault.

    Args:
        folder: A checkpoint's folder, or a folder that holds checkpoints or a run.
        compare: The other checkpoint; None compares nothing.
        strategy: A strategy to judge: can it load the checkpoint? None judges nothing.
        verify: True to read every piece and compare it with its checksum.

    Raises:
        ValueError: A folder holds no checkpoint, or a checkpoint of a format that the kit does not read.
    """
    contents = read_contents(folder)
    problems = find_problems(contents, verify)
    load_verdict = judge_loading(contents, strategy) if strategy else None
    coverage = describe_coverage(contents, verify)
    if compare is None or problems:
        return CheckpointInspection(contents, problems, coverage, strategy, load_verdict)
    from parakit.checkpoint.compare import compare_weights

    other = read_contents(compare)
    other_problems = tuple(f"COMPARE={compare}: {flaw}" for flaw in find_problems(other, verify))
    relations: list[TensorRelation] = []
    if not other_problems:
        try:
            relations = compare_weights(contents, other)
        except DamagedCheckpointError as error:
            other_problems = (f"{error}; copy the file again from where the checkpoint was saved.",)
    return CheckpointInspection(
        contents,
        problems,
        coverage,
        strategy,
        load_verdict,
        relations=tuple(relations),
        other_problems=other_problems,
    )


def _contents_to_dict(contents: Contents, problems: tuple[str, ...]) -> dict[str, Any]:
    """Return the description of a checkpoint with the keys of `parakit inspect --json`."""
    spec = contents.spec
    return {
        "format": contents.format,
        "iteration": contents.iteration,
        "layout": strategy_name(spec.parallelism) if spec else None,
        "parameters": contents.parameters,
        "states": contents.states,
        "arguments": dict(contents.arguments),
        "tensors": [
            {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "kind": tensor_kind(name)}
            for name, tensor in sorted(contents.stored.tensors.items())
        ],
        "problems": problems,
    }


def _describe_header(contents: Contents) -> list[str]:
    """Return the lines before the tensors: folder, format, states and arguments."""
    iteration = "" if contents.iteration is None else f", iteration {contents.iteration}"
    saved_by = f", saved by {strategy_name(contents.spec.parallelism)}" if contents.spec else ""
    lines = [
        f"{contents.folder}: {contents.format}{iteration}{saved_by}, {contents.parameters:,} parameters",
        f"States: {', '.join(contents.states) or 'none'}",
    ]
    if spec := contents.spec:
        shape = spec.shape
        lines.append(
            f"Arguments: {len(contents.arguments)} (JSON=1 prints them), of a model with "
            f"{plural(shape.layers, 'layer')}, width {shape.hidden}, {plural(shape.heads, 'head')}"
        )
    return lines


def _describe_modules(contents: Contents) -> list[str]:
    """Return a line per module, each followed by a line per weight of the module."""
    modules = defaultdict[str, list[str]](list)
    for name, weight in contents.weights.items():
        module, _, parameter = name.rpartition(".")
        modules[module].append(f"  {parameter} {list(weight.shape)} {weight.dtype}")
    return [line for module, tensors in modules.items() for line in (module, *tensors)]


def _describe_loading(loading: LoadVerdict) -> list[str]:
    """Return a line with the verdict and the flags that loading needs, and a line per reason."""
    flags = f" with {' '.join(loading.flags)}" if loading.flags else ""
    reasons = (reason[0].upper() + reason[1:] for reason in loading.reasons)
    return [f"Under that strategy: {loading.verdict}{flags}.", *reasons]


def _describe_relations(relations: Sequence[TensorRelation]) -> list[str]:
    """Return a line per tensor, and a last line that counts the relations."""
    lines = [f"{tensor.name}: {tensor.relation} {tensor.detail}".rstrip() for tensor in relations]
    counts = Counter(tensor.relation for tensor in relations).most_common()
    counted = ", ".join(f"{number} {relation}" for relation, number in counts)
    return [*lines, f"Of {len(relations)} tensors {counted}."]

"""The value that `inspect` prints and that `parakit.inspect_checkpoint` returns."""

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
    """Contents and faults of a checkpoint, what can load it, and how another checkpoint differs."""

    contents: Contents
    problems: tuple[str, ...]
    """A sentence for each fault of the checkpoint; empty if no fault was found."""
    coverage: CheckCoverage
    strategy: str | None = None
    """The strategy of which `loading` says whether it loads the checkpoint."""
    loading: LoadVerdict | None = None
    relations: tuple[TensorRelation, ...] | None = None
    """How each tensor differs from that of the other checkpoint; None if nothing was compared."""
    other_problems: tuple[str, ...] = ()
    """A sentence for each reason why the comparison could not be made; empty without one."""

    @property
    def is_as_wanted(self) -> bool:
        """True if no fault was found, the strategy loads the checkpoint and the two are one model."""
        same = all(relation.is_same for relation in self.relations or ())
        loads = self.loading is None or self.loading.verdict.startswith("loads")
        return not self.problems and not self.other_problems and same and loads

    @property
    def text(self) -> str:
        """Lines for a terminal: format, arguments, tensors by module, loading and comparison."""
        contents = self.contents
        lines = [*_header(contents), *_modules(contents)]
        moments = len(contents.stored.tensors) - len(contents.weights)
        lines.append(f"and {moments} tensors of the optimizer")
        if self.loading:
            flags = f" with {' '.join(self.loading.flags)}" if self.loading.flags else ""
            reasons = (reason[0].upper() + reason[1:] for reason in self.loading.reasons)
            lines += [f"Under that strategy: {self.loading.verdict}{flags}.", *reasons]
        relations = self.relations or ()
        lines += [
            f"{tensor.name}: {tensor.relation} {tensor.detail}".rstrip() for tensor in relations
        ]
        if relations:
            counts = Counter(tensor.relation for tensor in relations).most_common()
            kinds = ", ".join(f"{number} {relation}" for relation, number in counts)
            lines.append(f"Of {len(relations)} tensors {kinds}.")
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print the text, then the problems, or what was checked if there are none."""
        say(console, self.text)
        problems = (*self.problems, *self.other_problems)
        for line in problems or (self.coverage.sentences,):
            say(console, line)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit inspect --json` prints."""
        description = _describe(self.contents, self.problems) | asdict(self.coverage)
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
    """Read a checkpoint, and compare it with another one if it has no fault itself.

    Args:
        folder: A checkpoint's folder, or one that holds checkpoints or a run.
        compare: The other checkpoint.
        strategy: A strategy of which it is said whether it loads the checkpoint.
        verify: Whether every piece is read and compared with its checksum.

    Raises:
        ValueError: A folder is no checkpoint, or of a format that is not read; one sentence.
    """
    contents = read_contents(folder)
    problems = find_problems(contents, verify)
    loads = judge_loading(contents, strategy) if strategy else None
    coverage = describe_coverage(contents, verify)
    if compare is None or problems:
        return CheckpointInspection(contents, problems, coverage, strategy, loads)
    from parakit.checkpoint.compare import compare_weights

    other = read_contents(compare)
    flaws = tuple(f"COMPARE={compare}: {flaw}" for flaw in find_problems(other, verify))
    relations: list[TensorRelation] = []
    try:
        relations = [] if flaws else compare_weights(contents, other)
    except DamagedCheckpointError as error:
        flaws = (f"{error}; copy the file again from where the checkpoint was saved.",)
    return CheckpointInspection(
        contents, problems, coverage, strategy, loads, tuple(relations), flaws
    )


def _describe(contents: Contents, problems: tuple[str, ...]) -> dict[str, Any]:
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


def _header(contents: Contents) -> list[str]:
    """Return the lines before the tensors: folder, format, states and arguments."""
    at = "" if contents.iteration is None else f", iteration {contents.iteration}"
    saved_by = f", saved by {strategy_name(contents.spec.parallelism)}" if contents.spec else ""
    lines = [
        f"{contents.folder}: {contents.format}{at}{saved_by}, {contents.parameters:,} parameters",
        f"States: {', '.join(contents.states) or 'none'}",
    ]
    if spec := contents.spec:
        shape = spec.shape
        lines.append(
            f"Arguments: {len(contents.arguments)} (JSON=1 prints them), of a model with "
            f"{plural(shape.layers, 'layer')}, width {shape.hidden}, {plural(shape.heads, 'head')}"
        )
    return lines


def _modules(contents: Contents) -> list[str]:
    """Return a line per module, and below it a line per weight."""
    modules = defaultdict[str, list[str]](list)
    for name, weight in contents.weights.items():
        module, _, parameter = name.rpartition(".")
        modules[module].append(f"  {parameter} {list(weight.shape)} {weight.dtype}")
    return [line for module, tensors in modules.items() for line in (module, *tensors)]

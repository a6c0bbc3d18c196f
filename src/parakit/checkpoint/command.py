"""`make inspect`: what is in a checkpoint, whether a strategy loads it, whether two are one model."""

from __future__ import annotations

import json as texts
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parakit.artifacts.torch_dist import DamagedCheckpointError
from parakit.checkpoint.checks import Loading, coverage_of, loading, problems_of
from parakit.checkpoint.contents import Contents, kind_of, read_contents
from parakit.config.files import ROOT
from parakit.config.strategy import strategy_name
from parakit.formatting.units import plural

if TYPE_CHECKING:
    from parakit.checkpoint.compare import TensorRelation


def inspect_command(
    ckpt: str, compare: str | None, strategy: str | None, verify: bool, json: bool = False
) -> int:
    """Print it; 1 if something is wrong with it, the strategy cannot load it, or the two differ.

    Raises:
        ValueError: It is no checkpoint, or of a format that is not read; one sentence.
    """
    contents = read_contents(ROOT / Path(ckpt).expanduser())
    problems = problems_of(contents, verify)
    verdict = loading(contents, strategy) if strategy else None
    coverage = coverage_of(contents, verify)
    description = described(contents, problems) | asdict(coverage)
    if verdict:
        description["loading"] = {"strategy": strategy, **asdict(verdict)}
    pairs: list[TensorRelation] = []
    if compare and not problems:
        from parakit.checkpoint.compare import compare_weights

        other = read_contents(ROOT / Path(compare).expanduser())
        problems = tuple(f"COMPARE={compare}: {flaw}" for flaw in problems_of(other, verify))
        try:
            pairs = [] if problems else compare_weights(contents, other)
        except DamagedCheckpointError as error:
            problems = (f"{error}; copy the file again from where the checkpoint was saved.",)
        description["comparison"] = list(map(asdict, pairs))
    print(texts.dumps(description, indent=2) if json else _text(contents, verdict, pairs))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems and not json:
        print(coverage.sentences)
    if compare and problems:
        print("Nothing was compared: both checkpoints must be whole.", file=sys.stderr)
    same = all(pair.is_same for pair in pairs)
    return 1 if problems or not same or (verdict and not verdict.verdict.startswith("loads")) else 0


def described(contents: Contents, problems: tuple[str, ...]) -> dict[str, object]:
    """What `JSON=1` prints of one checkpoint."""
    spec = contents.spec
    return {
        "format": contents.format,
        "iteration": contents.iteration,
        "layout": strategy_name(spec.parallelism) if spec else None,
        "parameters": contents.parameters,
        "states": contents.states,
        "arguments": dict(contents.arguments),
        "tensors": [
            {"name": name, "shape": one.shape, "dtype": one.dtype, "kind": kind_of(name)}
            for name, one in sorted(contents.stored.tensors.items())
        ],
        "problems": problems,
    }


def _text(
    contents: Contents,
    verdict: Loading | None,
    pairs: Sequence[TensorRelation],
) -> str:
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
    modules = defaultdict[str, list[str]](list)
    for name, weight in contents.weights.items():
        module, _, own = name.rpartition(".")
        modules[module].append(f"  {own} {list(weight.shape)} {weight.dtype}")
    for module, tensors in modules.items():
        lines += [module, *tensors]
    moments = len(contents.stored.tensors) - len(contents.weights)
    lines.append(f"and {moments} tensors of the optimizer")
    if verdict:
        flags = f" with {' '.join(verdict.flags)}" if verdict.flags else ""
        reasons = (reason[0].upper() + reason[1:] for reason in verdict.reasons)
        lines += [f"Under that strategy: {verdict.verdict}{flags}.", *reasons]
    lines += [f"{one.name}: {one.relation} {one.detail}".rstrip() for one in pairs]
    counts = Counter(one.relation for one in pairs).most_common()
    if pairs:
        lines.append(f"Of {len(pairs)} tensors {', '.join(f'{n} {what}' for what, n in counts)}.")
    return "\n".join(lines)

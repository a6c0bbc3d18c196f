"""`make bench-verify`: every plant must be found where it is, and no healthy layout be called wrong.

    python -m tests.verify.bench [plants | resumed | live | healthy] [--only ID …] [--seeds N]
    python -m tests.verify.bench healthy --matrix docs/parity-matrix.md

Verifies with the real thing (Megatron on CPU ranks, the capture, `tools.verify`), on ranks that are
forked from one process, so that a verification takes seconds. Prints the tables of the package's README.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tests.verify.forked import ForkedRanks
from tests.verify.plants.check import FOLDER, Plant, plants
from tools.launch.compose import Launch
from tools.launch.options import Options, read_plant
from tools.launch.pairs import Difference, compose_verification
from tools.launch.start import ensure_start_checkpoint
from tools.launch.verify import judged
from tools.records.verdict import Outcome
from tools.spec.files import ROOT, read_yaml
from tools.verify.findings import Finding, Judged, findings
from tools.verify.verdict import Judgement

HEALTHY = Path(__file__).with_name("healthy.yaml")


@dataclass
class Bench:
    """Verifies layouts, one after another; a reference is trained once for all that share it."""

    data: str
    folder: Path
    ranks: ForkedRanks

    def verify(
        self,
        strategy: str,
        model: str,
        devices: int,
        flags: Sequence[str] = (),
        plant: Path | None = None,
        seed: int = 1234,
        iteration: int | None = 2,
        difference: Difference | None = None,
        both: bool = False,
    ) -> Judgement:
        """Verify a layout; a plant is in the layout alone, as `check.py` shows that it may be.

        With `both` it is in the reference as well.
        """
        options = Options(
            runs=self.folder,
            data=self.data,
            extra=tuple(flags),
            seed=seed,
            iterations=iteration,
            plant=read_plant(str(plant)) if plant else None,
        )
        name = f"verify-{strategy}-{model}-{devices}cpu"
        verification = compose_verification(name, options, difference or Difference())
        reference = replace(verification.reference, warm=self.ranks.warm)
        ensure_start_checkpoint(reference, options, Console(file=sys.stderr))
        batch = reference.spec.batch.global_batch_size
        words = "_".join(
            (
                verification.reference_name,
                model,
                str(batch),
                str(seed),
                str(verification.iteration),
                *flags,
            )
        )
        words += f"_{plant.stem}" if plant and both else ""
        kept = self.folder / "references" / words.replace("/", "_").replace(" ", "_")
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            training = _Training(self.ranks, kept, Path(scratch), both)
            return judged(verification, Path(scratch), training)


@dataclass(frozen=True)
class _Training:
    ranks: ForkedRanks
    kept: Path
    scratch: Path
    planted: bool = False
    """Whether the reference keeps the plant."""

    def __call__(self, part: str, launch: Launch) -> str:
        log = self.kept.with_name(f"{self.kept.name}.{part}.txt")
        if not part.startswith("reference"):
            return self.ranks.run(launch, log)
        # Of an earlier iteration its number follows.
        kept = self.kept.with_name(f"{self.kept.name}{part.removeprefix('reference')}")
        if not kept.is_dir():
            launch = launch if self.planted else _without_plant(launch)
            if failure := self.ranks.run(launch, log):
                return failure
            shutil.move(self.scratch / part, kept)
        (self.scratch / part).symlink_to(kept)
        return ""


def _without_plant(launch: Launch) -> Launch:
    kept = {name: value for name, value in launch.environment.items() if "PLANT" not in name}
    return replace(launch, environment=kept)


@dataclass(frozen=True)
class Row:
    """A plant's line of the table."""

    plant: Plant
    judgement: Judgement
    seconds: float

    @property
    def found(self) -> bool:
        """Whether stage and module are those that the plant has."""
        verdict = self.judgement.verdict
        if not self.plant.stage:
            return verdict.verdict is Outcome.HELD
        return (verdict.stage, verdict.module) == (self.plant.stage, self.plant.module)

    def line(self) -> str:
        """As Markdown."""
        verdict, first = self.judgement.verdict, self.judgement.first
        if verdict.verdict is Outcome.NOT_COMPARABLE:
            return f"| {self.plant.id} | not comparable: {verdict.reason} |"
        caught = "yes" if self.found else f"**no** ({self.plant.stage}, {self.plant.module})"
        ratio = f"{first.ratio:.2g}" if first else f"{verdict.worst_ratio or 0:.2g}"
        layout = " ".join((self.plant.strategy, self.plant.model, self.plant.dtype))
        return (
            f"| {self.plant.id} | {self.plant.catalogue} | {layout} | {caught} | "
            f"{verdict.stage or 'held'} | `{verdict.module or ''}` | {verdict.kind or ''} | {ratio} | "
            f"{self.seconds:.0f} |"
        )


PLANTS_HEAD = (
    "| plant | catalogue | layout | found | stage | module | kind | error/tolerance | s |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
HEALTHY_HEAD = (
    "| layout | model | flags | seed | verdict | error/tolerance | compared | s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def verify_plants(bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """Verify each plant's layout."""
    for plant in plants():
        if only and plant.id not in only:
            continue
        began = time.monotonic()
        judgement = bench.verify(
            plant.strategy,
            plant.model,
            plant.devices,
            plant.flags,
            plant.path,
            iteration=plant.step,
            difference=Difference(reference=plant.reference, flags=plant.own_flags),
            both=plant.both,
        )
        yield Row(plant, judgement, time.monotonic() - began)


def verify_resumed(bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """Verify the resumed runs that have a plant."""
    for entry in read_yaml(FOLDER / "resumed.yaml"):
        resumed = entry.pop("resumed_from", "")
        plant = Plant(**entry)
        if only and plant.id not in only:
            continue
        began = time.monotonic()
        difference = Difference(flags=plant.own_flags, resumed_from=resumed)
        judgement = bench.verify(
            *(plant.strategy, plant.model, plant.devices, plant.flags, plant.path),
            iteration=None,
            difference=difference,
        )
        yield Row(plant, judgement, time.monotonic() - began)


def verify_live(bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """Verify unmodified Megatron where it is known to be wrong, and cured, where it must hold."""
    for finding in findings():
        if finding.verdict is not Judged.REPRODUCED or (only and finding.id not in only):
            continue
        for patch, stated in ((finding.shown_with, True), (finding.patch, False)):
            began = time.monotonic()
            judgement = bench.verify(
                *(finding.layouts[0], finding.model, finding.devices, finding.flags, patch),
                iteration=None,
                difference=Difference(reference=finding.reference, flags=finding.own_flags),
                both=True,
            )
            yield Row(_of_finding(finding, stated), judgement, time.monotonic() - began)


def _of_finding(finding: Finding, stated: bool) -> Plant:
    """As a row of the table: what is to be found, or that nothing is once it is cured."""
    return Plant(
        id=finding.id if stated else f"{finding.id}, cured",
        file="",
        catalogue=finding.thread or "new",
        strategy=finding.layouts[0],
        model=finding.model,
        stage=finding.stage or "" if stated else "",
        module=finding.module if stated else "",
        kind=finding.kind if stated else "",
        devices=finding.devices,
    )


def verify_healthy(bench: Bench, only: Sequence[str], seeds: int) -> Iterator[tuple[str, bool]]:
    """Verify every healthy combination of layout, features and dtype: a line, and whether it held."""
    for group in read_yaml(HEALTHY):
        for strategy in group["strategies"]:
            for number in range(seeds):
                name, seed = f"{strategy}-{group['model']}", 1234 + number
                if only and name not in only:
                    continue
                began = time.monotonic()
                flags = group.get("flags", "").split()
                devices = group.get("devices", 2)
                difference = Difference(
                    reference=group.get("reference", ""),
                    flags=tuple(group.get("extra_b", "").split()),
                )
                judgement = bench.verify(
                    strategy,
                    group["model"],
                    devices,
                    flags,
                    seed=seed,
                    iteration=group.get("step", 2),
                    difference=difference,
                )
                verdict = judgement.verdict
                said = verdict.verdict if verdict.reason is None else verdict.reason
                if verdict.verdict is Outcome.DIFFERS:
                    said = f"**differs**: {verdict.stage}, {verdict.module}, {verdict.kind}"
                layout = strategy
                if difference.reference:
                    layout = f"{strategy} against {difference.reference}"
                features = " ".join((*flags, *difference.flags))
                yield (
                    f"| {layout} | {group['model']} | {features} | {seed} | {said} | "
                    f"{verdict.worst_ratio or 0:.2f} | {verdict.compared} of {verdict.seen} | "
                    f"{time.monotonic() - began:.0f} |",
                    verdict.verdict is Outcome.HELD,
                )


MATRIX_HEAD = """# Parity matrix

Which model features are numerically right under which layouts, by `make verify-…` on CPU ranks:
every tensor of a training step against one rank's (or the named layout's), with tolerances that the
reference measures ([verify](../tools/verify/README.md)). A number is the largest error over its
tolerance, of all seeds; a dash has not been tried.

Made by `.venv/bin/python -m tests.verify.bench healthy --matrix docs/parity-matrix.md`:
megatron-core {version}, {date}.
"""


def matrix(lines: Sequence[str]) -> str:
    """The lines of healthy layouts as one table a model: features by layouts."""
    cells: dict[str, dict[str, dict[str, list[tuple[str, float]]]]] = {}
    for line in lines:
        layout, model, flags, _, said, ratio, *_ = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        feature = f"`{flags}`" if flags else "as it is"
        found = cells.setdefault(model, {}).setdefault(feature, {})
        found.setdefault(layout, []).append((said, float(ratio)))
    return "\n".join(_matrix_of(model, features) for model, features in cells.items())


def _matrix_of(model: str, features: dict[str, dict[str, list[tuple[str, float]]]]) -> str:
    layouts = list(dict.fromkeys(layout for row in features.values() for layout in row))
    lines = [f"\n## {model}\n", f"| flags | {' | '.join(layouts)} |"]
    lines.append(f"|---|{'---|' * len(layouts)}")
    for feature, row in features.items():
        texts = [_cell(row[layout]) if layout in row else "–" for layout in layouts]
        lines.append(f"| {feature} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _cell(seeds: Sequence[tuple[str, float]]) -> str:
    wrong = next((said for said, _ in seeds if said != Outcome.HELD), "")
    return wrong or f"held {max(ratio for _, ratio in seeds):.2f}"


def main() -> int:
    """Print the tables; 1 if a plant was not found, or a healthy layout called wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", choices=("plants", "resumed", "live", "healthy", "all"), nargs="?", default="all"
    )
    parser.add_argument("--only", nargs="*", default=(), help="ids of plants, or strategy-model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="keeps logs and references (else a temporary one)"
    )
    parser.add_argument("--matrix", type=Path, help="writes the healthy layouts to this page too")
    parser.add_argument("--data", default="owt-ds/sample_text_document")
    given = parser.parse_args()
    missed = 0
    (ROOT / "runs").mkdir(exist_ok=True)
    with ExitStack() as around:
        temporary = tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".bench-verify-")
        folder = given.folder or Path(around.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        ranks = around.enter_context(closing(ForkedRanks()))
        bench = Bench(given.data, folder.resolve(), ranks)
        tables = {
            "plants": verify_plants(bench, given.only),
            "resumed": verify_resumed(bench, given.only),
            "live": verify_live(bench, given.only),
        }
        for what, rows in tables.items():
            if given.what in (what, "all"):
                print(PLANTS_HEAD)
                for row in rows:
                    print(row.line(), flush=True)
                    missed += not row.found
        if given.what in ("healthy", "all"):
            print(HEALTHY_HEAD)
            lines = []
            for line, held in verify_healthy(bench, given.only, given.seeds):
                print(line, flush=True)
                lines.append(line)
                missed += not held
            if given.matrix:
                head = MATRIX_HEAD.format(version=version("megatron-core"), date=date.today())
                given.matrix.write_text(f"{head}{matrix(lines)}\n")
    print(f"{missed} wrong")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

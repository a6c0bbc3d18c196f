"""What a finding does to a training, for its `effect:` in `docs/upstream/findings.yaml`.

    python -m tests.verify.effect [ID …] [--iterations 100]

Trains one rank and the finding's strategy, both as they are and with the patch, from the same weights on
the same batches, and compares the loss of the last iteration and all weights after it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from parakit.artifacts.capture import CaptureStage
from parakit.config import variables
from parakit.config.files import ROOT
from parakit.config.strategy import parse_strategy
from parakit.experiments.verify.pairs import LaunchPair, Verification, compose_pair
from parakit.experiments.verify.verifier import ForkedRanks, read_losses
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, read_patch_file
from parakit.verify.captured import Array, assemble_parameter, group_parameter_parts, read_capture
from parakit.verify.findings import Effect, Finding, FindingStatus, list_findings

_Weights = dict[tuple[object, ...], Array]


@dataclass(frozen=True)
class _Trainer:
    ranks: ForkedRanks
    data: str
    folder: Path

    def effect(self, finding: Finding, iterations: int) -> Effect:
        """Measure it.

        Raises:
            RuntimeError: A run failed; its log is named.
        """
        started, _ = self._trained(self._composed(finding, None, 1).reference, 1)
        as_it_is, cured = (
            self._composed(finding, patch, iterations)
            for patch in (finding.shown_with, finding.patch)
        )
        references = [as_it_is.reference]
        # A bug of strategies leaves one rank as it is; one of micro batches is in both.
        references += [cured.reference] if finding.devices == 1 else []
        truths = [self._trained(launch, iterations) for launch in references]
        measured = []
        for pair, (reference, loss) in zip((as_it_is, cured), truths * 2, strict=False):
            weights, other = self._trained(pair.strategy, iterations)
            moved = _distance(reference, started)
            measured += [abs(other - loss) / loss, _distance(weights, reference) / moved]
        return Effect(iterations, *(float(f"{value:.1e}") for value in measured))

    def _composed(self, finding: Finding, patch: Path | None, iterations: int) -> Verification:
        layout = parse_strategy(finding.strategies[0], finding.devices)
        options = Options(
            runs=self.folder,
            # As small as shows it: two micro batches a rank.
            micro_batch_size=2 if finding.own_flags else 1,
            global_batch_size=(4 if finding.own_flags else 2) * layout.data,
            data=self.data,
            extra=finding.flags,
            iterations=iterations,
            patch_file=read_patch_file(str(patch)) if patch else None,
        )
        target = f"train-{finding.strategies[0]}-{finding.model}-{finding.devices}cpu"
        pair = LaunchPair(parse_target(target, options), finding.reference, finding.own_flags)
        composed = compose_pair(pair)
        self.ranks.ensure_start(composed.reference)
        return composed

    def _trained(self, launch: Launch, iteration: int) -> tuple[_Weights, float]:
        """All weights after an iteration, and its loss."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            capture, log = Path(scratch, "capture"), Path(scratch, "log.txt")
            also = {variables.CAPTURE: str(capture), variables.CAPTURE_ITERATION: str(iteration)}
            if failure := self.ranks.run(launch, log, also):
                raise RuntimeError(f"{failure}\n{log.read_text()[-2000:]}")
            read = read_capture(capture)
            weights = {
                unit: np.array(assemble_parameter(pieces, read))
                for unit, pieces in group_parameter_parts(
                    read, CaptureStage.WEIGHTS, "weight"
                ).items()
                if unit[2] == "weight"
            }
            return weights, read_losses(log)[-1]


def _distance(ours: _Weights, reference: _Weights) -> float:
    squares = (
        np.square(np.subtract(ours[unit], reference[unit], dtype=float)) for unit in reference
    )
    return float(np.sqrt(sum(square.sum() for square in squares)))


def as_yaml(effect: Effect) -> str:
    """As `effect:` of a finding; YAML takes `1e-07`, without a point, for text."""
    command = (
        f"{name}: {value:.1e}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in asdict(effect).items()
    )
    return f"{{{', '.join(command)}}}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the effect of each finding that is named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--data", default="owt-ds/sample_text_document")
    options = parser.parse_args(arguments)
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".effect-") as folder,
        closing(ForkedRanks()) as ranks,
    ):
        trainer = _Trainer(ranks, options.data, Path(folder))
        for finding in list_findings():
            if finding.verdict is FindingStatus.REPRODUCED and (
                not options.ids or finding.id in options.ids
            ):
                print(
                    f"{finding.id}: {as_yaml(trainer.effect(finding, options.iterations))}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

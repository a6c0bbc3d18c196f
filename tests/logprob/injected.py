"""Inject faults into trainers and serving engines, and let `verify-logprob` explain them.

    python -m tests.logprob.injected [ID …]

One line per fault: the named causes, the explained part of the KL, the first module and the processor time.
`tests.logprob.healthy` judges pairs without a fault.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.verdict import VerifyOutcome
from parakit.config.files import read_yaml
from parakit.config.run import PatchFile
from parakit.convert import CONFIGS, ConversionProgress, import_model, read_source, write_model
from parakit.convert.hf import serve
from parakit.experiments.logprob.judge import judge_sides
from parakit.experiments.logprob.sides import Sides, SidesRequest
from parakit.experiments.verify.hf import write_random_tokens
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch.data import SMALL_SAMPLE
from parakit.launch.options import Options, read_patch_file
from parakit.logprob import LogprobVerdict, split_hypothesis
from tests.verify.bench import SMALL

FOLDER = Path(__file__).with_name("faults")
TABLE = Path(__file__).with_name("faults.yaml")


@dataclass(frozen=True)
class Fault:
    """Pair of engines with a fault, and what must be named; or a healthy pair, which has no fault."""

    id: str
    model: str
    """Random model of Hugging Face (`CONFIGS`), or model of the kit."""
    train: str
    serve: str
    cause: str
    """HypothesisFamily of hypotheses that explains the fault; empty for a healthy pair."""
    module: str
    """Pattern of the first module that differs; empty if no captured module differs."""
    extra: str = ""
    serve_extra: str = ""
    patch: str = ""
    """File of `FOLDER` that the trainer executes."""
    serve_patch: str = ""
    """File of `FOLDER` that the serving engine executes."""
    is_bf16: bool = False
    seed: int = 1
    """Seed of the initial weights of a model of the kit."""

    def is_named(self, verdict: LogprobVerdict) -> bool:
        """Return True if the verdict names the cause as the one that explains most."""
        if not self.cause:
            return verdict.outcome is VerifyOutcome.HELD
        causes = sorted(verdict.causes, key=lambda cause: -cause.fraction_of_kl)
        return bool(causes) and split_hypothesis(causes[0].hypothesis)[0] == self.cause

    def is_located(self, verdict: LogprobVerdict) -> bool:
        """Return True if the verdict names the right first module, or none where none differs."""
        first = verdict.first_module
        if first is None or not self.module:
            return first is None and not self.module
        return re.search(self.module, first.module) is not None


def read_faults() -> list[Fault]:
    """Return all faults of the table."""
    return [Fault(**entry) for entry in read_yaml(TABLE)]


@dataclass(frozen=True)
class Laboratory:
    """Folder with the random models, and the process from which ranks are forked."""

    folder: Path
    ranks: ForkedRanks

    def judge(self, fault: Fault) -> LogprobVerdict:
        """Return the verdict on a pair with a fault."""
        options = Options(
            runs=self.folder / "runs",
            extra=("--seq-length", "64", *fault.extra.split()),
            patch_file=_find_patch(fault.patch),
            seed=fault.seed,
        )
        source: Path | None = None
        model = fault.model
        if fault.model in CONFIGS:
            source, model_file, data = self._make_model(fault.model)
            model = str(model_file)
            options = replace(options, data=str(data))
        else:
            options = replace(options, data=SMALL_SAMPLE, extra=(*options.extra, *SMALL))
        serve_patch = FOLDER / f"{fault.serve_patch}.py" if fault.serve_patch else None
        request = SidesRequest(
            fault.train,
            fault.serve,
            model,
            options,
            served_model=source if fault.serve == "hf" else None,
            serve_flags=tuple(fault.serve_extra.split()),
            serve_patch=serve_patch,
            is_bf16=fault.is_bf16,
        )
        folder = self.folder / "sides" / f"{fault.id}-{os.getpid()}"
        sides = Sides(request, folder, self.ranks, serve_with_transformers=serve_in_fork)
        try:
            sides.prepare()
            return judge_sides(sides)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _make_model(self, family: str) -> tuple[Path, Path, Path]:
        """Return a random model of a family: its folder, its file of Megatron's flags, and a data set of its tokens."""
        source = self.folder / "sources" / family
        models, data = self.folder / "models", self.folder / f"{family}_tokens"
        if not source.is_dir():
            write_model(source, CONFIGS[family])
            import_model(read_source(source), family, ConversionProgress(), models)
            write_random_tokens(data, read_source(source).shape.vocabulary)
        return source, models / family / f"{family}.args", data


def serve_in_fork(arguments: list[str], log: Path) -> int:
    """Run `parakit.convert.hf.serve` in a fork of this process, and return its exit code.

    The fork does not import torch and transformers again, which takes longer than scoring.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # Patch files look for the program's functions in the module that was started.
        sys.modules["__main__"] = serve
        serve.main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _find_patch(name: str) -> PatchFile | None:
    """Return the patch file of the trainer; None without one."""
    return read_patch_file(str((FOLDER / f"{name}.py").resolve())) if name else None


def main(argv: Sequence[str]) -> None:
    """Judge the faults with the given ids, or all, and print a line per fault."""
    importlib.import_module("transformers.models.auto.modeling_auto")
    faults = [fault for fault in read_faults() if not argv or fault.id in argv]
    ranks = ForkedRanks()
    ranks.start_seconds = 3600.0
    with tempfile.TemporaryDirectory() as scratch:
        laboratory = Laboratory(Path(os.environ.get("LABORATORY", scratch)), ranks)
        for fault in faults:
            before = _processor_seconds()
            try:
                verdict = laboratory.judge(fault)
            except Exception as error:
                print(f"{fault.id} | failed: {error}", flush=True)
                continue
            first = verdict.first_module
            print(
                " | ".join(
                    (
                        fault.id,
                        "named" if fault.is_named(verdict) else "MISNAMED",
                        "located" if fault.is_located(verdict) else "MISPLACED",
                        f"{verdict.explained_fraction:.1%}",
                        ", ".join(
                            f"{cause.hypothesis} {cause.fraction_of_kl:.0%}"
                            for cause in verdict.causes
                        )
                        or verdict.outcome,
                        f"{first.side}: {first.module} {first.tensor}" if first else "no module",
                        f"KL {verdict.gap.kl_nats:.1e}",
                        f"relative {verdict.gap.relative_error:.1e} of {verdict.relative_tolerance:.1e}",
                        f"{_processor_seconds() - before:.0f} s",
                    )
                ),
                flush=True,
            )
    ranks.close()


def _processor_seconds() -> float:
    """Return the processor time of this process and of the processes that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


if __name__ == "__main__":
    main(sys.argv[1:])

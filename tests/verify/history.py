"""`make verify-history MEGATRON_LM=<a clone>`: its own merged fixes, each before and after.

    python -m tests.verify.history CLONE [COMMIT …]

The parent of each fix of docs/upstream/history.yaml must be called wrong where it was, and the fix hold (`is_gone`).
In the place of a parent `onto` names a release that has the fix, to which it is applied in reverse.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from megatron_patches.context import checkout_version
from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_yaml
from parakit.config.setting import SettingError
from parakit.experiments.verify.commits import copy_dataset_helpers
from parakit.experiments.verify.verifier import Verifier
from parakit.launch.data import SMALL_SAMPLE, make_sample
from parakit.launch.options import Options
from tests.verify.bench import Bench, PatientRanks

HISTORY = ROOT / "docs" / "upstream" / "history.yaml"
WRITER = Path("megatron/core/dist_checkpointing/strategies/filesystem_async.py")
BLOCK = Path("megatron/core/transformer/transformer_block.py")
LANGUAGE = Path("megatron/core/models/common/language_module/language_module.py")
FIRST_WITH_TODAYS_TORCH = Version("0.15.0rc0")
HEAD = "| fix | what was wrong | before | after |\n|---|---|---|---|"


@dataclass(frozen=True)
class Fix:
    """An entry of `history.yaml`."""

    commit: str
    pull: int
    says: str
    not_run: str = ""
    strategy: str = ""
    model: str = "gpt2-tiny"
    devices: int = 2
    flags: str = ""
    own_flags: str = ""
    reference: str = ""
    resumed: str = ""
    onto: str = ""
    patch: str = ""
    stage: str = ""
    module: str = ""
    """Empty where the first wrong tensor changes from run to run."""
    fails: str = ""

    def is_seen(self, verdict: VerifyVerdict) -> bool:
        """Whether it is in the Megatron of the verdict, and named where it is."""
        if self.fails and self.fails in str(verdict.reason):
            return True
        there = not self.stage or (verdict.stage, verdict.module) == (self.stage, self.module)
        return verdict.verdict is VerifyOutcome.DIFFERS and there

    def is_gone(self, verdict: VerifyVerdict) -> bool:
        """Return True if the fault is not in the Megatron of the verdict.

        A wrong value in the log is then another fault, as every tensor is right. The commits before #3199 print the
        z loss of one rank's tokens.
        """
        is_other_fault = verdict.stage is CaptureStage.LOG and self.stage != CaptureStage.LOG
        return verdict.verdict is VerifyOutcome.HELD or is_other_fault


def fixes() -> tuple[Fix, ...]:
    """All, as they stand in the file."""
    return tuple(Fix(**entry) for entry in read_yaml(HISTORY))


def verified(clone: Path, only: Sequence[str], folder: Path) -> Iterator[tuple[str, bool]]:
    """A line of the table for each fix that can run, and whether it is as stated."""
    releases: dict[str, Bench] = {}
    with ExitStack() as until:
        for fix in fixes():
            if fix.not_run or (only and fix.commit not in only):
                continue
            if fix.onto and fix.onto not in releases:
                release = until.enter_context(_version(folder, clone, fix.onto))
                releases[fix.onto] = release
            after = _verdict(fix, clone, folder, releases.get(fix.onto), mended=True)
            before = _verdict(fix, clone, folder, releases.get(fix.onto), mended=False)
            sentences = (
                str(verdict.reason or verdict.sentence).replace("|", "/")
                for verdict in (before, after)
            )
            right = fix.is_seen(before) and fix.is_gone(after)
            onto = f" ({fix.onto})" if fix.onto else ""
            yield f"| #{fix.pull}{onto} | {fix.says} | {' | '.join(sentences)} |", right


def _verdict(
    fix: Fix, clone: Path, folder: Path, release: Bench | None, *, mended: bool
) -> VerifyVerdict:
    with ExitStack() as until:
        bench = release
        if release is None:
            commit = fix.commit if mended else f"{fix.commit}~1"
            bench = until.enter_context(_version(folder, clone, commit))
        elif not mended:
            bench = until.enter_context(_version(folder, clone, fix.commit, release.megatron_lm))
        assert bench is not None
        try:
            return bench.verify(
                *(fix.strategy, fix.model, fix.devices, shlex.split(fix.flags)),
                iteration=None,
                reference=fix.reference,
                own_arguments=shlex.split(fix.own_flags),
                resumed=fix.resumed,
                bug=HISTORY.parent / fix.patch if fix.patch else None,
                both=True,
            ).verdict
        except LaunchError as error:
            return VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=str(error))


@contextmanager
def _version(
    folder: Path, clone: Path, commit: str, release: Path | None = None
) -> Iterator[Bench]:
    """A commit's Megatron, or that of a release without what a commit changes."""

    def git(*git_arguments: str) -> bytes:
        command = ("git", "-C", str(clone), *git_arguments)
        return subprocess.run(command, check=True, capture_output=True).stdout

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        checkout = Path(scratch) / "checkout"
        if release is None:
            checkout.mkdir()
            unread = [f":!{folder}" for folder in ("tests", "docs", "examples", "tools")]
            files = git("archive", commit, "--", ".", *unread)
            subprocess.run(("tar", "x", "-C", checkout), check=True, input=files)
        else:
            shutil.copytree(release, checkout)
            change = git("show", "--format=", commit, "--", "megatron")
            # The lines around it have moved since, and some have changed.
            reverse = ("patch", "--reverse", "--strip=1", "--fuzz=3", "--force", "--silent")
            subprocess.run(reverse, cwd=checkout, check=True, input=change)
        adapt_to_installed_torch(checkout)
        copy_dataset_helpers(checkout)
        options = Options(megatron_lm=checkout, allow_unknown_megatron=True)
        with closing(PatientRanks(options)) as ranks:
            verifier = Verifier(Path(scratch), ranks)
            yield Bench(SMALL_SAMPLE, verifier, checkout, small=True)


def adapt_to_installed_torch(checkout: Path) -> None:
    """Let a Megatron before 0.15 run with today's torch, and without its engine.

    None of it is what a fix changes.
    """
    if checkout_version(checkout) >= FIRST_WITH_TODAYS_TORCH:
        return
    if "serialization_format" not in (checkout / WRITER).read_text():
        _append(
            checkout / WRITER,
            "from torch.distributed.checkpoint import filesystem as _torch",
            "def _write_item(*given):",
            "    before = () if len(given) == 5 else (_torch._StorageWriterTransforms(),)",
            "    form = _torch.SerializationFormat.TORCH_SAVE",
            "    return _torch._write_item(*before, *given, form)",
        )
    # In the summer of 2025 the engine's norm was taken for there.
    _append(
        checkout / BLOCK,
        "from megatron.core.transformer.torch_norm import WrappedTorchNorm as LayerNormImpl",
    )
    # In the spring its version was asked for where weights in FP8 would be read again.
    _append(
        checkout / "megatron/training/checkpointing.py",
        "def fix_fp8_params_lose_precision_when_loading_dist_ckpt(_):",
        "    pass",
    )
    # In March of 2025 the engine's loss was imported whether it is there or not.
    name = "te_parallel_cross_entropy"
    unguarded = f"\nfrom megatron.core.extensions.transformer_engine import {name}\n"
    text = (checkout / LANGUAGE).read_text()
    (checkout / LANGUAGE).write_text(text.replace(unguarded, f"\n{name} = None\n"))


def _append(module: Path, *lines: str) -> None:
    module.write_text("\n".join((module.read_text(), *lines, "")))


def verify_history(megatron_lm: Path | None, only: Sequence[str] = ()) -> int:
    """Print the table; 1 if a fix is not as stated.

    Args:
        megatron_lm: A clone with its history.
        only: Commits of fixes; all that can run without.

    Raises:
        SettingError: There is no clone.
    """
    if megatron_lm is None:
        raise SettingError(
            "'make verify-history' reads commits; set MEGATRON_LM= to a whole clone."
        )
    make_sample(SMALL_SAMPLE, Console())
    missed = 0
    print(HEAD)
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".verify-history-") as folder:
        for line, right in verified(megatron_lm, only, Path(folder)):
            print(line, flush=True)
            missed += not right
    print(f"{missed} wrong")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(verify_history(Path(sys.argv[1]), sys.argv[2:]))

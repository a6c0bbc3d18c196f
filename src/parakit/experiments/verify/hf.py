"""`make verify-hf`: an imported model computes what `transformers` computes, in every strategy.

The model of `HF=`, or one of each family with random weights, is imported and exported again, bit for
bit, compared with `transformers` tensor by tensor through strategies of Megatron (`REFERENCE=hf`), and
trained beside it for some steps. All of it is in one folder of the runs folder.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from parakit.artifacts.run import LOG_FILE, Status, utc_stamp
from parakit.artifacts.verdict import EXIT_CODES, VerifyOutcome
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.model import find_model
from parakit.config.run import Backend
from parakit.config.strategy import StrategyError, count_devices, parse_strategy
from parakit.data import DocumentIndex, bin_path, idx_path, token_dtype, write_index
from parakit.experiments.verify.command import SharedReferences, run_verification
from parakit.experiments.verify.pairs import HF, LaunchPair, compose_pair
from parakit.experiments.verify.verifier import read_losses
from parakit.formatting.table import Column, Table, rich_table
from parakit.launch import (
    NO_TRANSFORMERS,
    Job,
    Options,
    check_launch,
    compose_job,
    execute_launch,
    fetch_model_folder,
    parse_target,
)

STRATEGIES = "baseline tp2 sp2 pp2 cp2 tp2pp2 tp2dp2"
STEPS, LOSS_TOLERANCE = 20, 1e-5
"""Training beside transformers, and how far losses may be apart."""
LEARNING_RATE_FLAGS = (
    *("--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant"),
    *("--lr-warmup-fraction", "0"),
)
_SEQUENCE = 64
"""Tokens of a sample, where the model has more positions and EXTRA= does not say."""
_DOCUMENTS, _DOCUMENT_TOKENS = 1000, 64
_OUTCOME_BY_SUCCESS = {True: VerifyOutcome.HELD, False: VerifyOutcome.DIFFERS}


@dataclass(frozen=True)
class Proof:
    """One thing that was shown of a model, or was not."""

    model: str
    what: str
    outcome: VerifyOutcome
    seen: str
    """What was compared and how close it was, or what is wrong."""


def verify_hf(
    hf: str | None,
    strategies: str | None,
    extra_b: tuple[str, ...],
    options: Options,
    console: Console,
) -> int:
    """Prove it of every model; 0 held, 1 differs, 2 not comparable.

    Raises:
        ValueError: It cannot run here, or the model cannot be converted.
    """
    laid = []
    for strategy in (strategies or STRATEGIES).split():
        try:
            laid.append((strategy, count_devices(strategy)))
            parse_strategy(*laid[-1])
        except StrategyError as error:
            raise LaunchError(f"STRATEGIES= holds {strategy}: {error}") from None
    if importlib.util.find_spec("transformers") is None:
        raise LaunchError(NO_TRANSFORMERS)
    folder = options.runs / f"{utc_stamp()}-verify-hf"
    shared = SharedReferences(folder / "references")
    prover = _Prover(folder, laid, extra_b, options, console, shared)
    proofs: list[Proof] = []
    try:
        for source, name in _list_models(hf, folder / "sources"):
            proofs += prover.proofs(source, name)
            shared.forget()
    finally:
        shared.forget()
        shutil.rmtree(folder / "models", ignore_errors=True)
    console.print(rich_table(Table(_COLUMNS, tuple(proofs), "Against transformers"), console.width))
    console.print(f"→ {relative_to_root(folder)}", highlight=False)
    return max(EXIT_CODES[proof.outcome] for proof in proofs)


def _list_models(given: str | None, made: Path) -> Iterator[tuple[Path, str]]:
    """Folders of Hugging Face's, each with the model's name."""
    from parakit.convert import CONFIGS, write_model

    if given is not None:
        folder = fetch_model_folder(given)
        yield folder, folder.resolve().name.lower()
        return
    for family, config in CONFIGS.items():
        yield write_model(made / family, config), f"random-{family}"


@dataclass(frozen=True)
class _Prover:
    folder: Path
    strategies: Sequence[tuple[str, int]]
    """Strategies with their devices."""
    extra_b: tuple[str, ...]
    options: Options
    console: Console
    shared: SharedReferences

    def proofs(self, source: Path, name: str) -> Iterator[Proof]:
        """Of a folder of Hugging Face's, under a model's name."""
        from parakit.convert import ConversionProgress, import_model, read_source

        found, hub = read_source(source), self.folder / "models"
        import_model(found, name, ConversionProgress(self.console), hub)
        yield _prove_round_trip(source, hub / name, self.folder / "exported" / name)
        data = self.options.data or _write_random_tokens(
            self.folder / f"{name}_tokens", found.shape.vocabulary
        )
        sequence = ("--seq-length", str(min(_SEQUENCE, found.shape.seq_length)))
        options = replace(
            self.options,
            data=str(data),
            runs=self.folder,
            extra=(*sequence, *self.options.extra),
            model=str(hub / name / f"{name}.args"),
        )
        job = parse_target(f"train-baseline-{name}-1cpu", options)
        for strategy in self.strategies:
            pair = LaunchPair(job.with_strategy(*strategy), HF, self.extra_b)
            verification, own = compose_pair(pair), self.folder / pair.job.name
            self.console.print(f"{pair.job.name}: {verification.mode}", highlight=False)
            verdict = run_verification(verification, self.console, own, shared=self.shared).verdict
            seen = verdict.sentence.removeprefix("tensors ").removeprefix("held: ")
            if verdict.seen:
                seen += f"; {verdict.compared:,} tensors compared"
            yield Proof(pair.job.model.name, pair.job.strategy, verdict.verdict, seen)
        yield self._trained(job)

    def _trained(self, job: Job) -> Proof:
        """Losses of Megatron on one rank, and of transformers with PyTorch's AdamW."""
        options = job.options
        own = replace(
            options,
            iterations=STEPS,
            dropout=0.0 if options.dropout is None else options.dropout,
            micro_batch_size=options.micro_batch_size or 2,
            global_batch_size=options.global_batch_size or 4,
            ledger=False,
            extra=(*LEARNING_RATE_FLAGS, *options.extra),
        )
        name, steps, losses = job.model.name, f"{STEPS} steps", []
        for backend in (Backend.MEGATRON, Backend.TRANSFORMERS):
            launch = compose_job(job.with_options(replace(own, backend=backend)))
            check_launch(launch)
            run, status = execute_launch(launch, self.folder, self.console, f"{steps}, {backend}")
            if status.status is not Status.OK:
                reason = f"{backend} ended '{status.status}': {status.reason}"
                return Proof(name, steps, VerifyOutcome.NOT_COMPARABLE, reason)
            losses.append(read_losses(run / LOG_FILE))
        apart = max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True))
        first, last = losses[0][0], losses[0][-1]
        seen = f"losses {first:.4f} to {last:.4f}, at most {apart:.1e} apart"
        return Proof(name, steps, _OUTCOME_BY_SUCCESS[apart <= LOSS_TOLERANCE], seen)


def _prove_round_trip(source: Path, imported: Path, target: Path) -> Proof:
    from parakit.convert import (
        ConversionProgress,
        TensorFolder,
        export_model,
        list_differing_tensors,
    )

    model = find_model(str(imported / f"{imported.name}.args"))
    checkpoint = imported / "checkpoint" / "iter_0000001"
    export_model(checkpoint, model.flags, model.shape, imported, target, ConversionProgress())
    ours, theirs = TensorFolder(target), TensorFolder(source)
    wrong = list_differing_tensors(ours, theirs)
    shutil.rmtree(target)
    seen = f"{len(ours.tensors)} tensors, the same bits" if not wrong else f"{wrong[0]} differs"
    return Proof(model.name, "import and export", _OUTCOME_BY_SUCCESS[not wrong], seen)


def _write_random_tokens(prefix: Path, vocabulary: int) -> Path:
    """A data set of random tokens, in documents that every split gets some of."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, vocabulary, _DOCUMENTS * _DOCUMENT_TOKENS)
    dtype = token_dtype(vocabulary)
    bin_path(prefix).write_bytes(tokens.astype(dtype).tobytes())
    lengths = np.full(_DOCUMENTS, _DOCUMENT_TOKENS, np.int32)
    boundaries = np.arange(_DOCUMENTS + 1, dtype=np.int64)
    write_index(idx_path(prefix), dtype.name, lambda: [DocumentIndex(lengths, boundaries)])
    return prefix


_COLUMNS = (
    Column[Proof]("model", lambda proof: proof.model, right=False),
    Column[Proof]("shown", lambda proof: proof.what, right=False),
    Column[Proof](
        "verdict",
        lambda proof: proof.outcome.value,
        right=False,
        style=lambda proof: "green" if proof.outcome is VerifyOutcome.HELD else "red",
    ),
    Column[Proof]("", lambda proof: proof.seen, right=False, wraps=True),
)

"""Prove that an imported model computes what `transformers` computes, in every strategy: `make verify-hf`.

The model is HF=, or one per family with random weights. It is imported and exported again, bit for bit. Strategies
of Megatron are compared with `transformers` tensor by tensor (`REFERENCE=hf`). Last, both are trained for some
steps, and their losses are compared. All results are in one folder of the runs folder.
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
EXPERT_STRATEGIES = "baseline sp2 pp2 ep2"
"""Strategies of models without experts, and of models with experts, which need SP under TP."""
STEPS, LOSS_TOLERANCE = 20, 1e-5
"""Training steps of Megatron and transformers, and the largest absolute difference of their losses."""
LEARNING_RATE_FLAGS = (
    *("--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant"),
    *("--lr-warmup-fraction", "0"),
)
_SEQUENCE = 64
"""Tokens per sample, unless EXTRA= sets another number or the model has fewer positions."""
_DOCUMENTS, _DOCUMENT_TOKENS = 1000, 64


@dataclass(frozen=True)
class Proof:
    """One property of a model that was proven, or was not."""

    model: str
    claim: str
    outcome: VerifyOutcome
    detail: str
    """The compared values and how close they are, or the error."""


def verify_hf(
    hf: str | None,
    strategies: str | None,
    extra_b: tuple[str, ...],
    options: Options,
    console: Console,
) -> int:
    """Prove all properties of every model and print a table; return 0 if all held, 1 if one differs, 2 if not.

    The code 2 means that something could not be compared.

    Args:
        hf: HF=, a folder or the name of a model of Hugging Face; None makes a random model per family.
        strategies: STRATEGIES=, separated by spaces; None is `STRATEGIES`, or `EXPERT_STRATEGIES` with experts.
        extra_b: EXTRA_B=, Megatron's flags for the strategies alone.
        options: Make variables.
        console: Shows progress and the table.

    Raises:
        ValueError: The proof cannot run here, or the model cannot be converted.
    """
    layouts = _parse_strategies(strategies or "")
    if importlib.util.find_spec("transformers") is None:
        raise LaunchError(NO_TRANSFORMERS)
    folder = options.runs / f"{utc_stamp()}-verify-hf"
    shared = SharedReferences(folder / "references")
    prover = _Prover(folder, layouts, extra_b, options, console, shared)
    proofs: list[Proof] = []
    try:
        for source, name in _list_models(hf, folder / "sources"):
            proofs += prover.prove_model(source, name)
            shared.remove()
    finally:
        shared.remove()
        shutil.rmtree(folder / "models", ignore_errors=True)
    console.print(rich_table(Table(_COLUMNS, tuple(proofs), "Against transformers"), console.width))
    console.print(f"→ {relative_to_root(folder)}", highlight=False)
    return max(EXIT_CODES[proof.outcome] for proof in proofs)


def _parse_strategies(strategies: str) -> list[tuple[str, int]]:
    """Return each strategy with its number of devices.

    Raises:
        LaunchError: A word is no strategy.
    """
    layouts = []
    for strategy in strategies.split():
        try:
            devices = count_devices(strategy)
            parse_strategy(strategy, devices)
        except StrategyError as error:
            raise LaunchError(f"STRATEGIES= holds {strategy}: {error}") from None
        layouts.append((strategy, devices))
    return layouts


def _list_models(hf: str | None, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield model folders in Hugging Face's format, each with the model's name.

    Without HF= they are written into `folder`, with random weights, one per family.
    """
    from parakit.convert import CONFIGS, write_model

    if hf is not None:
        source = fetch_model_folder(hf)
        yield source, source.resolve().name.lower()
        return
    for family, config in CONFIGS.items():
        yield write_model(folder / family, config), f"random-{family}"


@dataclass(frozen=True)
class _Prover:
    """Proves the properties of models, in one folder and with shared references."""

    folder: Path
    strategies: Sequence[tuple[str, int]]
    """Strategies, each with its number of devices; empty chooses them by the model."""
    extra_b: tuple[str, ...]
    options: Options
    console: Console
    shared: SharedReferences

    def prove_model(self, source: Path, name: str) -> Iterator[Proof]:
        """Yield the proofs of a model: import and export, then each strategy, then training.

        Args:
            source: Model folder in Hugging Face's format.
            name: Name of the imported model.
        """
        from parakit.convert import ConversionProgress, import_model, read_source

        model, models = read_source(source), self.folder / "models"
        import_model(model, name, ConversionProgress(self.console), models)
        yield _prove_round_trip(source, models / name, self.folder / "exported" / name)
        data = self.options.data or write_random_tokens(
            self.folder / f"{name}_tokens", model.shape.vocabulary
        )
        sequence = ("--seq-length", str(min(_SEQUENCE, model.shape.seq_length)))
        options = replace(
            self.options,
            data=str(data),
            runs=self.folder,
            extra=(*sequence, *self.options.extra),
            model=str(models / name / f"{name}.args"),
        )
        job = parse_target(f"train-baseline-{name}-1cpu", options)
        default_strategies = EXPERT_STRATEGIES if model.shape.experts else STRATEGIES
        for strategy, devices in self.strategies or _parse_strategies(default_strategies):
            yield self._prove_strategy(job.with_strategy(strategy, devices))
        yield self._prove_training(job)

    def _prove_strategy(self, job: Job) -> Proof:
        """Verify a strategy against transformers tensor by tensor; return the verdict as a proof."""
        pair = LaunchPair(job, HF, self.extra_b)
        verification, folder = compose_pair(pair), self.folder / job.name
        self.console.print(f"{job.name}: {verification.mode}", highlight=False)
        verdict = run_verification(verification, self.console, folder, shared=self.shared).verdict
        detail = verdict.sentence.removeprefix("tensors ").removeprefix("held: ")
        if verdict.seen:
            detail += f"; {verdict.compared:,} tensors compared"
        return Proof(job.model.name, job.strategy, verdict.verdict, detail)

    def _prove_training(self, job: Job) -> Proof:
        """Compare the losses of Megatron on one rank with those of transformers and PyTorch's AdamW.

        The proof is `not comparable` if one of the two runs fails.
        """
        options = replace(
            job.options,
            iterations=STEPS,
            dropout=0.0 if job.options.dropout is None else job.options.dropout,
            micro_batch_size=job.options.micro_batch_size or 2,
            global_batch_size=job.options.global_batch_size or 4,
            ledger=False,
            extra=(*LEARNING_RATE_FLAGS, *job.options.extra),
        )
        name, claim = job.model.name, f"{STEPS} steps"
        losses_by_backend = {}
        for backend in (Backend.MEGATRON, Backend.TRANSFORMERS):
            launch = compose_job(job.with_options(replace(options, backend=backend)))
            check_launch(launch)
            run, status = execute_launch(launch, self.folder, self.console, f"{claim}, {backend}")
            if status.status is not Status.OK:
                reason = f"{backend} ended '{status.status}': {status.reason}"
                return Proof(name, claim, VerifyOutcome.NOT_COMPARABLE, reason)
            losses_by_backend[backend] = read_losses(run / LOG_FILE)
        losses = losses_by_backend[Backend.MEGATRON]
        reference_losses = losses_by_backend[Backend.TRANSFORMERS]
        differences = [
            abs(loss - reference) for loss, reference in zip(losses, reference_losses, strict=True)
        ]
        largest = max(differences)
        outcome = VerifyOutcome.HELD if largest <= LOSS_TOLERANCE else VerifyOutcome.DIFFERS
        detail = f"losses {losses[0]:.4f} to {losses[-1]:.4f}, at most {largest:.1e} apart"
        return Proof(name, claim, outcome, detail)


def _prove_round_trip(source: Path, imported: Path, target: Path) -> Proof:
    """Return the proof, passed or failed and with a detail, that the export of an imported model has the same
    bits as its source.

    The export is written to the folder `target`, which is removed after the comparison.
    """
    from parakit.convert import (
        ConversionProgress,
        TensorFolder,
        export_model,
        list_differing_tensors,
    )

    model = find_model(str(imported / f"{imported.name}.args"))
    checkpoint = imported / "checkpoint" / "iter_0000001"
    export_model(checkpoint, model.flags, model.shape, imported, target, ConversionProgress())
    exported = TensorFolder(target)
    differing = list_differing_tensors(exported, TensorFolder(source))
    shutil.rmtree(target)
    claim = "import and export"
    if differing:
        return Proof(model.name, claim, VerifyOutcome.DIFFERS, f"{differing[0]} differs")
    detail = f"{len(exported.tensors)} tensors, the same bits"
    return Proof(model.name, claim, VerifyOutcome.HELD, detail)


def write_random_tokens(prefix: Path, vocabulary: int) -> Path:
    """Write a data set of random tokens, in enough documents for every split; return its prefix."""
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
    Column[Proof]("shown", lambda proof: proof.claim, right=False),
    Column[Proof](
        "verdict",
        lambda proof: proof.outcome.value,
        right=False,
        style=lambda proof: "green" if proof.outcome is VerifyOutcome.HELD else "red",
    ),
    Column[Proof]("", lambda proof: proof.detail, right=False, wraps=True),
)

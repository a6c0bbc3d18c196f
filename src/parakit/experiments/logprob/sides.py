"""Score the same tokens with the trainer and with the serving engine, each in processes of its own.

The trainer is scored twice: in the training layout, and on one rank (the bridge). The bridge computes what the
trainer computes, without its layout, so one thing at a time can be changed on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flags import Flags
from parakit.config.model import find_model
from parakit.config.run import DeviceKind, PatchFile
from parakit.config.strategy import StrategyError, count_devices, parse_strategy
from parakit.experiments.logprob.scores import ScoredCapture, read_scored_capture
from parakit.experiments.verify.pairs import LaunchPair, Verification, compose_pair
from parakit.experiments.verify.verifier import RANK_ENVIRONMENT, ForkedRanks
from parakit.launch import Launch, Options, make_sample, parse_target, read_patch_file
from parakit.logprob import (
    EXPLAINED_FILE,
    GENERATED_FOLDER,
    SCORES_FILE,
    SEQUENCES_FILE,
    TEXTS_FILE,
    WHOLE_FOLDER,
    GapExplanation,
    ScoreRequest,
    Task,
    TokenLogProbabilities,
    read_explanation,
    read_recorded_tokens,
)
from parakit.verify import Capture, find_token_loss_tolerance, read_capture

HF, MEGATRON = "hf", "megatron"
PADDING = "--make-vocab-size-divisible-by"
NUM_PROBES = 4
"""Repetitions of the bridge with rounding errors; the last one also rounds module inputs."""
NUM_SEQUENCES = 4
"""Number of sequences that are scored, unless a global batch size is set."""
PROMPT_DIVISOR = 4
"""Number of tokens per token of the prompt: the first fourth of each sequence is its prompt."""


class SideError(ValueError):
    """One side could not be scored; the message names its log."""


@dataclass(frozen=True)
class SidesRequest:
    """Request of a comparison: the trainer, the serving engine, and the model of both."""

    train: str
    """Strategy of the trainer, such as `ep2pp2`."""
    serve: str
    """`hf`, `megatron`, a strategy of Megatron, or a file or folder that an engine wrote."""
    model: str
    options: Options
    served_model: Path | None = None
    """Folder of Hugging Face that the engine serves; None exports the trainer's weights."""
    serve_flags: tuple[str, ...] = ()
    """Megatron's flags for the serving side alone."""
    serve_patch: Path | None = None
    """A Python file that the serving process executes before it loads the model."""
    is_bf16: bool = False

    @cached_property
    def verification(self) -> Verification:
        """The launches of the trainer in its layout (`strategy`) and on one rank (`reference`).

        Raises:
            LaunchError: The model or the strategy is unknown, or does not fit.
        """
        devices = _count_ranks(self.train)
        options = replace(
            self.options,
            model=self.model,
            iterations=1,
            global_batch_size=self.options.global_batch_size or NUM_SEQUENCES,
        )
        if self.recorded is not None:
            num_sequences, length = read_recorded_tokens(self.recorded).shape
            extra = (*options.extra, "--seq-length", str(length))
            options = replace(
                options, global_batch_size=num_sequences, micro_batch_size=1, extra=extra
            )
        job = parse_target(
            f"train-{self.train}-{_get_model_name(self.model)}-{devices}cpu", options
        )
        assert job.device is DeviceKind.CPU
        vocabulary_multiple = self._vocabulary_multiple
        if vocabulary_multiple == 1:
            return compose_pair(LaunchPair(job, "baseline", is_bf16=self.is_bf16))
        # Megatron pads the vocabulary to a multiple of the flag times TP. The bridge gets the product, so that both
        # count the same rows.
        tensor_degree = parse_strategy(self.train, devices).tensor
        extra = (*job.options.extra, PADDING, str(vocabulary_multiple))
        job = job.with_options(replace(job.options, extra=extra))
        flags = (PADDING, str(vocabulary_multiple // tensor_degree))
        return compose_pair(LaunchPair(job, "baseline", flags, is_bf16=self.is_bf16))

    @cached_property
    def _vocabulary_multiple(self) -> int:
        """Number to whose multiple an imported model's vocabulary is padded; 1 for other models and without TP."""
        flags = Flags((*find_model(self.model).flags, *self.options.extra))
        devices = _count_ranks(self.train)
        tensor_degree = parse_strategy(self.train, devices).tensor
        if not flags.has(PADDING) or tensor_degree == 1:
            return 1
        return flags.integer(PADDING) * tensor_degree

    def compose_serving(self) -> Launch:
        """Return the launch of Megatron as the serving engine: `megatron` is one rank, and a strategy is its layout.

        Raises:
            LaunchError: SERVE= names no engine, no file and no strategy.
        """
        strategy = "baseline" if self.serve == MEGATRON else self.serve
        try:
            devices = _count_ranks(strategy)
        except StrategyError as error:
            raise LaunchError(
                f"SERVE={self.serve} is neither hf, megatron nor a file, and no strategy: {error}"
            ) from None
        job = self.verification.pair.job.with_strategy(strategy, devices)
        options = replace(job.options, patch_file=self.serve_patch_file)
        flags = self.serve_flags
        tensor_degree = parse_strategy(strategy, devices).tensor
        if self._vocabulary_multiple > 1 and self._vocabulary_multiple % tensor_degree == 0:
            flags = (PADDING, str(self._vocabulary_multiple // tensor_degree), *flags)
        pair = LaunchPair(job.with_options(options), "baseline", flags, is_bf16=self.is_bf16)
        return compose_pair(pair).strategy

    @cached_property
    def serve_patch_file(self) -> PatchFile | None:
        """The file that Megatron's ranks execute on the serving side."""
        return read_patch_file(str(self.serve_patch)) if self.serve_patch else None

    @cached_property
    def recorded(self) -> Path | None:
        """The file of an engine that recorded its tokens; None if SERVE= names no file."""
        path = Path(self.serve).expanduser()
        return path if path.is_file() else None

    @property
    def dtype(self) -> str:
        """PyTorch's name of the dtype in which both sides compute."""
        return "bfloat16" if self.is_bf16 else "float32"


def _count_ranks(strategy: str) -> int:
    """Return the number of ranks of a strategy.

    Raises:
        StrategyError: The name is no strategy.
    """
    return 1 if strategy == "baseline" else count_devices(strategy)


def _get_model_name(model: str) -> str:
    """Return the name of a model that is given by its name or by a file."""
    return Path(model).stem if "/" in model else model


def serve_in_process(arguments: list[str], log: Path) -> int:
    """Run `parakit.convert.hf.serve` in a process of its own, and return its exit code.

    Args:
        arguments: Arguments of the program.
        log: File for what the program prints.
    """
    environment = {**os.environ, **RANK_ENVIRONMENT}
    command = [sys.executable, "-m", "parakit.convert.hf.serve", *arguments]
    with log.open("wb") as file:
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False
        ).returncode


@dataclass
class Sides:
    """Runner of both sides, which keeps their results in one folder."""

    request: SidesRequest
    folder: Path
    ranks: ForkedRanks
    console: Console = field(default_factory=lambda: Console(quiet=True))
    serve_with_transformers: Callable[[list[str], Path], int] = serve_in_process
    """Function that runs `parakit.convert.hf.serve` with arguments and a log, and returns the exit code."""
    problem: str = ""
    """Sentence on a part of the serving side that could not be run; empty if all parts ran."""

    def prepare(self) -> None:
        """Make the sample data and the initial weights that the trainer needs."""
        reference = self.request.verification.reference
        make_sample(reference.data, self.console)
        self.ranks.ensure_start(reference)
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _recorded_sequences(self) -> str:
        """File of the tokens that an engine has recorded; empty if the trainer's own samples are scored."""
        recorded = self.request.recorded
        if recorded is None:
            return ""
        path = self.folder / SEQUENCES_FILE
        np.save(path, read_recorded_tokens(recorded))
        return str(path)

    @cached_property
    def training(self) -> ScoredCapture:
        """The trainer in its layout."""
        return self._score_megatron("training", self.request.verification.strategy, num_probes=0)

    @cached_property
    def bridge(self) -> ScoredCapture:
        """The trainer on one rank, with measured responses to rounding."""
        return self._score_megatron("bridge", self.request.verification.reference, NUM_PROBES)

    @cached_property
    def relative_tolerance(self) -> float:
        """Relative error of the tokens' log probabilities that rounding explains."""
        return find_token_loss_tolerance(self.bridge.capture)

    @cached_property
    def prompt_tokens(self) -> int:
        """Number of tokens per sequence that are its prompt. For recorded sequences, it is that of the shortest one."""
        if self.request.recorded is not None:
            is_scored = TokenLogProbabilities.read(self.request.recorded).is_scored
            return int(np.argmax(is_scored.any(axis=0))) + 1
        num_positions = int(self.bridge.tokens.shape[1])
        return max(1, num_positions // PROMPT_DIVISOR)

    @cached_property
    def serving(self) -> Path:
        """Folder of the serving engine's results: `generated` and `whole`, and a capture.

        Raises:
            SideError: The engine could not be run.
        """
        serve = self.request.serve
        if serve == HF:
            return self._serve_with_transformers()
        if self.request.recorded is not None:
            return self._read_recorded(self.request.recorded)
        return self._serve_with_megatron(self.request.compose_serving())

    def read_serving(self) -> TokenLogProbabilities:
        """Return the log probabilities of the serving engine as it generates, or else of whole sequences."""
        generated = self.serving / GENERATED_FOLDER / SCORES_FILE
        whole = self.serving / WHOLE_FOLDER / SCORES_FILE
        return TokenLogProbabilities.read(generated if generated.is_file() else whole)

    @cached_property
    def serving_capture(self) -> Capture | None:
        """The modules' outputs of the serving engine; None if it wrote none."""
        folder = self.serving / "capture"
        return read_capture(folder) if folder.is_dir() else None

    @cached_property
    def texts_by_token(self) -> dict[str, str]:
        """Text of each scored token by its number; empty if the served model has no tokenizer."""
        path = self.serving / TEXTS_FILE
        texts: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        return texts

    def explain(self) -> GapExplanation:
        """Return the causes of the gap between the bridge and the serving engine."""
        folder = self.folder / "explained"
        request = ScoreRequest(
            task=Task.EXPLAIN,
            folder=str(folder),
            sequences=self._recorded_sequences,
            prompt_tokens=self.prompt_tokens,
            serving=str(self.serving),
            relative_tolerance=self.relative_tolerance,
        )
        self._run_request(self.request.verification.reference, request, folder)
        return read_explanation(folder / EXPLAINED_FILE)

    def _score_megatron(self, part: str, launch: Launch, num_probes: int) -> ScoredCapture:
        """Run the forward passes of a launch, and return the scored tokens."""
        folder = self.folder / part
        request = ScoreRequest(
            task=Task.CAPTURE,
            folder=str(folder),
            num_probes=num_probes,
            sequences=self._recorded_sequences,
        )
        self._run_request(launch, request, folder)
        return read_scored_capture(folder, self.folder / f"{part}-joined")

    def _run_request(self, launch: Launch, request: ScoreRequest, folder: Path) -> None:
        """Run a request on the ranks of a launch.

        Raises:
            SideError: A rank failed.
        """
        folder.mkdir(parents=True)
        path = folder / "request.json"
        request.write(path)
        environment = {**launch.environment, variables.LOGPROB: str(path)}
        failure = self.ranks.run(replace(launch, environment=environment), folder / "log.txt")
        if failure:
            raise SideError(f"The {folder.name} side {failure}")

    def _serve_with_transformers(self) -> Path:
        """Score the trainer's tokens with transformers, and return the folder of the results."""
        folder = self.folder / "serving"
        arguments = {
            "--folder": self.request.served_model or self._export_weights(),
            "--sequences": self._write_sequences(),
            "--like": self.bridge.capture.ranks[0].folder,
            "--out": folder,
            "--prompt": self.prompt_tokens,
            "--dtype": self.request.dtype,
        }
        if self.request.serve_patch is not None:
            arguments["--patch"] = self.request.serve_patch
        program_arguments = [str(text) for pair in arguments.items() for text in pair]
        log = self.folder / "serving.log"
        code = self.serve_with_transformers(program_arguments, log)
        if code:
            last_line = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            raise SideError(f"The serving side ended with {code}: {last_line} The log is {log}")
        return folder

    def _serve_with_megatron(self, launch: Launch) -> Path:
        """Score the trainer's tokens with Megatron in the serving layout, and return the folder of the results.

        The static engine scores token by token. If it does not run in this layout, only whole sequences are scored,
        and `problem` says why.
        """
        folder = self.folder / "serving"
        scored = self._score_megatron("served", launch, num_probes=0)
        (folder / WHOLE_FOLDER).mkdir(parents=True)
        (folder / "capture").symlink_to(scored.capture.folder)
        scored.select(self.prompt_tokens).write(folder / WHOLE_FOLDER / SCORES_FILE)
        request = ScoreRequest(
            task=Task.GENERATE,
            folder=str(folder / GENERATED_FOLDER),
            sequences=str(self._write_sequences()),
            prompt_tokens=self.prompt_tokens,
        )
        try:
            self._run_request(launch, request, folder / GENERATED_FOLDER)
        except SideError as error:
            self.problem = f"Megatron's static engine does not run in this layout: {error}"
        return folder

    def _read_recorded(self, path: Path) -> Path:
        """Return the folder of the results of an engine that recorded them (`parakit.record_tokens`)."""
        folder = self.folder / "serving"
        (folder / GENERATED_FOLDER).mkdir(parents=True)
        TokenLogProbabilities.read(path).write(folder / GENERATED_FOLDER / SCORES_FILE)
        return folder

    def _write_sequences(self) -> Path:
        """Write the trainer's tokens, and return the file."""
        path = self.folder / SEQUENCES_FILE
        np.save(path, self.bridge.tokens)
        return path

    def _export_weights(self) -> Path:
        """Write the trainer's weights in Hugging Face's format, with all rows of the vocabulary; return the folder.

        The rows with which Megatron pads the vocabulary are exported, too, because Megatron's softmax counts them.
        """
        from parakit.convert import ConversionProgress, export_model

        launch = self.request.verification.reference
        assert launch.initial_checkpoint is not None
        checkpoint = find_checkpoints(launch.initial_checkpoint)[0].path
        target = self.folder / "exported"
        shape = launch.model.shape
        rows = self.count_vocabulary_rows(launch)
        export_model(
            checkpoint,
            launch.flags,
            replace(shape, vocabulary=rows),
            None,
            target,
            ConversionProgress(self.console),
        )
        return target

    @staticmethod
    def count_vocabulary_rows(launch: Launch) -> int:
        """Return the rows of a launch's embedding, with Megatron's padding."""
        multiple = Flags(launch.flags).integer(PADDING)
        shape = replace(launch.model.shape, vocabulary_multiple=multiple)
        return shape.padded_vocabulary(launch.spec.parallelism.tensor)

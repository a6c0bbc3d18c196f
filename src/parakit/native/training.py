"""Train the native backend's model, from the flags to the last log line; `pretrain_native.py` calls `main`.

The log lines are those of Megatron 0.19, so the same parser reads the logs of every backend. Since 0.16, Megatron
prints the first iteration without resetting its sums, so its second line is the mean of two iterations. This
module does the same. Readers leave the second line out of the times, because the kit's memory accounting slows the
second iteration down.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from parakit.data import Split
from parakit.native.batches import SplitSamples, micro_batches
from parakit.native.capture import build_native_counterpart, wrap_for_capture
from parakit.native.engines import DeepSpeedEngine, Engine, TorchEngine, Update, count_parameters
from parakit.native.model import GPT, initialise
from parakit.native.optimizer import learning_rate
from parakit.native.parallel import RankLayout, end_ranks, start_ranks
from parakit.native.pipelines import build_pipeline_engine, cut_into_stages
from parakit.native.settings import Settings, parse_settings
from parakit.native.weights import load_initial_weights

LOSS_NAMES = ("lm loss", "load_balancing_loss", "z_loss")
"""Names of an engine's losses in Megatron's log, in their order; a dense model has the first loss only."""


def main() -> None:
    """Read the flags of the command line, and train from the first iteration to `--exit-interval`."""
    settings = parse_settings(sys.argv[1:])
    ranks = start_ranks(settings)
    torch.manual_seed(settings.seed + ranks.data_rank)
    num_samples = settings.train_iters * settings.global_batch_size
    samples = _open_samples(settings, Split.TRAINING, num_samples)
    train(settings, ranks, build_engine(settings, ranks), samples)
    end_ranks(settings)


def build_engine(settings: Settings, ranks: RankLayout) -> Engine:
    """Build the model with its initial weights, and return the engine that `--engine` names.

    Ranks with the data-parallel rank 0 print the number of parameters. Every rank must call this function.
    """
    model = GPT(settings)
    if settings.start_weights:
        load_initial_weights(model, Path(settings.start_weights))
    else:
        initialise(model, settings)
    model.to(ranks.device)
    num_model_parameters = count_parameters(model)
    local_model: nn.Module = model
    engine: Engine
    if settings.engine == "deepspeed":
        engine = DeepSpeedEngine(model, settings, ranks)
    elif ranks.pipeline_size > 1:
        local_model = cut_into_stages(model, settings, ranks)
        engine = build_pipeline_engine(local_model, settings, ranks)
    else:
        engine = wrap_for_capture(
            TorchEngine(model, settings, ranks), build_native_counterpart(model), settings
        )
    # Megatron prints the parameters of one replica's part: tensor, pipeline and expert parallelism split
    # the replica, and sharding over replicas does not.
    is_split = ranks.data_size < ranks.world_size or settings.expert_model_parallel_size > 1
    num_parameters = count_parameters(local_model) if is_split else num_model_parameters
    if ranks.data_rank == 0:
        line = format_parameters_line(ranks.tensor_rank, ranks.pipeline_rank, num_parameters)
        print(line, flush=True)
    return engine


def train(settings: Settings, ranks: RankLayout, engine: Engine, samples: SplitSamples) -> None:
    """Run all iterations and evaluations. As in Megatron, the last rank prints the log.

    Args:
        settings: The run's settings; training ends after `exit_interval` iterations.
        ranks: This rank's position.
        engine: Engine with the model.
        samples: Training samples in the order of consumption.
    """
    log = Log(settings)
    evaluator = Evaluator(settings, ranks) if _has_evaluations(settings) else None
    for iteration in range(1, settings.exit_interval + 1):
        start = time.perf_counter()
        first_sample = (iteration - 1) * settings.global_batch_size
        batches = micro_batches(settings, ranks, samples, first_sample)
        losses = engine.forward_backward(batches)
        update = engine.update(learning_rate(settings, iteration - 1))
        means = ranks.average(losses).tolist()
        milliseconds = (time.perf_counter() - start) * 1000
        log.add(milliseconds, means, update)
        line = log.line(iteration, learning_rate(settings, iteration), update)
        if ranks.writes and line:
            print(line, flush=True)
        if evaluator and iteration % settings.eval_interval == 0:
            loss, accuracy = evaluator.score(engine)
            if ranks.writes:
                print(format_validation_lines(iteration, loss, accuracy), flush=True)
    if ranks.writes:
        # This is the line with which Megatron ends at `--exit-interval`.
        last_line = f"[exiting program at iteration {settings.exit_interval}] datetime: {_now()}"
        print(last_line, flush=True)


def _has_evaluations(settings: Settings) -> bool:
    """Return True if the run evaluates at least once. The engine `bare` does not train, and evaluates nothing."""
    reaches_evaluation = 0 < settings.eval_interval <= settings.exit_interval
    return reaches_evaluation and settings.eval_iters > 0 and settings.engine != "bare"


class Evaluator:
    """Validation as in Megatron, on documents that training does not use. It also measures next-token accuracy.

    Each evaluation reads the next validation samples, after the samples of the previous evaluation.
    """

    def __init__(self, settings: Settings, ranks: RankLayout) -> None:
        self._settings, self._ranks = settings, ranks
        self._finished_batches = 0
        # The number of requested samples decides their order, so it must be Megatron's
        # (`get_train_valid_test_num_samples`).
        num_evaluations = settings.train_iters // settings.eval_interval + 1
        num_samples = num_evaluations * settings.eval_iters * settings.global_batch_size
        self._samples = _open_samples(settings, Split.VALIDATION, num_samples)

    def score(self, engine: Engine) -> tuple[float, float]:
        """Return mean loss and next-token accuracy over the next `--eval-iters` batches of all ranks.

        The accuracy is the fraction of tokens whose label has the largest logit. Every rank must call this
        function.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for _ in range(self._settings.eval_iters):
            first = self._finished_batches * self._settings.global_batch_size
            for tokens, labels in micro_batches(self._settings, self._ranks, self._samples, first):
                logits = engine.logits(tokens)
                loss = cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
                )
                num_correct = (logits.argmax(dim=-1) == labels).sum()
                num_tokens = torch.tensor(labels.numel(), device=labels.device)
                sums += torch.stack((loss.double(), num_correct.double(), num_tokens.double()))
            self._finished_batches += 1
        dist.all_reduce(sums)
        loss_sum, correct_sum, token_sum = sums.tolist()
        return loss_sum / token_sum, correct_sum / token_sum


def _open_samples(settings: Settings, part: Split, num_samples: int) -> SplitSamples:
    """Return the samples of one part of the run's data set."""
    return SplitSamples(
        Path(settings.data_path),
        settings.split,
        samples=num_samples,
        seq_length=settings.seq_length,
        seed=settings.seed,
        part=part,
    )


class LoggedIteration(NamedTuple):
    """Values of one iteration that its log line needs."""

    milliseconds: float
    losses: Sequence[float]
    """Losses in the order of LOSS_NAMES."""
    update: Update


@dataclass
class Log:
    """The iterations since the last log line, from which lines in Megatron's format are made.

    There is a line for the first iteration and for every `--log-interval`-th iteration.
    """

    settings: Settings
    _iterations: list[LoggedIteration] = field(default_factory=list)

    def add(self, milliseconds: float, losses: Sequence[float], update: Update) -> None:
        """Store one iteration for the next line; the losses of a skipped update will not count."""
        self._iterations.append(LoggedIteration(milliseconds, losses, update))

    def line(self, iteration: int, rate: float, update: Update) -> str | None:
        """Return the log line of this iteration, or None if the iteration has none.

        Times and losses are means over the stored iterations. After the line these iterations are dropped,
        except after the line of iteration 1.

        Args:
            iteration: Number of the iteration, from 1.
            rate: Learning rate of the next update, which Megatron prints.
            update: Update of this iteration.
        """
        if iteration > 1 and iteration % self.settings.log_interval:
            return None
        batch = self.settings.global_batch_size
        elapsed = fmean(logged.milliseconds for logged in self._iterations)
        norm = "" if update.gradient_norm is None else f" grad norm: {update.gradient_norm:.3f} |"
        num_skipped = sum(logged.update.skipped for logged in self._iterations)
        num_nan = sum(math.isnan(logged.losses[0]) for logged in self._iterations)
        text = (
            f" [{_now()}] iteration {iteration:8d}/{self.settings.train_iters:8d} |"
            f" consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {rate:.6E} |"
            f" global batch size: {batch:5d} |{self._format_mean_losses()}"
            f" loss scale: {update.loss_scale:.1f} |{norm}"
            f" number of skipped iterations: {num_skipped:3d} |"
            f" number of nan iterations: {num_nan:3d} |"
        )
        if iteration > 1:
            self._iterations.clear()
        return text

    def _format_mean_losses(self) -> str:
        """Return the fields of the losses, averaged over the stored iterations whose updates were not skipped.

        If all updates were skipped, the model's loss is 0, and the other losses are left out.
        """
        trained_losses = [logged.losses for logged in self._iterations if not logged.update.skipped]
        means = [0.0]
        if trained_losses:
            means = [fmean(values_of_loss) for values_of_loss in zip(*trained_losses, strict=True)]
        text = ""
        for name, mean in zip(LOSS_NAMES, means, strict=False):
            text += f" {name}: {mean:.6E} |"
        return text


def format_parameters_line(tensor_rank: int, pipeline_rank: int, parameters: int) -> str:
    """Return Megatron's log line on the number of parameters of a tensor- and pipeline-parallel rank."""
    return (
        " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank "
        f"({tensor_rank}, 0, {pipeline_rank}): {parameters}"
    )


def format_validation_lines(iteration: int, loss: float, accuracy: float) -> str:
    """Return Megatron's log lines on a validation, with the accuracy as an additional value.

    The three lines are a rule of dashes, the values and another rule.
    """
    line = (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {math.exp(min(20, loss)):.6E} | next token accuracy value: {accuracy:.6E} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def _now() -> str:
    """Return the local time as Megatron prints it, such as `2026-01-31 12:00:00.000000`."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")

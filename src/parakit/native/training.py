"""The run of the native backend, from its flags to its last line; `pretrain_native.py` calls `main`.

It writes Megatron 0.19's log lines, so that one scraper reads every backend. From 0.16 on Megatron
prints the first iteration without resetting what it adds up, so its second line is the mean of two. That
is kept: the kit's memory ledger slows the second iteration down, and readers of these logs leave that
line out of the times, as they do of Megatron's.
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
"""What an engine's means are, in their order; a dense model has the first alone."""


def main() -> None:
    """Train to `--exit-interval`."""
    settings = parse_settings(sys.argv[1:])
    ranks = start_ranks(settings)
    torch.manual_seed(settings.seed + ranks.data_rank)
    samples = _samples(settings, Split.TRAINING, settings.train_iters * settings.global_batch_size)
    train(settings, ranks, build_engine(settings, ranks), samples)
    end_ranks(settings)


def build_engine(settings: Settings, ranks: RankLayout) -> Engine:
    """The model with its starting weights, under the engine of `--engine`."""
    model = GPT(settings)
    if settings.start_weights:
        load_initial_weights(model, Path(settings.start_weights))
    else:
        initialise(model, settings)
    model.to(ranks.device)
    whole = count_parameters(model)
    held: nn.Module = model
    engine: Engine
    if settings.engine == "deepspeed":
        engine = DeepSpeedEngine(model, settings, ranks)
    elif ranks.pipeline_size > 1:
        held = cut_into_stages(model, settings, ranks)
        engine = build_pipeline_engine(held, settings, ranks)
    else:
        engine = wrap_for_capture(
            TorchEngine(model, settings, ranks), build_native_counterpart(model), settings
        )
    # As Megatron counts: sharding over replicas leaves the number, splitting a replica does not.
    is_split = ranks.data_size < ranks.world_size or settings.expert_model_parallel_size > 1
    parameters = count_parameters(held) if is_split else whole
    if ranks.data_rank == 0:
        print(
            format_parameters_line(ranks.tensor_rank, ranks.pipeline_rank, parameters), flush=True
        )
    return engine


def train(settings: Settings, ranks: RankLayout, engine: Engine, samples: SplitSamples) -> None:
    """The loop; the last rank writes the log, as in Megatron."""
    log = Log(settings)
    # Where evaluations lie within the run; the bare engine trains nothing to evaluate.
    wanted = 0 < settings.eval_interval <= settings.exit_interval and settings.eval_iters > 0
    evaluator = Evaluator(settings, ranks) if wanted and settings.engine != "bare" else None
    for iteration in range(1, settings.exit_interval + 1):
        start = time.perf_counter()
        first = (iteration - 1) * settings.global_batch_size
        losses = engine.forward_backward(micro_batches(settings, ranks, samples, first))
        update = engine.update(learning_rate(settings, iteration - 1))
        means = ranks.average(losses).tolist()
        log.add((time.perf_counter() - start) * 1000, means, update)
        line = log.line(iteration, learning_rate(settings, iteration), update)
        if ranks.writes and line:
            print(line, flush=True)
        if evaluator and iteration % settings.eval_interval == 0:
            loss, accuracy = evaluator.score(engine)
            if ranks.writes:
                print(format_validation_lines(iteration, loss, accuracy), flush=True)
    if ranks.writes:
        # Megatron's last line at `--exit-interval`.
        end = f"[exiting program at iteration {settings.exit_interval}] datetime: {_now()}"
        print(end, flush=True)


class Evaluator:
    """Validation as Megatron does it, on documents that training never sees, and next-token accuracy.

    Every evaluation continues in the validation samples where the one before it ended.
    """

    def __init__(self, settings: Settings, ranks: RankLayout) -> None:
        self._settings, self._ranks = settings, ranks
        self._batches = 0
        # As many as Megatron prepares, because their number decides their order
        # (`get_train_valid_test_num_samples`).
        evaluations = settings.train_iters // settings.eval_interval + 1
        count = evaluations * settings.eval_iters * settings.global_batch_size
        self._samples = _samples(settings, Split.VALIDATION, count)

    def score(self, engine: Engine) -> tuple[float, float]:
        """Mean loss, and share of next tokens that the largest logit names; `--eval-iters` batches."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for _ in range(self._settings.eval_iters):
            first = self._batches * self._settings.global_batch_size
            for tokens, labels in micro_batches(self._settings, self._ranks, self._samples, first):
                logits = engine.logits(tokens)
                loss = cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
                )
                right = (logits.argmax(dim=-1) == labels).sum()
                count = torch.tensor(labels.numel(), device=labels.device)
                sums += torch.stack((loss.double(), right.double(), count.double()))
            self._batches += 1
        dist.all_reduce(sums)
        total, guessed, seen = sums.tolist()
        return total / seen, guessed / seen


def _samples(settings: Settings, part: Split, count: int) -> SplitSamples:
    prefix = Path(settings.data_path)
    return SplitSamples(prefix, settings.split, count, settings.seq_length, settings.seed, part)


@dataclass
class Log:
    """Keeps iterations and writes a line every `--log-interval`, and after the first."""

    settings: Settings
    _kept: list[tuple[float, Sequence[float], Update]] = field(default_factory=list)

    def add(self, milliseconds: float, losses: Sequence[float], update: Update) -> None:
        """Keep one iteration; the loss of a skipped one does not count."""
        self._kept.append((milliseconds, losses, update))

    def line(self, iteration: int, rate: float, update: Update) -> str | None:
        """The line of this iteration, if it has one; `rate` is the next update's, as Megatron's is."""
        if iteration > 1 and iteration % self.settings.log_interval:
            return None
        batch = self.settings.global_batch_size
        elapsed = fmean(milliseconds for milliseconds, _, _ in self._kept)
        trained = [losses for _, losses, update in self._kept if not update.skipped]
        means = [fmean(each) for each in zip(*trained, strict=True)] or [0.0]
        losses = "".join(
            f" {name}: {mean:.6E} |" for name, mean in zip(LOSS_NAMES, means, strict=False)
        )
        norm = "" if update.gradient_norm is None else f" grad norm: {update.gradient_norm:.3f} |"
        text = (
            f" [{_now()}] iteration {iteration:8d}/{self.settings.train_iters:8d} |"
            f" consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {rate:.6E} |"
            f" global batch size: {batch:5d} |{losses}"
            f" loss scale: {update.loss_scale:.1f} |{norm}"
            f" number of skipped iterations: {len(self._kept) - len(trained):3d} |"
            f" number of nan iterations: {sum(math.isnan(one[0]) for _, one, _ in self._kept):3d} |"
        )
        if iteration > 1:
            self._kept.clear()
        return text


def format_parameters_line(tensor_rank: int, pipeline_rank: int, parameters: int) -> str:
    """How many parameters this tensor- and pipeline-parallel rank holds."""
    return (
        " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank "
        f"({tensor_rank}, 0, {pipeline_rank}): {parameters}"
    )


def format_validation_lines(iteration: int, loss: float, accuracy: float) -> str:
    """Megatron's validation line between its rules, and the accuracy that Megatron does not have."""
    line = (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {math.exp(min(20, loss)):.6E} | next token accuracy value: {accuracy:.6E} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")

"""The run of the native backend, from its flags to its last line; `pretrain_native.py` calls `main`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tools.dataset.split import Split
from tools.native.batches import SplitSamples, micro_batches
from tools.native.capture import capturing, native_counterpart
from tools.native.engines import DeepSpeedEngine, Engine, TorchEngine, count_parameters
from tools.native.log_lines import Log, exit_line, parameters_line, validation_lines
from tools.native.model import GPT, initialise
from tools.native.optimizer import learning_rate
from tools.native.parallel import RankLayout, end_ranks, start_ranks
from tools.native.pipelines import cut_into_stages, pipeline_engine
from tools.native.settings import Settings, parse_settings
from tools.native.weights import load_start


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
        load_start(model, Path(settings.start_weights))
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
        engine = pipeline_engine(held, settings, ranks)
    else:
        engine = capturing(TorchEngine(model, settings, ranks), native_counterpart(model), settings)
    # As Megatron counts: sharding over replicas leaves the number, splitting a replica does not.
    is_split = ranks.data_size < ranks.world_size or settings.expert_model_parallel_size > 1
    parameters = count_parameters(held) if is_split else whole
    if ranks.data_rank == 0:
        print(parameters_line(ranks.tensor_rank, ranks.pipeline_rank, parameters), flush=True)
    return engine


def train(settings: Settings, ranks: RankLayout, engine: Engine, samples: SplitSamples) -> None:
    """The loop; the last rank writes the log, as in Megatron."""
    log = Log(settings)
    evaluator = _evaluator(settings, ranks)
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
                print(validation_lines(iteration, loss, accuracy), flush=True)
    if ranks.writes:
        print(exit_line(settings.exit_interval), flush=True)


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
                sums += _token_sums(engine.logits(tokens), labels)
            self._batches += 1
        dist.all_reduce(sums)
        loss, right, tokens_seen = sums.tolist()
        return loss / tokens_seen, right / tokens_seen


def _token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, right guesses and tokens; logits are [batch, sequence, vocabulary]."""
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    right = (logits.argmax(dim=-1) == labels).sum()
    count = torch.tensor(labels.numel(), device=labels.device)
    return torch.stack((loss.double(), right.double(), count.double()))


def _evaluator(settings: Settings, ranks: RankLayout) -> Evaluator | None:
    """None where no evaluation lies within the run; the bare engine trains nothing to evaluate."""
    wanted = 0 < settings.eval_interval <= settings.exit_interval and settings.eval_iters > 0
    if not wanted or settings.engine == "bare":
        return None
    return Evaluator(settings, ranks)


def _samples(settings: Settings, part: Split, count: int) -> SplitSamples:
    prefix = Path(settings.data_path)
    return SplitSamples(prefix, settings.split, count, settings.seq_length, settings.seed, part)

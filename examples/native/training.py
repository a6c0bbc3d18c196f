"""The run of a native backend, from its flags to its last line; `pretrain_native.py` calls it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from examples.native.batches import SplitSamples, micro_batches
from examples.native.engines import Engine, TorchEngine, count_parameters
from examples.native.evaluation import Evaluator, validation_samples
from examples.native.lines import Log, exit_line, parameters_line, validation_lines
from examples.native.model import GPT, initialise
from examples.native.parallel import Ranks, start_ranks
from examples.native.schedule import learning_rate
from examples.native.settings import Settings, parse_settings
from examples.native.watch import Watch
from examples.native.weights import load_start
from tools.preprocess.split import Part


def main() -> None:
    """Train to `--exit-interval`."""
    settings = parse_settings(sys.argv[1:])
    ranks = start_ranks(settings)
    torch.manual_seed(settings.seed + ranks.data_rank)
    samples = _samples(settings, Part.TRAINING, settings.train_iters * settings.global_batch_size)
    train(settings, ranks, build_engine(settings, ranks), samples)
    dist.destroy_process_group()


def build_engine(settings: Settings, ranks: Ranks) -> Engine:
    """The model with its starting weights, under the engine that was asked for."""
    model = GPT(settings)
    if settings.start_weights:
        load_start(model, settings.start_weights)
    else:
        initialise(model, settings)
    model.to(ranks.device)
    whole = count_parameters(model)
    if settings.engine == "deepspeed":
        from examples.native.deepspeed_engine import DeepSpeedEngine

        engine: Engine = DeepSpeedEngine(model, settings, ranks, Watch())
    else:
        engine = TorchEngine(model, settings, ranks, Watch())
    # Sharding over the replicas is not counted, splitting of tensors and experts is; as Megatron counts.
    is_split = ranks.tensor_size > 1 or settings.expert_model_parallel_size > 1
    held = count_parameters(model) if is_split else whole
    if ranks.data_rank == 0:
        print(parameters_line(ranks.tensor_rank, held), flush=True)
    return engine


def train(settings: Settings, ranks: Ranks, engine: Engine, samples: SplitSamples) -> None:
    """The loop; the last rank writes the log, as in Megatron."""
    log = Log(settings)
    evaluator = _evaluator(settings, ranks)
    writes = ranks.rank == ranks.world_size - 1
    for iteration in range(1, settings.exit_interval + 1):
        start = time.perf_counter()
        first = (iteration - 1) * settings.global_batch_size
        losses = engine.forward_backward(micro_batches(settings, ranks, samples, first))
        update = engine.update(learning_rate(settings, iteration - 1))
        dist.all_reduce(losses)
        means = (losses / ranks.world_size).tolist()
        log.add((time.perf_counter() - start) * 1000, means, update)
        line = log.line(iteration, learning_rate(settings, iteration), update)
        if writes and line:
            print(line, flush=True)
        if evaluator and iteration % settings.eval_interval == 0:
            score = evaluator.score(engine)
            if writes:
                print(validation_lines(iteration, score.loss, score.accuracy), flush=True)
    if writes:
        print(exit_line(settings.exit_interval), flush=True)


def _evaluator(settings: Settings, ranks: Ranks) -> Evaluator | None:
    """None where no evaluation lies within the run; the bare engine trains nothing to evaluate."""
    wanted = 0 < settings.eval_interval <= settings.exit_interval and settings.eval_iters > 0
    if not wanted or settings.engine == "bare":
        return None
    samples = _samples(settings, Part.VALIDATION, validation_samples(settings))
    return Evaluator(settings, ranks, samples)


def _samples(settings: Settings, part: Part, count: int) -> SplitSamples:
    prefix = Path(settings.data_path)
    return SplitSamples(prefix, settings.split, count, settings.seq_length, settings.seed, part)

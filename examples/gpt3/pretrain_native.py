"""Train the same GPT without Megatron: plain PyTorch, or DeepSpeed with `--engine deepspeed`.

It takes Megatron's flags, starts from the same weights (`--start-weights`, a torch_dist checkpoint),
reads the same batches in the same order and writes Megatron's iteration lines. Validation during
training is left out; everything else that it does not do it refuses by name.

    torchrun --nproc-per-node 2 -m examples.gpt3.pretrain_native FLAGS…
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from examples.native.batches import TrainingSamples
from examples.native.engines import Engine, MicroBatch, TorchEngine, count_parameters
from examples.native.lines import Log, exit_line, parameters_line
from examples.native.model import GPT, initialise
from examples.native.parallel import Ranks, start_ranks
from examples.native.schedule import learning_rate
from examples.native.settings import Settings, parse_settings
from examples.native.watch import Watch
from examples.native.weights import load_start


def main() -> None:
    """Train to `--exit-interval`."""
    settings = parse_settings(sys.argv[1:])
    ranks = start_ranks(settings)
    torch.manual_seed(settings.seed + ranks.data_rank)
    samples = TrainingSamples(
        Path(settings.data_path),
        settings.split,
        settings.train_iters * settings.global_batch_size,
        settings.seq_length,
        settings.seed,
    )
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
    # Sharding over the replicas is not counted, splitting of tensors is; as Megatron counts.
    held = count_parameters(model) if ranks.tensor_size > 1 else whole
    if ranks.data_rank == 0:
        print(parameters_line(ranks.tensor_rank, held), flush=True)
    return engine


def train(settings: Settings, ranks: Ranks, engine: Engine, samples: TrainingSamples) -> None:
    """The loop; the last rank writes the log, as in Megatron."""
    log = Log(settings)
    writes = ranks.rank == ranks.world_size - 1
    for iteration in range(1, settings.exit_interval + 1):
        start = time.perf_counter()
        loss = engine.forward_backward(micro_batches(settings, ranks, samples, iteration))
        update = engine.update(learning_rate(settings, iteration - 1))
        dist.all_reduce(loss)
        log.add((time.perf_counter() - start) * 1000, float(loss) / ranks.world_size, update)
        line = log.line(iteration, learning_rate(settings, iteration), update)
        if writes and line:
            print(line, flush=True)
    if writes:
        print(exit_line(settings.exit_interval), flush=True)


def micro_batches(
    settings: Settings, ranks: Ranks, samples: TrainingSamples, iteration: int
) -> list[MicroBatch]:
    """This rank's micro batches of an iteration: a step takes one from each replica in turn."""
    size = settings.micro_batch_size
    step = size * ranks.data_size
    first = (iteration - 1) * settings.global_batch_size + ranks.data_rank * size
    last = iteration * settings.global_batch_size
    batches = (samples.batch(start, size) for start in range(first, last, step))
    return [(tokens.to(ranks.device), labels.to(ranks.device)) for tokens, labels in batches]


if __name__ == "__main__":
    main()

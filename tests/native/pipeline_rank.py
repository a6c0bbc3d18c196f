"""Three ranks that train a small model by every schedule, and save losses and final weights.

python -m tests.native.pipeline_rank FOLDER
"""

import importlib
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parakit.native.batches import MicroBatch
from parakit.native.model import GPT, initialise
from parakit.native.parallel import RankLayout
from parakit.native.pipelines import StageModules, build_pipeline_engine, cut_into_stages
from parakit.native.settings import Settings
from tests.native.pipelined import STAGES
from tests.native.small_model import settings

ITERATIONS = 6
MICRO_BATCHES = 3
"""Micro batches per iteration; PipeDream has a single one, because it updates after each."""
TIED = ("gpipe", "1f1b", "interleaved", "pipedream-flush")
UNTIED = ("1f1b", "pipedream", "pipedream-2bw")


def chosen(schedule: str, *, tied: bool) -> Settings:
    """Return settings with six layers and batches of three samples. Schedules without flushes have no clipping."""
    micro = 3 if schedule == "pipedream" else 1
    flags = {
        "--num-layers": 6,
        "--micro-batch-size": micro,
        "--global-batch-size": 3,
        "--exit-interval": ITERATIONS,
        "--pipeline-model-parallel-size": STAGES,
        "--num-virtual-stages-per-pipeline-rank": 2 if schedule == "interleaved" else 1,
        "--pipeline-schedule": schedule,
        "--clip-grad": 0.5 if tied else 0,
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        # Large enough that weights of another update give another loss.
        "--lr": 1e-2,
        "--lr-warmup-fraction": 0,
    }
    arguments = [str(word) for pair in flags.items() for word in pair]
    return settings(*arguments, *([] if tied else ["--untie-embeddings-and-output-weights"]))


def batches(of: Settings, iteration: int) -> list[MicroBatch]:
    """Return the micro batches of an iteration. Their tokens do not depend on the micro batch size."""
    tokens = torch.randint(100, (3, 9), generator=torch.Generator().manual_seed(iteration))
    pieces = tokens.split(of.micro_batch_size)
    return [(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces]


def whole_model(of: Settings) -> GPT:
    """Return the full model with its initial weights."""
    model = GPT(of)
    initialise(model, of)
    return model


def _train(of: Settings, rank: int) -> tuple[list[float], StageModules, torch.Tensor]:
    ranks = RankLayout(rank, STAGES, 1, torch.device("cpu"), STAGES)
    stages = cut_into_stages(whole_model(of), of, ranks)
    engine = build_pipeline_engine(stages, of, ranks)
    losses = []
    for iteration in range(ITERATIONS):
        losses.append(float(engine.forward_backward(batches(of, iteration))))
        engine.update(0.0)
    return losses, stages, engine.logits(batches(of, 0)[0][0])


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES
    )
    results = {}
    for tied, schedules in ((True, TIED), (False, UNTIED)):
        for schedule in schedules:
            losses, stages, logits = _train(chosen(schedule, tied=tied), rank)
            weights = [dict(stage.state_dict()) for stage in stages]
            kept = [[data.clone() for data in version] for version in stages.weight_versions]
            results[schedule, tied] = (losses, weights, kept, logits)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked after the imports, which take longer than the training; the schedules load a compiler.
    importlib.import_module("torch.distributed.pipelining")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(Path(sys.argv[1]), rank)) for rank in range(STAGES)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))

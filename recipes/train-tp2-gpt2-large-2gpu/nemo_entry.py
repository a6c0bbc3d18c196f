"""gpt2-large, tp2, on 2 GPUs, with nemo-run 0.11.1 on this machine.

Made by `x`.
Trains where the data set's path begins, in an image with Megatron-Bridge and nemo-run:

    python y    # --dryrun shows the command and starts nothing

Another executor (run.SlurmExecutor, run.DockerExecutor) takes the place of LocalExecutor.
"""

import sys
from pathlib import Path

import nemo_run as run

DEVICES = 2
RECIPE = Path(__file__).with_name("bridge_recipe.py").resolve()


def executor() -> run.LocalExecutor:
    """torchrun with one rank a GPU."""
    return run.LocalExecutor(
        ntasks_per_node=DEVICES,
        launcher="torchrun",
        env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )


if __name__ == "__main__":
    with run.Experiment("train-tp2-gpt2-large-2gpu") as experiment:
        recipe = run.Script(path=str(RECIPE), entrypoint="python")
        experiment.add(recipe, executor=executor(), name="train")
        if "--dryrun" in sys.argv:
            experiment.dryrun()
        else:
            experiment.run(sequential=True, tail_logs=True)

"""gpt2-tiny, tp2, on 2 GPUs, with nemo-run 0.11.1 on this machine.

Made by `make export-recipe RUN=tests/golden/runs/20261122T010857Z-tp2-gpt2-tiny-2cpu TO=nemo`. From the folder that the data set's path is relative to:

    python nemo_entry.py            # --dryrun shows the command and starts nothing

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


def experiment() -> run.Experiment:
    """The one task: Megatron-Bridge's recipe."""
    planned = run.Experiment("20261122T010857Z-tp2-gpt2-tiny-2cpu")
    with planned:
        planned.add(
            run.Script(path=str(RECIPE), entrypoint="python"), executor=executor(), name="train"
        )
    return planned


if __name__ == "__main__":
    with experiment() as planned:
        if "--dryrun" in sys.argv:
            planned.dryrun()
        else:
            planned.run(sequential=True, tail_logs=True)

"""Groups of make's variables that several packages use: the variables of a training target and of `plan`.

`src/parakit/cli/commands.py` lists them for its commands. `launch.Options` and `planner.PlanOptions` read their
values. A variable may have another meaning, kind or default in a command. It is described here, or in the command's
entry if no other package uses it. This module must run on every Python from 3.6 on, as `settings.py`.
"""

from typing import Any

from parakit.config import settings as v
from parakit.config.settings import Setting


def replace_meaning(setting: Setting, text: str, **fields: Any) -> Setting:
    """Return a variable with the help text, and other fields, that it has in one command."""
    return setting._replace(help=text, **fields)


BATCH = (v.MICRO_BATCH, v.GLOBAL_BATCH)
MEGATRON = (v.MEGATRON_LM, v.ALLOW_UNKNOWN_MEGATRON)
_WHERE = (v.DRY_RUN, v.RUNS, v.RUNTIME, v.IMAGE, v.HOST_NETWORK, v.SHARE_GPU, v.NET)
LASTING = (
    *(v.SEED, v.DROPOUT, v.OPTIMIZER, v.DATA, v.EXTRA, v.PATCH_FILE, v.SHARED_START, v.FUSED),
    *MEGATRON,
    *_WHERE,
    *(v.WANDB, v.LEDGER, v.HANG_TIMEOUT),
)
"""Variables of every command that trains."""
COMPARED = (v.ITERS, *LASTING, v.REPEATS)
"""Variables of a comparison whose batches follow from its definition."""
TRAINING = (*COMPARED, *BATCH)
SAVING = (v.SAVE_EVERY, v.KEEP, v.ASYNC_SAVE, v.GRACE)
ONE_RUN = (*TRAINING, v.BACKEND, *SAVING)
TRAIN = (*ONE_RUN, v.MODEL, v.RUN_FOLDER, *v.NODE_SETTINGS, *v.SLURM_SETTINGS)
"""Variables of a training target: all that concern one run."""

READ_RUNS = replace_meaning(v.RUNS, "folder of run folders ({default})", default="runs")
"""Variable of commands that read run folders."""

PLAN_MODEL = replace_meaning(
    v.MODEL, "a model of make list or of measurements (deepseek-v3), an .args file or config.json"
)
PLAN_GPU = replace_meaning(v.GPU, "h200, a100-80g, … ({default})", default="h200")
PLAN_CALIBRATE = replace_meaning(
    v.CALIBRATE,
    'what was measured: "700 TFLOP/s on 4k x 4k x 4k", "200 ms on STRATEGY=tp8 MODEL=gpt3-13b"',
    kind=v.TEXT,
    default=None,
)
PLAN_EXTRA = replace_meaning(
    v.EXTRA, "Megatron flags of the planned model and strategy", kind=v.TEXT, default=None
)
PLAN_STRATEGY = replace_meaning(v.STRATEGY, "times this strategy alone, tp8pp16dp8-zero1")
PLAN = (
    *(PLAN_MODEL, v.GPUS, PLAN_GPU, v.NODES, v.GPUS_PER_NODE, v.INTRA, v.INTER),
    *(v.NICS, v.OVERSUBSCRIPTION, v.IMBALANCE, v.GLOBAL_BATCH, v.SEQ, v.DTYPE),
    *(v.CALIBRATION, PLAN_CALIBRATE, v.JSON, PLAN_EXTRA, v.READINGS),
    *(v.MICRO_BATCH, v.TOKENS, v.VERIFY, v.ALPA, v.LARGEST, v.RECIPE, v.RECOMPUTE, v.PEFT),
    *(v.DOCUMENT_LENGTH, v.SVG, PLAN_STRATEGY, v.WHAT_IF),
)
"""Variables of `plan` that decide what is planned."""
PLAN_GPUS = replace_meaning(
    v.GPUS,
    "number of devices, or several: 128,512,1024 shows how the plan scales",
    kind=v.COUNTS,
)
PLAN_COMMAND = (
    *(PLAN_GPUS if setting is v.GPUS else setting for setting in PLAN),
    *(v.ALL, v.FOR, v.MTBF, v.CHECKPOINT_SECONDS, v.RESTART_SECONDS),
    replace_meaning(v.LAUNCHER, "slurm prints the planned run as a script for sbatch"),
)
"""Variables of the command `plan`: those of a plan, several numbers of devices, and what is printed."""

"""Command line, plan and refusal of every target, compared with `commands/<area>.txt`."""

import re
import shlex
from pathlib import Path

import pytest

from tests.golden.commands_of_the_kit import HERE, Commands, check_golden, normalised

LAUNCH = "parakit"
SIX = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")
PRODUCTS = (
    "train-vpp2-gpt2-tiny-2cpu",
    "train-zero1-gpt2-tiny-2cpu",
    "train-zero2-gpt2-tiny-2cpu",
    "train-zero3-gpt2-tiny-2cpu",
    "train-fsdp2-gpt2-tiny-2cpu",
    "train-dp2-zero1-gpt2-tiny-2cpu",
    "train-tp2pp2-gpt2-tiny-4cpu",
    "train-tp2dp2-zero1-gpt2-large-4gpu",
    "train-tp2pp2dp2-gpt3-1.3b-8gpu",
    "train-sp2cp2-llama3-8b-4gpu",
    "train-tp4dp2-fsdp2-gpt2-xl-8gpu",
    "train-pp4-gpt3-345m-4gpu",
    "train-vpp4-gpt3-13b-4gpu",
    "train-tp8pp16dp8-gpt3-175b-1024gpu",
    "train-sp2dp4-zero1-llama3-8b-fp8-8gpu",
)
EXPERTS = (
    "train-baseline-moe-tiny-1cpu",
    "train-dp2-moe-tiny-2cpu",
    "train-ep2-moe-tiny-2cpu",
    "train-ep2dp2-moe-tiny-4cpu",
    "train-tp2ep2-moe-tiny-4cpu",
    "train-pp2ep2-moe-tiny-4cpu",
    "train-ep8-mixtral-8x7b-8gpu",
    "train-ep2-blueberry-79m-2gpu",
    "train-zero1-moe-tiny-2cpu",
    "train-dp2-blueberry-dense-2gpu",
)
TP2_CPU, TP2_GPU = "train-tp2-gpt2-tiny-2cpu", "train-tp2-gpt2-large-2gpu"
DP2_CPU = "train-dp2-gpt2-tiny-2cpu"
FIRST_LINES = 10
"""Number of lines that are compared of a command in the area of that name."""


def target(name: str, settings: str = "") -> str:
    """Return the shell line of a target's dry run."""
    return f"DRY_RUN=1 {settings} {LAUNCH} {name}".replace("  ", " ")


AREAS: dict[str, list[str]] = {
    "named-cpu": [target(f"train-{s}-gpt2-tiny-{1 if s == 'baseline' else 2}cpu") for s in SIX],
    "named-gpu": [
        target(f"train-{s}-gpt2-large-{1 if s == 'baseline' else 2}gpu", f"RUNTIME={runtime}")
        for runtime in ("host", "docker")
        for s in SIX
    ],
    "products": [target(name, "RUNTIME=host" if "gpu" in name else "") for name in PRODUCTS],
    "experts": [target(name, "RUNTIME=host" if "gpu" in name else "") for name in EXPERTS]
    + [target("train-ep2-moe-tiny-2gpu", "RUNTIME=docker")],
    "backends": [
        *(target(f"train-{s}-gpt2-tiny-2cpu", "BACKEND=native") for s in ("dp2", "zero3", "fsdp2")),
        target("train-baseline-gpt2-tiny-1cpu", "BACKEND=native"),
        target("train-baseline-gpt2-tiny-1cpu", "BACKEND=bare"),
        target("train-ep2-moe-tiny-2cpu", "BACKEND=native"),
        target("train-dp2-gpt2-large-2gpu", "BACKEND=native RUNTIME=host"),
        target("train-zero2-gpt2-large-2gpu", "BACKEND=native RUNTIME=docker"),
        *(target(f"train-{s}-gpt2-tiny-2cpu", "BACKEND=deepspeed") for s in ("dp2", "zero1")),
        target("train-zero3-gpt2-large-2gpu", "BACKEND=deepspeed RUNTIME=host"),
        target(TP2_CPU, "BACKEND=native"),
        target(TP2_CPU, "BACKEND=deepspeed"),
        target(TP2_CPU, "BACKEND=torchtitan"),
    ],
    "settings": [
        target(TP2_CPU, "ITERS=50 MICRO_BATCH=2 GLOBAL_BATCH=8 SEED=7 DROPOUT=0.1"),
        target(TP2_CPU, "DATA=owt-ds/mine_text_document RUNS=elsewhere"),
        target(TP2_CPU, "EXTRA='--lr 1e-4 --bf16' LEDGER=0"),
        target(TP2_CPU, "SHARED_START=0 DROPOUT=0"),
        target(TP2_CPU, "OPTIMIZER=muon"),
        target(DP2_CPU, "OPTIMIZER=muon BACKEND=native"),
        target(TP2_CPU, "SAVE_EVERY=10 KEEP=3"),
        target(TP2_GPU, "SAVE_EVERY=10 ASYNC_SAVE=1 HANG_TIMEOUT=60 RUNTIME=host"),
        target(TP2_GPU, "FUSED=norm,adamw RUNTIME=host"),
        target(TP2_GPU, "FUSED=bias_gelu,cross_entropy EXTRA=--bf16 RUNTIME=host"),
        target(TP2_GPU, "SHARE_GPU=1 RUNTIME=host"),
        target(TP2_GPU, "RUNTIME=docker IMAGE=25.06-py3 HOST_NETWORK=1"),
        target("train-sp2-llama3-8b-fp8-2gpu", "RUNTIME=docker"),
        target(TP2_GPU, "RUNTIME=docker DATA=/data/mine_text_document RUNS=/data/runs"),
        target(DP2_CPU, "NET=1gbps"),
        target(DP2_CPU, "WANDB=1"),
        target(DP2_CPU, "REPEATS=3"),
        target("train-dp2-gpt2-tiny-2cpu", "NNODES=2 NODE_RANK=1 MASTER_ADDR=host-a"),
        target("train-tp2dp2-gpt2-large-4gpu", "RUNTIME=host NNODES=2 NODE_RANK=0 MASTER_ADDR=a"),
        target("train-tp2-gpt3-345m-2gpu", "RUNTIME=host EXTRA=--bf16"),
        target("train-gpt3-345m-1gpu-x-model-parallelism", "RUNTIME=host"),
        target("train-tp2-gpt3-354m-2gpu", "RUNTIME=host"),
    ],
    "refusals": [
        target("train-tp2-gpt2-large-3gpu", "RUNTIME=host"),
        target("train-tp2-gpt2-larg-2gpu"),
        target("train-xp2-gpt2-tiny-2cpu"),
        target("train-dp2-zero9-gpt2-tiny-2cpu"),
        target("train-pp2-gpt2-tiny"),
        target("trane-tp2-gpt2-tiny-2cpu"),
        target("repport"),
        target(TP2_CPU, "ITERS=many"),
        target(TP2_CPU, "DROPOUT=1"),
        target(TP2_CPU, "SHARED_START=yes"),
        target(TP2_CPU, "NET=fast"),
        target(TP2_CPU, "FUSED=nrom"),
        target(TP2_CPU, 'EXTRA="--lr \'1"'),
        target(TP2_CPU, "MEGATRON_LM=nowhere"),
        target(TP2_CPU, "OPTIMIZER=sgd"),
        target("train-dp2-llama3-8b-fp8-2cpu"),
        target(TP2_GPU, "RUNTIME=docker IMAGE=1.2-py3"),
        target(TP2_GPU, "RUNTIME=enroot"),
        target(DP2_CPU, "NNODES=2"),
        target(DP2_CPU, "NNODES=2 NODE_RANK=2 MASTER_ADDR=a"),
        target(DP2_CPU, "LAUNCHER=pbs"),
        f"NNODES=2 NODE_RANK=0 MASTER_ADDR=a {LAUNCH} demo",
        f"LAUNCHER=slurm NODES=2 {LAUNCH} reproduce",
        f"RUN=tests/golden/runs/no-such-run {LAUNCH} resume",
    ],
    "slurm": [
        target(TP2_GPU, "LAUNCHER=slurm NODES=2 RUNTIME=host DATA='<data>'"),
        target(
            "train-tp2pp2dp2-gpt3-1.3b-8gpu",
            "LAUNCHER=slurm NODES=2 RUNTIME=host ITERS=50 SAVE_EVERY=10 SLURM_PARTITION=gpu "
            "SLURM_ACCOUNT=lab SLURM_QOS=high SLURM_TIME=02:00:00 SLURM_LINES=--exclusive "
            "DATA='<data>'",
        ),
        target(
            "train-dp2-gpt2-tiny-2cpu", "LAUNCHER=slurm NODES=1 DATA='<data>' EXTRA='--lr 1e-4'"
        ),
        target("train-dp2-gpt2-large-2gpu", "LAUNCHER=slurm NODES=1 RUNTIME=docker DATA='<data>'"),
        target("train-dp2-gpt2-tiny-3cpu", "LAUNCHER=slurm NODES=2"),
    ],
    "many-runs": [
        f"DRY_RUN=1 RUNTIME=docker {LAUNCH} reproduce",
        f"DRY_RUN=1 RUNTIME=host ITERS=50 {LAUNCH} reproduce",
        f"DRY_RUN=1 ITERS=16 RUNTIME=host {LAUNCH} reproduce",
        "DRY_RUN=1 DATA='<data>' MODELS='gpt2-tiny moe-tiny' STRATEGIES='baseline dp2 tp2 ep2' "
        f"BACKENDS='megatron native' DEVICES='1cpu 2cpu' REPEATS=2 NAME=cells {LAUNCH} sweep",
        f"DRY_RUN=1 DATA='<data>' MODELS=gpt2-tiny {LAUNCH} sweep",
        f"DRY_RUN=1 DATA='<data>' DEVICES=cpu {LAUNCH} sweep",
        f"DRY_RUN=1 DATA='<data>' BACKENDS=jax {LAUNCH} sweep",
        f"NAME=gpu DRY_RUN=1 {LAUNCH} bench",
    ],
    "list": [f"{LAUNCH} list"],
    "module": [
        f"DRY_RUN=1 RUNTIME=host {LAUNCH} module tools.preprocess sample --output-prefix owt-ds/s",
        f"DRY_RUN=1 RUNTIME=docker {LAUNCH} module tools.preprocess sample --output-prefix owt-ds/s",
        f"DRY_RUN=1 {LAUNCH} image",
        f"DRY_RUN=1 IMAGE=1.2-py3 {LAUNCH} image",
    ],
    "plan": [
        "parakit plan --model gpt2-large --gpus 2 --gpu h200 --global-batch 64",
        "parakit plan --model gpt2-large --gpus 2 --gpu h200 --global-batch 64 --tokens 9e9",
        "parakit plan --model gpt3-13b --gpus 16 --gpu a100-80gb --nodes 2 --gpus-per-node 8 "
        "--global-batch 64",
        "parakit plan --model moe-tiny --gpus 4 --gpu h100 --global-batch 16",
        "parakit plan --model mixtral-8x7b --gpus 16 --gpu h100 --global-batch 64 --dtype bf16",
        "parakit plan --model gpt3-13b --gpus 2 --gpu rtx4090 --global-batch 2",
        "parakit plan --model gpt2-larg --gpus 2",
        "parakit plan --model llama3-8b-fp8 --gpus 8 --gpu h100 --global-batch 128",
        "parakit plan --model llama3-8b-fp8 --gpus 8 --gpu a100 --global-batch 128",
        "parakit plan dryrun --model llama3-8b-fp8 --tensor 2",
        "parakit plan schedules",
        "parakit plan schedules --pipeline 4 --microbatches 16 --virtual 2",
        "parakit plan dryrun --model gpt2-large --tensor 3",
        "parakit plan dryrun --model gpt2-larg --tensor 2",
    ],
    "first-lines": [
        f"MODEL=tests/golden/mine.args GPUS=8 GPU=h100 {LAUNCH} plan",
        f"MODEL=tests/golden/mine.args GPUS=8 EXTRA=--swigluu {LAUNCH} plan",
        f"LARGEST=1 GPUS=8 GPU=h100 {LAUNCH} plan",
        f"MODEL=gpt3-1.3b GPUS=16 NODES=2 GPU=v100 DTYPE=fp16 INTER=100gbe NICS=1 GLOBAL_BATCH=64 {LAUNCH} plan",
        f"MODEL=t5 GPUS=2 {LAUNCH} plan",
        f"MODEL=gpt3-355m GPU=a100-80g {LAUNCH} compare-zero",
        f"{LAUNCH} train-zero3tp2-gpt2-tiny-2cpu",
        f"{LAUNCH} verify-tp2-gpt2-tiny-3cpu",
        target(TP2_CPU, "EXTRA=--swigluu"),
        target("train-tp2-mine-2cpu", "MODEL=tests/golden/mine.args"),
        f"RUNS=tests/golden/runs {LAUNCH} explain",
        "parakit --help",
    ],
    "plan-json": [
        "parakit plan --model gpt2-large --gpus 2 --gpu h200 --global-batch 64 --json",
        "parakit plan schedules --json",
    ],
}


@pytest.mark.parametrize("area", AREAS)
def test_printed_text_of_commands_equals_the_golden_files(
    area: str, commands: Commands, sample_prefix: Path
) -> None:
    parts = []
    for line in AREAS[area]:
        command = shlex.split(line.replace("<data>", str(sample_prefix)))
        settings = [word for word in command if re.match(r"[A-Z_]+=", word)]
        environment = dict(word.split("=", 1) for word in settings)
        code, printed = commands.run(command[len(settings) :], environment)
        if "DRY_RUN=1" in settings:
            printed, code = _without_machine_dependent_refusals(line, printed, code)
        text = _without_this_machine(normalised(printed, data=sample_prefix))
        if area == "first-lines":
            text = "\n".join(text.splitlines()[:FIRST_LINES])
        parts.append(f"$ {line}\n{text}\nexit {code}\n")
    check_golden(HERE / "commands" / f"{area}.txt", "\n".join(parts))


_LACKED = re.compile(r"needs the package|NET= needs| free and the run needs")


_COMMAND = re.compile(r' --tensorboard-dir |tools\.cli "\$\{words')
"""The last line of a command: Megatron's, or a Slurm job's."""


def _without_machine_dependent_refusals(line: str, printed: str, code: int) -> tuple[str, int]:
    """Return a dry run without the refusals after its commands that depend on the machine.

    Those of a target for GPUs all go: here there are none, or others, or no data for them.
    """
    lines = printed.splitlines()
    commands = [index for index, text in enumerate(lines) if _COMMAND.search(text)]
    if not commands:
        return printed, code
    end = commands[-1] + 1
    refusals = lines[end:] if line.endswith("cpu") else []
    kept = [text for text in refusals if not _LACKED.search(text)]
    return "\n".join([*lines[:end], *kept]), code if kept else 0


def _without_this_machine(text: str) -> str:
    text = re.sub(r"This machine: .*", "This machine: …", text)
    # The lines state whether the data set exists, and its content, which depends on the version of Python.
    text = re.sub(r"'?(\S+/\.data/)\S+-(?:<its hash>|[0-9a-f]{12})'?", r"\1…", text)
    # The last column of `list` depends on this machine's memory, and so does the table's width.
    text = re.sub(r"(?m)( \d+/\d+)  (all .*|too large|\w+(?:, \w+)*)$", r"\1  …", text)
    return re.sub(r"(?s)^(This machine: …\n) *(Models\n.*? )─+\n", r"\1\2───\n", text)

"""The script that sbatch is given: one launcher of the kit on each node, which starts one torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.cluster.slurm import Slurm
from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.run import DeviceKind
from parakit.formatting.units import plural

OUTPUT_FILE = "slurm.txt"
"""In the run folder: what the launchers say on their terminals."""

BASICS = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER")
"""Variables that a job gets from its submitter, besides those the ranks use; by name, no others."""

MASTER_PORT = "export MASTER_PORT=$((SLURM_JOB_ID % 12000 + 20000))"
"""Below what Linux gives to clients; two jobs that share a node differ by their numbers."""


FIRST_NODE = (
    'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "# The address by which Slurm itself reaches the first node, which may be in a hidden partition.",
    'read -r MASTER_ADDR < <(sinfo --all --noheader --nodes="$first" --format=%o)',
    "export MASTER_ADDR",
)
"""Shell that finds the address to which all nodes connect, on any node of an allocation."""


CPUS = '[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'
"""Shell that gives a step the CPUs that the job asked for: since 22.05 srun does not take them over."""


@dataclass(frozen=True)
class ArrayTask:
    """One run of a job."""

    folder: str
    """The run folder, as seen from the repository root."""
    argv: tuple[str, ...]
    """Arguments of `python -m parakit`."""
    settings: Mapping[str, str]
    """Make variables as they were given; never a secret."""


@dataclass(frozen=True)
class BatchJob:
    """What one call of sbatch starts; several cells are an array."""

    name: str
    device: DeviceKind
    devices_per_node: int
    slurm: Slurm
    tasks: tuple[ArrayTask, ...]
    python: str
    inherited: tuple[str, ...] = ()
    """Names of the submitter's variables that ranks use."""
    container: tuple[str, ...] = ()
    """srun's flags of the kit's image; none on the host."""


def pyxis_flags(image: str, mounts: Sequence[Path]) -> tuple[str, ...]:
    """srun's, by Pyxis: the caller's user, nothing mounted but what the run needs, root read-only.

    Raises:
        LaunchError: A folder's name would end a mount.
    """
    for path in mounts:
        if "," in str(path) or ":" in str(path):
            raise LaunchError(
                f"{path} cannot be mounted by Pyxis, which takes ',' and ':' for its own; move it."
            )
    return (
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
        f"--container-workdir={ROOT}",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--container-readonly",
    )


def render_batch_script(job: BatchJob) -> str:
    """The script; every value in it is quoted, and none is a secret."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {job.name} on {plural(job.slurm.nodes, 'node')}: the kit's launcher on each starts "
        "torchrun.",
        *(f"#SBATCH {line}" for line in _directives(job)),
        "set -euo pipefail",
        *_redirect(job.tasks),
        # Environment modules and conda ask for variables that are not set.
        *(("set +u", *job.slurm.setup, "set -u") if job.slurm.setup else ()),
        *_choose(job.tasks),
        f"export PYTHONPATH={shlex.quote(PYTHON_PATH)}",
        "export NNODES=$SLURM_JOB_NUM_NODES RENDEZVOUS=c10d",
        MASTER_PORT,
        *FIRST_NODE,
        CPUS,
        "# Launchers hear of each other's end themselves; srun must not end one that is clearing up.",
        f"exec srun {shlex.join(_srun(job))} \\",
        """  bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' node \\""",
        f'  {shlex.join((job.python, "-m", "parakit"))} "${{words[@]}}"',
    ]
    return "\n".join(lines) + "\n"


def _directives(job: BatchJob) -> Sequence[str]:
    array = len(job.tasks) > 1
    output = f"{ROOT / job.tasks[0].folder}/{OUTPUT_FILE}".replace("%", "%%")
    return (
        f"--job-name={job.name}",
        f"--nodes={job.slurm.nodes}",
        "--ntasks-per-node=1",
        f"--{_devices(job)}",
        *((f"--array=0-{len(job.tasks) - 1}",) if array else ()),
        f'--chdir="{ROOT}"',
        f'--output="{"/dev/null" if array else output}"',
        "--open-mode=append",
        "--requeue",
        f"--export={','.join(sorted({*BASICS, *job.inherited}))}",
        *job.slurm.directives,
    )


def _devices(job: BatchJob) -> str:
    kind = "gpus-per-node" if job.device is DeviceKind.GPU else "cpus-per-task"
    return f"{kind}={job.devices_per_node}"


def _srun(job: BatchJob) -> tuple[str, ...]:
    # srun no longer takes the CPUs of a task from the job, and needs the option again.
    cpus = (f"--{_devices(job)}",) if job.device is DeviceKind.CPU else ()
    return ("--ntasks-per-node=1", *cpus, "--export=ALL", "--kill-on-bad-exit=0", *job.container)


def _redirect(cells: Sequence[ArrayTask]) -> Sequence[str]:
    """An array's element has a folder of its own, which gets what the shell prints from here on."""
    if len(cells) == 1:
        return ()
    folders = shlex.join(cell.folder for cell in cells)
    return (
        f"folders=({folders})",
        f'exec >> "${{folders[SLURM_ARRAY_TASK_ID]}}/{OUTPUT_FILE}" 2>&1',
    )


def _choose(cells: Sequence[ArrayTask]) -> Sequence[str]:
    if len(cells) == 1:
        return _cell(cells[0])
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, cell in enumerate(cells):
        lines += [f"{number})", *(f"  {line}" for line in _cell(cell)), "  ;;"]
    return (*lines, "esac")


def _cell(cell: ArrayTask) -> tuple[str, ...]:
    settings = {**cell.settings, "RUN_FOLDER": cell.folder}
    assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return (f"export {assigned}", f"words=({shlex.join(cell.argv)})")

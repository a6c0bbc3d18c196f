"""Write the script of a Slurm job: one launcher of the kit per node, which starts one torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.cluster.slurm import Slurm, quote_value, split_directives
from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.run import DeviceKind
from parakit.formatting.units import plural

OUTPUT_FILE = "slurm.txt"
"""The file in the run folder that receives the terminal output of the launchers."""

BASICS = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER")
"""Variables that a job inherits from its submitter, besides the variables that ranks use."""

MODULES = ("BASH_ENV", "MODULEPATH", "MODULESHOME", "LMOD_*", "LOADEDMODULES", "_LMFILES_")
"""Variables of environment modules, which the shell lines of a site may load; `*` stands for any ending."""

CPUS_PER_GPU = 4
"""CPUs per GPU that a job asks for: a rank's own thread, two of its data loader, and one of NCCL."""
MAX_RUNNING_TASKS = 8
"""Elements of a job array that run at once, so that a sweep does not take a whole partition."""
TIME_LIMIT = "04:00:00"
"""Time limit of a job, because many partitions have none, or a short one, for jobs that state none."""

DEFINE_MODULE = (
    "# Slurm passes no shell functions on, so 'module' is defined anew where the site has it.",
    'for file in "${BASH_ENV-}" "${MODULESHOME-}/init/bash" "${LMOD_PKG-}/init/bash" \\',
    "  /etc/profile.d/{modules,lmod,z00_lmod}.sh; do",
    "  # shellcheck source=/dev/null",
    '  if ! declare -F module >/dev/null && [ -r "$file" ]; then . "$file" || :; fi',
    "done",
)
"""Shell that defines the function `module` from the start-up file of environment modules or of Lmod."""

MASTER_PORT = "export MASTER_PORT=$((SLURM_JOB_ID % 12000 + 20000))"
"""Shell that sets the port of the rendezvous.

The port is below those that Linux gives to clients. Two jobs that share a node have different job numbers, so they
have different ports.
"""


FIRST_NODE = (
    'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    "# The address by which Slurm itself reaches the first node, which may be in a hidden partition.",
    'read -r MASTER_ADDR < <(sinfo --all --noheader --nodes="$first" --format=%o) || MASTER_ADDR=$first',
    "export MASTER_ADDR",
)
"""Shell that sets MASTER_ADDR, the address to which all nodes connect; it works on any node of an allocation.

Where sinfo reports no address, the first node's name is used. `read` alone would end the script without a message.
"""

STATED_OPTIONS = (
    *("array", "error", "export", "get-user-env", "job-name", "no-requeue", "open-mode", "output"),
    *("requeue", "signal", "wait"),
)
"""Options of sbatch that belong to the script, or would have sbatch wait for the job's end."""
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_RENAMED_OPTIONS = {
    **{"array-inx": "array", "timelimit": "time", "mem-per-node": "mem"},
    **{"A": "account", "C": "constraint", "c": "cpus-per-task", "p": "partition", "q": "qos"},
    **{"t": "time"},
}
"""Long options of sbatch, by short option and by variable, where they have another name."""


CPUS = '[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK'
"""Shell that gives a job step the CPUs of the job. Since 22.05 srun does not inherit their number from the job."""


@dataclass(frozen=True)
class ArrayTask:
    """One run of a Slurm job. A job with several runs is a job array, with one task per run."""

    folder: str
    """The run folder, relative to the repository root."""
    argv: tuple[str, ...]
    """Arguments of `python -m parakit`."""
    settings: Mapping[str, str]
    """Make variables as the user wrote them; never a secret."""


@dataclass(frozen=True)
class BatchJob:
    """A job for sbatch; a job with several tasks becomes a job array."""

    name: str
    device: DeviceKind
    devices_per_node: int
    slurm: Slurm
    tasks: tuple[ArrayTask, ...]
    python: str
    inherited: tuple[str, ...] = ()
    """Names of the variables that ranks use, which the job inherits from the submitter."""
    warning_seconds: int | None = None
    """Time before the end of the job at which Slurm announces it by SIGUSR1, so that ranks save a checkpoint."""
    container: tuple[str, ...] = ()
    """Flags of srun that run ranks in the kit's image; empty to run them on the host."""


def pyxis_flags(image: str, mounts: Sequence[Path]) -> tuple[str, ...]:
    """Return the srun flags with which Pyxis runs ranks in an image.

    The container runs as the caller's user, mounts the given folders at the same paths, and has a read-only root.

    Raises:
        LaunchError: A folder's name has a character that Pyxis takes for the end of a mount.
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
    """Return the batch script of a job. Every value in the script is quoted, and no value is a secret."""
    nodes = plural(job.slurm.nodes, "node")
    inherited = " ".join(job.inherited) or "nothing"
    header = (
        "#!/usr/bin/env bash",
        f"# {job.name} on {nodes}: the kit's launcher on each starts torchrun.",
        *(f"#SBATCH {directive}" for directive in _directives(job)),
        f"# Passed on from the submitter, beside {' '.join(BASICS)}: {inherited}.",
        "set -euo pipefail",
    )
    setup = (
        *_redirect_output(job.tasks),
        *_load_site(job.slurm.setup),
        *_select_task(job.tasks),
        f"export PYTHONPATH={shlex.quote(PYTHON_PATH)}",
        "export NNODES=$SLURM_JOB_NUM_NODES RENDEZVOUS=c10d",
        MASTER_PORT,
        *FIRST_NODE,
        CPUS,
    )
    launcher = shlex.join((job.python, "-m", "parakit"))
    start = (
        "# Launchers hear of each other's end themselves; srun must not end one that is clearing up.",
        f"exec srun {shlex.join(_srun_options(job))} \\",
        """  bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' node \\""",
        f'  {launcher} "${{words[@]}}"',
    )
    return "\n".join((*header, *setup, *start)) + "\n"


def _load_site(site_lines: Sequence[str]) -> Sequence[str]:
    """Return the shell lines of the site file, with `module` defined before them; empty without such lines."""
    if not site_lines:
        return ()
    # Environment modules and conda read variables that are not set, at which `set -u` would end the script.
    return ("set +u", *DEFINE_MODULE, *site_lines, "set -u")


def find_replacing_variables(job: BatchJob, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the SBATCH_ variables that would replace options that the script states, sorted.

    sbatch prefers such a variable to the script, without a message: SBATCH_EXPORT=NONE would drop every variable that
    the script passes on. Options of the script that are only defaults may be replaced: SBATCH_TIMELIMIT counts without
    SLURM_TIME= and without a site's time limit.
    """
    stated = {*STATED_OPTIONS, *(GPU_OPTIONS if job.device is DeviceKind.GPU else ())}
    stated |= _list_stated_options(job.slurm.directives)
    names = []
    for name in sorted(environment):
        option = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and _get_option_name(option) in stated:
            names.append(name)
    return tuple(names)


def _list_stated_options(directives: Sequence[str]) -> set[str]:
    """Return the long names of the options that `#SBATCH` lines of the site and of the user state, without dashes."""
    return {_get_option_name(argument) for argument in split_directives(directives)}


def _get_option_name(option: str) -> str:
    """Return the long name of an option of sbatch, without dashes and value."""
    name = option.partition("=")[0].lstrip("-")
    return _RENAMED_OPTIONS.get(name, name)


def _directives(job: BatchJob) -> Sequence[str]:
    """Return the options of the script's #SBATCH lines. Options of the site file and of the user come last.

    A default of the kit is left out if the site or the user states the option.
    """
    signal: tuple[str, ...] = ()
    if job.warning_seconds:
        signal = (f"--signal=USR1@{job.warning_seconds}",)
    if len(job.tasks) > 1:
        array: tuple[str, ...] = (f"--array=0-{len(job.tasks) - 1}%{MAX_RUNNING_TASKS}",)
        output = "/dev/null"  # Each task redirects its own output.
    else:
        array = ()
        # In this option, sbatch replaces patterns that begin with a percent sign.
        output = f"{ROOT / job.tasks[0].folder}/{OUTPUT_FILE}".replace("%", "%%")
    exported = sorted({*BASICS, *job.inherited})
    stated = _list_stated_options(job.slurm.directives)
    defaults = (*_resources(job), f"--time={TIME_LIMIT}")
    return (
        f"--job-name={job.name}",
        f"--nodes={job.slurm.nodes}",
        "--ntasks-per-node=1",
        *(option for option in defaults if _get_option_name(option) not in stated),
        *signal,
        *array,
        f"--chdir={quote_value(str(ROOT))}",
        f"--output={quote_value(output)}",
        "--open-mode=append",
        "--requeue",
        f"--export={','.join(exported)}",
        *job.slurm.directives,
    )


def _resources(job: BatchJob) -> tuple[str, ...]:
    """Return the options of the devices and CPUs of a node. SLURM_GRES= names the GPUs itself."""
    if job.device is DeviceKind.CPU:
        return (_cpus_option(job),)
    gpus = () if job.slurm.names_gres else (f"--gpus-per-node={job.devices_per_node}",)
    return (*gpus, _cpus_option(job))


def _cpus_option(job: BatchJob) -> str:
    """Return the option of the CPUs of a node's only task: one per CPU rank, CPUS_PER_GPU per GPU."""
    cpus_per_rank = CPUS_PER_GPU if job.device is DeviceKind.GPU else 1
    return f"--cpus-per-task={cpus_per_rank * job.devices_per_node}"


def _srun_options(job: BatchJob) -> tuple[str, ...]:
    """Return the options with which srun starts a launcher on each node."""
    # srun does not inherit the CPUs per task from the job, so the option is repeated. Those of a GPU job may be
    # others in the site's or the user's lines; CPUS passes the job's number on.
    cpus = (_cpus_option(job),) if job.device is DeviceKind.CPU else ()
    return ("--ntasks-per-node=1", *cpus, "--export=ALL", "--kill-on-bad-exit=0", *job.container)


def _redirect_output(tasks: Sequence[ArrayTask]) -> Sequence[str]:
    """Return shell lines that append all output of an array task to a file in the task's run folder.

    The result is empty for a single task, whose output sbatch redirects itself.
    """
    if len(tasks) == 1:
        return ()
    folders = shlex.join(task.folder for task in tasks)
    return (
        f"folders=({folders})",
        f'exec >> "${{folders[SLURM_ARRAY_TASK_ID]}}/{OUTPUT_FILE}" 2>&1',
    )


def _select_task(tasks: Sequence[ArrayTask]) -> Sequence[str]:
    """Return shell lines that set the variables and arguments of the job's task.

    In a job array, SLURM_ARRAY_TASK_ID selects the task.
    """
    if len(tasks) == 1:
        return _set_task(tasks[0])
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, task in enumerate(tasks):
        lines.append(f"{number})")
        lines += [f"  {line}" for line in _set_task(task)]
        lines.append("  ;;")
    return (*lines, "esac")


def _set_task(task: ArrayTask) -> tuple[str, ...]:
    """Return shell that exports a task's make variables and sets its arguments as the array `words`."""
    settings = {**task.settings, "RUN_FOLDER": task.folder}
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return (f"export {assignments}", f"words=({shlex.join(task.argv)})")

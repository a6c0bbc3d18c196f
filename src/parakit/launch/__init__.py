"""One training job, from its name to a complete run folder.

This package decides the command line of a job, whether the job can run here, and how its ranks are started,
watched, stopped and resumed. It runs jobs on this machine, on several hosts, in containers and under Slurm.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.launch.backends import NO_TRANSFORMERS
    from parakit.launch.code import find_entry, kit_commit
    from parakit.launch.compose import Launch
    from parakit.launch.data import SAMPLE, SMALL_SAMPLE, call_module, make_sample
    from parakit.launch.devices import visible_gpus
    from parakit.launch.execute import execute_launch
    from parakit.launch.flags import CPU_RANK, saving_flags
    from parakit.launch.hub import folder_of
    from parakit.launch.job import Job, make_command, parse_devices, parse_target
    from parakit.launch.options import (
        NO_OPTIONS,
        OF_A_RUN,
        Options,
        Saving,
        options_from_texts,
        options_of,
        read_patch_file,
    )
    from parakit.launch.preflight import LOG_BYTES, check
    from parakit.launch.run_folder import computed_by, identity_here
    from parakit.launch.runtime import choose_runtime
    from parakit.launch.start import ensure_start_checkpoint
    from parakit.launch.status import follow, read_job
    from parakit.launch.submit import image_asked, over_nodes, submit_array
    from parakit.launch.supervise.exit_status import outcome
    from parakit.launch.supervise.interruption import Interrupted, interruptible
    from parakit.launch.supervise.warm import WarmMegatron, WarmPool
    from parakit.launch.train import (
        command_line,
        compose_job,
        dry_run,
        other_split,
        other_vocabulary,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "CPU_RANK",
    "LOG_BYTES",
    "NO_OPTIONS",
    "NO_TRANSFORMERS",
    "OF_A_RUN",
    "SAMPLE",
    "SMALL_SAMPLE",
    "Interrupted",
    "Job",
    "Launch",
    "Options",
    "Saving",
    "WarmMegatron",
    "WarmPool",
    "call_module",
    "check",
    "choose_runtime",
    "command_line",
    "compose_job",
    "computed_by",
    "dry_run",
    "ensure_start_checkpoint",
    "execute_launch",
    "find_entry",
    "folder_of",
    "follow",
    "identity_here",
    "image_asked",
    "interruptible",
    "kit_commit",
    "make_command",
    "make_sample",
    "options_from_texts",
    "options_of",
    "other_split",
    "other_vocabulary",
    "outcome",
    "over_nodes",
    "parse_devices",
    "parse_target",
    "read_job",
    "read_patch_file",
    "saving_flags",
    "submit_array",
    "visible_gpus",
]

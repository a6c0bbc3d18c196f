"""One training job, from its name to a complete run folder.

This package decides the command line of a job, whether the job can run here, and how its ranks are started,
watched, stopped and resumed. It runs jobs on this machine, on several hosts, in containers and under Slurm.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.launch.backends import NO_TRANSFORMERS
    from parakit.launch.code import find_entry, read_kit_commit
    from parakit.launch.compose import Launch
    from parakit.launch.data import SAMPLE, SMALL_SAMPLE, call_module, make_sample
    from parakit.launch.devices import visible_gpus
    from parakit.launch.execute import execute_launch
    from parakit.launch.flags import CPU_RANK_ENVIRONMENT, saving_flags
    from parakit.launch.hub import export_hf, fetch_model_folder
    from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
    from parakit.launch.job import Job, format_make_command, parse_devices, parse_target
    from parakit.launch.options import (
        NO_OPTIONS,
        RUN_SETTINGS,
        Options,
        Saving,
        options_from_namespace,
        options_from_texts,
        read_patch_file,
    )
    from parakit.launch.preflight import LOG_BYTES, check_launch
    from parakit.launch.preflight_attention import attention_problems
    from parakit.launch.run_folder import identify_computation, identify_launch
    from parakit.launch.runtime import choose_runtime
    from parakit.launch.status import read_job_record, read_run_statuses
    from parakit.launch.submit import choose_image, spread_over_nodes, submit_array
    from parakit.launch.supervise.exit_status import format_outcome
    from parakit.launch.supervise.interruption import Interrupted, interruptible
    from parakit.launch.supervise.warm import WarmMegatron, WarmPool
    from parakit.launch.train import (
        DRY_RUN_REFUSED,
        compose_job,
        describe_chosen_split,
        describe_vocabulary_change,
        format_command_line,
        print_dry_run,
        start_job,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "CPU_RANK_ENVIRONMENT",
    "DRY_RUN_REFUSED",
    "LOG_BYTES",
    "NO_OPTIONS",
    "NO_TRANSFORMERS",
    "RUN_SETTINGS",
    "SAMPLE",
    "SMALL_SAMPLE",
    "Interrupted",
    "Job",
    "Launch",
    "Options",
    "Saving",
    "WarmMegatron",
    "WarmPool",
    "attention_problems",
    "call_module",
    "check_launch",
    "choose_image",
    "choose_runtime",
    "compose_job",
    "describe_chosen_split",
    "describe_vocabulary_change",
    "ensure_initial_checkpoint",
    "execute_launch",
    "export_hf",
    "fetch_model_folder",
    "find_entry",
    "format_command_line",
    "format_make_command",
    "format_outcome",
    "identify_computation",
    "identify_launch",
    "interruptible",
    "make_sample",
    "options_from_namespace",
    "options_from_texts",
    "parse_devices",
    "parse_target",
    "print_dry_run",
    "read_job_record",
    "read_kit_commit",
    "read_patch_file",
    "read_run_statuses",
    "saving_flags",
    "spread_over_nodes",
    "start_job",
    "submit_array",
    "visible_gpus",
]

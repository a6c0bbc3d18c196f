"""Nodes, Slurm, containers, and what a machine has or lacks.

This package decides how a command is wrapped for a container or a batch job, and what `make doctor` checks. It
knows no strategy and trains nothing. Its checks run on any Python from 3.6 on.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.cluster.checks.devices import GpuUse, check_busy
    from parakit.cluster.checks.docker import check_container, check_engine, image_id
    from parakit.cluster.checks.host import (
        LOOPBACK,
        RUN_FILES,
        check_loopback,
        check_room,
        free_files,
        unresolvable,
    )
    from parakit.cluster.checks.network import wandb_login
    from parakit.cluster.checks.result import ask, image_tag, refusals
    from parakit.cluster.container.docker import (
        CONTAINER_FILE,
        HUB_VARIABLES,
        IMAGE_PYTHON,
        Container,
        ContainerEnd,
        container_of,
        container_user,
        data_folders,
        end_of,
        identified,
        inherited_names,
        remove_container,
        versions_of,
    )
    from parakit.cluster.container.image import MEGATRON_IN_IMAGE, ImagePair, find_pair
    from parakit.cluster.container.versions import installed_versions
    from parakit.cluster.nodes import (
        SINGLE_NODE,
        NodeFiles,
        NodeGroup,
        Nodes,
        node_folder,
        nodes_of,
    )
    from parakit.cluster.sbatch import OUTPUT_FILE, ArrayTask, BatchJob, pyxis_flags, script
    from parakit.cluster.slurm import (
        ENDINGS,
        STOPPED_BY_SLURM,
        JobState,
        Slurm,
        cancel_job,
        job_states,
        slurm_of,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "CONTAINER_FILE",
    "ENDINGS",
    "HUB_VARIABLES",
    "IMAGE_PYTHON",
    "LOOPBACK",
    "MEGATRON_IN_IMAGE",
    "OUTPUT_FILE",
    "RUN_FILES",
    "SINGLE_NODE",
    "STOPPED_BY_SLURM",
    "ArrayTask",
    "BatchJob",
    "Container",
    "ContainerEnd",
    "GpuUse",
    "ImagePair",
    "JobState",
    "NodeFiles",
    "NodeGroup",
    "Nodes",
    "Slurm",
    "ask",
    "cancel_job",
    "check_busy",
    "check_container",
    "check_engine",
    "check_loopback",
    "check_room",
    "container_of",
    "container_user",
    "data_folders",
    "end_of",
    "find_pair",
    "free_files",
    "identified",
    "image_id",
    "image_tag",
    "inherited_names",
    "installed_versions",
    "job_states",
    "node_folder",
    "nodes_of",
    "pyxis_flags",
    "refusals",
    "remove_container",
    "script",
    "slurm_of",
    "unresolvable",
    "versions_of",
    "wandb_login",
]

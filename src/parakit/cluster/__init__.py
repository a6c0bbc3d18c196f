"""Run commands on several nodes, in Slurm jobs and in containers, and check what a machine has and lacks.

This package decides how a command is wrapped for a container or a batch job, and what `make doctor` checks. It
knows no strategy and trains nothing. Its checks run on any Python from 3.6 on.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.cluster.checks.devices import GpuUse, check_busy
    from parakit.cluster.checks.docker import check_engine
    from parakit.cluster.checks.host import (
        LOOPBACK,
        RUN_FILES,
        check_loopback,
        check_room,
        explain_unresolvable,
        free_files,
    )
    from parakit.cluster.checks.network import read_wandb_key
    from parakit.cluster.checks.podman import check_podman_engine
    from parakit.cluster.checks.result import image_tag, refusal_sentences, run_program
    from parakit.cluster.container.apptainer import ApptainerContainer
    from parakit.cluster.container.docker import (
        CONTAINER_FILE,
        HUB_VARIABLES,
        IMAGE_PYTHON,
        Container,
        ContainerEnd,
        PodmanContainer,
        add_container_id_file,
        container_groups,
        container_user,
        data_folders,
        inherited_names,
        query_container_end,
        read_container_id,
        read_image_versions,
        remove_container,
    )
    from parakit.cluster.container.image import MEGATRON_IN_IMAGE, ImagePair, find_pair
    from parakit.cluster.container.versions import installed_versions
    from parakit.cluster.nodes import (
        SINGLE_NODE,
        NodeFiles,
        NodeGroup,
        Nodes,
        node_folder,
        parse_nodes,
    )
    from parakit.cluster.sbatch import (
        MODULES,
        OUTPUT_FILE,
        ArrayTask,
        BatchJob,
        find_replacing_variables,
        pyxis_flags,
        render_batch_script,
    )
    from parakit.cluster.slurm import (
        ENDINGS,
        STOPPED_BY_SLURM,
        JobState,
        Slurm,
        cancel_job,
        parse_slurm_options,
        query_job_states,
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
    "MODULES",
    "OUTPUT_FILE",
    "RUN_FILES",
    "SINGLE_NODE",
    "STOPPED_BY_SLURM",
    "ApptainerContainer",
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
    "PodmanContainer",
    "Slurm",
    "add_container_id_file",
    "cancel_job",
    "check_busy",
    "check_engine",
    "check_loopback",
    "check_podman_engine",
    "check_room",
    "container_groups",
    "container_user",
    "data_folders",
    "explain_unresolvable",
    "find_pair",
    "find_replacing_variables",
    "free_files",
    "image_tag",
    "inherited_names",
    "installed_versions",
    "node_folder",
    "parse_nodes",
    "parse_slurm_options",
    "pyxis_flags",
    "query_container_end",
    "query_job_states",
    "read_container_id",
    "read_image_versions",
    "read_wandb_key",
    "refusal_sentences",
    "remove_container",
    "render_batch_script",
    "run_program",
]

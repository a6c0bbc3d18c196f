"""Wrap a command in `apptainer exec`, which runs it in the kit's image as an ordinary process of the caller.

`checks/apptainer.py` checks whether Apptainer and the image's SIF file are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from parakit.cluster.checks.apptainer import check_apptainer_container, sif_file, sif_id
from parakit.cluster.checks.result import CheckResult
from parakit.cluster.container.docker import ALWAYS, Container, bind_mount
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.flags import format_flags

EXEC_SCRIPT = ROOT / "docker/apptainer_exec.sh"
"""The script that passes variables on by name. Apptainer itself takes names with values, which `ps` would show."""

ENVIRONMENT = (f"PYTHONPATH={PYTHON_PATH}", "PYTHONNOUSERSITE=1")
"""Variables of the container. Apptainer mounts the caller's home, whose Python packages are for another Python."""


@dataclass(frozen=True)
class ApptainerContainer(Container):
    """The options of an `apptainer exec`, without the command.

    The container has the caller's user, home, network, shared memory, devices and limits. Its ranks are descendants of
    the process that starts it and end as ranks on the host do.
    """

    program: ClassVar[str] = "apptainer"
    has_engine: ClassVar[bool] = False

    def wrap(self, command: Sequence[str], settings: Iterable[str]) -> tuple[str, ...]:
        """Return the command that executes `command` in the image's SIF file, in the repository root.

        Args:
            command: The command inside of the container.
            settings: Names of further variables that the container inherits.
        """
        names = sorted({*settings, *self.inherited, *ALWAYS})
        options = {"--cleanenv": True, "--nv": self.gpus, "--pwd": ROOT}
        mounts = chain.from_iterable(("--mount", bind_mount(path)) for path in self.mounts)
        environment = chain.from_iterable(("--env", text) for text in ENVIRONMENT)
        flags = (*format_flags(options), *mounts, *environment)
        return (str(EXEC_SCRIPT), *names, "--", *flags, str(sif_file(self.image)), *command)

    def check(self, tag: str) -> list[CheckResult]:
        """Check whether Apptainer is installed, and whether the image's SIF file is here."""
        return check_apptainer_container(self.image, tag)

    def image_id(self) -> str | None:
        """Return the UUID of the image's SIF file; None if the file is not here."""
        return sif_id(sif_file(self.image))

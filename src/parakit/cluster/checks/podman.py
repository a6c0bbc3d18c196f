"""Check what RUNTIME=podman needs: the program, its answer, a CDI specification of the GPUs, and the image."""

import shutil

from parakit.cluster.checks.docker import (
    ContainerEngine,
    check_image,
    has_cdi_specification,
    read_engine_info,
)
from parakit.cluster.checks.result import CheckResult, image_tag, pass_or_warn


def check_podman() -> "list[CheckResult]":
    """Check Podman for the doctor; return nothing where Podman is not installed or a container is not needed."""
    if image_tag() or shutil.which("podman") is None:
        return []
    return check_podman_container()


def check_podman_container(
    image: str = "", tag: str = "", gpus: bool = True
) -> "list[CheckResult]":
    """Check Podman, its access to GPUs and an image; stop at the first that is missing.

    Args:
        image: The image; empty for any image of the kit.
        tag: The image's NGC tag, which the fix names.
        gpus: True if the container needs GPUs.
    """
    result, engine = check_podman_engine()
    if engine is None:
        return [result]
    if gpus and not engine.gives_gpus:
        fix = (
            "install the NVIDIA container toolkit and run 'sudo nvidia-ctk cdi generate "
            "--output=/etc/cdi/nvidia.yaml', or set RUNTIME=host"
        )
        return [
            result,
            pass_or_warn("Podman's GPUs", "Podman has no CDI specification of GPUs", fix),
        ]
    return [result, check_image(image, tag, "podman")]


def check_podman_engine() -> "tuple[CheckResult, ContainerEngine | None]":
    """Check whether Podman is installed and works; the engine is None if it does not."""
    if shutil.which("podman") is None:
        finding = "Podman is not installed (no 'podman' on PATH)"
        fix = "install it with the NVIDIA container toolkit, or set RUNTIME=host"
        return pass_or_warn("Podman", finding, fix), None
    security, reason = read_engine_info("podman", "{{json .Host.Security}}")
    if "rootless" not in security:
        finding = f"Podman does not work here ({reason})"
        return pass_or_warn("Podman", finding, "see 'podman info', or set RUNTIME=host"), None
    engine = ContainerEngine(has_cdi_specification(), bool(security["rootless"]))
    return pass_or_warn("Podman", "rootless" if engine.rootless else "as root"), engine

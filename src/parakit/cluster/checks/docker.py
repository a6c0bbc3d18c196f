"""Check what RUNTIME=docker needs: client, engine, NVIDIA runtime and image."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from parakit.cluster.checks.result import CheckResult, image_tag, pass_or_warn, run_program

REPOSITORY = "megatron-parallelism-kit"
"""The repository of the kit's images. Its tags are the pairs of `docker/versions.env`."""

NVIDIA_HOOK = "nvidia-container-runtime-hook"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""Folders of the Container Device Interface in which `nvidia-ctk cdi generate` describes GPUs."""

ENGINE_FORMAT = '{"runtimes":{{json .Runtimes}},"is":{{json .SecurityOptions}}}'
"""The template by which `docker info` prints its runtimes and security options as JSON."""


class ContainerEngine(NamedTuple):
    """Properties that Docker or Podman reports of itself."""

    gives_gpus: bool
    """True if containers can get this machine's NVIDIA GPUs."""
    rootless: bool
    """True if the engine runs without root, and maps the root of a container to the caller."""


def check_docker() -> "list[CheckResult]":
    """Check client, engine, NVIDIA runtime and image, up to the first that is missing."""
    if image_tag():
        return [pass_or_warn("Docker", "inside the kit's image, where targets run directly")]
    return check_container()


def check_container(image: str = "", tag: str = "", gpus: bool = True) -> "list[CheckResult]":
    """Check Docker's client and engine, NVIDIA's runtime and an image; stop at the first that is missing.

    Args:
        image: The image; empty for any image of the kit.
        tag: The image's NGC tag, which the fix names.
        gpus: True if the container needs GPUs.
    """
    result, engine = check_engine()
    if engine is None:
        return [result]
    if gpus and not engine.gives_gpus:
        fix = (
            "install the NVIDIA container toolkit and run 'sudo nvidia-ctk runtime configure "
            "--runtime=docker && sudo systemctl restart docker', or set RUNTIME=host"
        )
        finding = "Docker has no NVIDIA runtime, hook or CDI specification"
        return [result, pass_or_warn("NVIDIA runtime", finding, fix)]
    return [result, check_image(image, tag)]


def check_engine() -> "tuple[CheckResult, ContainerEngine | None]":
    """Check whether Docker's client is installed and its engine answers.

    Returns:
        The result, and the engine. The engine is None if Docker is missing or silent, or if `docker` is Podman.
    """
    if shutil.which("docker") is None:
        finding = "Docker is not installed (no 'docker' on PATH)"
        fix = "install Docker Engine with the NVIDIA container toolkit, or set RUNTIME=host"
        return pass_or_warn("Docker", finding, fix), None
    described, reason = read_engine_info("docker", ENGINE_FORMAT)
    if described.get("runtimes") is None:
        finding = f"Docker's engine does not answer ({reason})"
        fix = "start it, see that you may use it (group 'docker'), or set RUNTIME=host"
        # In `docker --version`, Podman calls itself docker if its program is named so; in `docker version` it does not.
        if "Podman" in run_program(["docker", "version"]).out:
            finding = "'docker' is Podman here"
            fix = "set RUNTIME=podman, put Docker Engine's client before it on PATH, or set RUNTIME=host"
        return pass_or_warn("Docker", finding, fix), None
    rootless = any("name=rootless" in option for option in described.get("is") or ())
    gives_gpus = "nvidia" in described["runtimes"] or _has_nvidia_hook()
    engine = ContainerEngine(gives_gpus, rootless)
    return pass_or_warn("Docker", "its engine answers"), engine


def read_engine_info(program: str, template: str) -> "tuple[dict[str, Any], str]":
    """Return what `docker info` or `podman info` prints by a template as JSON, and why it may be empty.

    Args:
        program: docker or podman.
        template: The value of `--format`.
    """
    output = run_program([program, "info", "--format", template])
    if not output.succeeded:
        return {}, output.problem.rstrip(".?!") or "no answer"
    try:
        return json.loads(output.out), "no answer"
    except ValueError:
        return {}, "no answer"


def _has_nvidia_hook() -> bool:
    """Return True if `--gpus` can work on this machine although the engine has no NVIDIA runtime.

    Docker 19.03 and later then use the toolkit's hook on PATH, or a CDI specification of the GPUs.
    """
    return bool(shutil.which(NVIDIA_HOOK)) or has_cdi_specification()


def has_cdi_specification() -> bool:
    """Return True if a CDI specification describes NVIDIA GPUs on this machine."""
    return any(
        any(Path(folder).glob(pattern))
        for folder in CDI_FOLDERS
        for pattern in ("nvidia*.yaml", "nvidia*.json")
    )


def image_id(image: str, program: str = "docker") -> "str | None":
    """Return the id of an image on this machine; None if `program`, docker or podman, does not have the image."""
    output = run_program([program, "image", "inspect", "--format", "{{.Id}}", image])
    if not output.succeeded:
        return None
    return output.out or None


def check_image(image: str, tag: str, program: str = "docker") -> CheckResult:
    """Check whether docker or podman has an image. An empty name checks whether it has any image of the kit."""
    runtime = "" if program == "docker" else f" RUNTIME={program}"
    if image:
        if image_id(image, program):
            return pass_or_warn("Image", image)
        fix = f"run 'make image IMAGE={tag}{runtime}', or set RUNTIME=host"
        return pass_or_warn("Image", f"Image {image} is not built", fix)
    output = run_program([program, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]).out
    # Podman names the host of an image that was built here, localhost.
    names = [name.rpartition("/")[2] for name in output.splitlines()]
    built = [name for name in names if name.startswith(REPOSITORY + ":")]
    if not built:
        return pass_or_warn("Image", "not built", f"run 'make image{runtime}', or set RUNTIME=host")
    return pass_or_warn("Image", ", ".join(built))

"""What RUNTIME=docker needs: client, engine, NVIDIA runtime and image."""

import json
import shutil
from typing import NamedTuple

from parakit.cluster.checks.result import CheckResult, image_tag, pass_or_warn, run_program

REPOSITORY = "megatron-parallelism-kit"
"""Of the kit's images; a pair of `docker/versions.env` is a tag."""

DESCRIBE = '{"runtimes":{{json .Runtimes}},"is":{{json .SecurityOptions}}}'


class DockerEngine(NamedTuple):
    """What Docker's engine reports."""

    has_nvidia_runtime: bool
    """Whether containers can be given GPUs."""
    rootless: bool


def check_docker() -> "list[CheckResult]":
    """Rows for client, engine, NVIDIA runtime and image, up to the first that is missing."""
    if image_tag():
        return [pass_or_warn("Docker", "inside the kit's image, where targets run directly")]
    return check_container()


def check_container(image: str = "", tag: str = "", gpus: bool = True) -> "list[CheckResult]":
    """The same for one image, whose NGC tag the fix names; without arguments for any of the kit's."""
    row, engine = check_engine()
    if engine is None:
        return [row]
    if gpus and not engine.has_nvidia_runtime:
        fix = (
            "install the NVIDIA container toolkit and run 'sudo nvidia-ctk runtime configure "
            "--runtime=docker && sudo systemctl restart docker', or set RUNTIME=host"
        )
        return [row, pass_or_warn("NVIDIA runtime", "Docker has no NVIDIA runtime", fix)]
    return [row, _check_image(image, tag)]


def check_engine() -> "tuple[CheckResult, DockerEngine | None]":
    """Whether there is a client and its engine answers; without one a fix, and no engine."""
    if shutil.which("docker") is None:
        found = "Docker is not installed (no 'docker' on PATH)"
        fix = "install Docker Engine with the NVIDIA container toolkit, or set RUNTIME=host"
        return pass_or_warn("Docker", found, fix), None
    answer = run_program(["docker", "info", "--format", DESCRIBE])
    try:
        described = json.loads(answer.out) if answer.succeeded else {}
    except ValueError:
        described = {}
    if described.get("runtimes") is None:
        reason = "no answer" if answer.succeeded else answer.problem.rstrip(".?!") or "no answer"
        found = f"Docker's engine does not answer ({reason})"
        fix = "start it, see that you may use it (group 'docker'), or set RUNTIME=host"
        # It calls itself docker in `--version` where it is called so.
        if "Podman" in run_program(["docker", "version"]).out:
            found = "'docker' is Podman here, which the kit does not know"
            fix = "put Docker Engine's client before it on PATH, or set RUNTIME=host"
        return pass_or_warn("Docker", found, fix), None
    rootless = any("name=rootless" in option for option in described.get("is") or ())
    engine = DockerEngine("nvidia" in described["runtimes"], rootless)
    return pass_or_warn("Docker", "its engine answers"), engine


def image_id(image: str) -> "str | None":
    """The digest of a local image; None if it is not built."""
    answer = run_program(["docker", "image", "inspect", "--format", "{{.Id}}", image])
    return answer.out or None if answer.succeeded else None


def _check_image(image: str, tag: str) -> CheckResult:
    if image:
        if image_id(image):
            return pass_or_warn("Image", image)
        fix = f"run 'make image IMAGE={tag}', or set RUNTIME=host"
        return pass_or_warn("Image", f"Image {image} is not built", fix)
    listed = run_program(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]).out
    built = [name for name in listed.splitlines() if name.startswith(REPOSITORY + ":")]
    if not built:
        return pass_or_warn("Image", "not built", "run 'make image', or set RUNTIME=host")
    return pass_or_warn("Image", ", ".join(built))

"""Check what RUNTIME=apptainer needs: the program, and the image as a SIF file."""

import shutil
from pathlib import Path

from parakit.cluster.checks.docker import REPOSITORY
from parakit.cluster.checks.result import ROOT, CheckResult, image_tag, pass_or_warn

_FOLDER = Path(ROOT, "docker")
_MAGIC_AT, _MAGIC = 32, b"SIF_MAGIC"
_ID_AT, _ID_BYTES = 48, 16
"""Positions in the header of a SIF file: the launch script, the magic, two versions, then the file's UUID."""


def sif_file(image: str) -> Path:
    """Return the path of the SIF file that is made of an image of the kit."""
    return _FOLDER / (image.replace(":", "+") + ".sif")


def sif_id(path: Path) -> "str | None":
    """Return the UUID in a SIF file's header, which every build draws anew; None if the file is no SIF file."""
    try:
        with path.open("rb") as file:
            header = file.read(_ID_AT + _ID_BYTES)
    except OSError:
        return None
    if header[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] != _MAGIC or len(header) < _ID_AT + _ID_BYTES:
        return None
    return header[_ID_AT:].hex()


def check_apptainer() -> "list[CheckResult]":
    """Check Apptainer for the doctor; return nothing where it is not installed or a container is not needed."""
    if image_tag() or shutil.which("apptainer") is None:
        return []
    files = sorted(_FOLDER.glob(f"{REPOSITORY}+*.sif"))
    if not files:
        return [
            pass_or_warn(
                "Apptainer", "without an image", "see docker/README.md, or set RUNTIME=host"
            )
        ]
    return [pass_or_warn("Apptainer", ", ".join(file.name for file in files))]


def check_apptainer_container(image: str, tag: str) -> "list[CheckResult]":
    """Check whether Apptainer is installed and has an image as a SIF file; stop at the first that is missing.

    Args:
        image: The image's name in Docker or Podman.
        tag: The image's NGC tag, which the fix names.
    """
    if shutil.which("apptainer") is None:
        finding = "Apptainer is not installed (no 'apptainer' on PATH)"
        return [pass_or_warn("Apptainer", finding, "install or load it, or set RUNTIME=host")]
    file = sif_file(image)
    if sif_id(file) is None:
        finding = f"{file} is no SIF file" if file.exists() else f"{file} is not there"
        fix = (
            f"make it where Docker is with 'make image IMAGE={tag}' and 'apptainer build {file} "
            f"docker-daemon:{image}', or set RUNTIME=host"
        )
        return [pass_or_warn("Image", finding, fix)]
    return [pass_or_warn("Apptainer", "installed"), pass_or_warn("Image", str(file))]

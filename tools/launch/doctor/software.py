"""Python, packages and the programs that the kit calls."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from tools.launch.doctor.finding import FAIL, PASS, ROOT, WARN, Finding, ask

VENV_PYTHON = Path(ROOT, ".venv", "bin", "python")
# What is meant for some machines alone stands before a ';' with the condition, and is not looked for.
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s#;]+)(?=[ \t]*(?:\\|#|$))", re.MULTILINE)
LIST_PACKAGES = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version"
    " for d in m.distributions() if d.metadata['Name']}))"
)


def check_python() -> Finding:
    """Whether setup has a fitting Python to work with; asks what setup itself would take."""
    if os.environ.get("KIT_IMAGE"):
        return Finding(PASS, "Python", "of the image {}".format(os.environ["KIT_IMAGE"]))
    answer = ask(["tools/setup.sh", "--python"])
    if not answer.good:
        return Finding(
            FAIL,
            "Python",
            "no CPython 3.12 or 3.13 with venv",
            "install one, for example 'uv python install 3.12' or 'pyenv install 3.12'",
        )
    version = ask([answer.out, "-c", "import platform; print(platform.python_version())"]).out
    return Finding(PASS, "Python", f"{version} at {answer.out}")


def check_packages() -> Finding:
    """Whether `.venv` holds what requirements.txt pins."""
    if os.environ.get("KIT_IMAGE"):
        return Finding(PASS, "Packages", "those of the image")
    requirements = Path(ROOT, "requirements.txt").read_bytes()
    stamp = Path(ROOT, ".venv", ".requirements.sha256")
    if not VENV_PYTHON.exists() or not stamp.is_file():
        return Finding(
            WARN,
            "Packages",
            "not installed yet",
            "'make setup', or any other target, installs them",
        )
    if hashlib.sha256(requirements).hexdigest() not in stamp.read_text():
        return Finding(WARN, "Packages", "requirements.txt has changed since", "run 'make setup'")
    wrong = differing_packages(requirements.decode())
    if wrong is None:
        return Finding(FAIL, "Packages", ".venv's Python does not run", "rm -r .venv && make setup")
    if wrong:
        return Finding(
            FAIL, "Packages", "not as pinned: " + ", ".join(wrong), "rm -r .venv && make setup"
        )
    return Finding(PASS, "Packages", "as pinned in requirements.txt")


def differing_packages(requirements: str) -> "list[str] | None":
    """Packages of `.venv` that are not at their pinned version; None if its Python does not run."""
    answer = ask([str(VENV_PYTHON), "-c", LIST_PACKAGES])
    if not answer.good:
        return None
    installed = json.loads(answer.out)
    pins = {name.lower().replace("_", "-"): version for name, version in PIN.findall(requirements)}
    return [
        "{} {} instead of {}".format(name, installed.get(name, "missing"), version)
        for name, version in sorted(pins.items())
        if installed.get(name) != version
    ]


def check_programs() -> Finding:
    """git for the kit's commit, make and a C++ compiler for a checkout's data helpers."""
    missing = [name for name in ("git", "make", "g++") if shutil.which(name) is None]
    if missing:
        return Finding(
            WARN,
            "Programs",
            "missing: " + ", ".join(missing),
            "install them; git records the commit, make and g++ build a Megatron-LM checkout's helpers",
        )
    return Finding(PASS, "Programs", "git, make, g++")


def check_docker() -> "list[Finding]":
    """Client, engine, NVIDIA runtime and image: what RUNTIME=docker takes."""
    without = "without it GPU targets run with RUNTIME=host"
    if os.environ.get("KIT_IMAGE"):
        return [Finding(PASS, "Docker", "inside the kit's image, where targets run directly")]
    if shutil.which("docker") is None:
        fix = "install Docker Engine and the NVIDIA container toolkit; " + without
        return [Finding(WARN, "Docker", "not installed", fix)]
    engine = ask(["docker", "info", "--format", "{{json .Runtimes}}"])
    if not engine.good or engine.out in ("", "null"):
        found = "its engine does not answer: " + engine.problem.rstrip(".?")
        return [Finding(WARN, "Docker", found, "start it, or join the group 'docker'; " + without)]
    if "nvidia" not in json.loads(engine.out):
        fix = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
        return [
            Finding(PASS, "Docker", "its engine answers"),
            Finding(WARN, "NVIDIA runtime", "Docker has none", f"{fix}; {without}"),
        ]
    return [Finding(PASS, "Docker", "its engine answers and has the NVIDIA runtime"), _image()]


def _image() -> Finding:
    images = ask(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]).out.splitlines()
    ours = [image for image in images if image.startswith("megatron-parallelism-kit:")]
    if not ours:
        return Finding(WARN, "Image", "not built", "make image")
    return Finding(PASS, "Image", ", ".join(ours))

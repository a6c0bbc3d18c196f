"""Check whether the hub, the package index and the image registry can be reached, and the login of W&B."""

import netrc
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

from parakit.cluster.checks.result import ROOT, CheckResult, kit_python, pass_or_warn, run_program
from parakit.config.reachable import SECONDS, explain_unreachable

SMALL_PACKAGE = "six"
WANDB_HOST = "api.wandb.ai"


def check_hub() -> CheckResult:
    """Check whether the hub of data sets, or the mirror that HF_ENDPOINT names, can be reached."""
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    problem = explain_unreachable(address)
    if problem:
        fix = "name a mirror with HF_ENDPOINT=; 'make prepare-ds-sample' and prepare-ds need none"
        return pass_or_warn("Hub", f"{address} is out of reach: {problem}", fix)
    return pass_or_warn("Hub", address)


def check_package_index() -> CheckResult:
    """Check whether pip can download a small package from its configured index."""
    python = kit_python() or sys.executable
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    timeout = ["--timeout", str(int(SECONDS)), "--retries", "0"]
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--dest", folder, SMALL_PACKAGE]
        output = run_program(
            [python, "-m", "pip", *download, *quiet, *timeout], seconds=6 * SECONDS
        )
    if output.succeeded:
        return pass_or_warn("Package index", "pip gets packages")
    if "No module named pip" in output.problem:
        finding = "not asked: this Python has no pip"
        return pass_or_warn("Package index", finding, "run 'make setup'")
    fix = "set PIP_INDEX_URL to a mirror, or the proxy in HTTPS_PROXY; needed by 'make setup' alone"
    return pass_or_warn("Package index", "pip gets no packages: " + output.problem[:120], fix)


def check_image_registry() -> CheckResult:
    """Check whether the registry of the Dockerfile's BASE_IMAGE answers; an HTTP error such as 401 is an answer too."""
    dockerfile = Path(ROOT, "docker", "Dockerfile").read_text()
    match = re.search(r"^ARG BASE_IMAGE=([^/\s]+)/", dockerfile, re.MULTILINE)
    if match is None:
        fix = "write ARG BASE_IMAGE=<registry>/…"
        return pass_or_warn("Image registry", "docker/Dockerfile names none", fix)
    problem = explain_unreachable(f"https://{match.group(1)}/v2/")
    if problem:
        fix = "'make image' needs it; RUNTIME=host does not"
        finding = f"{match.group(1)} is out of reach: {problem}"
        return pass_or_warn("Image registry", finding, fix)
    return pass_or_warn("Image registry", match.group(1))


def check_wandb() -> CheckResult:
    """Check whether WANDB=1 would log online: whether a key exists. The key itself is not tested."""
    if os.environ.get("WANDB_API_KEY"):
        return pass_or_warn("W&B", "a key in WANDB_API_KEY: WANDB=1 logs online")
    if read_wandb_key(os.environ):
        return pass_or_warn("W&B", "logged in ('wandb login'): WANDB=1 logs online")
    fix = "run '.venv/bin/wandb login' or set WANDB_API_KEY; 'wandb sync' uploads a run later"
    return pass_or_warn("W&B", "not logged in: WANDB=1 logs offline", fix)


def read_wandb_key(environment: "Mapping[str, str]") -> str:
    """Return the key that `wandb login` wrote into netrc for the W&B service in use; empty without a key."""
    host = urlparse(environment.get("WANDB_BASE_URL") or "https://" + WANDB_HOST).hostname or ""
    try:
        login = netrc.netrc(environment.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return ""
    if login is None:
        return ""
    return login[2] or ""

"""`make image`: build the kit's image from a pair of an NGC tag and a Megatron-LM commit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from parakit.cluster.checks.apptainer import sif_file
from parakit.cluster.checks.docker import REPOSITORY, check_engine
from parakit.cluster.checks.podman import check_podman_engine
from parakit.cluster.container.docker import PROXIES
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.run import RuntimeName

RECIPE = ROOT / "docker"
VERSIONS = RECIPE / "versions.env"
DOCKERFILE = RECIPE / "Dockerfile"
MEGATRON_IN_IMAGE = "/opt/megatron-lm"

INDEXES = ("index-url", "extra-index-url", "trusted-host")
"""pip's settings of package indexes, which can also be set as PIP_INDEX_URL and the like."""

_PAIR = re.compile(r'^PAIR_\w+="(\S+) ([0-9a-f]{40}) (\S+?)(?: (sha256:[0-9a-f]{64}))?"$')


@dataclass(frozen=True)
class ImagePair:
    """An NGC tag and the Megatron-LM commit that belongs to it: a line of `docker/versions.env`."""

    ngc_tag: str
    megatron_commit: str
    megatron_version: str
    ngc_digest: str | None = None
    """The digest of the base image; None to trust the tag alone."""

    @property
    def name(self) -> str:
        """The name of the built image, which differs between pairs."""
        return f"{REPOSITORY}:{self.ngc_tag}-{self.megatron_commit[:8]}"


def read_pairs(path: Path) -> tuple[ImagePair, ...]:
    """Read the pairs of an NGC tag and a Megatron-LM commit in `versions.env`, in the file's order.

    Empty lines and comments are skipped.

    Raises:
        LaunchError: A line is no pair; the message names the line.
    """
    pairs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _PAIR.fullmatch(line)
        if match is None:
            raise LaunchError(
                f"{path.name}:{number}: '{line}' is no pair; write "
                'PAIR_<name>="<NGC tag> <40-digit commit> <Megatron version>", behind which the digest '
                "of the base may stand (sha256:…)."
            )
        pairs.append(ImagePair(*match.groups()))
    return tuple(pairs)


def find_pair(ngc_tag: str | None, path: Path | None = None) -> ImagePair:
    """Return the pair with the NGC tag that IMAGE= names; without a tag, the first pair.

    Raises:
        LaunchError: No pair has the tag.
    """
    path = path or VERSIONS
    pairs = read_pairs(path)
    for pair in pairs:
        if ngc_tag in (None, pair.ngc_tag):
            return pair
    known = ", ".join(pair.ngc_tag for pair in pairs) or "none"
    raise LaunchError(
        f"IMAGE={ngc_tag} is no pair of docker/{path.name} (it has {known}); choose one of these tags, or "
        "add a line with its Megatron-LM commit."
    )


def build_settings(environment: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a container build that hold this machine's proxies and package indexes.

    An index that is a folder of this machine is left out, because the build cannot see it.

    Args:
        environment: The environment, for the proxies.
        pip: pip's configuration, by setting.

    Raises:
        LaunchError: An index contains a login, which the image's history would show.
    """
    variables = {name: environment[name] for name in PROXIES if environment.get(name)}
    for setting in INDEXES:
        urls = [url for url in pip.get(setting, "").split() if not url.startswith("file:")]
        name = f"PIP_{setting.upper().replace('-', '_')}"
        if any("@" in urlsplit(url).netloc for url in urls):
            raise LaunchError(
                f"pip's {setting} has a login in it, which the history of the image would show; set "
                f"{name}= to an index that needs none, such as a mirror."
            )
        if urls:
            variables[name] = " ".join(urls)
    return variables


def build_command(
    pair: ImagePair,
    url: str | None = None,
    settings: Mapping[str, str] | None = None,
    base_image: str | None = None,
    program: str = "docker",
) -> tuple[str, ...]:
    """Return the `docker build` or `podman build` command of a pair.

    Data sets are not copied into the build, because `.dockerignore` excludes them.

    Args:
        pair: The pair to build.
        url: Where to clone Megatron-LM from; None for the Dockerfile's default.
        settings: Variables that are passed by name, so that their values do not show in the command.
        base_image: The base image without its tag, on a mirror registry; None for the Dockerfile's default.
        program: docker or podman.
    """
    arguments = {
        "NGC_TAG": pair.ngc_tag,
        "MEGATRON_COMMIT": pair.megatron_commit,
        "MEGATRON_VERSION": pair.megatron_version,
        "MEGATRON_FOLDER": MEGATRON_IN_IMAGE,
    }
    if pair.ngc_digest:
        arguments["NGC_DIGEST"] = f"@{pair.ngc_digest}"
    if url:
        arguments["MEGATRON_URL"] = url
    if base_image:
        arguments["BASE_IMAGE"] = base_image
    build_arguments = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    build_arguments += [f"--build-arg={name}" for name in settings or ()]
    recipe = ("--file", str(DOCKERFILE), str(ROOT))
    return (program, "build", *build_arguments, "--tag", pair.name, *recipe)


def _pip_settings() -> dict[str, str]:
    """Return pip's configuration, which `tools/install.py --settings` prints as JSON."""
    script = (sys.executable, str(ROOT / "tools/install.py"), "--settings")
    completed = subprocess.run(script, capture_output=True, text=True, check=True)
    return dict(json.loads(completed.stdout))


def build_image(
    image: str | None,
    dry_run: bool = False,
    base_image: str | None = None,
    runtime: RuntimeName | None = None,
) -> int:
    """Build the image of a pair with Docker or Podman and return 0.

    Args:
        image: IMAGE=, the NGC tag of the pair; None for the first pair.
        dry_run: True prints the command and builds nothing.
        base_image: BASE_IMAGE=, the base image on a mirror registry; None for NVIDIA's.
        runtime: RUNTIME=, the program that builds the image; None for Docker.

    Raises:
        LaunchError: The program is missing, does not answer or builds no images, BASE_IMAGE= has a tag,
            MEGATRON_URL has a login, or the build failed.
    """
    pair = find_pair(image)
    if base_image:
        _check_base_image(base_image)
    program = runtime or RuntimeName.DOCKER
    if program in (RuntimeName.APPTAINER, RuntimeName.HOST):
        file = sif_file(pair.name)
        raise LaunchError(
            f"RUNTIME={program} builds no image from a Dockerfile; use 'make image IMAGE={pair.ngc_tag}' where Docker "
            f"is, or RUNTIME=podman, and for Apptainer then 'apptainer build {file} docker-daemon:{pair.name}'."
        )
    settings = build_settings(os.environ, _pip_settings())
    url = os.environ.get("MEGATRON_URL")
    if url:
        _check_megatron_url(url)
    command = build_command(pair, url, settings, base_image=base_image, program=program.value)
    if dry_run:
        print(shlex.join(command))
    check = check_podman_engine if program is RuntimeName.PODMAN else check_engine
    result, engine = check()
    if engine is None:
        raise LaunchError(result.refusal)
    if not dry_run:
        _run_build(command, settings, pair, program)
        print(f"Built {pair.name}.")
    return 0


def _run_build(
    command: Sequence[str], settings: Mapping[str, str], pair: ImagePair, program: RuntimeName
) -> None:
    """Run the build command of a pair, with `settings` in the environment.

    Raises:
        LaunchError: The build failed.
    """
    # The recipe mounts a cache, which only BuildKit knows. Docker before 23 builds without it by default.
    environment = {"DOCKER_BUILDKIT": "1", **os.environ, **settings}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        raise LaunchError(
            f"{pair.name} was not built ({program} build ended with {status}); its last lines above say "
            "why. 'make image' resumes from the layers that were built."
        )


def _check_megatron_url(url: str) -> None:
    """Raise LaunchError if MEGATRON_URL is a web address with a login."""
    parts = urlsplit(url)
    is_web_address = parts.scheme.startswith("http")
    if is_web_address and "@" in parts.netloc:
        raise LaunchError(
            "MEGATRON_URL has a login in it, which the labels and the history of the image would show; name a mirror "
            "that needs none, such as a bare repository on this machine's network."
        )


def _check_base_image(base_image: str) -> None:
    """Raise LaunchError if BASE_IMAGE= has a tag or a digest. A colon before the last slash is that of a port."""
    has_tag = ":" in base_image.rpartition("/")[2]
    has_digest = "@" in base_image
    if has_tag or has_digest:
        raise LaunchError(
            f"BASE_IMAGE={base_image} has a tag or a digest, which the pair of IMAGE= states; name the image "
            "alone, such as mirror.example/nvidia/pytorch."
        )

"""The kit's image: which NGC tag and Megatron-LM commit belong together, and `make image`."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.checks.docker import REPOSITORY
from tools.cluster.container.docker import ask_engine
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT

RECIPE = ROOT / "docker"
VERSIONS = RECIPE / "versions.env"
MEGATRON_IN_IMAGE = "/opt/megatron-lm"

_PAIR = re.compile(r'^PAIR_\w+="(\S+) ([0-9a-f]{40}) (\S+)"$')


@dataclass(frozen=True)
class ImagePair:
    """One line of `versions.env`."""

    ngc_tag: str
    megatron_commit: str
    megatron_version: str

    @property
    def name(self) -> str:
        """What the built image is called; another pair is another image."""
        return f"{REPOSITORY}:{self.ngc_tag}-{self.megatron_commit[:8]}"


def read_pairs(path: Path) -> tuple[ImagePair, ...]:
    """Every pair, in the file's order.

    Raises:
        LaunchError: A line is no pair; the message names it.
    """
    pairs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _PAIR.fullmatch(line)
        if match is None:
            raise LaunchError(
                f"{path.name}:{number}: '{line}' is no pair; write "
                'PAIR_<name>="<NGC tag> <40-digit commit> <Megatron version>".'
            )
        pairs.append(ImagePair(*match.groups()))
    return tuple(pairs)


def find_pair(ngc_tag: str | None, path: Path | None = None) -> ImagePair:
    """The pair that IMAGE= chooses; without it the first.

    Raises:
        LaunchError: There is none of that tag.
    """
    path = path or VERSIONS
    pairs = read_pairs(path)
    for pair in pairs:
        if ngc_tag in (None, pair.ngc_tag):
            return pair
    known = ", ".join(pair.ngc_tag for pair in pairs) or "none"
    raise LaunchError(
        f"IMAGE={ngc_tag} is no pair of docker/{path.name} (it has {known}); choose one of those, or "
        "add a line with its Megatron-LM commit."
    )


def build_command(pair: ImagePair, url: str | None = None) -> tuple[str, ...]:
    """The whole `docker build`; the context is `docker/` alone, so no data set is sent."""
    arguments = {
        "NGC_TAG": pair.ngc_tag,
        "MEGATRON_COMMIT": pair.megatron_commit,
        "MEGATRON_FOLDER": MEGATRON_IN_IMAGE,
    }
    if url:
        arguments["MEGATRON_URL"] = url
    given = (f"--build-arg={name}={value}" for name, value in arguments.items())
    return ("docker", "build", *given, "--tag", pair.name, str(RECIPE))


def build(image: str | None, dry_run: bool = False, megatron_url: str | None = None) -> int:
    """Build the image of the pair that an NGC tag chooses; with `dry_run` print the command.

    Raises:
        LaunchError: Docker is missing or does not answer, or the build failed.
    """
    pair = find_pair(image)
    command = build_command(pair, megatron_url)
    if dry_run:
        print(shlex.join(command))
    ask_engine()
    if dry_run:
        return 0
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise LaunchError(
            f"{pair.name} was not built (docker build ended with {status}); its last lines above say "
            "why. 'make image' resumes from the layers that were built."
        )
    print(f"Built {pair.name}.")
    return 0

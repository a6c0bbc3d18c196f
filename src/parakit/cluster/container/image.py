"""The kit's image: which NGC tag and Megatron-LM commit belong together, and `make image`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from parakit.cluster.checks.docker import REPOSITORY, check_engine
from parakit.cluster.container.docker import PROXIES
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT

RECIPE = ROOT / "docker"
VERSIONS = RECIPE / "versions.env"
MEGATRON_IN_IMAGE = "/opt/megatron-lm"

INDEXES = ("index-url", "extra-index-url", "trusted-host")
"""What pip is told of package indexes, in its configuration or as PIP_INDEX_URL and its like."""

_PAIR = re.compile(r'^PAIR_\w+="(\S+) ([0-9a-f]{40}) (\S+?)(?: (sha256:[0-9a-f]{64}))?"$')


@dataclass(frozen=True)
class ImagePair:
    """One line of `versions.env`."""

    ngc_tag: str
    megatron_commit: str
    megatron_version: str
    ngc_digest: str | None = None
    """Of the base image, where the tag alone is not trusted."""

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
                'PAIR_<name>="<NGC tag> <40-digit commit> <Megatron version>", behind which the digest '
                "of the base may stand (sha256:…)."
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


def build_settings(environment: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """Proxies and package indexes of this machine that a build is given, as variables.

    An index that is a folder of this machine is left out: the build cannot see it.

    Raises:
        LaunchError: An index has a login in it, which the image's history would show.
    """
    given = {name: environment[name] for name in PROXIES if environment.get(name)}
    for setting in INDEXES:
        urls = [url for url in pip.get(setting, "").split() if not url.startswith("file:")]
        name = f"PIP_{setting.upper().replace('-', '_')}"
        if any("@" in urlsplit(url).netloc for url in urls):
            raise LaunchError(
                f"pip's {setting} has a login in it, which the history of the image would show; set "
                f"{name}= to an index that needs none, such as a mirror."
            )
        if urls:
            given[name] = " ".join(urls)
    return given


def build_command(
    pair: ImagePair, url: str | None = None, settings: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The whole `docker build`; `settings` go by name. `.dockerignore` keeps data sets out of it."""
    arguments = {
        "NGC_TAG": pair.ngc_tag,
        "MEGATRON_COMMIT": pair.megatron_commit,
        "MEGATRON_FOLDER": MEGATRON_IN_IMAGE,
    }
    if pair.ngc_digest:
        arguments["NGC_DIGEST"] = f"@{pair.ngc_digest}"
    if url:
        arguments["MEGATRON_URL"] = url
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    given += [f"--build-arg={name}" for name in settings or ()]
    recipe = ("--file", str(RECIPE / "Dockerfile"), str(ROOT))
    return ("docker", "build", *given, "--tag", pair.name, *recipe)


def _pip_settings() -> dict[str, str]:
    """Return what pip is configured with, as `tools/install.py --settings` prints it as JSON."""
    script = (sys.executable, str(ROOT / "tools/install.py"), "--settings")
    answer = subprocess.run(script, capture_output=True, text=True, check=True)
    return dict(json.loads(answer.stdout))


def build_image(image: str | None, dry_run: bool = False) -> int:
    """Build the image of the pair that an NGC tag chooses; with `dry_run` print the command.

    Raises:
        LaunchError: Docker is missing or does not answer, or the build failed.
    """
    pair = find_pair(image)
    settings = build_settings(os.environ, _pip_settings())
    command = build_command(pair, os.environ.get("MEGATRON_URL"), settings)
    if dry_run:
        print(shlex.join(command))
    answer, engine = check_engine()
    if engine is None:
        raise LaunchError(answer.refusal)
    if dry_run:
        return 0
    status = subprocess.run(command, env={**os.environ, **settings}, check=False).returncode
    if status != 0:
        raise LaunchError(
            f"{pair.name} was not built (docker build ended with {status}); its last lines above say "
            "why. 'make image' resumes from the layers that were built."
        )
    print(f"Built {pair.name}.")
    return 0

"""The versions of Megatron that the kit pins, builds images of and knows belong together."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.version import Version

from megatron_patches.context import NEWEST_KNOWN, OLDEST_KNOWN, TESTED_COMMIT, is_known
from parakit.cluster.container import image
from parakit.config.files import ROOT
from parakit.verify.findings import VERSIONS

PIN = re.compile(r"^megatron-core==(\S+)", re.MULTILINE)
MINOR = 2
"""Numbers of a release that name its minor version: 0.19.2 is of 0.19."""


def read_pin(text: str) -> Version:
    """Return the version of `megatron-core` in the text of a file of requirements."""
    (pin,) = PIN.findall(text)
    return Version(pin)


def read_pin_of_file(name: str) -> Version:
    return read_pin((ROOT / name).read_text(encoding="utf-8"))


PINNED = read_pin_of_file("requirements.in")


def test_the_lock_the_wheel_and_the_installed_package_have_the_pinned_megatron() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    train = "\n".join(project["optional-dependencies"]["train"])
    versions = {
        "requirements.txt": read_pin_of_file("requirements.txt"),
        "pyproject.toml, extra train": read_pin(train),
        "installed": Version(importlib.metadata.version("megatron-core")),
    }
    assert versions == dict.fromkeys(versions, PINNED)


def test_the_pinned_megatron_is_of_the_newest_release_that_the_patches_know() -> None:
    assert PINNED.release[:MINOR] == NEWEST_KNOWN.release[:MINOR]
    assert is_known(PINNED, None)
    assert VERSIONS[-1] == str(PINNED), "findings are judged for the pinned version too"


def test_every_image_has_a_megatron_that_the_patches_know_and_the_newest_image_that_of_the_pin() -> (
    None
):
    pairs = image.read_pairs(image.VERSIONS)
    unknown = [
        pair for pair in pairs if not is_known(Version(pair.megatron_version), pair.megatron_commit)
    ]
    assert unknown == []
    newest = max(Version(pair.megatron_version) for pair in pairs)
    assert newest.release[:MINOR] == PINNED.release[:MINOR]
    default = pairs[0]
    assert default.megatron_commit.startswith("f4fa7d6b"), "the commit of the published figures"


def test_the_pages_name_the_versions_that_the_patches_know() -> None:
    oldest, newest = f"{OLDEST_KNOWN.major}.{OLDEST_KNOWN.minor}", str(NEWEST_KNOWN)
    patches = read_line(ROOT / "megatron_patches/README.md", "Tested are ")
    assert f"Tested are {oldest} to {newest} (" in patches
    assert TESTED_COMMIT in patches
    front = read_line(ROOT / "README.md", TESTED_COMMIT)
    named = re.findall(r"\b0\.\d+\b", front.partition(" and main")[0])
    assert (named[0], named[-1]) == (oldest, newest)


def read_line(path: Path, phrase: str) -> str:
    """Return the only line of a file that holds a phrase."""
    (line,) = (line for line in path.read_text(encoding="utf-8").splitlines() if phrase in line)
    return line

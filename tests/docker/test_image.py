"""The image's recipe as far as it goes without a Docker engine and a GPU image."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from parakit.cluster.container.image import (
    MEGATRON_IN_IMAGE,
    RECIPE,
    VERSIONS,
    ImagePair,
    build_command,
    build_image,
    build_settings,
    find_pair,
    read_pairs,
)
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from tools.install import packages_of

PUBLISHED = "f4fa7d6bb9d10873a58fa736cacd22e11db706d2"
OWN_OF_THE_IMAGE = (
    "torch",
    "transformer-engine",
    "transformer_engine",
    "apex",
    "numpy",
    "nvidia-nccl",
)


def run(*command: str, **named: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **named)  # type: ignore[call-overload,no-any-return]


def requirements(path: Path) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line]
    return {requirement.name.lower(): requirement for requirement in parsed}


class TestVersions:
    def test_the_default_is_the_published_pair(self) -> None:
        assert find_pair(None) == ImagePair("25.06-py3", PUBLISHED, "0.15.0rc2")

    @pytest.mark.parametrize(
        ("tag", "version", "commit"),
        [
            ("25.09-py3", "0.14.1", "32ad5c89"),
            ("26.04-py3", "0.18.2", "571370c8"),
            ("26.06-py3", "0.19.1", "5be96267"),
        ],
    )
    def test_pairs_of_megatrons_own_releases_can_be_chosen(
        self, tag: str, version: str, commit: str
    ) -> None:
        pair = find_pair(tag)
        assert (pair.megatron_version, pair.name) == (
            version,
            f"megatron-parallelism-kit:{tag}-{commit}",
        )
        assert f"--build-arg=MEGATRON_VERSION={version}" in build_command(pair)

    def test_image_chooses_among_several_pairs(self, tmp_path: Path) -> None:
        path = tmp_path / "versions.env"
        path.write_text(f'{VERSIONS.read_text()}PAIR_26_08="26.08-py3 {"5" * 40} 0.19.0"\n')
        assert find_pair("26.08-py3", path).name == "megatron-parallelism-kit:26.08-py3-55555555"
        assert find_pair(None, path).ngc_tag == "25.06-py3"

    def test_the_tutorials_pair_is_there(self) -> None:
        assert find_pair("25.09-py3").megatron_version == "0.14.1"

    def test_the_readme_lists_every_pair_and_says_which_is_the_newest(self) -> None:
        page = (RECIPE / "README.md").read_text()
        rows = re.findall(
            r"^\| `([\d.]+-py3)`( \(default\))? \| (\w{8})\b(.*)$", page, re.MULTILINE
        )
        pairs = read_pairs(VERSIONS)
        assert [row[0] for row in rows] == [pair.ngc_tag for pair in pairs]
        assert [row[2] for row in rows] == [pair.megatron_commit[:8] for pair in pairs]
        assert [row[0] for row in rows if row[1]] == [pairs[0].ngc_tag]
        newest = [row[0] for row in rows if "**the newest pair**" in row[3]]
        assert newest == [max(pair.ngc_tag for pair in pairs)]

    def test_a_digest_behind_a_pair_is_the_bases(self, tmp_path: Path) -> None:
        path = tmp_path / "versions.env"
        path.write_text(f'PAIR_A="25.06-py3 {PUBLISHED} 0.15.0rc2 sha256:{"5" * 64}"\n')
        pair = find_pair(None, path)
        assert pair.megatron_version == "0.15.0rc2"
        assert f"--build-arg=NGC_DIGEST=@sha256:{'5' * 64}" in build_command(pair)

    def test_an_unknown_tag_gets_those_that_are_known(self) -> None:
        with pytest.raises(
            LaunchError, match=r"IMAGE=25.07-py3 is no pair .*\(it has 25.06-py3, 25.09"
        ):
            find_pair("25.07-py3")

    @pytest.mark.parametrize("line", ['PAIR_A="25.06-py3 f4fa7d6b 0.15"', "25.06-py3", "PAIR_A="])
    def test_a_line_that_is_no_pair_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "versions.env"
        path.write_text(f"# text\n{line}\n")
        with pytest.raises(LaunchError, match=f"versions.env:2: '{re.escape(line)}' is no pair"):
            read_pairs(path)

    def test_a_shell_can_read_the_file_too(self) -> None:
        answer = run("bash", "-c", f". {VERSIONS} && echo $PAIR_25_06")
        assert answer.stdout.split()[:2] == ["25.06-py3", PUBLISHED]


class TestDockerfile:
    def test_built_without_arguments_it_is_the_published_pair(self) -> None:
        text = (RECIPE / "Dockerfile").read_text()
        defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
        pair = find_pair(None)
        assert defaults["NGC_TAG"] == pair.ngc_tag
        assert defaults["MEGATRON_COMMIT"] == pair.megatron_commit
        assert defaults["MEGATRON_FOLDER"] == MEGATRON_IN_IMAGE
        without = {"NGC_DIGEST", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"}
        assert set(re.findall(r"^ARG (\w+)", text, re.MULTILINE)) == {*defaults, *without}

    def test_labels_state_versions_and_base_and_the_user_is_not_root(self) -> None:
        text = (RECIPE / "Dockerfile").read_text().replace("\\\n", " ")
        labels = dict(re.findall(r"org\.opencontainers\.image\.([\w.]+)=\"([^\"]+)\"", text))
        assert labels["base.name"] == "${BASE_IMAGE}:${NGC_TAG}${NGC_DIGEST}"
        assert labels["version"] == "${NGC_TAG}-${MEGATRON_VERSION}"
        assert labels["revision"] == "${MEGATRON_COMMIT}"
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["1000:1000"]
        assert re.search(r"^RUN --mount=type=cache,\S+ +\S+install_requirements.sh", text, re.M)

    def test_hadolint_has_nothing_to_say(self) -> None:
        hadolint = Path(sys.executable).with_name("hadolint")
        answer = run(str(hadolint), str(RECIPE / "Dockerfile"))
        assert (answer.returncode, answer.stdout) == (0, "")

    def test_shellcheck_has_nothing_to_say(self) -> None:
        shellcheck = Path(sys.executable).with_name("shellcheck")
        answer = run(str(shellcheck), *map(str, RECIPE.glob("*.sh")))
        assert (answer.returncode, answer.stdout) == (0, "")

    def test_every_argument_of_the_build_is_one_of_the_recipe(self) -> None:
        text = (RECIPE / "Dockerfile").read_text()
        known = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
        given = {
            word.removeprefix("--build-arg=").partition("=")[0]
            for word in build_command(find_pair(None), settings={"PIP_INDEX_URL": "https://a"})
            if word.startswith("--build-arg=")
        }
        assert given <= known

    def test_copied_files_exist_are_sent_and_scripts_may_be_run(self) -> None:
        copied = re.findall(r"^COPY (.+) /opt/kit/", (RECIPE / "Dockerfile").read_text(), re.M)
        sent = (ROOT / ".dockerignore").read_text().splitlines()
        for name in " ".join(copied).split():
            file = ROOT / name
            assert file.is_file()
            assert any(
                file.match(pattern.removeprefix("!")) for pattern in sent if pattern[0] == "!"
            )
            assert not name.endswith(".sh") or file.stat().st_mode & 0o111


class TestRequirements:
    def test_the_images_own_stack_is_not_named(self) -> None:
        named = requirements(RECIPE / "requirements.in")
        assert not [name for name in named if name.startswith(OWN_OF_THE_IMAGE)]

    def test_pins_are_the_hosts_so_that_data_sets_are_the_same(self) -> None:
        host = requirements(ROOT / "requirements.in")
        for name, requirement in requirements(RECIPE / "requirements.in").items():
            if "==" in str(requirement.specifier):
                assert requirement.specifier == host[name].specifier

    def test_the_lock_has_all_of_them(self) -> None:
        locked = {
            requirement.partition("==")[0]
            for requirement in packages_of((ROOT / "requirements.txt").read_text())
        }
        assert {name.lower() for name in requirements(RECIPE / "requirements.in")} <= locked

    def test_the_hosts_versions_are_among_those_allowed(self) -> None:
        """Resolved by pip offline against what is installed here: nothing more would be needed."""
        answer = run(
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet"),
            *("--disable-pip-version-check", "--requirement", str(RECIPE / "requirements.in")),
        )
        assert answer.returncode == 0, answer.stderr


FAKE_PYTHON = """#!/usr/bin/env bash
# Stands for the image's Python: `pip list` tells a file, tools/install.py does what the test says.
echo "$*" >> {folder}/calls
case "$1" in
  -m) cat {folder}/installed ;;
  tools/install.py) {install} ;;
esac
"""


@pytest.mark.ranks
class TestInstallation:
    def install(
        self, folder: Path, install: str, constraint: bool = True
    ) -> subprocess.CompletedProcess[str]:
        (folder / "installed").write_text("torch==2.8.0a0\ntransformer_engine==2.4\nrich==14\n")
        python = folder / "python3"
        python.write_text(FAKE_PYTHON.format(folder=folder, install=install))
        python.chmod(0o755)
        if constraint:
            (folder / "constraint.txt").touch()
        environment = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "PIP_CONSTRAINT": f"{folder}/constraint.txt",
        }
        return run(str(RECIPE / "install_requirements.sh"), env=environment)

    def test_the_constraint_file_is_honoured(self, tmp_path: Path) -> None:
        answer = self.install(tmp_path, f"echo 'wandb==1' >> {tmp_path}/installed")
        assert answer.returncode == 0, answer.stderr
        calls = (tmp_path / "calls").read_text()
        assert (
            f"tools/install.py --beside {tmp_path}/constraint.txt docker/requirements.in" in calls
        )

    def test_without_a_constraint_file_nothing_is_installed(self, tmp_path: Path) -> None:
        answer = self.install(tmp_path, "true", constraint=False)
        assert answer.returncode == 1
        assert (
            "constraint.txt is missing, so nothing would keep the image's own torch"
            in answer.stderr
        )
        assert not (tmp_path / "calls").exists()

    def test_a_changed_torch_fails_the_build(self, tmp_path: Path) -> None:
        answer = self.install(tmp_path, f"sed -i s/2.8.0a0/2.15.0/ {tmp_path}/installed")
        assert answer.returncode == 1
        assert "changed the image's own packages" in answer.stderr
        assert "> torch==2.15.0" in answer.stderr

    def test_packages_that_do_not_fit_are_one_sentence(self, tmp_path: Path) -> None:
        answer = self.install(tmp_path, "exit 1")
        assert answer.returncode == 1
        assert "The packages of docker/requirements.in do not fit" in answer.stderr


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository with two commits, and their names."""
    folder = tmp_path / "upstream"
    git = ("git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org")
    run("git", "init", "--quiet", str(folder))
    commits = []
    for text in ("first", "second"):
        (folder / "file").write_text(text)
        run(*git, "add", "file")
        run(*git, "commit", "--quiet", "--message", text)
        commits.append(run(*git, "rev-parse", "HEAD").stdout.strip())
    return folder, commits


class TestClone:
    def fetch(self, url: object, commit: str, target: Path) -> subprocess.CompletedProcess[str]:
        return run(str(RECIPE / "fetch_megatron.sh"), str(url), commit, str(target))

    def test_the_pinned_commit_is_checked_out_although_newer_ones_exist(
        self, upstream: tuple[Path, list[str]], tmp_path: Path
    ) -> None:
        folder, (first, _) = upstream
        answer = self.fetch(f"file://{folder}", first, tmp_path / "mlm")
        assert answer.returncode == 0, answer.stderr
        assert (tmp_path / "mlm/file").read_text() == "first"
        history = run("git", "-C", str(tmp_path / "mlm"), "rev-list", "--count", "HEAD")
        assert history.stdout.strip() == "1"

    def test_a_pin_that_cannot_be_cloned_is_one_sentence(
        self, upstream: tuple[Path, list[str]], tmp_path: Path
    ) -> None:
        answer = self.fetch(f"file://{upstream[0]}", "0" * 40, tmp_path / "mlm")
        assert answer.returncode == 1
        # Git's own words, and those of its other end, come around it in any order.
        (told,) = [line for line in answer.stderr.splitlines() if line.startswith("Megatron-LM")]
        assert told.startswith(f"Megatron-LM {'0' * 40} cannot be cloned from file://")
        assert "docker/versions.env, or name a mirror with MEGATRON_URL=." in told

    def test_a_branch_is_no_pin(self, upstream: tuple[Path, list[str]], tmp_path: Path) -> None:
        branch = run("git", "-C", str(upstream[0]), "branch", "--show-current").stdout.strip()
        answer = self.fetch(f"file://{upstream[0]}", branch, tmp_path / "mlm")
        assert answer.returncode == 1
        assert "write the whole commit there" in answer.stderr


@pytest.mark.ranks
class TestBuild:
    def test_a_dry_run_prints_the_pair_and_the_small_context(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setenv("MEGATRON_URL", "https://mirror.example/mlm.git")
        with pytest.raises(LaunchError, match="Docker is not installed"):  # As the build would.
            build_image(None, dry_run=True)
        shown = capsys.readouterr().out
        assert f"--build-arg=MEGATRON_COMMIT={PUBLISHED}" in shown
        assert "--build-arg=MEGATRON_URL=https://mirror.example/mlm.git" in shown
        assert "--tag megatron-parallelism-kit:25.06-py3-f4fa7d6b" in shown
        assert shown.strip().endswith(f"--file {RECIPE}/Dockerfile {ROOT}")

    def test_proxies_and_indexes_go_by_name_and_folders_of_this_machine_stay(self) -> None:
        pip = {"index-url": "https://m.example/simple", "extra-index-url": "file:///opt/simple"}
        given = build_settings({"HTTPS_PROXY": "http://user:word@proxy:3128"}, pip)
        assert given["PIP_INDEX_URL"] == "https://m.example/simple"
        assert "PIP_EXTRA_INDEX_URL" not in given
        command = build_command(find_pair(None), settings=given)
        assert {"--build-arg=HTTPS_PROXY", "--build-arg=PIP_INDEX_URL"} <= set(command)

    def test_a_mirror_registry_gives_the_base_and_the_pair_its_tag(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(LaunchError, match="Docker is not installed"):
            build_image("26.06-py3", dry_run=True, base_image="mirror.example:5000/nvidia/pytorch")
        shown = capsys.readouterr().out
        assert "--build-arg=BASE_IMAGE=mirror.example:5000/nvidia/pytorch " in shown
        assert "--build-arg=NGC_TAG=26.06-py3 " in shown
        with pytest.raises(LaunchError, match="which the pair of IMAGE= states"):
            build_image(None, dry_run=True, base_image="mirror.example/nvidia/pytorch:25.06-py3")

    def test_an_index_with_a_login_is_refused(self) -> None:
        with pytest.raises(LaunchError, match=r"index-url has a login .* set PIP_INDEX_URL= to"):
            build_settings({}, {"index-url": "https://user:word@m.example/simple"})

    def test_a_mirror_of_megatron_with_a_login_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MEGATRON_URL", "https://user:word@mirror.example/mlm.git")
        with pytest.raises(LaunchError, match=r"^MEGATRON_URL has a login in it, which the labels"):
            build_image(None, dry_run=True)

    def test_without_docker_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setenv("MEGATRON_URL", "https://mirror.example/mlm.git")
        with pytest.raises(LaunchError, match="Docker is not installed"):
            build_image(None)

    def test_a_failed_build_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = tmp_path / "docker"
        answer = '{"runtimes":{"runc":{}},"is":[]}'
        client.write_text(f"#!/bin/sh\n[ \"$1\" = info ] && echo '{answer}' && exit 0\nexit 9\n")
        client.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(
            LaunchError, match=r"f4fa7d6b was not built \(docker build ended with 9\)"
        ):
            build_image(None)

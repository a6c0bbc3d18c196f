import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.cluster.checks import docker as docker_checks
from parakit.cluster.checks.docker import check_container, check_engine
from parakit.cluster.checks.result import CommandOutput, refusal_sentences
from parakit.cluster.container import docker
from parakit.cluster.container import docker as docker_module
from parakit.cluster.container.docker import Container, bind_mount, container_user
from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.run import DeviceKind, RuntimeName
from parakit.launch import runtime as runtime_module
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.runtime import choose_runtime, default_runtime
from parakit.launch.train import compose_job, format_command_line
from tests.launch.fake_nvml import FakeNvml
from tests.machines import FakeDocker

DOCKER = Options(runtime=RuntimeName.DOCKER)


def composed(options: Options, name: str = "train-tp2-gpt2-large-2gpu") -> Launch:
    target = parse_target(name)
    return compose_job(target.with_options(options))


def values(argv: tuple[str, ...], flag: str) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == flag]


def test_container_runs_as_the_caller_with_only_the_privileges_that_nccl_needs(
    docker: FakeDocker,
) -> None:
    argv = composed(DOCKER).command("runs/20250901T000000Z-tp2-gpt2-large-2gpu")
    image = argv.index("megatron-parallelism-kit:25.06-py3-f4fa7d6b")
    options = argv[:image]
    assert options[:4] == ("docker", "run", "--rm", "--init")
    assert "--name" not in options  # Another container may have the name.
    assert values(options, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert values(options, "--gpus") == ["all"]
    assert values(options, "--ulimit") == ["memlock=-1", "stack=67108864"]
    assert "--ipc=host" in options
    assert "--privileged" not in options
    assert values(options, "--workdir") == [str(ROOT)]
    assert argv[image + 1 : image + 3] == ("python3", "-m")


def test_command_in_the_container_differs_only_in_python_and_entry(docker: FakeDocker) -> None:
    inside = composed(DOCKER).command("runs/x")
    ranks = inside[inside.index("python3") :]
    program = ranks.index("megatron_patches")
    assert ranks[program + 1] == "/opt/megatron-lm/pretrain_gpt.py"
    assert ranks[program + 2 :] == composed(DOCKER).arguments("runs/x")


def test_only_kit_and_data_are_mounted_at_unchanged_paths(
    docker: FakeDocker, tmp_path: Path
) -> None:
    folder = tmp_path / 'odd, "place" here'
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "d.bin").touch()
    (folder / "d.bin").symlink_to(elsewhere / "d.bin")
    options = Options(runtime=RuntimeName.DOCKER, data=str(folder / "d"), runs=tmp_path / "my runs")
    mounts = values(composed(options).command("r"), "--mount")
    assert mounts == [
        bind_mount(ROOT),
        bind_mount(folder),
        bind_mount(elsewhere),
        bind_mount(tmp_path / "my runs"),
    ]
    assert values(composed(DOCKER).command("r"), "--mount") == [bind_mount(ROOT)]


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/a b", "type=bind,source=/a b,target=/a b"),
        ("/a:b", "type=bind,source=/a:b,target=/a:b"),
        ("/a,b", 'type=bind,"source=/a,b","target=/a,b"'),
        ('/a"b', 'type=bind,"source=/a""b","target=/a""b"'),
    ],
)
def test_mount_path_may_contain_spaces_colons_commas_and_quotes(path: str, mount: str) -> None:
    assert bind_mount(Path(path)) == mount


def test_variables_are_passed_by_name_without_values_in_the_command(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:s3cret@proxy")
    monkeypatch.setenv("HF_TOKEN", "s3cret-token")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    launch = composed(options_from_texts({**os.environ, "RUNTIME": "docker", "WANDB": "1"}))
    names = values(launch.command("r"), "--env")
    assert {"WANDB_API_KEY", "WANDB_MODE", "HTTPS_PROXY", "NCCL_DEBUG", "KIT_DEVICE"} <= set(names)
    assert "HF_TOKEN" not in names  # training has no use for it
    assert [name for name in names if "=" in name] == [f"PYTHONPATH={PYTHON_PATH}"]
    assert "s3cret" not in format_command_line(launch)
    assert "s3cret" not in repr(launch)


@pytest.mark.parametrize("runtime", [RuntimeName.DOCKER, RuntimeName.PODMAN, RuntimeName.APPTAINER])
def test_variables_of_transport_and_memory_reach_a_container_and_folders_of_this_machine_do_not(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch, runtime: RuntimeName
) -> None:
    inherited = {
        "UCX_TLS": "rc",
        "FI_PROVIDER": "efa",
        "NCCL_TOPO_FILE": "/site/topology.xml",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    left_out = {"TRITON_CACHE_DIR": "/scratch/triton", "CUDA_HOME": "/opt/cuda", "PATH": "/bin"}
    for name, text in {**inherited, **left_out}.items():
        monkeypatch.setenv(name, text)
    command = composed(Options(runtime=runtime)).command("r")
    assert inherited.keys() <= set(command)
    assert not left_out.keys() & set(command)
    assert not set(inherited.values()) & set(command), "values show in ps"


def test_container_gets_the_key_of_a_login_but_not_its_file(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", "")
    for wandb, is_passed in (("0", False), ("1", True)):
        asked = {**os.environ, "RUNTIME": "docker", "WANDB": wandb}
        launch = composed(options_from_texts(asked))
        assert (os.environ["WANDB_API_KEY"] == "s3cret") is is_passed
        assert "s3cret" not in format_command_line(launch) + repr(launch)
    assert "WANDB_API_KEY" in values(launch.command("r"), "--env")
    assert not any("netrc" in mount for mount in values(launch.command("r"), "--mount"))


def test_an_argument_with_quotes_and_spaces_arrives_as_one_word(docker: FakeDocker) -> None:
    options = Options(runtime=RuntimeName.DOCKER, extra=("--wandb-exp-name", 'it\'s "a" $HOME'))
    launch = composed(options)
    assert launch.command("r")[-1] != ""
    shown = format_command_line(launch)
    arguments = shlex.split(shown)
    assert arguments[arguments.index("--wandb-exp-name") + 1] == 'it\'s "a" $HOME'


def test_a_rootless_engine_maps_root_to_the_caller(docker: FakeDocker) -> None:
    docker.answer("info", '{"runtimes":{"nvidia":{}},"is":["name=seccomp","name=rootless"]}')
    assert values(composed(DOCKER).command("r"), "--user") == ["0:0"]
    assert container_user() == f"{os.getuid()}:{os.getgid()}"


def test_the_callers_supplementary_groups_are_those_of_the_container(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [4321, os.getgid(), 987])
    command = composed(DOCKER).command("r")
    assert values(command[: command.index("python3")], "--group-add") == ["987", "4321"]
    docker.answer("info", '{"runtimes":{"nvidia":{}},"is":["name=rootless"]}')
    assert "--group-add" not in composed(DOCKER).command("r"), (
        "they have no number in its containers"
    )


CONNECT = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?\n"


def test_podman_is_recognised_even_if_it_is_called_docker(docker: FakeDocker) -> None:
    # podman 4.3.1 answers in this way; its `--version` starts with the name by which it was called.
    docker.answer("info", err="Error: template: info:1:19: can't evaluate field Runtimes", code=125)
    docker.answer("version", "Client:       Podman Engine\nVersion:      4.3.1\n")
    refusal = check_engine()[0].refusal
    assert re.fullmatch(r"'docker' is Podman here; set RUNTIME=podman, .* RUNTIME=host\.", refusal)


@pytest.mark.parametrize(
    ("verb", "answer", "message"),
    [
        (
            "info",
            {"err": CONNECT, "code": 1},
            "engine does not answer \\(Cannot connect.*RUNTIME=host",
        ),
        ("info", {"out": '{"runtimes":null,"is":null}', "code": 0}, "engine does not answer"),
        ("info", {"out": "nonsense"}, "engine does not answer"),
        ("info", {"out": '{"runtimes":{"runc":{}},"is":[]}'}, "no NVIDIA runtime.*nvidia-ctk"),
        (
            "image inspect",
            {"err": "No such image", "code": 1},
            "Image i:t is not built; run 'make image",
        ),
    ],
)
def test_missing_part_of_docker_gives_a_single_sentence_with_the_fix(
    docker: FakeDocker, verb: str, answer: dict[str, object], message: str
) -> None:
    docker.answer(verb, **answer)  # type: ignore[arg-type]
    (refusal, *_) = refusal_sentences(check_container("i:t", "25.06-py3", gpus=True))
    assert re.search(message, refusal)
    assert "\n" not in refusal


def test_gpus_need_no_entry_of_a_runtime_if_there_is_a_hook_or_a_cdi_specification(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.answer("info", '{"runtimes":{"runc":{}},"is":[]}')

    def refusals() -> list[str]:
        return refusal_sentences(check_container("i:t", "25.06-py3", gpus=True))

    cdi = tmp_path / "cdi"
    monkeypatch.setattr(docker_checks, "CDI_FOLDERS", (str(cdi), str(tmp_path / "gone")))
    assert len(refusals()) == 1
    cdi.mkdir()
    (cdi / "amd.yaml").touch()
    assert len(refusals()) == 1
    (cdi / "nvidia.yaml").touch()
    assert refusals() == []
    (cdi / "nvidia.yaml").unlink()
    hook = docker.folder / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    assert refusals() == []


def test_a_container_with_gpus_gets_infiniband_and_a_label_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = Container("image", "1:1")
    monkeypatch.setattr(docker_module, "INFINIBAND", tmp_path / "gone")
    assert "--device" not in container.wrap(("true",), ())
    monkeypatch.setattr(docker_module, "INFINIBAND", tmp_path)
    command = container.wrap(("true",), ())
    assert command[command.index("--device") + 1] == str(tmp_path)
    assert "--device" not in replace(container, gpus=False).wrap(("true",), ())
    labelled = docker_module.add_container_id_file(command, tmp_path / "R1" / "container.id")
    assert labelled[labelled.index("--label") + 1] == "megatron-parallelism-kit.run=R1"


def test_missing_docker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (refusal,) = refusal_sentences(check_container("i:t", "25.06-py3", gpus=True))
    assert re.search(r"Docker is not installed.*RUNTIME=host", refusal)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a process outside of containers, because these tests may run inside one."""
    monkeypatch.setattr(runtime_module, "is_inside_container", lambda: False)


def test_docker_is_the_default_on_a_machine_with_docker_and_gpus(
    outside: None, docker: FakeDocker, two_h200: FakeNvml
) -> None:
    assert default_runtime() is RuntimeName.DOCKER
    assert choose_runtime(Options(), DeviceKind.GPU).container is not None


def test_host_is_the_default_without_a_gpu(outside: None, docker: FakeDocker) -> None:
    assert default_runtime() is RuntimeName.HOST


def test_host_is_the_default_without_the_nvidia_runtime(
    outside: None, docker: FakeDocker, two_h200: FakeNvml
) -> None:
    docker.answer("info", '{"runtimes":{"runc":{}},"is":[]}')
    assert default_runtime() is RuntimeName.HOST


def test_host_is_the_default_inside_any_container(
    docker: FakeDocker, two_h200: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "is_inside_container", lambda: True)
    assert default_runtime() is RuntimeName.HOST


def test_inside_the_kits_image_targets_run_directly(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_IMAGE", "25.06-py3")
    assert choose_runtime(DOCKER, DeviceKind.GPU).container is None


def test_cpu_ranks_run_in_a_container_on_request_without_gpus(
    docker: FakeDocker,
) -> None:
    assert choose_runtime(Options(), DeviceKind.CPU).container is None
    container = choose_runtime(DOCKER, DeviceKind.CPU).container
    assert container is not None
    assert "--gpus" not in container.wrap((), ())


def test_a_checkout_of_the_host_is_refused_in_a_container(
    docker: FakeDocker, tmp_path: Path
) -> None:
    options = Options(runtime=RuntimeName.DOCKER, megatron_lm=tmp_path)
    with pytest.raises(
        LaunchError, match="image's own Megatron; unset MEGATRON_LM, or set RUNTIME=host"
    ):
        choose_runtime(options, DeviceKind.GPU)


@pytest.mark.parametrize(
    ("message", "is_gone"),
    [
        ("No such container: 1a", True),
        ('no container with name or ID "1a" found: no such container', True),
        ("removal of container 1a is already in progress", True),
        ("Cannot connect to the Docker daemon", False),
    ],
)
def test_container_removed_by_the_engine_counts_as_removed(
    message: str, is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "run_program", lambda _: CommandOutput(1, "", f"Error: {message}"))
    file = tmp_path / docker.CONTAINER_FILE
    file.write_text("1a")
    assert docker.remove_container(file) is is_gone
    assert file.exists() is not is_gone

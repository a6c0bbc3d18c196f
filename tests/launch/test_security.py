"""What the kit promises about containers, secrets, logs, checkpoints and its own code."""

import ast
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from parakit.cluster.nodes import Nodes
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.run import RuntimeName
from parakit.launch.initial_checkpoint import check_owner
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import nodes_problems
from parakit.launch.train import compose_job
from tests.launch.fake_nvml import FakeNvml
from tests.machines import FakeDocker

SECRET = "s3cret-1f0e"
SECRETS = {
    "WANDB_API_KEY": f"{SECRET}-wandb",
    "HF_TOKEN": f"{SECRET}-hub",
    "HTTPS_PROXY": f"http://user:{SECRET}-proxy@127.0.0.1:9",
}


def docker_command(**changes: object) -> tuple[str, ...]:
    target = parse_target("train-dp2-gpt2-large-2gpu")
    options = replace(Options(runtime=RuntimeName.DOCKER), **changes)  # type: ignore[arg-type]
    return compose_job(target.with_options(options)).command("runs/R")


def test_a_container_is_the_callers_confined_and_has_a_network_of_its_own(
    docker: FakeDocker,
) -> None:
    command = docker_command()
    options = command[: command.index("megatron-parallelism-kit:25.06-py3-f4fa7d6b")]
    assert options[options.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "--read-only" in options
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert options[options.index("--security-opt") + 1] == "no-new-privileges"
    assert not {"--privileged", "--network", "--net", "--pid", "--cap-add", "--device"} & {*options}


def test_the_hosts_network_is_given_only_when_it_is_asked_for(
    docker: FakeDocker, two_h200: FakeNvml
) -> None:
    asked = docker_command(host_network=True)
    assert asked[asked.index("--network") + 1] == "host"
    target = parse_target("train-dp2-gpt2-large-2gpu")
    nodes = Nodes(2, 0, "10.0.0.1")
    spread = Options(runtime=RuntimeName.DOCKER, nodes=nodes)
    launch = compose_job(target.with_options(spread))
    (problem,) = nodes_problems(launch)
    assert "use this machine's network with HOST_NETWORK=1, or set RUNTIME=host" in problem


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("S102", "exec(text)"),
        ("S301", "import pickle\npickle.load(file)"),
        ("S307", "eval(text)"),
        ("S506", "import yaml\nyaml.load(text, Loader=yaml.Loader)"),
        ("S602", "import subprocess\nsubprocess.run(text, shell=True)"),
        ("S605", "import os\nos.system(text)"),
        ("S701", "import jinja2\njinja2.Environment(autoescape=False)"),
    ],
)
def test_lint_refuses_what_would_run_or_show_what_it_is_given(rule: str, code: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    answer = subprocess.run(
        (ruff, "check", "--output-format=concise", "--stdin-filename=tools/x.py", "-"),
        input=code,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f" {rule} " in answer.stdout


def unsafe_loads(text: str) -> list[int]:
    """Lines of `torch.load` that would unpickle more than tensors."""
    if "torch.load" not in text:
        return []
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "load"
        and ast.unparse(call.func) == "torch.load"
        and "weights_only=True" not in map(ast.unparse, call.keywords)
    ]


def test_the_kit_itself_unpickles_nothing() -> None:
    assert unsafe_loads("import torch\ntorch.load(path)\ntorch.load(path, weights_only=True)") == [
        2
    ]
    files = [
        path
        for top in ("src", "megatron_patches", "examples", "tools")
        for path in (ROOT / top).rglob("*.py")
    ]
    assert len(files) > 200
    assert {path: lines for path in files if (lines := unsafe_loads(path.read_text()))} == {}


def test_a_log_moves_no_cursor_and_makes_no_link_or_script(tmp_path: Path) -> None:
    evil = (
        "\x1b[2J\x1b]8;;http://evil.example\x07here\x1b]8;;\x07 \x9b31m \x08\x08 \x1b"
        "<script>alert(1)</script> [click](javascript:alert(1)) ![i](http://evil.example/i.png) [red]x"
    )
    log = tmp_path / "a.log"
    log.write_text(
        " [2026-01-01 00:00:00.000000] iteration        1/     500 | consumed samples: 8 | elapsed time "
        "per iteration (ms): 100.0 | learning rate: 1.0E-04 | global batch size:     8 | lm loss: "
        "1.0E+01 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | number of "
        "nan iterations:   0 |\n"
        f'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: {evil}\n'
    )
    answer = subprocess.run(
        (sys.executable, "-m", "parakit", "report", str(log), "--name", "evil"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    folder = next(iter((tmp_path / "reports").glob("evil*")), None) or ROOT / "reports" / "evil"
    shown = {
        "terminal": answer.stdout,
        "report.md": (folder / "report.md").read_text(),
        "report.html": (folder / "report.html").read_text(),
    }
    for name, text in shown.items():
        assert "ValueError" in text, (name, answer.stderr)
        assert not re.search("[\x00-\x08\x0e-\x1f\x7f\x80-\x9f]", text), name
    assert "<script>alert" not in shown["report.html"]
    assert "<script>alert" not in shown["report.md"]
    assert "[click](javascript" not in shown["report.md"]
    assert "![i](http" not in shown["report.md"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_checkpoint_that_somebody_else_put_there_is_not_loaded(tmp_path: Path) -> None:
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(b"a pickle")
    check_owner(tmp_path)
    os.chown(metadata, 1234, -1)
    with pytest.raises(
        LaunchError, match=r"\.metadata is user 1234's, and a checkpoint can run code"
    ):
        check_owner(tmp_path)


def test_a_checkpoint_that_everybody_may_change_is_not_loaded(tmp_path: Path) -> None:
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(b"a pickle")
    metadata.chmod(0o666)
    with pytest.raises(LaunchError, match="writable by everybody"):
        check_owner(tmp_path)


@pytest.mark.slow
def test_no_file_process_list_or_report_of_a_real_run_holds_a_secret(
    tmp_path: Path, sample_prefix: Path
) -> None:
    settings = {"ITERS": "3", "WANDB": "1", "WANDB_MODE": "offline", "DATA": str(sample_prefix)}
    command = (sys.executable, "-m", "parakit", "train-dp2-gpt2-tiny-2cpu")
    environment = {**os.environ, **SECRETS, **settings, "RUNS": str(tmp_path / "runs")}
    with (tmp_path / "said").open("wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        while run.poll() is None:
            for process in psutil.process_iter(["cmdline"]):
                assert SECRET not in " ".join(process.info["cmdline"] or ())
            time.sleep(0.5)
    assert run.returncode == 0
    report = (sys.executable, "-m", "parakit", "report", "--name", f"secrets-{os.getpid()}")
    (folder,) = (tmp_path / "runs").glob("2*")
    known = environment | {"PYTHONPATH": str(ROOT)}
    subprocess.run((*report, str(folder)), cwd=tmp_path, env=known, check=True)
    assert (tmp_path / "reports").is_dir()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def pins(path: Path) -> dict[str, str]:
    """Versions by name, of lines such as `name==1.0 ; condition \\`."""
    matches = re.findall(r"^([\w.-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in matches}


@pytest.mark.parametrize("name", ["requirements", "requirements-deepspeed", "requirements-hf"])
def test_every_package_is_pinned_with_hashes_and_comes_from_no_named_address(name: str) -> None:
    text = (ROOT / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    packages = re.split(r"\n(?=\S)", "\n".join(lines))
    assert len(packages) > 5
    for package in packages:
        assert re.match(r"[\w.-]+==\S+ ", package), package
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package
    assert "//" not in text
    assert pins(ROOT / f"{name}.in").items() <= pins(ROOT / f"{name}.txt").items()

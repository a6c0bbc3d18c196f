"""The sbatch script: golden files, its execution by a shell, and the quoting of values."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.cluster import sbatch
from parakit.cluster.sbatch import (
    CPUS,
    ArrayTask,
    BatchJob,
    find_replacing_variables,
    pyxis_flags,
    render_batch_script,
)
from parakit.cluster.slurm import Slurm, parse_slurm_options, split_directives
from parakit.config.files import ROOT
from parakit.config.run import DeviceKind
from parakit.config.settings import SLURM_SETTINGS
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import nodes_problems
from parakit.launch.submit import spread_over_nodes
from parakit.launch.train import compose_job
from tests.given import read_of

GOLDEN = Path(__file__).parent / "golden"
CELL = ArrayTask("runs/R1", ("run", "dp2", "gpt2-tiny", "2cpu", "--"), {"ITERS": "5"})


def job(*cells: ArrayTask, **changes: object) -> BatchJob:
    known = {
        "name": "dp2-gpt2-tiny-2cpu",
        "device": DeviceKind.CPU,
        "devices_per_node": 1,
        "slurm": Slurm(nodes=2),
        "python": ".venv/bin/python",
    }
    return BatchJob(tasks=cells or (CELL,), **(known | changes))  # type: ignore[arg-type]


SITE = Slurm(
    nodes=4,
    directives=("--account=lab", "--partition=h200", "--exclusive"),
    setup=("module load cuda", "export NCCL_IB_HCA=mlx5"),
)
TP8 = ("--tensor-model-parallel-size", "8")
JOBS = {
    "two-cpu-nodes": job(),
    "repeats-are-an-array": job(CELL, ArrayTask("runs/R2", CELL.argv, CELL.settings)),
    "gpus-in-the-image": job(
        ArrayTask("runs/R3", ("run", "tp8dp4", "gpt2-large", "32gpu", "--", *TP8), {}),
        name="tp8dp4-gpt2-large-32gpu",
        device=DeviceKind.GPU,
        devices_per_node=8,
        slurm=SITE,
        python="python3",
        inherited=("NCCL_DEBUG", "WANDB_API_KEY"),
        container=pyxis_flags("/shared/kit.sqsh", (ROOT, Path("/data"))),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_batch_script_equals_its_golden_file(name: str) -> None:
    assert (
        render_batch_script(JOBS[name]).replace(str(ROOT), "/kit")
        == (GOLDEN / f"{name}.sbatch").read_text()
    )


@pytest.mark.parametrize("name", JOBS)
def test_shellcheck_finds_nothing_in_a_script(name: str) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    answer = subprocess.run(
        (checker, "--shell=bash", "--exclude=SC2016", "-"),  # each node expands it
        input=render_batch_script(JOBS[name]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout


PROGRAMS = {
    "scontrol": "echo n1",
    "sinfo": "echo 10.0.0.1",
    # A fake srun runs task 1 of the step and prints the launcher's arguments and environment.
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "python": (
        "exec {python} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))'"
        ' "$@"'
    ),
}


def run_script(text: str, folder: Path, **slurm: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment of the job's launcher on node 1."""
    for name, line in PROGRAMS.items():
        program = folder / name
        program.write_text(
            "#!/usr/bin/env bash\n" + line.replace("{python}", sys.executable) + "\n"
        )
        program.chmod(0o755)
    known = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **known, **slurm}
    answer = subprocess.run(
        ("bash", "-c", text),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    arguments, seen = json.loads(answer.stdout)
    return arguments, seen


def test_every_node_starts_the_launcher_with_its_rank_and_the_address_of_node_0(
    tmp_path: Path,
) -> None:
    arguments, seen = run_script(render_batch_script(job(python="python")), tmp_path)
    assert arguments == ["-m", "parakit", *CELL.argv]
    told = {name: seen[name] for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert told == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20012",
    }
    assert (seen["RENDEZVOUS"], seen["ITERS"], seen["RUN_FOLDER"]) == ("c10d", "5", "runs/R1")


def test_a_first_node_whose_address_slurm_does_not_report_is_reached_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROGRAMS, "sinfo", "exit 0")
    _, seen = run_script(render_batch_script(job(python="python")), tmp_path)
    assert seen["MASTER_ADDR"] == "n1"


def test_the_kits_folder_may_have_quotes_and_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "ROOT", Path('/my "kit"'))
    lines = [
        line.removeprefix("#SBATCH ")
        for line in render_batch_script(job()).splitlines()
        if line.startswith(("#SBATCH --chdir", "#SBATCH --output"))
    ]
    assert [shlex.split(line) for line in lines] == [
        ['--chdir=/my "kit"'],
        ['--output=/my "kit"/runs/R1/slurm.txt'],
    ]


@pytest.mark.parametrize(
    ("device", "directives", "names"),
    [
        (DeviceKind.GPU, (), ["SBATCH_EXPORT", "SBATCH_GPUS", "SBATCH_WAIT"]),
        (DeviceKind.CPU, (), ["SBATCH_EXPORT", "SBATCH_WAIT"]),
        (DeviceKind.CPU, ("-t 60 # short",), ["SBATCH_EXPORT", "SBATCH_TIMELIMIT", "SBATCH_WAIT"]),
    ],
)
def test_variables_of_sbatch_count_where_the_script_has_only_a_default(
    device: DeviceKind, directives: tuple[str, ...], names: list[str]
) -> None:
    variables = {f"SBATCH_{name}": "1" for name in ("EXPORT", "GPUS", "TIMELIMIT", "WAIT", "QOS")}
    described = job(device=device, slurm=Slurm(directives=directives))
    assert sorted(find_replacing_variables(described, variables)) == names


def test_array_element_runs_the_task_of_its_number(tmp_path: Path) -> None:
    (tmp_path / "runs" / "R2").mkdir(parents=True)
    two = job(CELL, ArrayTask("runs/R2", ("run", "pp2"), {"SEED": "2"}), python="python")
    with pytest.raises(json.JSONDecodeError):  # its output goes to its own run folder
        run_script(render_batch_script(two), tmp_path, SLURM_ARRAY_TASK_ID="1")
    arguments, seen = json.loads((tmp_path / "runs" / "R2" / "slurm.txt").read_text())
    assert arguments[2:] == ["run", "pp2"]
    assert (seen["SEED"], seen["RUN_FOLDER"]) == ("2", "runs/R2")


@pytest.mark.ranks
@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=40))
def test_values_in_the_script_are_quoted(value: str) -> None:
    text = render_batch_script(job(ArrayTask("runs/R", ("run", value), {"EXTRA": value})))
    start = text.index("export EXTRA=")
    chosen = text[start : text.index("\nexport PYTHONPATH", start)]
    answer = subprocess.run(
        ("bash", "-c", f'{chosen}\nprintf "%s\\0" "$EXTRA" "${{words[@]}}"'),
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert answer.stdout.decode().split("\0")[:3] == [value, "run", value]


def test_a_value_with_spaces_stays_one_word_in_a_directive_and_for_srun() -> None:
    asked = {"LAUNCHER": "slurm", "SLURM_LINES": "--comment='a \"b\" c' --mem=0"}
    slurm = parse_slurm_options(read_of(SLURM_SETTINGS, asked))
    assert slurm is not None
    assert [shlex.split(line) for line in slurm.directives] == [['--comment=a "b" c'], ["--mem=0"]]


def test_site_lines_may_use_unset_variables_and_override_no_variable(
    tmp_path: Path,
) -> None:
    site = Slurm(setup=('echo "got:$NEVER_SET"', "export ITERS=7"))
    folders = [tmp_path / "a b", tmp_path / "c"]
    for folder in folders:
        folder.mkdir()
    cells = (ArrayTask(str(folder), CELL.argv, CELL.settings) for folder in folders)
    lines = render_batch_script(job(*cells, slurm=site)).splitlines()
    text = "\n".join((*lines[: lines.index("esac") + 1], 'echo "$ITERS $RUN_FOLDER"'))
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "0"}
    subprocess.run(("bash", "-c", text), check=True, env=environment)
    assert (folders[0] / "slurm.txt").read_text() == f"got:\n5 {folders[0]}\n"


def test_a_site_may_load_modules_although_slurm_passes_no_function_on(tmp_path: Path) -> None:
    (tmp_path / "modules" / "init").mkdir(parents=True)
    (tmp_path / "modules" / "init" / "bash").write_text(
        'module() { export LOADED="$*"; [ -n "$NEVER_SET" ] || true; }\n'
    )
    site = Slurm(setup=("module load cuda/12.9",))
    text = render_batch_script(job(slurm=site, python="python"))
    _, seen = run_script(text, tmp_path, MODULESHOME=str(tmp_path / "modules"))
    assert seen["LOADED"] == "load cuda/12.9"


def list_options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_gpus_cpus_time_and_running_elements_have_defaults() -> None:
    gpus = {"device": DeviceKind.GPU, "devices_per_node": 8}
    text = render_batch_script(job(*(CELL,) * 20, **gpus))
    for ours in ("--gpus-per-node=8", "--cpus-per-task=32", "--time=04:00:00", "--array=0-19%8"):
        assert ours in list_options(text)
    assert "--cpus-per-task" not in text.partition("exec srun")[2]


@pytest.mark.parametrize(
    "stated", [("--time=1:00", "--cpus-per-task=96"), ("-t 1:00", "-c 96"), ("-c 96 -t 1:00",)]
)
def test_a_default_is_left_out_if_the_site_states_the_option(stated: tuple[str, ...]) -> None:
    gpus = {"device": DeviceKind.GPU, "devices_per_node": 8}
    options = list_options(render_batch_script(job(slurm=Slurm(directives=stated), **gpus)))
    assert options[-len(stated) :] == list(stated)
    assert "--gpus-per-node=8" in options
    assert "--time=04:00:00" not in options
    assert "--cpus-per-task=32" not in options


def test_slurm_gres_names_the_gpus_in_place_of_gpus_per_node() -> None:
    asked = {"LAUNCHER": "slurm", "SLURM_GRES": "gpu:h200:4"}
    slurm = parse_slurm_options(read_of(SLURM_SETTINGS, asked))
    assert slurm is not None
    text = render_batch_script(job(slurm=slurm, device=DeviceKind.GPU, devices_per_node=4))
    assert "#SBATCH --gres=gpu:h200:4\n" in text
    assert "--gpus-per-node" not in text


@pytest.mark.parametrize(
    ("directives", "gpus"),
    [
        (("--qos=high",), None),
        (("--gres=gpu:h200:4",), 4),
        (("--gres=gpu:8",), 8),
        (("--gres=gpu:h200",), 1),
        (("--gres=nvme:1,gpu:2",), 2),
        (("--gres=nvme:1",), 0),
        (("--gres=gpu:8", '--gres="gpu:4"'), 4),
    ],
)
def test_gpus_per_node_are_those_of_the_last_gres(
    directives: tuple[str, ...], gpus: int | None
) -> None:
    assert Slurm(directives=directives).gpus_per_node == gpus


@pytest.mark.parametrize(("gres", "is_refused"), [("gpu:4", True), ("gpu:h200:1", False)])
def test_a_gres_that_does_not_fit_the_target_is_refused(gres: str, is_refused: bool) -> None:
    options = Options(slurm=Slurm(nodes=2, directives=(f"--gres={gres}",)))
    job_of_two = parse_target("train-dp2-gpt2-large-2gpu").with_options(options)
    launch = spread_over_nodes(compose_job(job_of_two), 2)
    expected = [
        f"SLURM_GRES= or a --gres line asks for 4 GPUs per node, and {launch.job.name} on 2 nodes has 1 rank there; "
        "ask for gpu:1, or name a target with 8 GPUs."
    ]
    assert list(nodes_problems(launch)) == (expected if is_refused else [])


def test_a_misspelt_variable_of_slurm_is_refused_and_slurms_own_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_JOB_PARTITION"):
        monkeypatch.setenv(name, "x")
    parse_slurm_options(read_of(SLURM_SETTINGS, {"LAUNCHER": "slurm"}))
    monkeypatch.setenv("SLURM_PARTION", "h200")
    with pytest.raises(
        ValueError, match="no variable SLURM_PARTION; did you mean SLURM_PARTITION="
    ):
        parse_slurm_options(read_of(SLURM_SETTINGS, {"LAUNCHER": "slurm"}))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    parse_slurm_options(read_of(SLURM_SETTINGS, {"LAUNCHER": "slurm"}))


def test_step_gets_the_cpus_of_its_job() -> None:
    show = f"{CPUS}\necho ${{SRUN_CPUS_PER_TASK-none}}"
    for given_, told in (({}, "none"), ({"SLURM_CPUS_PER_TASK": "64"}, "64")):
        environment = {"PATH": os.environ["PATH"], **given_}
        answer = subprocess.run(
            ("bash", "-euc", show), capture_output=True, text=True, check=True, env=environment
        )
        assert answer.stdout.strip() == told
    assert CPUS in render_batch_script(JOBS["gpus-in-the-image"])


def test_nothing_is_submitted_without_launcher_slurm() -> None:
    assert parse_slurm_options(read_of(SLURM_SETTINGS, {"NODES": "2"})) is None


@pytest.mark.parametrize(
    ("value", "line"),
    [
        # The result of Slurm 22.05 was read back with 'scontrol show job'.
        ("a b", '"--comment=a b"'),
        ("it's", '"--comment=it\'s"'),
        ("back\\slash", '"--comment=back\\\\slash"'),
        ("a#b", '"--comment=a#b"'),
        ("a&b;$c", "--comment=a&b;$c"),
    ],
)
def test_user_line_is_quoted_if_sbatch_would_split_it(value: str, line: str) -> None:
    asked = {"LAUNCHER": "slurm", "SLURM_LINES": shlex.quote(f"--comment={value}")}
    slurm = parse_slurm_options(read_of(SLURM_SETTINGS, asked))
    assert slurm is not None
    assert slurm.directives == (line,)
    assert split_directives(slurm.directives) == (f"--comment={value}",)


def test_a_site_line_whose_quotes_do_not_end_is_named(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.write_text("#SBATCH --comment='a b\n")
    with pytest.raises(ValueError, match=r"site has a wrong #SBATCH line \(No closing quotation"):
        parse_slurm_options(read_of(SLURM_SETTINGS, {"LAUNCHER": "slurm", "SLURM_SITE": str(site)}))


def test_variables_add_to_the_site_file_and_come_after_it(tmp_path: Path) -> None:
    site = tmp_path / "site.slurm"
    site.write_text(
        "#!/bin/bash\n#SBATCH --partition=slow\n\nmodule load cuda\n#SBATCH --exclusive\n"
    )
    slurm = parse_slurm_options(
        read_of(
            SLURM_SETTINGS,
            {
                "LAUNCHER": "slurm",
                "NODES": "3",
                "SLURM_SITE": str(site),
                "SLURM_PARTITION": "fast",
                "SLURM_TIME": "1-00:30:00",
                "SLURM_LINES": "--constraint='a&b' --mem=0",
            },
        )
    )
    assert slurm == Slurm(
        nodes=3,
        directives=(
            *("--partition=slow", "--exclusive", "--partition=fast", "--time=1-00:30:00"),
            *("--constraint=a&b", "--mem=0"),
        ),
        setup=("module load cuda",),
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LAUNCHER", "pbs", "LAUNCHER=pbs is not torchrun or slurm"),
        ("NODES", "0", "NODES=0 is not a whole number above 0"),
        ("SLURM_PARTITION", "a\n#SBATCH --uid=0", "is not a word that sbatch takes"),
        ("SLURM_LINES", "-p gpu", "SLURM_LINES=-p gpu is not a list of sbatch's long options"),
        ("SLURM_SITE", "/nowhere/site", "SLURM_SITE=/nowhere/site cannot be read"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_slurm_options(read_of(SLURM_SETTINGS, {"LAUNCHER": "slurm", name: value}))


def test_a_folder_that_pyxis_would_misread_is_refused() -> None:
    with pytest.raises(ValueError, match="/a:b cannot be mounted by Pyxis"):
        pyxis_flags("image", (Path("/a:b"),))


def test_slurm_launcher_is_refused_for_targets_that_do_not_train() -> None:
    answer = subprocess.run(
        (sys.executable, "-m", "parakit", "demo"),
        env={**os.environ, "LAUNCHER": "slurm"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert answer.returncode == 2
    assert "leave LAUNCHER= to train-… targets and sweep" in " ".join(answer.stderr.split())

from itertools import product
from pathlib import Path

import pytest

from parakit.cli.dispatch import run_target
from parakit.config.errors import LaunchError
from parakit.config.run import DeviceKind
from parakit.experiments import load
from parakit.experiments.commands import find_output
from parakit.experiments.definition import FOLDER
from parakit.experiments.load import load_experiment
from parakit.experiments.tutorial.commands import NAME as TUTORIAL
from parakit.experiments.tutorial.experiment import load_chapter
from parakit.launch.options import Options, options_from_texts
from parakit.launch.train import compose_job

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_can_be_read_and_its_table_is_known(name: str) -> None:
    if name == TUTORIAL:
        # The runs of this experiment are rows of a table, of which a chapter chooses some.
        experiment = load_chapter(None, Options(), devices=None, model=None)
    else:
        experiment = load_experiment(name, Options())
    assert experiment.cells
    assert find_output(experiment.file.table)


def test_variables_override_defaults_but_not_fixed_settings() -> None:
    plain = load_experiment("demo", Options()).options
    assert (plain.micro_batch_size, plain.global_batch_size, plain.shared_start) == (2, 8, True)
    asked = options_from_texts({"MICRO_BATCH": "4", "SHARED_START": "0"})
    options = load_experiment("demo", asked).options
    assert (options.micro_batch_size, options.global_batch_size, options.shared_start) == (
        4,
        8,
        True,
    )


def test_the_demo_is_the_same_work_for_every_strategy() -> None:
    demo = load_experiment("demo", Options(data="owt-ds/any"))
    launches = [compose_job(cell.job) for cell in demo.cells]
    assert {launch.spec.batch for launch in launches} == {launches[0].spec.batch}
    assert [launch.devices for launch in launches] == [1, 2, 2, 2, 2, 2]
    assert {launch.spec.device for launch in launches} == {DeviceKind.CPU}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load, "FOLDER", tmp_path)
    monkeypatch.setattr(load, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "repeat: 2",
            "own.yaml has the key 'repeat', which no experiment has; did you mean repeats",
        ),
        (
            "defaults: {ITER: 5}",
            "own.yaml sets ITER, which is no variable of a training target; did you mean ITERS",
        ),
        ("defaults: {ITERS: many}", "ITERS=many is not a whole number above 0"),
        ("device: tpu", "Invalid enum value 'tpu'"),
        ("on_models: {gpt2: {LR: 1}}", ""),
    ],
)
def test_invalid_content_of_an_experiment_file_is_named(
    folder: Path, text: str, message: str
) -> None:
    whole = "{report: r, model: gpt2-tiny, cells: [dp2], " + text + "}"
    (folder / "own.yaml").write_text(whole)
    if not message:  # The file is of another model, so it is not read.
        load_experiment("own", Options())
        return
    with pytest.raises(ValueError, match=message):
        load_experiment("own", Options())


def test_unknown_key_of_a_cell_is_refused_with_the_similar_key(folder: Path) -> None:
    (folder / "own.yaml").write_text(
        "{report: r, model: gpt2-tiny, cells: [{strategy: dp2, backnd: native}]}"
    )
    with pytest.raises(LaunchError, match=r"key 'backnd', .*; did you mean backend"):
        load_experiment("own", Options())


def test_unknown_table_is_refused_with_the_similar_table() -> None:
    with pytest.raises(LaunchError, match=r"no table 'zeroo' .*; did you mean zero\?"):
        find_output("zeroo")
    with pytest.raises(LaunchError, match="no table ''"):
        find_output("")


def test_an_unknown_strategy_of_a_cell_is_refused_by_name(folder: Path) -> None:
    (folder / "own.yaml").write_text("{report: r, model: gpt2-tiny, cells: [xp2]}")
    with pytest.raises(ValueError, match="Unknown strategy 'xp2'"):
        load_experiment("own", Options())


def test_unknown_experiment_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"no experiment 'dmo'; there are .*demo"):
        load_experiment("dmo", Options())


def test_cells_use_the_requested_model_and_the_available_devices(folder: Path) -> None:
    text = "{report: 'r-{model}', model: gpt2-tiny, batch: model_each_rank, cells: [dp2]}"
    (folder / "own.yaml").write_text(text)
    experiment = load_experiment("own", Options(), "gpt3-64m")
    job = experiment.cells[0].job
    assert (experiment.report, job.name) == ("r-gpt3-64m", "dp2-gpt3-64m-2cpu")
    assert job.options.global_batch_size == 8
    asked = Options(global_batch_size=4)
    assert load_experiment("own", asked, "gpt3-64m").options.global_batch_size == 4


def test_list_is_an_axis_for_fields_and_for_settings(folder: Path) -> None:
    entry = "{strategy: [dp2, tp2], backend: [megatron, native], settings: {SEED: [1, 2]}}"
    (folder / "own.yaml").write_text(f"{{report: r, model: gpt2-tiny, cells: [{entry}]}}")
    cells = load_experiment("own", Options()).cells
    jobs = [(c.job.strategy, c.job.options.backend, c.job.options.seed) for c in cells]
    assert jobs == list(product(("dp2", "tp2"), ("megatron", "native"), (1, 2)))


def test_the_readmes_example_is_an_experiment(folder: Path) -> None:
    text = (FOLDER / "README.md").read_text()
    (folder / "mine.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    experiment = load_experiment("mine", Options())
    assert [cell.job.strategy for cell in experiment.cells] == ["dp2", "tp2", "dp2"]
    assert experiment.options.iterations == 50


def test_an_experiment_runs_by_the_name_of_its_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sample_prefix: Path
) -> None:
    for name, value in {"DRY_RUN": "1", "DATA": str(sample_prefix), "ITERS": "7"}.items():
        monkeypatch.setenv(name, value)
    assert run_target("experiment", ["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("--exit-interval 7 " in line for line in lines)
    assert run_target("experiment", ["dmo"]) == 2

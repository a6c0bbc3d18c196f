import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parakit.config.files import ROOT
from parakit.config.model import load_model
from parakit.planner.advice import request_sentence
from parakit.planner.request import build_request
from tests.given import asked_of_plan
from tests.planner.printed import print_plan
from tests.program import run_plan as main

CONTRACT = ["--model", "gpt2-large", "--gpus", "2", "--gpu", "h200", "--global-batch", "64"]


def test_json_holds_the_ranking_with_every_component() -> None:
    plan = json.loads(print_plan(" ".join([*CONTRACT, "--json"])))
    assert plan["winner"]["strategy"] == "dp2"
    assert len(plan["ranked"]) == 10
    for entry in plan["ranked"]:
        assert sum(entry["memory"].values()) == entry["memory_bytes"]
        assert sum(entry["time"].values()) == pytest.approx(entry["iteration_seconds"])
        assert entry["command"].startswith("make train-")
    assert [entry["strategy"] for entry in plan["named"]] == ["dp2", "cp2", "sp2", "tp2", "pp2"]
    assert plan["assumptions"]


def test_json_has_the_answers_of_the_first_screen() -> None:
    advice = json.loads(print_plan(" ".join([*CONTRACT, "--json"])))["advice"]
    printed = " ".join(print_plan(" ".join(CONTRACT)).split())
    assert advice[0].startswith("Use DP 2; ")
    for answer in advice:
        assert " ".join(answer.removeprefix("Use ").split()) in printed


def test_tokens_add_days_and_efficiency(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONTRACT, "--tokens", "9e9", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["training_days"] == pytest.approx(9e9 / 144_609 / 86400, rel=0.05)
    assert plan["scaling"]["devices"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt2-larg --gpus 2", "did you mean gpt2-large"),
        ("--model gpt2-large --gpus 2 --gpu h201", "did you mean h20"),
        ("--model gpt2-large --gpus 2 --intra nvlnk4", "did you mean nvlink4"),
        ("--model gpt2-large --gpus 0", "--gpus is 0; use 1 or more."),
        ("--model gpt2-large --gbs 64", "did you mean --global-batch?"),
        ("--model gpt2-large --dtype fp8", 'use --extra "--fp8-format hybrid"'),
        ("--model gpt2-large --gpus 12 --nodes 2 --gpus-per-node 8", "have 16 GPUs, not 12"),
        ("--model gpt2-large --gpus 2 --dtype fp64", "no dtype 'fp64'; use fp16, bf16, fp32"),
        (
            "--model gpt2-large --gpus 2 --global-batch -3",
            "--global-batch: -3 is not a whole number",
        ),
        (
            "--model gpt2-large --gpus two",
            "Argument --gpus: two is not a whole number or several with commas; write 2; see --help.",
        ),
        ("--model gpt2-large --gpus 2 --seq 0", "sequence length is 0"),
        ("--model gpt2-large --gpus 1000000000", "1,000,000,000 GPUs are more than any cluster"),
        ("--model gpt2-large --gpus 2 --global-batch 0", "0 is not a whole number above 0"),
        ("--model gpt2-large --gpus 2 --tokens -5", "-5 is not a number above 0"),
        ("--model gpt2-large --gpus 2 --tokens nan", "nan is not a number above 0"),
        ("--model gpt2-large --gpus 2 --verify -1", "-1 is not a whole number from 0 to 10"),
        (
            "--model gpt2-large --gpus 2 --svg /no/dir/x.svg",
            "the folder /no/dir does not exist; make it",
        ),
        ("--model gpt2-large --gpus 2 --svg /", "/ is a folder; name a file in it; see"),
        ("dryrun --model gpt2-large --tensor 0", "0 is not a whole number above 0"),
        ("schedules --pipeline 1000000", "use at most 100,000"),
        ("schedules --pipeline 0", "0 is not a whole number above 0"),
        ("schedules --svg /no/dir/x.svg", "the folder /no/dir does not exist; make it"),
        (
            "--model gpt2-large --gpus 2 --imbalance 1.3",
            "--imbalance 1.3 is of experts and the model is dense",
        ),
        ("--model moe-tiny --gpus 2 --imbalance 0.9", "0.9 is not a number from 1 up"),
        ("--model moe-tiny --gpus 2 --imbalance nan", "nan is not a number from 1 up"),
        ("--model mixtral-8x7b --gpus 8 --imbalance 5", "of 8 experts per token; use 1 to 4."),
        ("--model mixtral-8x7b --strategy ep2dp4 --imbalance 3", "a rank of EP 2 can receive"),
        ("--model gpt2-large --gpus 16 --oversubscription 0", "0 is not a number from 1 up"),
        ("--model gpt2-large --gpus 16 --oversubscription -2", "-2 is not a number from 1 up"),
        ("--model gpt2-large --gpus 16 --oversubscription inf", "inf is not a number from 1 up"),
        ("--model gpt2-large --gpus 2 --calibration nowhere.json", "nowhere.json cannot be read"),
    ],
)
def test_impossible_request_gives_a_single_sentence(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_model_that_does_not_fit_states_the_number_of_devices_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = "--model gpt3-13b --gpus 2 --gpu rtx4090 --global-batch 2"
    assert main(arguments.split()) == 1
    error = capsys.readouterr().err
    assert "does not fit on 2" in error
    assert "misses by" in error
    assert "It fits on" in error


def test_indivisible_batch_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt2-large", "--gpus", "7", "--global-batch", "6"]) == 1
    assert "multiple of the number of devices" in capsys.readouterr().err


def test_calibrated_constants_change_the_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps({"matmul": 0.29}))
    times = []
    for extra in ([], ["--calibration", str(file)]):
        assert main([*CONTRACT, "--json", *extra]) == 0
        times.append(json.loads(capsys.readouterr().out)["winner"]["time"]["matmul"])
    assert times[1] > 1.5 * times[0]
    file.write_text(json.dumps({"speed": 1}))
    assert main([*CONTRACT, "--calibration", str(file)]) == 2
    assert " may hold all_gather_share, all_to_all_share, attention, " in capsys.readouterr().err


def test_a_longer_sequence_is_planned_with_more_positions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CONTRACT, "--seq", "4096", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["seq_length"] == 4096
    assert "--seq-length 4096 --max-position-embeddings 4096" in plan["winner"]["command"]


def test_the_picture_is_an_svg_with_both_panels(tmp_path: Path) -> None:
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert main([*CONTRACT, "--json", "--svg", str(picture)]) == 0
    text = pictures[0].read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "Winner: dp2" in text
    assert "device memory" in text
    assert text == pictures[1].read_text()


def test_schedules_are_compared_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "schedules.svg"
    arguments = f"schedules --pipeline 4 --microbatches 8 --json --svg {picture}"
    assert main(arguments.split()) == 0
    schedules = json.loads(capsys.readouterr().out)
    bubbles = [entry["bubble"] for entry in schedules]
    assert bubbles == pytest.approx([0.375, 0.375, 0.1875, 0.1875, 0.1875])
    assert "up to 4 weight versions" in picture.read_text()
    assert main(["schedules", "--pipeline", "4", "--microbatches", "6"]) == 2
    assert "use 8" in capsys.readouterr().err
    assert main(["schedules", "--pipeline", "2", "--microbatches", "4"]) == 0
    assert "interleaved 1F1B" in capsys.readouterr().out


def test_planner_imports_neither_torch_nor_matplotlib_without_a_picture() -> None:
    program = (
        "import sys; from tests.program import run_plan as main; "
        f"main({CONTRACT!r} + ['--json']); "
        "loaded = {'torch', 'matplotlib', 'numpy'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, stdout=subprocess.DEVNULL)


def test_batch_in_a_model_file_is_used_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args_file = tmp_path / "own.args"
    args_file.write_text((ROOT / "examples/gpt3/models/gpt2-large.args").read_text() + "\n")
    arguments = ["--model", str(args_file), "--gpus", "2", "--gpu", "h200"]
    stated = load_model("gpt2-large").batch.global_batch_size
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"a global batch of {stated:,} sequences" in " ".join(out.split())
    assert "--global-batch" not in out.partition("Run it\n")[2].splitlines()[0]


def describe_request(arguments: str) -> str:
    """Return the sentence on the job, with which the first screen begins."""
    return request_sentence(build_request(asked_of_plan(arguments.split())))


def test_batch_in_a_file_of_the_kit_is_rounded_up_to_the_devices() -> None:
    sentence = describe_request("--model gpt2-tiny --gpus 8 --gpu h200")
    assert "a global batch of 8 sequences of 64 tokens" in sentence
    assert "(the batch of the model's file, rounded up to a multiple of the devices)" in sentence


def test_an_assumed_global_batch_is_named_and_a_stated_one_is_not() -> None:
    assumption = "(the batch of the model's file)"
    assert assumption in describe_request("--model gpt2-large --gpus 2")
    assert assumption not in describe_request("--model gpt2-large --gpus 2 --global-batch 128")


def test_a_small_model_has_millions_of_parameters() -> None:
    assert "gpt2-tiny has 3.4 million parameters" in describe_request("--model gpt2-tiny --gpus 1")


def test_network_ports_per_node_are_printed_and_shared_by_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--model",
        "gpt3-1.3b",
        "--gpus",
        "16",
        "--gpu",
        "a100",
        "--inter",
        "100gbe",
        "--strategy",
        "dp16",
        "--json",
    ]
    seconds = []
    for ports in ([], ["--nics", "8"], ["--nics", "1"]):
        assert main([*arguments, *ports]) == 0
        layout = json.loads(capsys.readouterr().out)["layout"]
        seconds.append(layout["time"]["gradient_sync"])
    assert seconds[0] == seconds[1]
    assert seconds[2] == pytest.approx(8 * seconds[0], rel=0.05)
    assert "one port per GPU, the default" in describe_request(" ".join(arguments[:-3]))

"""The public Python API: modules loaded by its import, results of its functions, and display of values."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import parakit
from parakit.api import name_arguments
from parakit.artifacts.verdict import VerifyOutcome
from parakit.config.files import ROOT
from parakit.formatting.presented import SHORT_LINES, Presented, PresentedTable
from parakit.planner.result import NothingFitsError
from tests.program import printed_json

DATA = ROOT / "examples/notebooks/data"
LOG = ROOT / "tests/reporting/logs/megatron-0.19.0.log"


def run_python(code: str, *options: str) -> str:
    """Return the output of a separate Python process."""
    command = (sys.executable, *options, "-c", code)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_importing_the_package_loads_only_its_own_lazy_names() -> None:
    modules = "sorted(name for name in sys.modules if name.partition('.')[0] not in sys.stdlib_module_names)"
    code = f"import sys; sys.path.insert(0, 'src'); import parakit; print(*{modules})"
    assert run_python(code, "-I", "-S").split() == ["__main__", "parakit", "parakit.lazy"]


def test_every_public_name_is_a_function_after_every_submodule_is_imported() -> None:
    """A submodule or package with the name of a public function would replace the function."""
    answers = json.loads(run_python(CALL_EVERYTHING))
    assert sorted(answers) == sorted(parakit.__all__)
    assert answers == {
        "capture": "generator",
        "compare_captures": "not comparable",
        "estimate": "tp2",
        "inspect_checkpoint": 1080,
        "plan": "dp2",
        "read_logs": 12,
        "record_tokens": ["tokens.npz"],
        "report": ["tp2"],
        "why_hang": [2],
    }


CALL_EVERYTHING = f"""
import importlib, json, os, pkgutil, tempfile
import parakit
for module in pkgutil.walk_packages(parakit.__path__, "parakit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import torch
scratch = tempfile.TemporaryDirectory()
parakit.record_tokens(scratch.name + "/tokens.npz", [[1]], [[2]], [[-1.0]])
layer = torch.nn.Linear(2, 2)
data = {str(DATA)!r}
print(json.dumps({{
    "capture": type(parakit.capture(layer, torch.optim.SGD(layer.parameters()), "nowhere")).__name__,
    "compare_captures": parakit.compare_captures("nowhere", "nowhere").verdict,
    "estimate": parakit.estimate("gpt2-large", "tp2").candidate.strategy,
    "inspect_checkpoint": parakit.inspect_checkpoint(data + "/gpt2-one-layer").contents.parameters,
    "plan": parakit.plan("gpt2-large", gpus=2).winner.strategy.partition("-")[0],
    "read_logs": len(parakit.read_logs({str(LOG)!r})[0].iterations),
    "record_tokens": os.listdir(scratch.name),
    "report": [row["strategy"] for row in parakit.report([data + "/tp2.log"]).to_rows()],
    "why_hang": parakit.why_hang(data + "/stacks").culprits,
}}))
"""


@pytest.mark.parametrize(
    ("value", "command"),
    [
        (
            lambda: parakit.plan("gpt2-large", gpus=2, gpu="h200", tokens=1e9, recipe="tuned"),
            (
                "plan",
                "--model",
                "gpt2-large",
                "--gpus",
                "2",
                "--tokens",
                "1e9",
                "--recipe",
                "tuned",
            ),
        ),
        (
            lambda: parakit.estimate("gpt2-large", "tp2", gpu="h100", micro_batch=2),
            *[
                [
                    "plan",
                    "--model",
                    "gpt2-large",
                    "--strategy",
                    "tp2",
                    "--gpu",
                    "h100",
                    "--micro-batch",
                    "2",
                ]
            ],
        ),
        (lambda: parakit.why_hang(DATA / "stacks"), ("why-hang", "--dumps", str(DATA / "stacks"))),
        (
            lambda: parakit.inspect_checkpoint(DATA / "gpt2-one-layer", strategy="tp2"),
            ("inspect", "--ckpt", str(DATA / "gpt2-one-layer"), "--strategy", "tp2"),
        ),
    ],
    ids=["plan", "estimate", "why_hang", "inspect_checkpoint"],
)
def test_value_as_data_equals_the_json_of_the_command(
    value: Any, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    made = value()
    assert json.loads(json.dumps(made.to_dict())) == printed_json(command, capsys)
    assert isinstance(made, Presented)
    assert len(repr(made).splitlines()) <= SHORT_LINES + 1
    assert made._repr_html_().startswith("<pre")


def test_logs_as_data_equal_the_json_of_scrape(capsys: pytest.CaptureFixture[str]) -> None:
    logs = parakit.read_logs([LOG])
    data = json.loads(json.dumps([log.to_dict() for log in logs]))
    assert data == printed_json(("report", "scrape", str(LOG)), capsys)
    assert repr(logs[0]) == f"{LOG}: ok, 12 iterations"


def test_a_report_as_data_is_its_results_json(tmp_path: Path) -> None:
    report = parakit.report([DATA / "baseline.log", DATA / "tp2.log"])
    assert [row["strategy"] for row in report.to_dict()["rows"]] == ["baseline", "tp2"]
    assert "None of them" not in repr(report)
    assert list(tmp_path.iterdir()) == []
    report.write(tmp_path / "one")
    assert json.loads((tmp_path / "one/results.json").read_text()) == report.to_dict()


def test_a_plan_has_its_winner_and_a_row_per_strategy() -> None:
    plan = parakit.plan("llama3-8b", gpus=4, gpu="h100", global_batch=4)
    assert (plan.winner.strategy, len(plan.ranked)) == ("tp2cp2-zero1", 10)
    row = plan.to_rows()[0]
    assert row["strategy"] == "tp2cp2-zero1"
    assert row["iteration_seconds"] == plan.winner.seconds.total
    assert row["memory.weights"] == plan.winner.memory.weights
    assert row["parallelism.tensor"] == 2
    assert "tp2cp2-zero1" in str(plan)


def test_plan_that_does_not_fit_names_the_number_of_devices_that_does() -> None:
    with pytest.raises(NothingFitsError, match=r"does not fit on 2 H200 .* It fits on 32\.$"):
        parakit.plan("gpt3-175b", gpus=2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: parakit.plan("gpt2-large", gpus=3, nodes=2),
            "leave one of gpus=, nodes= and gpus_per_node= out.",
        ),
        (
            lambda: parakit.plan("gpt2-large", gpus="eight"),  # type: ignore[arg-type]
            'gpus="eight" is not a whole number',
        ),
        (lambda: parakit.plan("gpt2-large", recipe="best"), 'recipe="best" is not defaults'),
        (lambda: parakit.plan("gpt2-large", extra=["--fp16", "--bf16"]), "extra has --fp16"),
        (lambda: parakit.plan("gpt2-huge"), "There is no model 'gpt2-huge'; did you mean"),
        (lambda: parakit.estimate("gpt2-large", "tp2", gpus=3), "not 3; leave gpus= out"),
        (lambda: parakit.estimate("gpt2-large", "tp2", imbalance=2), "imbalance=2 is of experts"),
        (lambda: parakit.why_hang("nowhere"), 'paths="nowhere" does not exist'),
        (lambda: parakit.read_logs("nowhere.log"), "nowhere.log cannot be read"),
        (lambda: parakit.report([LOG], device="h1000"), 'device="h1000": There is no GPU'),
        (lambda: parakit.report([LOG], baseline="nowhere"), "nowhere holds no results.json"),
        (lambda: parakit.inspect_checkpoint("nowhere"), "nowhere is no folder"),
    ],
)
def test_refusal_is_a_value_error_that_names_python_arguments(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^.+\S[.?]$|did you mean") as refusal:
        call()
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("STRATEGY=tp8pp16dp8.", 'strategy="tp8pp16dp8".'),
        ("IMBALANCE=1.5 is of experts", "imbalance=1.5 is of experts"),
        ("'make report LOGS=' reads it", "'make report LOGS=' reads it"),
        ("NCCL_DEBUG=INFO shows it", "NCCL_DEBUG=INFO shows it"),
        ("EXTRA cannot be split", "extra cannot be split"),
    ],
)
def test_make_variables_in_errors_are_named_as_arguments(text: str, renamed: str) -> None:
    assert name_arguments(text) == renamed


def test_missing_captures_are_not_comparable() -> None:
    verdict = parakit.compare_captures("nowhere", "elsewhere")
    assert verdict.verdict is VerifyOutcome.NOT_COMPARABLE
    assert verdict.to_dict()["verdict"] == "not comparable"
    assert repr(verdict).startswith("not comparable: ")


class Page(PresentedTable):
    """Value whose text contains markup of rich and HTML, and more lines than `repr` shows."""

    def show(self, console: Any) -> None:
        console.print("\n".join(["[bold]<b>&"] + ["line"] * 50), markup=False)

    def to_rows(self) -> list[dict[str, Any]]:
        return [{"name": "a", "seconds": 1.5}, {"name": "b", "bytes": 2}]


def test_text_is_escaped_in_html_and_repr_is_short() -> None:
    assert "[bold]&lt;b&gt;&amp;" in Page()._repr_html_()
    assert str(Page()).splitlines()[0] == "[bold]<b>&"
    assert len(str(Page()).splitlines()) == 51
    assert repr(Page()).splitlines()[-1] == "… and 11 more lines, which print() shows."


def test_a_notebook_shows_a_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(Page()).splitlines()[:2] == ["[bold]<b>&", "line"]
    assert "line" in Page()._repr_html_()


def test_rows_become_a_data_frame_with_missing_values_for_unknown_ones() -> None:
    pytest.importorskip("pandas")
    frame = Page().to_pandas()
    assert list(frame.columns) == ["name", "seconds", "bytes"]
    assert frame["bytes"].isna().tolist() == [True, False]
    if importlib.util.find_spec("polars"):
        assert Page().to_polars()["bytes"].to_list() == [None, 2]


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"{package} is not installed: pip install"):
        getattr(Page(), f"to_{package}")()

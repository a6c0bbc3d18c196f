from pathlib import Path

import pytest

from parakit.cluster.checks.result import PASS, WARN, CheckResult
from parakit.cluster.doctor.nodes import (
    Outlier,
    describe_all_reduce,
    find_outliers,
    parse_answers,
    srun_command,
)


def driver(version: str) -> CheckResult:
    return CheckResult(PASS, "Driver", version)


def rate(value: float) -> CheckResult:
    return CheckResult(PASS, "All-reduce", f"{value} GB/s", "", value)


def test_identical_nodes_have_no_outlier() -> None:
    answers = {node: [driver("580.82"), rate(100 + number)] for number, node in enumerate("abc")}
    assert find_outliers(answers) == []


def test_node_with_another_driver_is_named_with_the_driver_of_the_others() -> None:
    answers = {"a": [driver("580.82")], "b": [driver("570.10")], "c": [driver("580.82")]}
    assert find_outliers(answers) == [Outlier("b", "Driver", "570.10", "580.82")]


def test_rates_are_compared_with_the_median_within_a_tolerance() -> None:
    answers = {"a": [rate(100)], "b": [rate(95)], "c": [rate(60)]}
    assert find_outliers(answers) == [Outlier("c", "All-reduce", "60 GB/s", "100 GB/s")]


def test_both_of_two_differing_nodes_are_named() -> None:
    answers = {"a": [driver("580.82")], "b": [driver("570.10")]}
    assert find_outliers(answers) == [
        Outlier("a", "Driver", "580.82", "b: 570.10"),
        Outlier("b", "Driver", "570.10", "a: 580.82"),
    ]


def test_a_node_that_lacks_a_row_is_an_outlier() -> None:
    gpus = CheckResult(PASS, "GPUs", "8 H200")
    answers = {"a": [gpus], "b": [], "c": [gpus]}
    assert find_outliers(answers) == [Outlier("b", "GPUs", "no such row", "8 H200")]


def test_other_output_of_a_nodes_shell_is_ignored() -> None:
    text = 'Welcome!\n{"host": "b", "results": [["warn", "Hub", "out of reach", "", null]]}\n{}\n'
    assert parse_answers(text) == [("b", [CheckResult(WARN, "Hub", "out of reach")])]


def test_slowest_pair_is_named_if_it_is_an_outlier() -> None:
    told = {
        "backend": "NCCL",
        "ranks": 3,
        "bytes_per_second": 10e9,
        "link": "network card ib0",
        "link_bytes_per_second": 50e9,
        "nodes": ["a", "b", "c"],
        "pairs": [40e9, 10e9, 41e9],
    }
    text = describe_all_reduce(told)
    assert "20% of network card ib0" in text
    assert "The slowest pair is b and c: 10.00 GB/s" in text
    assert "slowest" not in describe_all_reduce({**told, "pairs": [40e9, 39e9, 41e9]})


def test_nodes_of_the_current_allocation_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: program)
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    assert srun_command(inside) == ("srun", "--overlap", "--nodes", "3", "--ntasks-per-node=1")
    asked = {"LAUNCHER": "slurm", "NODES": "2", "SLURM_PARTITION": "gpu"}
    assert srun_command(asked)[1:] == ("--nodes", "2", "--ntasks-per-node=1", "--partition=gpu")


def test_site_line_with_several_options_is_split_for_srun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: program)
    site = tmp_path / "site.slurm"
    site.write_text("#SBATCH -p gpu --comment='a b'\n")
    asked = {"LAUNCHER": "slurm", "NODES": "2", "SLURM_SITE": str(site)}
    assert srun_command(asked)[-3:] == ("-p", "gpu", "--comment=a b")

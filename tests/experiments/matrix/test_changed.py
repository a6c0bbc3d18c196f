"""Two versions of Megatron are compared by cells: what each run shows by itself, and which cells are compared."""

from __future__ import annotations

import io
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version
from rich.console import Console

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.measurements import (
    CallSummary,
    CommunicationRecord,
    MemoryCategory,
    RankCommunication,
    RankMemory,
)
from parakit.artifacts.run import MegatronEntry
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config.errors import LaunchError
from parakit.costs import Operation, Phase
from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.cell_change import (
    Aspect,
    CallKind,
    CallTotal,
    CellChange,
    CellComparer,
    ChangeStatus,
    CountedRun,
    VersionRunner,
    add_up_calls,
    compare_calls,
    compare_counted_runs,
    compare_losses,
    compare_memory,
    compare_parameters,
    describe_printed_difference,
    is_same_fault,
)
from parakit.experiments.matrix.changed import (
    ComparedVersion,
    VersionComparison,
    list_compared_cells,
    list_findings_in_one,
    open_version,
    write_changes_page,
)
from parakit.experiments.matrix.definition import Exclusion, load_matrix
from parakit.experiments.verify.pairs import Verification
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch import SMALL_SAMPLE, Options, make_sample
from parakit.launch.code import find_entry
from tests.experiments.matrix.factory import TP, factor, family, matrix

MODEL = family(factor("heads", "mha", "gqa"), factor("norm", "layer", "rms"))
CELL = MatrixCell(MODEL, TP)
FORWARD = CallKind("all_reduce", group="tp", phase="forward", dtype="fp32")
OLD = ComparedVersion("0.18.2", MegatronEntry("a/pretrain_gpt.py", "0.18.2", "abc"), Path("a"))
NEW = ComparedVersion("0.19.2", MegatronEntry("b/pretrain_gpt.py", "0.19.2", None), None)


def memory(rank: int, activations: int, temporary: int) -> RankMemory:
    categories = {MemoryCategory.ACTIVATIONS: activations, MemoryCategory.TEMPORARY: temporary}
    peak = sum(categories.values())
    return RankMemory(rank, 2, peak, Phase.BACKWARD, "", categories, {}, {})


def call(calls: int, payload_bytes: int) -> CallSummary:
    return CallSummary(
        "tp", 2, Operation.ALL_REDUCE, Phase.FORWARD, "fp32", calls, payload_bytes, 0, "ring", 0, 0
    )


def test_another_printed_value_is_told_without_calling_it_wrong() -> None:
    logged = (
        "the log prints z_loss 4.3565E+00 at iteration 1, the reference's log 4.3557E+00; every captured "
        "tensor agrees, so the loss function reports a wrong value"
    )
    assert describe_printed_difference(logged) == (
        "the log prints z_loss 4.3565E+00 at iteration 1, the older version's log 4.3557E+00"
    )


def test_a_fault_of_both_versions_is_the_same_only_with_the_same_tensor_and_kind() -> None:
    fault = VerifyVerdict(
        VerifyOutcome.DIFFERS, stage=CaptureStage.WEIGHTS, module="a.weight", kind="as initialised"
    )
    assert is_same_fault(fault, replace(fault, iteration=3))
    assert not is_same_fault(fault, replace(fault, kind="other"))
    assert not is_same_fault(fault, VerifyVerdict(VerifyOutcome.HELD))


def test_equal_runs_give_no_sentence() -> None:
    run = CountedRun(
        parameters={"rank (tp 0, pp 0)": 10},
        losses=(2.5,),
        calls={FORWARD: CallTotal(2, 1024)},
        memory=(memory(0, 4096, 0),),
    )
    assert compare_counted_runs(run, run) == {}


def test_another_number_of_parameters_names_the_rank() -> None:
    old = {"rank (tp 0, pp 0)": 1000, "rank (tp 1, pp 0)": 1000}
    new = {"rank (tp 0, pp 0)": 1000, "rank (tp 1, pp 0)": 1008}
    assert compare_parameters(old, new) == "1,008 on rank (tp 1, pp 0) instead of 1,000"


def test_another_loss_names_the_first_iteration() -> None:
    assert compare_losses((9.5, 9.25, 9.0), (9.5, 9.2, 8.0)) == "9.2 instead of 9.25 in iteration 2"
    assert compare_losses((9.5,), ()) == "0 iterations printed instead of 1"


def test_calls_of_all_ranks_are_added_up() -> None:
    ranks = tuple(RankCommunication(rank, 2, 1, (call(3, 8), call(1, 16))) for rank in (0, 1))
    assert add_up_calls(CommunicationRecord(ranks)) == {FORWARD: CallTotal(8, 80)}


def test_calls_that_differ_most_come_first_and_further_kinds_are_counted() -> None:
    kinds = [FORWARD._replace(group=group) for group in ("dp", "tp", "cp", "ep")]
    old = {kind: CallTotal(1, 1024) for kind in kinds}
    new = {kind: CallTotal(1, 1024 * (index + 2)) for index, kind in enumerate(kinds)}
    sentence = compare_calls(old, new)
    assert sentence.startswith(
        "all_reduce (fp32) over ep in forward: 1 call of 5 KiB instead of 1 call of 1 KiB, "
    )
    assert sentence.endswith("and 1 further kind of calls")


def test_calls_that_only_one_version_makes_are_told() -> None:
    added = compare_calls({}, {FORWARD: CallTotal(4, 2048)})
    assert added == "all_reduce (fp32) over tp in forward: 4 calls of 2 KiB instead of none"
    removed = compare_calls({FORWARD: CallTotal(4, 2048)}, {})
    assert removed == "all_reduce (fp32) over tp in forward: none instead of 4 calls of 2 KiB"


def test_memory_names_the_rank_with_the_largest_change_and_its_categories() -> None:
    old = (memory(0, 8192, 0), memory(1, 8192, 256))
    new = (memory(0, 9216, 0), memory(1, 10240, 0))
    assert (
        compare_memory(old, new)
        == "peak of rank 1 10 KiB instead of 8.25 KiB (activations +2 KiB, temporary −256 bytes)"
    )


def test_a_scalar_more_is_no_change_of_memory() -> None:
    assert compare_memory((memory(0, 1 << 20, 0),), (memory(0, 1 << 20, 8),)) == ""


def test_each_level_is_compared_once_in_the_first_layout_that_can_have_it() -> None:
    model = family(factor("heads", "mha", "gqa"), factor("norm", "layer", "rms"))
    forbidden = Exclusion(("heads/gqa",), layout="tp2")
    cells = list_compared_cells(matrix(model, forbidden), [Version("0.18.2")])
    levels = {(cell.layout.name, level.path) for cell in cells for level in cell.levels}
    assert levels == {("dp2", "heads/gqa"), ("tp2", "norm/rms")}
    assert {cell.layout.name for cell in cells if not cell.levels} == {"tp2", "dp2"}


def test_cells_that_resume_are_not_compared() -> None:
    cells = list_compared_cells(load_matrix(), [Version("0.19.0")])
    assert {cell.family.name for cell in cells} == {"dense", "moe", "mla"}


def test_levels_that_one_version_lacks_are_left_out() -> None:
    model = family(factor("heads", "mha", "gqa", since=Version("0.19.0")))
    both = [Version("0.18.2"), Version("0.19.2")]
    assert all(not cell.levels for cell in list_compared_cells(matrix(model), both))
    newer = [Version("0.19.0"), Version("0.19.2")]
    assert any(cell.levels for cell in list_compared_cells(matrix(model), newer))


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(LaunchError, match="STRATEGIES=tp9 is none of the matrix's"):
        list_compared_cells(load_matrix(), [Version("0.19.2")], layouts=("tp9",))


class FakeComparer(CellComparer):
    """Comparer that trains nothing and reports the same change for every cell."""

    def __init__(self) -> None:
        pass

    def compare_cell(self, cell: MatrixCell, findings: tuple[str, ...] = ()) -> CellChange:
        levels = tuple(level.path for level in cell.levels)
        sentences = {Aspect.LOSSES: "1 instead of 2 in iteration 1"} if levels else {}
        status = ChangeStatus.CHANGED if sentences else ChangeStatus.SAME
        return CellChange(
            cell.id, "dense", cell.layout.name, levels, status, sentences, findings=findings
        )


def test_compared_cells_are_stored_and_not_compared_again(tmp_path: Path) -> None:
    output = io.StringIO()
    comparison = VersionComparison(
        OLD, NEW, FakeComparer(), tmp_path, Console(file=output, width=200)
    )
    cells = list_compared_cells(matrix(MODEL), [Version("0.18.2")])
    changes = comparison.compare_cells(cells)
    assert len(output.getvalue().splitlines()) == len(cells) == 4
    assert comparison.compare_cells(cells) == changes
    assert len(output.getvalue().splitlines()) == 4
    assert (
        "tp2 dense, heads/gqa: changed; losses: 1 instead of 2 in iteration 1" in output.getvalue()
    )


def test_no_cell_is_begun_after_the_deadline(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    comparison = VersionComparison(OLD, NEW, FakeComparer(), tmp_path, console)
    assert comparison.compare_cells([CELL], deadline=0.0) == []


def test_page_has_a_row_per_change_and_says_what_is_missing(tmp_path: Path) -> None:
    sentences = {Aspect.LOSSES: "1 instead of 2 in iteration 1", Aspect.TENSORS: "first wrong | x"}
    changes = [
        CellChange("a", "dense", "tp2", ("norm/rms",), ChangeStatus.CHANGED, sentences),
        CellChange("b", "dense", "dp2", (), ChangeStatus.SAME, worst_ratio=0.0),
        CellChange("c", "moe", "ep2", (), ChangeStatus.RUNS_IN_NEITHER, reason="no CUDA"),
        CellChange(
            "d", "dense", "cp2", (), ChangeStatus.CHANGED, {Aspect.LOSSES: sentences[Aspect.LOSSES]}
        ),
    ]
    text = write_changes_page(tmp_path, OLD, NEW, changes, 6).read_text()
    assert "2 of 4 compared cells" in text
    assert "1 same, 2 changed, 1 in neither version" in text
    assert "2 further cells are not compared yet" in text
    assert "| losses | 1 instead of 2 in iteration 1 | tp2 dense, norm/rms; cp2 dense |" in text
    assert "| tensors | first wrong \\| x | tp2 dense, norm/rms |" in text
    assert "| ep2 moe | no CUDA |" in text


def test_installed_release_needs_no_clone(tmp_path: Path) -> None:
    installed = find_entry(None).megatron_version
    with open_version("B", installed, None, tmp_path) as version:
        assert version.checkout is None
        assert version.name == installed


def test_other_release_without_a_clone_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(LaunchError, match=r"A=0\.1\.0 is not the installed Megatron, which is"),
        open_version("A", "0.1.0", None, tmp_path),
    ):
        pass


def test_release_that_the_clone_lacks_is_refused(tmp_path: Path) -> None:
    subprocess.run(("git", "init", "--quiet", str(tmp_path / "clone")), check=True)
    with (
        pytest.raises(LaunchError, match=r"has no commit 'core_v0\.1\.0'"),
        open_version("A", "0.1.0", tmp_path / "clone", tmp_path),
    ):
        pass


def test_known_finding_of_one_version_alone_is_named() -> None:
    dense = next(family for family in load_matrix().families if family.name == "dense")
    cells = list_compared_cells(load_matrix(), [Version("0.19.0")], features=("dense",))
    assert all(cell.family.name == dense.name for cell in cells)
    sentences = {
        sentence for cell in cells for sentence in list_findings_in_one("0.19.0", "nobody", cell)
    }
    assert all("is a known finding in 0.19.0 alone" in sentence for sentence in sentences)


class OtherEpsilonRunner(VersionRunner):
    """Stands for a version of Megatron whose norms use another epsilon."""

    def compose(self, cell: MatrixCell, folder: Path) -> Verification:
        return super().compose(replace(cell, more=("--norm-epsilon", "1e-3")), folder)


@pytest.mark.ranks
def test_a_real_cell_is_the_same_in_one_version_and_changes_with_another_epsilon(
    tmp_path: Path,
) -> None:
    dense = next(family for family in load_matrix().families if family.name == "dense")
    cell = MatrixCell(dense, next(layout for layout in dense.layouts if layout.name == "tp2"))
    make_sample(SMALL_SAMPLE, Console(quiet=True))
    options = Options()
    with closing(ForkedRanks(options)) as ranks:
        runner = VersionRunner(ranks, options)
        same = CellComparer(runner, runner, tmp_path).compare_cell(cell)
        other = OtherEpsilonRunner(ranks, options)
        changed = CellComparer(runner, other, tmp_path).compare_cell(cell)
    assert (same.status, same.sentences, same.worst_ratio) == (ChangeStatus.SAME, {}, 0.0)
    assert set(changed.sentences) == {Aspect.LOSSES, Aspect.TENSORS}
    assert "layernorm" in changed.sentences[Aspect.TENSORS]

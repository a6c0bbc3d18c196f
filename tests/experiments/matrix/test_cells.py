"""Choice of cells: every pair of levels is covered, and separate levels are never combined."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.experiments.matrix.cell import (
    MatrixCell,
    affects_cell,
    apply_known_patches,
    find_uncured,
)
from parakit.experiments.matrix.cells import choose_cells, choose_rows, draw_cells
from parakit.experiments.matrix.commands import select_families
from parakit.experiments.matrix.definition import Exclusion, Family, Layout, Level, load_matrix
from parakit.launch.job import parse_target
from parakit.verify.findings import Finding, list_findings
from tests.experiments.matrix.factory import DP, TP, factor, family, matrix

RELEASE = Version("0.19.0")
KNOWN = tuple(finding for finding in list_findings() if finding.id == "sink-missing-in-norm")


@cache
def drawn() -> dict[str, tuple[Family, list[MatrixCell]]]:
    whole = load_matrix()
    families = select_families(whole, RELEASE)
    return {
        model_family.name: (model_family, choose_cells(whole, model_family, KNOWN))
        for model_family in families
    }


def has(cell: MatrixCell, level: Level, is_first: bool) -> bool:
    same = [other for other in cell.levels if other.factor == level.factor]
    return not same if is_first else same == [level]


@pytest.mark.parametrize("name", [model_family.name for model_family in load_matrix().families])
def test_every_level_is_combined_with_every_strategy(name: str) -> None:
    model_family, cells = drawn()[name]
    for layout in model_family.layouts:
        layout_cells = [cell for cell in cells if cell.layout == layout]
        for levels in model_family.factors.values():
            for level in levels:
                is_first = level == levels[0]
                assert any(has(cell, level, is_first) for cell in layout_cells), (
                    layout.name,
                    level.path,
                )


@pytest.mark.parametrize("name", [model_family.name for model_family in load_matrix().families])
def test_every_compatible_pair_of_levels_is_in_a_row(name: str) -> None:
    model_family, _ = drawn()[name]
    whole = load_matrix()
    covered = {pair for row in choose_rows(whole, model_family) for pair in combinations(row, 2)}
    firsts = tuple(levels[0] for levels in model_family.factors.values())
    for levels, other_levels in combinations(model_family.factors.values(), 2):
        for pair in ((level, other) for level in levels for other in other_levels):
            if pair[0].alone or pair[1].alone:
                continue
            needed = model_family.add_needed_levels(
                [level for level in pair if level not in firsts]
            )
            picked = {level.factor: level for level in (*firsts, *needed)}
            row = tuple(picked.values())
            if set(pair) <= set(row) and whole.is_legal(model_family, row):
                assert pair in covered, [level.path for level in pair]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 9))
def test_cells_of_random_features_cover_levels_and_strategies(sizes: list[int], seed: int) -> None:
    factors = [
        factor(f"f{index}", *(f"l{number}" for number in range(size)))
        for index, size in enumerate(sizes)
    ]
    model_family = family(*factors)
    cells = choose_cells(matrix(model_family), model_family, (), seed)
    for layout in model_family.layouts:
        layout_cells = [cell for cell in cells if cell.layout == layout]
        for levels in factors:
            assert all(
                any(has(cell, it, it == levels[0]) for cell in layout_cells) for it in levels
            )


def test_separate_level_is_verified_once_alone_and_in_no_other_cell() -> None:
    model_family = family(factor("masks", "causal", "eod"), factor("norm", "layer", "rms", "none"))
    cells = choose_cells(matrix(model_family, Exclusion(("masks/eod",), "tp2")), model_family, ())
    together = [cell for cell in cells if cell.layout == TP and "eod" in str(cell.flags)]
    assert [[level.path for level in cell.levels] for cell in together] == [["masks/eod"]]
    assert any("eod" in str(cell.flags) and len(cell.levels) > 1 for cell in cells)


def test_level_that_a_release_cannot_train_is_separate_only_for_that_release() -> None:
    model_family = family(factor("ahead", "none", "mtp"), factor("recompute", "none", "full"))
    whole = matrix(model_family, Exclusion(("ahead/mtp", "recompute/full"), release="0.18"))
    both = [model_family.find_level("ahead/mtp"), model_family.find_level("recompute/full")]
    assert not whole.select_release(Version("0.18.2")).is_legal(model_family, both)
    assert whole.select_release(Version("0.19.0")).is_legal(model_family, both)


def test_cells_that_only_pair_two_levels_come_last() -> None:
    _, cells = drawn()["dense"]
    of_tables = {(cell.layout.name, level) for cell in cells for level in cell.levels}
    early = {(cell.layout.name, level) for cell in cells[:-5] for level in cell.levels}
    assert early == of_tables


def test_cells_with_the_same_reference_are_consecutive() -> None:
    _, cells = drawn()["dense"]
    keys = [(cell.flags, cell.samples, cell.optimizer, cell.patch) for cell in cells]
    changes = sum(key != next_key for key, next_key in pairwise(keys))
    assert changes + 1 == len(set(keys))


def test_known_finding_is_verified_alone_and_patched_in_other_cells() -> None:
    _, cells = drawn()["dense"]
    sinks = [cell for cell in cells if "learnable" in cell.flags and "tp" in cell.layout.name]
    plain = [cell for cell in sinks if not cell.patch]
    assert {len(cell.levels) for cell in plain} == {1}
    assert {cell.layout.name for cell in plain} >= {"tp2", "tp2pp2", "tp2cp2"}
    assert {cell.patch for cell in sinks} == {"", "docs/upstream/sink_missing_in_norm.py"}
    assert (
        f"PATCH_FILE={KNOWN[0].patch.relative_to(KNOWN[0].patch.parents[2])}"
        in sinks[-1].format_command()
    )


def test_cell_of_a_strategy_without_the_finding_has_no_patch() -> None:
    model_family = load_matrix().families[0]
    sink = model_family.find_level("attention/sink")
    assert apply_known_patches(MatrixCell(model_family, DP, (sink,)), KNOWN).patch == ""


def finding(
    name: str, *flags: str, strategies: tuple[str, ...] = ("tp2",), **fields: object
) -> Finding:
    """Return a finding whose patch exists, like that of every finding."""
    made = replace(KNOWN[0], id=name, flags=flags, strategies=strategies, **fields)  # type: ignore[arg-type]
    assert made.patch.is_file()
    return made


SINK = finding("sink-missing-in-norm", "--softmax-type", "learnable")
RATE = finding("rate-of-second-embedding", "--decoupled-lr", "1e-4", strategies=("pp2",))
FREED = finding("outputs-freed-before-sent", strategies=("vpp2",), stage=None)


def test_cell_with_several_findings_has_the_patches_of_all() -> None:
    model_family = load_matrix().families[0]
    layout = next(layout for layout in model_family.layouts if layout.name == "tp2pp2")
    levels = model_family.add_needed_levels(
        [model_family.find_level("attention/sink"), model_family.find_level("rates/decoupled")]
    )
    cell = apply_known_patches(MatrixCell(model_family, layout, levels), (SINK, RATE, FREED))
    names = ("sink_missing_in_norm", "rate_of_second_embedding")
    assert cell.patch == ",".join(f"docs/upstream/{name}.py" for name in names)
    patch_file = cell.make_pair().job.options.patch_file
    assert patch_file is not None
    assert patch_file.path == cell.patch
    assert f"PATCH_FILE={cell.patch}" in cell.format_command()
    assert find_uncured(cell, (SINK, RATE, FREED)) == []
    assert find_uncured(replace(cell, patch=""), (SINK, RATE, FREED)) == [SINK, RATE]


def test_patch_that_includes_another_cure_is_applied_alone() -> None:
    model_family = load_matrix().families[0]
    after = replace(RATE, strategies=("tp2",), behind=SINK.id)
    levels = (model_family.find_level("attention/sink"), model_family.find_level("rates/decoupled"))
    cell = apply_known_patches(MatrixCell(model_family, TP, levels), (SINK, after))
    assert cell.patch == "docs/upstream/rate_of_second_embedding.py"
    assert find_uncured(cell, (SINK, after)) == []


def test_cell_of_a_finding_has_the_patches_of_all_other_findings() -> None:
    rates = factor("rates", "one", "decoupled")
    rates = (rates[0], Level("rates", "decoupled", ("--decoupled-lr", "1e-4")))
    model_family = family(rates, layouts=(Layout("vpp2", "vpp2"),))
    cells = choose_cells(matrix(model_family), model_family, (RATE, FREED))
    rate, freed = (relative_to_root(finding.patch) for finding in (RATE, FREED))
    patches = {(len(cell.levels), cell.patch) for cell in cells}
    assert patches == {(1, freed), (0, ""), (1, f"{rate},{freed}"), (0, freed)}


def test_crash_of_a_strategy_is_patched_in_all_its_cells_only_if_it_ends_every_run() -> None:
    model_family = load_matrix().families[0]
    cell = MatrixCell(model_family, TP, (model_family.find_level("rates/decoupled"),))
    ends = replace(RATE, strategies=("tp2",), fails="no such method")
    assert apply_known_patches(cell, [ends]).patch == ""
    assert (
        apply_known_patches(cell, [replace(ends, flags=())]).patch
        == "docs/upstream/rate_of_second_embedding.py"
    )


def test_every_strategy_is_in_the_grammar_and_every_flag_of_a_command_is_quoted() -> None:
    for model_family, cells in drawn().values():
        for layout in model_family.layouts:
            target = f"train-{layout.strategy}-{model_family.model}-{layout.devices}cpu"
            assert parse_target(target).flags is not None
        assert all(
            shlex.split(cell.format_command())[:2] == ["make", cell.target] for cell in cells
        )


def test_level_implies_its_required_levels_and_is_removed_with_them() -> None:
    model_family = load_matrix().families[0]
    ahead, rope = model_family.find_level("ahead/mtp"), model_family.find_level("position/rope")
    cell = MatrixCell(model_family, TP, model_family.add_needed_levels([ahead]))
    assert cell.levels == (rope, ahead)
    assert cell.remove_level(rope).levels == ()
    assert cell.remove_level(ahead).levels == (rope,)


def test_id_of_a_cell_changes_with_its_content() -> None:
    model_family = family(factor("norm", "layer", "rms"))
    cells = [
        MatrixCell(model_family, TP),
        MatrixCell(model_family, DP),
        MatrixCell(model_family, TP, (model_family.find_level("norm/rms"),)),
        MatrixCell(model_family, TP, seed=7),
        MatrixCell(model_family, TP, patch="docs/upstream/sink_missing_in_norm.py"),
        MatrixCell(model_family, Layout("tp2", "tp2", samples=16)),
    ]
    assert len({cell.id for cell in cells}) == len(cells)


def test_requested_features_and_strategies_are_selected() -> None:
    whole = load_matrix()
    (dense,) = select_families(whole, RELEASE, ("dense", "heads"), ("?p2",))
    assert [len(levels) for name, levels in dense.factors.items() if name == "heads"] == [3]
    assert sum(len(levels) for levels in dense.factors.values()) == len(dense.factors) + 2
    assert [layout.name for layout in dense.layouts] == ["dp2", "tp2", "sp2", "cp2", "pp2"]
    assert [model_family.name for model_family in select_families(whole, RELEASE, ("moe",))] == [
        "moe"
    ]


def test_a_version_has_the_levels_whose_flags_it_knows() -> None:
    older = select_families(load_matrix(), Version("0.15.0rc2"), ("attention",))
    newer = select_families(load_matrix(), RELEASE, ("attention",))
    assert [len(model_family.factors["attention"]) for model_family in newer] == [4]
    assert older == ()


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"features": ("haeds",)}, "FEATURES=haeds"), ({"layouts": ("tp7",)}, "STRATEGIES=tp7")],
)
def test_unknown_name_is_refused_with_the_known_names(
    asked: dict[str, tuple[str, ...]], named: str
) -> None:
    with pytest.raises(
        LaunchError, match=f"{named} is none of the matrix's; name some of .*(tp2|rope)"
    ):
        select_families(load_matrix(), RELEASE, **asked)


def test_draws_are_legal_and_the_same_for_the_same_seed() -> None:
    whole = load_matrix()
    families = select_families(whole, RELEASE)

    def first(seed: int) -> list[MatrixCell]:
        cells = draw_cells(whole, families, KNOWN, seed)
        return [next(cells) for _ in range(40)]

    cells = first(1)
    assert cells == first(1) != first(2)
    assert len({cell.id for cell in cells}) == 40
    for cell in cells:
        every = {**cell.family.factors, **cell.family.fuzzed}
        picked = {level.factor: level for level in cell.levels}
        row = [picked.get(name, levels[0]) for name, levels in every.items()]
        assert whole.is_legal(cell.family, row, cell.layout.name)


def test_resumed_cell_is_compared_with_one_rank_that_was_not_interrupted() -> None:
    (resumed,) = select_families(load_matrix(), RELEASE, ("resumed",))
    zero1 = next(layout for layout in resumed.layouts if layout.name == "zero1")
    levels = resumed.add_needed_levels([resumed.find_level("checkpoint/of-tp2")])
    plain, other = MatrixCell(resumed, zero1), MatrixCell(resumed, zero1, levels)
    assert [cell.make_pair().saving_strategy for cell in (plain, other)] == ["zero1", "tp2"]
    assert {cell.make_pair().reference_strategy for cell in (plain, other)} == {"baseline"}
    assert "REFERENCE=baseline RESUMED=tp2" in other.format_command()
    assert plain.id != other.id
    assert plain.reference_key == other.reference_key


def test_cells_that_resume_and_cells_that_do_not_share_no_reference() -> None:
    saved = Level("checkpoint", "own", resumed="1")
    plain = family(factor("norm", "layer"))
    resumed = family(factor("norm", "layer"), (saved,))
    cells = [MatrixCell(model_family, TP) for model_family in (plain, resumed)]
    assert [model_family.is_resumed for model_family in (plain, resumed)] == [False, True]
    assert cells[0].reference_key != cells[1].reference_key
    assert cells[0].id != cells[1].id


def test_finding_of_a_resumed_run_affects_only_cells_that_resume_from_its_strategy() -> None:
    finding = next(finding for finding in list_findings() if finding.fails and finding.resumed)
    finding = replace(finding, model="gpt2-tiny", strategies=("tp2",))
    saved = [Level("checkpoint", name, resumed=name) for name in ("", "pp2", "dp2")]
    families = [family(factor("norm", "layer"), (level,)) for level in saved]
    affected = [affects_cell(finding, MatrixCell(model_family, TP)) for model_family in families]
    assert affected == [False, True, False]

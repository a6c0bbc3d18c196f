"""Injected bugs of strategies and levels: every passing cell must fail with an injected bug.

`python -m tests.verify.bench turned` verifies every row of the matrix with an injected bug.
"""

from __future__ import annotations

import pytest

from parakit.experiments.matrix.cell import has_flags, list_split_dimensions
from parakit.experiments.matrix.definition import Family, Layout, Level, load_matrix
from tests.verify.bench import GENERAL
from tests.verify.injected_bugs.check import InjectedBug, injected_bugs

FAMILIES = load_matrix().families
WITHOUT_ONE_OF_ITS_OWN = {
    "dense": (
        *("position/rope-half", "position/none", "heads/mqa", "activation/squared-relu"),
        *("biases/qkv-alone", "qk-norm/qk-layernorm-decays", "masks/reset-at-eod"),
        *("attention/window", "attention/off-by-one", "recompute/selective", "rates/decoupled"),
        *("clipping/does-not-bite", "clipping/off", "optimizer/muon", "batches/one"),
    ),
    "moe": (
        *("dtype/bf16", "top-k/one", "shared-expert/shared-gated", "balancing/seq-aux-loss"),
        *("balancing/sinkhorn", "z-loss/without", "capacity/drops"),
        *("capacity/drops-padded", "groups/limited", "dispatcher/all-gather"),
        *("latent/latent-experts", "layers/every-second", "activation/swiglu", "heads/gqa"),
        *("masks/reset-at-eod", "loss/per-token", "recompute/selective", "recompute/full"),
        *("recompute/moe-layer", "clipping/does-not-bite", "clipping/off", "optimizer/muon"),
        "batches/one",
    ),
    "mla": (
        *("dtype/bf16", "query/whole", "norm/rmsnorm", "biases/without", "loss/per-token"),
        *("recompute/full", "recompute/up-projection", "ahead/mtp", "clipping/does-not-bite"),
        "clipping/off",
    ),
    # `injected_bugs/resumed` acts on what a checkpoint holds.
    "resumed": (
        "checkpoint/of-one-rank",
        "checkpoint/of-tp2",
        "checkpoint/of-zero1",
        "optimizer/muon",
        "optimizer/precision-aware",
    ),
}
"""Levels whose own code no injected bug and no live bug breaks: those that act in every model turn
them."""
OF_LIVE_BUGS = {"attention/sink", "qk-norm/qk-layernorm", "ahead/mtp"}


def of_family(bug: InjectedBug, family: Family) -> bool:
    latent = "--multi-latent-attention" in bug.flags
    return bug.model == family.model and latent == (family.name == "mla")


def turns(bug: InjectedBug, level: Level) -> bool:
    flags = (*level.flags, *level.strategy_flags)
    return bool(flags) and has_flags(flags, (*bug.flags, *bug.own_flags))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_level_has_an_injected_bug_or_is_listed_without_one(family: Family) -> None:
    family_bugs = [bug for bug in injected_bugs() if of_family(bug, family)]
    levels = [level for levels in family.factors.values() for level in levels[1:]]
    live = OF_LIVE_BUGS if family.name != "moe" else set()
    missing = {
        level.path
        for level in levels
        if level.path not in live and not any(turns(bug, level) for bug in family_bugs)
    }
    assert missing == set(WITHOUT_ONE_OF_ITS_OWN[family.name]) - live


@pytest.mark.parametrize("family", FAMILIES, ids=lambda bug: bug.name)
def test_every_strategy_has_an_injected_bug_in_what_it_splits(family: Family) -> None:
    splits = [
        list_split_dimensions(bug.strategy, bug.devices)
        for bug in injected_bugs()
        if bug.devices > 1
    ]

    def has_one(layout: Layout) -> bool:
        parts = list_split_dimensions(layout.strategy, layout.devices)
        return any(split <= parts for split in splits)

    assert [layout.name for layout in family.layouts if not has_one(layout)] == []


def test_injected_bugs_for_rows_work_with_every_model() -> None:
    by_id = {bug.id: bug for bug in injected_bugs()}
    for family in FAMILIES:
        layouts = {layout.name for layout in family.layouts}
        for name in GENERAL[family.name]:
            assert not by_id[name].flags
            assert by_id[name].strategy in layouts

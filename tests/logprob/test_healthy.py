"""Healthy pairs: how they are drawn, what their table counts, and that a number means the pair of its line."""

from collections import Counter

from tests.judged import read_judged
from tests.logprob.healthy import (
    COLUMNS,
    FAMILIES,
    JUDGED,
    NUM_PAIRS,
    SEED,
    count_held,
    draw_pairs,
    get_family,
)


def test_pairs_are_drawn_evenly_over_families_and_their_layouts() -> None:
    pairs = draw_pairs(SEED, 6 * len(FAMILIES))
    assert set(Counter(map(get_family, pairs)).values()) == {6}
    for name, family in FAMILIES.items():
        layouts = Counter(pair.train for pair in pairs if get_family(pair) == name)
        assert len(layouts) == len(family.layouts.split())


def test_drawn_pairs_differ_and_never_serve_the_layout_of_the_trainer() -> None:
    pairs = draw_pairs(SEED, NUM_PAIRS)
    assert len({(pair.id, pair.is_bf16) for pair in pairs}) == NUM_PAIRS
    assert all(pair.train != pair.serve for pair in pairs)


def test_at_least_100_pairs_are_judged_and_each_line_is_that_of_the_pair_with_its_number() -> None:
    lines = read_judged(JUDGED)
    assert len(lines) >= 100
    pairs = draw_pairs(SEED, NUM_PAIRS)
    for line in lines:
        pair = pairs[int(line["number"]) - 1]
        dtype = "bf16" if pair.is_bf16 else "fp32"
        drawn = (get_family(pair), pair.train, pair.serve, dtype, str(pair.seed))
        assert tuple(line[column] for column in COLUMNS[1:6]) == drawn


def test_judged_pairs_are_counted_with_the_largest_error_in_units_of_the_tolerance() -> None:
    judged = (
        ("1", "llama", "tp2", "hf", "fp32", "1", "held", "1e-8", "2e-8", "0", "compared"),
        ("2", "llama", "pp2", "hf", "bf16", "2", "differs", "6e-2", "2e-2", "0", "compared"),
    )
    rows = list(count_held([dict(zip(COLUMNS, cells, strict=True)) for cells in judged]))
    assert rows[1:] == [
        "| against hf | 2 | 1 | 3.00 |",
        "| all | 2 | 1 | 3.00 |",
        "| llama | 2 | 1 | 3.00 |",
        "| bf16 | 1 | 0 | 3.00 |",
        "| fp32 | 1 | 1 | 0.50 |",
        "| pp2 | 1 | 0 | 3.00 |",
        "| tp2 | 1 | 1 | 0.50 |",
    ]

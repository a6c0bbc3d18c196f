"""Shrinking to the smallest set of parts that still shows a failure, on predicates with a known answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parakit.experiments.matrix.running import minimize_parts


@given(st.lists(st.integers(0, 15), unique=True, min_size=1), st.data())
def test_shrinking_keeps_exactly_the_required_parts(parts: list[int], data: st.DataObject) -> None:
    guilty = set(data.draw(st.lists(st.sampled_from(parts), unique=True)))
    assert minimize_parts(parts, lambda some: guilty <= set(some)) == tuple(
        part for part in parts if part in guilty
    )


def test_single_required_part_of_sixteen_is_isolated_in_at_most_nine_tries() -> None:
    tries: list[tuple[int, ...]] = []

    def shows(some: tuple[int, ...]) -> bool:
        tries.append(some)
        return 11 in some

    assert minimize_parts(range(16), shows) == (11,)
    assert len(tries) <= 9


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 3))
def test_no_remaining_part_can_be_removed(guilty: set[int], least: int) -> None:
    def shows(some: tuple[int, ...]) -> bool:
        return len(guilty & set(some)) >= min(least, len(guilty))

    minimal = minimize_parts(range(10), shows)
    assert shows(minimal)
    assert not any(shows(tuple(part for part in minimal if part != out)) for out in minimal)


def test_failure_without_any_part_shrinks_to_no_parts() -> None:
    assert minimize_parts("abc", lambda _: True) == ()

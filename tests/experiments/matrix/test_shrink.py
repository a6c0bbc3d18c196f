"""The least that still shows something, on predicates whose answer is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parakit.experiments.matrix.running import minimize_parts


@given(st.lists(st.integers(0, 15), unique=True, min_size=1), st.data())
def test_the_parts_that_are_all_needed_are_what_is_left(
    parts: list[int], data: st.DataObject
) -> None:
    guilty = set(data.draw(st.lists(st.sampled_from(parts), unique=True)))
    assert minimize_parts(parts, lambda some: guilty <= set(some)) == tuple(
        part for part in parts if part in guilty
    )


def test_one_guilty_part_of_sixteen_is_found_in_at_most_nine_tries() -> None:
    tries: list[tuple[int, ...]] = []

    def shows(some: tuple[int, ...]) -> bool:
        tries.append(some)
        return 11 in some

    assert minimize_parts(range(16), shows) == (11,)
    assert len(tries) <= 9


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 3))
def test_none_of_what_is_left_can_be_left_out(guilty: set[int], least: int) -> None:
    def shows(some: tuple[int, ...]) -> bool:
        return len(guilty & set(some)) >= min(least, len(guilty))

    minimal = minimize_parts(range(10), shows)
    assert shows(minimal)
    assert not any(shows(tuple(part for part in minimal if part != out)) for out in minimal)


def test_what_shows_it_with_nothing_needs_nothing() -> None:
    assert minimize_parts("abc", lambda _: True) == ()

"""Lines that are read as columns give the same values, to the last bit, as lines that are read singly."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.logs import scrape
from parakit.logs.dialects import find_iterations, load_line_formats
from parakit.logs.layouts import LayoutReader
from parakit.logs.scrape import make_event_pattern, scrape_runs
from tests.reporting.factory import iteration_line

PRIMUS = (
    "[20251121 12:10:29][rank-31/32][INFO ] [--------trainer.py:2488] :  iteration    {n:8d}/   36000"
    " | consumed samples:   {samples:10d} | elapsed time per iteration (ms): {ms:.1f}/2712.7 |"
    " hip mem usage/free/total/usage_ratio: {ms:.2f}GB/28.63GB/255.98GB/88.81% | learning rate:"
    " {loss:.6E} | global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: nan |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def columns_and_lines(text: str):
    """Return each plain line's iteration as read by columns, with the iterations of the line alone."""
    reader = LayoutReader(make_event_pattern())
    reader.format = load_line_formats()[0]
    block = reader.block(text.encode(), range(1, text.count("\n") + 1))
    whole = list(block.columns.rows(0, len(block.plain)))
    lines = text.split("\n")[:-1]
    return [
        (whole[index], find_iterations(line))
        for index, line in enumerate(lines)
        if block.plain[index]
    ]


def without_nan(iteration):
    return {name: str(getattr(iteration, name)) for name in iteration.__struct_fields__}


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 10**8 - 1),
            st.floats(0.1, 1e7),
            st.floats(1e-30, 1e30) | st.floats(1e-3, 1e3),
            st.integers(1, 10**5),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["megatron", "primus", "docker"]),
)
def test_plain_lines_read_as_columns_give_the_values_of_single_lines(rows, kind):
    def line(n, ms, loss, samples):
        if kind == "primus":
            return PRIMUS.format(n=n, ms=ms, loss=loss, samples=samples)
        prefix = "2026-01-01T00:00:00.123456789Z stdout F [default3]:" if kind == "docker" else ""
        extra = f" z_loss: {loss:.3E} |"
        return prefix + iteration_line(n, ms, loss, total=10**8, global_batch=samples, extra=extra)

    text = "".join(line(*row) + "\n" for row in rows)
    pairs = columns_and_lines(text)
    assert pairs or not all(1e-9 < row[2] < 1e9 for row in rows)
    for from_columns, alone in pairs:
        assert [without_nan(from_columns)] == [without_nan(iteration) for iteration in alone]


def test_most_lines_of_a_log_are_plain_at_any_width():
    generator = random.Random(1)
    lines = [
        iteration_line(n, generator.uniform(90, 1100), generator.uniform(0.5, 20))
        for n in range(1, 500)
    ]
    assert len(columns_and_lines("\n".join([*lines, ""]))) == 499


@pytest.mark.parametrize(
    "other",
    [
        "saving checkpoint at iteration 5",
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 |",
        " validation loss at iteration 5 | lm loss value: 1.0 |",
        "Traceback (most recent call last):",
        "    forward-backward ...............: (1210.11, 1214.92)",
        "[exiting program at iteration 5]",
        "got signal: 15",
        "train.py: error: no",
    ],
)
def test_line_with_additional_text_is_not_plain(other):
    for glued in (other + iteration_line(5), iteration_line(5) + other):
        assert columns_and_lines(glued + "\n") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lm loss: 9", "xm loss: 9"),
        ("lm loss: 9.0", "lm loss: 9,0"),
        ("       5/", "   1   5/"),
        ("23:58:47", "23:58.47"),
        ("1.095", "1x095"),
    ],
)
def test_line_with_a_changed_byte_is_not_read_with_columns_of_other_lines(old, new):
    usual = iteration_line(5, loss=9.0)
    assert old in usual
    changed = usual.replace(old, new)
    pairs = columns_and_lines(f"{usual}\n{changed}\n")
    for from_columns, alone in pairs:
        assert [from_columns] == alone


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "reporting" / "logs").glob("*.log"))
)
def test_log_gives_the_same_values_by_columns_and_line_by_line(path, tmp_path, monkeypatch):
    generator = random.Random(path.stem)
    original = path.read_bytes()
    for _ in range(6):
        pieces = [original]
        for _ in range(generator.randrange(12)):
            start = generator.randrange(1, 30)
            count = generator.randrange(1, 12)
            pieces += [
                (iteration_line(n, 100 + n % 7, 9.0, micro=True) + "\n").encode()
                for n in range(start, start + count)
            ]
        log = tmp_path / path.name
        log.write_bytes(b"".join(pieces))
        together = scrape_runs(log)
        with monkeypatch.context() as patch:
            patch.setattr(scrape, "_MIN_PLAIN_LINES", 10**9)
            assert scrape_runs(log) == together

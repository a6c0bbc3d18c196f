import pytest

from parakit.reporting.canvas import draw_chart


def drawn(width):
    def fill(figure):
        figure.set_layout_engine("none")
        figure.add_axes((0.1, 0.1, width, 0.8)).plot([1, 2], [3, 4])

    return draw_chart("curve", "A curve", "What it shows.", fill)


@pytest.mark.usefixtures("laid_out_charts")
def test_bounds_that_differ_in_their_last_digit_give_the_same_picture():
    assert drawn(0.8) == drawn(0.8 + 2**-52)
    assert drawn(0.8) != drawn(0.7)

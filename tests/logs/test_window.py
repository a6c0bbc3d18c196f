import random

from parakit.logs.scrape import scrape_log
from parakit.logs.window import Window, count_warm_up_samples, select_window
from tests.reporting.factory import iteration_line, log_text


def window(tmp_path, text) -> Window:
    path = tmp_path / "a.log"
    path.write_text(text)
    return select_window(scrape_log(path))


def noise(count, level=100.0, spread=1.0, seed=0):
    generator = random.Random(seed)
    return [level + spread * generator.gauss(0, 1) for _ in range(count)]


def test_first_and_averaged_lines_do_not_count(tmp_path):
    timed = window(tmp_path, log_text([900, 500, 100, 101, 102], micro=True))
    assert timed.samples_ms == (100, 101, 102)
    assert timed.iterations == (3, 4, 5)
    assert dict(timed.dropped) == {"first after a start": 1, "averaged over two iterations": 1}


def test_second_line_counts_in_older_logs(tmp_path):
    assert window(tmp_path, log_text([900, 100, 101])).samples_ms == (100, 101)


def test_skipped_steps_and_pauses_do_not_count(tmp_path):
    text = "\n".join(
        [
            iteration_line(1, 900),
            iteration_line(2, 50, skipped=1),
            iteration_line(3, 100),
            "saving checkpoint at iteration       3 to ckpt in torch_dist format",
            iteration_line(4, 130),
            iteration_line(5, 101),
        ]
    )
    timed = window(tmp_path, text)
    assert timed.samples_ms == (100, 101)
    assert dict(timed.dropped)["skipped steps"] == 1
    assert dict(timed.dropped)["after an evaluation or checkpoint"] == 1


def test_pauses_after_every_iteration_are_the_normal_state(tmp_path):
    pause = " validation loss at iteration 1 | lm loss value: 9.5E+00 | lm loss PPL: 1.3E+04 | "
    text = "\n".join(f"{iteration_line(n, 100 + n)}\n{pause}" for n in range(1, 8))
    assert window(tmp_path, text).iterations == (2, 3, 4, 5, 6, 7)


def test_warm_up_ends_once_times_settle():
    assert count_warm_up_samples([300.0, 220.0, 160.0, 130.0, *noise(40)]) == 4


def test_noise_alone_is_no_warm_up():
    cuts = [count_warm_up_samples(noise(40, seed=seed)) for seed in range(50)]
    assert sum(cut > 0 for cut in cuts) <= 5


def test_late_outlier_does_not_extend_the_warm_up():
    samples = noise(40)
    samples[30] = 5000.0
    assert count_warm_up_samples(samples) == 0


def test_few_or_equal_samples_have_no_warm_up():
    assert count_warm_up_samples([5.0] * 100) == 0
    assert count_warm_up_samples([900.0, 1.0, 1.0, 1.0]) == 0


def test_window_describes_itself_in_a_sentence(tmp_path):
    text = window(tmp_path, log_text([900, 500, 100, 101, 102], micro=True)).text
    assert text == (
        "3 samples, iterations 3 to 5; left out: 1 first after a start,"
        " 1 averaged over two iterations"
    )
    assert Window().text == "no samples"

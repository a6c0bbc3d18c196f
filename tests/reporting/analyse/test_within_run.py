"""What changes while a run is on is found, dated by its iteration and named."""

import numpy as np
import pytest

from parakit.logs.runs import load_log
from parakit.reporting.analyse.within_run import ChangeKind, find_changes_within_run
from tests.reporting.factory import iteration_line


def shifts(tmp_path, times, batches=None, more=()):
    """Of a log with these times; the first line of a start never counts."""
    batches = batches or [8] * len(times)
    lines = [
        iteration_line(n, ms, global_batch=batch)
        for n, (ms, batch) in enumerate(zip(times, batches, strict=True), start=1)
    ]
    for after, text in more:
        if after:
            lines[after - 1] += f"\n{text}"
        else:
            lines[0] = f"--- arguments ---\n{text}\n--- end of arguments ---\n{lines[0]}"
    path = tmp_path / "a.log"
    path.write_text("\n".join([*lines, ""]))
    return find_changes_within_run(load_log(path)[0])


def noisy(level, count, seed=0):
    return list(level * (1 + 0.005 * np.random.default_rng(seed).standard_normal(count)))


@pytest.mark.parametrize("seed", range(5))
def test_a_quiet_run_has_nothing(tmp_path, seed):
    assert shifts(tmp_path, noisy(100, 200, seed)) == ()


def test_a_single_hiccup_is_no_change(tmp_path):
    assert shifts(tmp_path, [*noisy(100, 30), 900.0, *noisy(100, 30, 1)]) == ()


def test_a_slowdown_after_iteration_20_is_dated(tmp_path):
    (change,) = shifts(tmp_path, [*noisy(100, 20), *noisy(110, 60, 1)])
    assert (change.kind, change.iteration) == (ChangeKind.STEP, 21)
    assert "from iteration 21 on iterations take 1" in change.text
    assert change.share == pytest.approx(0.09, abs=0.01)
    assert f"longer, which costs {change.share:.1%} of the time from there on" in change.text


def test_two_steps_are_two_changes(tmp_path):
    times = [*noisy(100, 40), *noisy(120, 40, 1), *noisy(90, 40, 2)]
    assert [(f.kind, f.iteration) for f in shifts(tmp_path, times)] == [
        (ChangeKind.STEP, 41),
        (ChangeKind.STEP, 81),
    ]


def test_iterations_that_begin_to_alternate_are_named_as_that(tmp_path):
    later = [
        level for pair in zip(noisy(195, 50), noisy(223, 50, 1), strict=True) for level in pair
    ]
    (change,) = shifts(tmp_path, [*noisy(214, 50, 2), *later])
    assert (change.kind, change.iteration) == (ChangeKind.ALTERNATING, 51)
    assert "alternate between 19" in change.text
    assert "before they took 21" in change.text


OVERLAP = "[2026-01-01 10:00:00] overlapping of grad reduce begins, bucket 3"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([(50, OVERLAP)], '(the log has there: "overlapping of grad reduce begins, bucket 3")'),
        # What it says again and again has not begun there.
        ([(20, OVERLAP), (50, OVERLAP.replace("3", "4"))], ""),
        (
            [
                (0, "  profile ......................................... True"),
                (0, "  profile_step_start .............................. 50"),
            ],
            "(as --profile-step-start 50 states)",
        ),
        # Megatron prints the default of a run that is not profiled, too.
        ([(0, "  profile_step_start .............................. 50")], ""),
        ([(0, "  lr_warmup_iters ................................. 50")], ""),
        ([(0, "  cuda_graph_warmup_steps ......................... 50")], ""),
        (
            [
                (0, "  cuda_graph_warmup_steps ......................... 50"),
                (0, "  cuda_graph_impl ................................. none"),
            ],
            "",
        ),
        (
            [
                (0, "  cuda_graph_warmup_steps ......................... 50"),
                (0, "  enable_cuda_graph ............................... True"),
            ],
            "(as --cuda-graph-warmup-steps 50 states)",
        ),
    ],
)
def test_what_begins_where_the_time_changes_is_named(tmp_path, more, named):
    times = [*noisy(214, 50, 2), *([195.0, 223.0] * 25)]
    (change,) = shifts(tmp_path, times, more=more)
    assert change.iteration == 51
    assert change.text.endswith(f" ms {named}" if named else " ms")


def correlated(count, seed, scatter, kept=0.7):
    generator = np.random.default_rng(seed)
    deviations = [generator.standard_normal()]
    for item in generator.standard_normal(count - 1):
        deviations.append(kept * deviations[-1] + (1 - kept**2) ** 0.5 * item)
    return list(100 * np.exp(scatter * np.array(deviations)))


@pytest.mark.parametrize("kept", [0.0, 0.7])
def test_pure_noise_rarely_changes_and_no_argument_is_its_cause(tmp_path, kept):
    defaults = [
        f"  {name} ................................. {value}"
        for name in ("cuda_graph_warmup_steps", "profile_step_start", "profile_step_end")
        for value in range(1, 26)
    ] + ["  eval_interval ................................ 5", "  manual_gc_interval .......... 3"]
    changes = []
    for seed in range(25):  # With 25 seeds, every value of the defaults is in one of the logs.
        remarks = [(0, line) for line in defaults[seed % 25 :: 25]]
        text = "\n".join(line for _, line in remarks)
        changes += shifts(tmp_path, correlated(25, seed, 0.1, kept), more=[(0, text)])
    assert len(changes) <= 1
    assert not any("(as --" in item.text or "as often as" in item.text for item in changes)


def test_a_run_that_alternates_all_along_says_so_once(tmp_path):
    (change,) = shifts(tmp_path, [100.0, 130.0] * 40)
    assert change.text == "all along iterations alternate between 100.0 and 130.0 ms"


def test_slow_iterations_have_their_period_and_share(tmp_path):
    times = [100.0 if n % 10 else 200.0 for n in range(1, 101)]
    (change,) = shifts(tmp_path, times)
    assert (change.kind, change.iteration) == (ChangeKind.PERIODIC, 10)
    assert "every 10 iterations, from 10 on, one takes 200.0 ms instead of 100.0" in change.text
    assert change.share == pytest.approx(1000 / 10900, abs=1e-3)
    assert "does not show why" in change.text


def test_slow_iterations_after_checkpoints_are_named(tmp_path):
    times = [100.0 if n % 10 != 1 else 200.0 for n in range(1, 101)]
    saved = "  successfully saved checkpoint from iteration {:7d} to ckpt"
    more = [(n, saved.format(n)) for n in range(10, 100, 10)]
    (change,) = shifts(tmp_path, times, more=more)
    assert "they follow a checkpoint" in change.text


def test_the_end_of_a_batch_ramp_is_no_slowdown(tmp_path):
    times = [*noisy(50, 20), *noisy(100, 60)]
    (change,) = shifts(tmp_path, times, [16] * 20 + [32] * 60)
    assert (change.kind, change.iteration) == (ChangeKind.RAMP, 21)
    assert "the global batch grows from 16 to 32 until iteration 21" in change.text

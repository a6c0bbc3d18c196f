"""Every number on the page, recomputed from the lines of the logs by other means than the report's."""

import re
import statistics
from html.parser import HTMLParser

import pytest

from parakit.config.strategy import PUBLISHED_STRATEGIES
from tests.logs.test_golden_logs import LOGS
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.render.test_build import made

SHAPE = {"layers": 4, "hidden": 64, "seq": 64, "ffn": 256}
BATCH, RANKS = 8, 2
PARAMETERS = 3_423_616
OF_A_RANK = {"tp2": 1_718_784, "sp2": 1_718_784, "pp2": 3_423_424}
"""As Megatron prints them, where they are not the model's; over stages nothing is checked."""


class Tables(HTMLParser):
    """Cells of every table by the id of its section."""

    def __init__(self):
        super().__init__()
        self.section, self.rows, self.open = "", {}, False
        self.sentences = []
        self.in_verdicts = False

    def handle_starttag(self, tag, attrs):
        if tag == "section":
            self.section = dict(attrs)["id"]
        elif tag == "ul":
            self.in_verdicts = dict(attrs).get("class") == "verdicts"
        elif tag == "li" and self.in_verdicts:
            self.sentences.append("")
        elif tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self.section][-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.open = False
        elif tag == "ul":
            self.in_verdicts = False

    def handle_data(self, data):
        if self.in_verdicts and self.sentences:
            self.sentences[-1] += data
        if self.open:
            self.rows[self.section][-1][-1] += data


def parsed(folder):
    parser = Tables()
    parser.feed((folder / "report.html").read_text())
    return parser


def tables_of(folder):
    parser = parsed(folder)
    return {
        section: [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        for section, rows in parser.rows.items()
        if section in ("results", "measured", "speed")
    }


def lines_of(log):
    """Time and loss of each iteration line, read with nothing but str.split."""
    changes = []
    for line in log.splitlines():
        if "consumed samples" in line:
            ms = float(line.split("elapsed time per iteration (ms):")[1].split("|")[0])
            changes.append((ms, float(line.split("lm loss:")[1].split("|")[0])))
    return changes


def digits(value):
    """Four significant digits, as the page writes them."""
    places = max(0, 4 - (len(str(int(value))) if value >= 1 else 0))
    return f"{value:,.{places}f}"


def percentage(ratio):
    """How much more or less time a ratio is, as the report writes it."""
    fraction = abs(ratio - 1)
    return f"{100 * fraction:.0f}" if fraction >= 0.0995 else f"{100 * fraction:.1f}"


def numbers(text):
    return re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", text)


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    root = tmp_path_factory.mktemp("trace")
    logs = {}
    for index, name in enumerate(PUBLISHED_STRATEGIES):
        times = [400.0, 260.0, *(80.3 + 7.1 * index + 1.7 * (k * k % 11) for k in range(23))]
        losses = [10.81 * 0.983**k for k in range(25)]
        parameters = OF_A_RANK.get(name, PARAMETERS)
        logs[name] = log_text(times, losses, micro=True, parameters=parameters)
        write_run(root / "runs", run_record(f"run-{name}", name), logs[name])
    _, _, folder = made(root)
    chart = (folder / "iteration-time.svg").read_text()
    return tables_of(folder), logs, chart, parsed(folder).sentences


@pytest.mark.parametrize("strategy", PUBLISHED_STRATEGIES)
def test_every_number_of_a_results_row_is_recomputed(demo_page, strategy):
    tables, logs, chart, _ = demo_page
    (row,) = (r for r in tables["results"] if r["Strategy"].split()[0] == strategy)
    times = [ms for ms, _ in lines_of(logs[strategy])][2:]
    reference = [ms for ms, _ in lines_of(logs["baseline"])][2:]
    median, ranks = statistics.median(times), 1 if strategy == "baseline" else RANKS
    seconds = median / 1000
    s, h, layers = SHAPE["seq"], SHAPE["hidden"], SHAPE["layers"]
    flops = 6 * BATCH * s * (layers * (4 * h * h + s * h + 2 * h * SHAPE["ffn"]) + h * 50304)
    expected = {
        "Strategy": [str(ranks)] if ranks else [],
        "ms/iteration": [digits(median)],
        "Time per token": (
            [percentage(median / statistics.median(reference))] if strategy != "baseline" else []
        ),
        "Devices": [str(ranks)],
        "Batch": [str(BATCH)],
        "Sequence": [str(s)],
        "Tokens/s": [digits(BATCH * s / seconds)],
        "Tokens/s/device": [digits(BATCH * s / seconds / ranks)],
        "TFLOP/s/device": [digits(flops / seconds / ranks / 1e12)],
        "Final loss": [f"{lines_of(logs[strategy])[-1][1]:.7g}"],
        "Parameters/rank": [f"{OF_A_RANK.get(strategy, PARAMETERS):,}"],
        "Parity": [],
        "Status": [],
    }
    low, high = map(float, numbers(row.pop("95% interval")))
    # One run on CPU ranks: 5.5% of scatter between runs is in its interval, and little more.
    assert 0.85 * median < low <= median * (1 - 1.96 * 0.055)
    assert median * (1 + 1.96 * 0.055) <= high < 1.15 * median
    for skipped in ("Model", "Device"):
        row.pop(skipped)
    assert {name: numbers(text.removeprefix(strategy)) for name, text in row.items()} == expected
    assert f">{digits(median)}<" in chart


@pytest.mark.parametrize("strategy", PUBLISHED_STRATEGIES)
def test_every_number_of_how_it_was_measured_is_recomputed(demo_page, strategy):
    tables, logs, _, _ = demo_page
    (row,) = (r for r in tables["measured"] if r["Strategy"].split()[0] == strategy)
    times = [ms for ms, _ in lines_of(logs[strategy])][2:]
    median = statistics.median(times)
    spread = 1.4826 * statistics.median(abs(ms - median) for ms in times) / median
    assert numbers(row["Runs"]) == ["1"]
    assert numbers(row["Window of the newest run"]) == ["23", "3", "25", "1", "1"]
    assert row["Spread"] == f"{spread:.1%}"
    assert numbers(row["Notes"]) == []


def test_every_number_of_the_speed_comparison_is_recomputed(demo_page):
    tables, logs, _, _ = demo_page
    medians = {n: statistics.median([ms for ms, _ in lines_of(t)][2:]) for n, t in logs.items()}
    assert len(tables["speed"]) == len(PUBLISHED_STRATEGIES) - 1
    for row in tables["speed"]:
        name = row["Strategy"].split()[0]
        ratio = medians[name] / medians["baseline"]
        assert numbers(row["Time per iteration"]) == [percentage(ratio)]
        assert numbers(row["Time per token"]) == [percentage(ratio)]
        low, high = map(float, numbers(row["95% interval of the ratio"]))
        assert low <= ratio <= high
        assert row["Tokens/s/device"] == f"{1 / ratio / RANKS:.1%}"
        differing = numbers(row["What differs"])
        assert differing == ["1", "2"] + (["50304", "50432"] if name in ("tp2", "sp2") else [])


def test_every_number_of_the_summary_is_recomputed(demo_page):
    _, logs, _, sentences = demo_page
    medians = {n: statistics.median([ms for ms, _ in lines_of(t)][2:]) for n, t in logs.items()}
    texts = {" ".join(sentence.split()) for sentence in sentences}
    assert {t for t in texts if t.startswith("6 runs")} == {
        "6 runs in 6 configurations, all ended well."
    }
    explained = 1
    for text in texts:
        if " time per iteration" in text:
            ratio = medians[text.split()[0]] / medians["baseline"]
            shown, percent, low, high = re.search(
                r"([\d.]+)% (?:more|less) time per iteration.*?(95)% interval: ([\d.]+)% .*?([\d.]+)%",
                text,
            ).groups()
            assert (shown, percent) == (percentage(ratio), "95")
            sign = -1 if re.search(r"interval: [\d.]+% less", text) else 1
            assert 1 + sign * float(low) / 100 <= ratio + 0.005 <= 1.01 + float(high) / 100
        elif text.startswith("One or two runs cannot show"):
            assert numbers(text)[:1] == ["5.5"]
            assert numbers(text)[2:] == ["16.5", "5.5", "13.3"]
        elif text.startswith("All verdicts of 5 comparisons"):
            assert numbers(text) == ["5", "95", "95"]
        elif text.startswith("Medians rest"):
            assert numbers(text) == ["23"]
        elif "the same model" in text:
            # Five strategies on two ranks; 25 iterations less the averaged one; nothing differs.
            assert numbers(text) == [*["2"] * 5, "1", "24"]
        elif not text.startswith("6 runs"):
            assert numbers(text) == [], text
            continue
        explained += 1
    assert explained == 1 + 1 + 5 + 1 + 1 + 1 + 1


def test_numbers_of_a_real_foreign_log_are_recomputed(tmp_path):
    source = LOGS / "megatron-f4fa7d6b.log"
    times = [ms for ms, _ in lines_of(source.read_text())]
    # 1 is the first; 6, 9 and 11 follow an evaluation or a checkpoint.
    settled = [ms for index, ms in enumerate(times, 1) if index not in (1, 6, 9, 11)]
    _, _, folder = made(tmp_path, paths=(source,))
    (row,) = tables_of(folder)["results"]
    median = statistics.median(settled)
    assert row["ms/iteration"] == digits(median)
    assert row["Tokens/s"] == digits(8 * 64 / median * 1000)
    assert row["Final loss"] == "10.17701"
    assert row["Parameters/rank"] == "1,718,784"

"""The page in a real browser: nothing on the console, curves that answer, any width and colours."""

import html
import json
import re

import pytest

from tests.chromium import chromium, needs_chromium
from tests.reporting.factory import iteration_line, run_record, write_run
from tests.reporting.render.test_build import demo, made

pytestmark = needs_chromium

CHECK = """
<script>
addEventListener("load", () => {
  const result = {};
  const table = document.querySelector("#results-table");
  const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === "ms/iteration");
  const read = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent).join(" ");
  const head = table.tHead.rows[0].cells[column];
  result.before = read();
  head.querySelector("button").click(); result.up = read(); result.upSort = head.ariaSort;
  head.querySelector("button").click(); result.down = read(); result.downSort = head.ariaSort;

  const boxes = (nodes) => [...nodes].map((node) => node.getBoundingClientRect());
  const meet = (one, two) => one.left < two.right - 1 && two.left < one.right - 1
    && one.top < two.bottom - 1 && two.top < one.bottom - 1;
  const overlaps = (nodes) => {
    const found = boxes(nodes);
    return found.filter((box, k) => found.slice(k + 1).some((other) => meet(box, other))).length;
  };
  const plots = [...document.querySelectorAll("figure[data-plot]")];
  result.plots = plots.map((plot) => plot.dataset.plot);
  result.spoken = [...document.querySelectorAll("figure svg")].every(
    (svg) => svg.getAttribute("role") === "img" && svg.getAttribute("aria-label").length > 20);
  result.overlaps = plots.map((plot) => overlaps(plot.querySelectorAll("svg > text"))
    + overlaps(plot.querySelectorAll(".label circle")));
  result.marks = plots[0].querySelectorAll(".marks li").length;
  result.labels = plots[0].querySelectorAll(".label").length;

  const svg = plots[0].querySelector("svg"), tip = plots[0].querySelector(".tip");
  const box = svg.getBoundingClientRect();
  const middle = { clientX: box.left + box.width / 2, clientY: box.top + 60 };
  svg.dispatchEvent(new PointerEvent("pointermove", middle));
  result.tip = tip.hidden ? "" : tip.textContent;
  const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  svg.dispatchEvent(new Event("blur"));
  press("ArrowRight"); press("ArrowRight");
  result.byKeyboard = tip.textContent.slice(0, 11);
  const lines = () => plots[0].querySelectorAll("path.line").length;
  const key = plots[0].querySelector(".legend .key");
  result.lines = [lines()];
  key.click(); result.lines.push(lines(), key.getAttribute("aria-pressed"));
  key.click(); result.lines.push(lines(), key.getAttribute("aria-pressed"));
  const axis = () => [...svg.querySelectorAll("text")].map((text) => text.textContent).join(" ");
  const whole = axis();
  press("+"); result.zoomed = axis() !== whole && !plots[0].querySelector(".reset").hidden;
  press("0"); result.whole = axis() === whole;

  const light = (colour) => {
    const parts = colour.match(/\\d+/g).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (colour) => {
    const [low, high] = [light(colour), paper].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  result.curveContrast = Math.min(...[...document.querySelectorAll("path.line")].map(
    (line) => contrast(getComputedStyle(line).stroke)));
  const texts = document.querySelectorAll("figure[data-plot] svg text, p, li, td");
  result.textContrast = Math.min(...[...texts].map(
    (node) => contrast(getComputedStyle(node)[node.closest("svg") ? "fill" : "color"])));
  const scroll = document.querySelector("#results .scroll");
  result.sideways = scroll.scrollWidth > scroll.clientWidth;
  result.wide = document.documentElement.scrollWidth > innerWidth;
  result.cards = getComputedStyle(table.tBodies[0].rows[0]).display === "block";
  result.order = [...document.querySelectorAll("section")].map((section) => section.id).slice(0, 4);
  result.ink = getComputedStyle(document.body).color;
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  result.height = document.documentElement.scrollHeight;
  const stops = [...document.querySelectorAll("a, button, summary, [tabindex]")];
  result.stops = stops.findIndex((node) => node.closest("#results"));
  result.captions = [...document.querySelectorAll("table")].every((found) => found.caption?.textContent);
  result.links = [...document.querySelectorAll("nav a, .skip")].every(
    (link) => document.querySelector(link.getAttribute("href")));
  result.bars = [...document.querySelectorAll(".bars .bar")].map((bar) => bar.className);
  result.dashes = [...document.querySelectorAll("#results td")].filter(
    (cell) => cell.textContent === "–" && !cell.title).length;
  result.strokes = [...plots[0].querySelectorAll("path.line")].map(
    (line) => [line.classList[1], line.getAttribute("stroke-dasharray")]);
  result.barsOnPaper = [...new Set([...document.querySelectorAll(".bar, .bar-track, .whisker")].map(
    (bar) => getComputedStyle(bar).printColorAdjust))];
  result.columns = getComputedStyle(document.querySelector(".panels")).gridTemplateColumns.split(" ").length;
  result.folded = [...document.querySelectorAll("details:not([open])")].filter(
    (details) => getComputedStyle(details).display !== "none").length;
  result.inMain = !!document.querySelector("main #answer");
  result.repeated = ids.filter((id, place) => ids.indexOf(id) !== place);
  parent.document.title = "CHECKED " + JSON.stringify(result);
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The demo, with a run that slows down and has gradient norms that change."""
    folder = tmp_path_factory.mktemp("page")
    demo(folder / "runs")
    lines = [
        iteration_line(n, 101.0 if n < 31 else 131.0, 9 - n / 99, micro=True, global_batch=8)
        for n in range(1, 61)
    ]
    lines = [line.replace("1.095", f"{2 - n / 60:.3f}") for n, line in enumerate(lines)]
    write_run(folder / "runs", run_record("run-slow", seed=5, dropout=0.1), "\n".join(lines))
    made(folder)
    path = folder / "reports" / "r" / "report.html"
    checked = path.with_name("checked.html")
    checked.write_text(path.read_text().replace("</body>", CHECK + "</body>"))
    return path, checked


COLOURS_ALIKE = [
    ("c0", "c2", "c5"),
    ("c0", "c5", "c6"),
    ("c1", "c3", "c4"),
    ("c2", "c3", "c5", "c7"),
]
"""Colours that look the same with one of the colour vision deficiencies, as simulated in Chromium."""


def opened(path, width, *more):
    """What the check found; a frame, because a window of Chromium is at least 500 pixels wide."""
    framed = path.with_name(f"framed-{width}.html")
    inside = html.escape(path.read_text(), quote=True)
    frame = f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{inside}"></iframe>'
    framed.write_text(f"<!doctype html><title></title>{frame}")
    path, width = framed, width + 100
    dumped, console = chromium(*more, f"--window-size={width},900", "--dump-dom", path.as_uri())
    assert console == []
    title = re.search(r"<title>CHECKED (.*?)</title>", dumped, re.DOTALL)
    assert title, "the check did not run"
    return json.loads(html.unescape(title[1]))


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (400, False)])
def test_page_opens_without_errors_and_everything_answers(page, width, dark):
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    result = opened(page[1], width, *scheme)
    before = result["before"].split()
    assert sorted(map(float, before)) == [91, 96, 101, 106, 111, 116, 131]
    assert result["up"].split() == result["down"].split()[::-1]
    assert (result["upSort"], result["downSort"]) == ("ascending", "descending")
    assert result["order"] == ["answer", "results", "summary", "curves"]
    assert result["plots"] == ["times", "losses", "grad-norm"], "no loss differs"
    assert result["spoken"], "every picture has a text that stands for it"
    assert (result["marks"], result["labels"]) == (1, 1)
    assert result["overlaps"] == [0] * 3, "no label of a picture lies on another"
    assert re.match(r"iteration \d+.* ms|.*, log line \d+", result["tip"])
    assert result["byKeyboard"].startswith("iteration 4"), "the second is a mean since the start"
    assert result["lines"] == [7, 6, "false", 7, "true"]
    dash_by_colour = dict(result["strokes"])
    for colours in COLOURS_ALIKE:
        dashes = [dash_by_colour[colour] for colour in colours if colour in dash_by_colour]
        assert len(set(dashes)) == len(dashes), "curves of like colours have different dashes"
    assert (result["zoomed"], result["whole"]) == (True, True)
    assert result["curveContrast"] >= 4.5
    assert result["textContrast"] >= 4.5
    assert not result["wide"], "the page itself must not scroll sideways"
    assert not result["sideways"], "nor must the table"
    assert result["cards"] == (width == 400)
    assert result["repeated"] == []
    assert width == 400 or result["height"] <= 6000
    assert result["stops"] <= 12
    assert (result["captions"], result["links"], result["inMain"]) == (True, True, True)
    assert result["dashes"] == 0, "every dash has its reason"
    assert result["bars"][0] == "bar reference"
    assert set(result["bars"][1:]) == {"bar within-noise", "bar slower"}
    assert result["ink"] == ("rgb(230, 237, 243)" if dark else "rgb(31, 35, 40)")


def test_on_paper_nothing_is_cut(page):
    """A width of A4 across with the print style, and the PDF itself."""
    paper = page[0].with_name("paper.html")
    paper.write_text(page[1].read_text().replace("@media print", "@media all"))
    result = opened(paper, 980)
    assert result["barsOnPaper"] == ["exact"], "browsers leave backgrounds out"
    assert (result["columns"], result["folded"]) == (2, 0)
    assert not result["wide"]
    assert not result["sideways"]
    pdf = page[0].with_name("report.pdf")
    for _ in range(3):
        # On a machine that is much too busy it may leave an empty file.
        chromium("--no-pdf-header-footer", f"--print-to-pdf={pdf}", page[0].as_uri())
        if pdf.stat().st_size:
            break
    assert pdf.read_bytes().startswith(b"%PDF")


def test_number_at_the_edge_of_an_axis_is_not_cut_off(tmp_path):
    logs = tmp_path / "a.log", tmp_path / "b.log"
    for log in logs:
        lines = [iteration_line(n, 100.0, 9 - n / 9999) for n in range(100, 3001, 100)]
        log.write_text("\n".join([*lines, ""]))
    _, _, folder = made(tmp_path, paths=logs)
    cut = """
    <script>
    addEventListener("load", () => {
      const texts = [...document.querySelectorAll("figure[data-plot] svg text")];
      const right = (node) => node.getBoundingClientRect().right;
      const cut = texts.filter((text) => right(text) > right(text.closest("svg")) + 1);
      parent.document.title = "CHECKED " + JSON.stringify([texts.length, cut.length]);
    });
    </script>"""
    checked = folder / "checked.html"
    checked.write_text((folder / "report.html").read_text().replace("</body>", cut + "</body>"))
    num_texts, num_cut = opened(checked, 1400)
    assert num_texts > 10
    assert num_cut == 0


def test_console_errors_would_be_seen(page):
    broken = page[0].with_name("broken.html")
    broken.write_text(page[0].read_text().replace("</body>", "<script>nope()</script></body>"))
    _, console = chromium("--dump-dom", broken.as_uri())
    assert any("nope is not defined" in line for line in console)


def test_screenshot_is_kept(page):
    from matplotlib.image import imread

    picture = page[0].with_name("report.png")
    chromium("--window-size=1300,2200", f"--screenshot={picture}", page[0].as_uri())
    pixels = imread(picture)
    assert pixels.shape[:2] == (2200, 1300)
    assert len({tuple(pixel) for pixel in pixels[::20, ::20, :3].reshape(-1, 3)}) > 10

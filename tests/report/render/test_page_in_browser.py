"""The page in a real browser: nothing on the console, charts drawn, sorting works, dark and light."""

import re

import pytest

from tests.chromium import chromium, needs_chromium
from tests.report.render.test_build import demo, made

pytestmark = needs_chromium

CHECK = """
<script>
addEventListener("load", () => {
  const table = document.querySelector("#results-table");
  const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === "ms/iteration");
  const read = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent).join(" ");
  const head = table.tHead.rows[0].cells[column];
  const result = { before: read() };
  head.querySelector("button").click(); result.up = read(); result.upSort = head.ariaSort;
  head.querySelector("button").click(); result.down = read(); result.downSort = head.ariaSort;
  result.charts = [...document.querySelectorAll("figure svg")].map(
    (svg) => [svg.getBoundingClientRect().width > 300, svg.querySelectorAll("path").length > 5]);
  result.wide = document.documentElement.scrollWidth > innerWidth;
  result.ink = getComputedStyle(document.body).color;
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  result.repeated = ids.filter((id, place) => ids.indexOf(id) !== place);
  document.title = "CHECKED " + JSON.stringify(result);
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    demo(folder / "runs")
    made(folder)
    path = folder / "reports" / "r" / "report.html"
    checked = path.with_name("checked.html")
    checked.write_text(path.read_text().replace("</body>", CHECK + "</body>"))
    return path, checked


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (420, False)])
def test_page_opens_without_errors_and_everything_is_there(page, width, dark):
    import html
    import json

    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dumped, console = chromium(
        *scheme, f"--window-size={width},900", "--dump-dom", page[1].as_uri()
    )
    assert console == []
    title = re.search(r"<title>CHECKED (.*?)</title>", dumped, re.DOTALL)
    assert title, "the check did not run"
    result = json.loads(html.unescape(title[1]))
    before = result["before"].split()
    assert before == ["91.00", "96.00", "101.0", "106.0", "111.0", "116.0"]
    assert (result["up"].split(), result["down"].split()) == (before, before[::-1])
    assert (result["upSort"], result["downSort"]) == ("ascending", "descending")
    assert len(result["charts"]) == 2
    assert all(wide and drawn for wide, drawn in result["charts"])
    assert not result["wide"], "the page itself must not scroll sideways"
    assert result["repeated"] == []
    assert result["ink"] == ("rgb(230, 237, 243)" if dark else "rgb(31, 35, 40)")


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

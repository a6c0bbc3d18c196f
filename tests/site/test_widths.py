"""Pages fit a phone: none is wider than its window, whatever lies in boxes that scroll."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from parakit.experiments.matrix.definition import load_matrix
from parakit.experiments.matrix.page import write_cells_page, write_differences_page
from parakit.site.drawing.figure import render_drawings_page
from parakit.site.planner_page import TEMPLATES
from tests.chromium import chromium, needs_chromium

_FRAMED = """<body><iframe src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<p id="found"></p>
<script>onload = () => {{
  const {{ documentElement }} = document.querySelector("iframe").contentDocument;
  document.getElementById("found").textContent = `${{documentElement.scrollWidth}} pixels`;
}}</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    (made / "drawings.html").write_text(render_drawings_page(), encoding="utf-8")
    # Python fills the lists with names as long as this one.
    planner = (TEMPLATES / "planner.html").read_text(encoding="utf-8")
    planner = planner.replace(
        "the device's own", "a link between two devices, by its long name " * 2
    )
    (made / "planner.html").write_text(planner, encoding="utf-8")
    shutil.copy(ROOT / "src/parakit/formatting/house.css", made)
    write_cells_page(stored=ROOT / "docs", folder=made, matrix=load_matrix())
    write_differences_page(stored=ROOT / "docs", folder=made, matrix=load_matrix())
    return made


@needs_chromium
@pytest.mark.parametrize(
    "name", ["drawings.html", "planner.html", "parity-cells.html", "parity-differences.html"]
)
@pytest.mark.parametrize("width", [400, 1400])
def test_a_page_is_no_wider_than_its_window(folder: Path, name: str, width: int) -> None:
    framed = folder / f"framed-{name}"

    framed.write_text(_FRAMED.format(page=name, width=width), encoding="utf-8")
    document, _ = chromium("--allow-file-access-from-files", "--dump-dom", framed.as_uri())
    assert f">{width} pixels" in document

"""`verify.html`, of small made captures: what is marked, what is calm, what is drawn."""

import html
import json
import re
from base64 import b64decode
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from parakit.artifacts.capture import CapturedModule, CaptureStage, Placement, TensorKey
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.verify.comparison import CaptureComparison, ComparedTensor, TensorComparison
from parakit.verify.map import COLUMNS, build_map_rows
from parakit.verify.page import render_page, write_page
from parakit.verify.picture import Picture
from parakit.verify.verdict import Judgement, judge, refuse_comparison
from tests.chromium import chromium, needs_chromium
from tests.verify.captures import rank, write

MODULES = [
    *("embedding", "decoder", "decoder.layers.0", "decoder.layers.0.mlp"),
    *("decoder.layers.1", "decoder.layers.1.mlp"),
]
RANK = rank(
    vocabulary=32,
    modules={name: CapturedModule("Module", f"megatron/{name}.py:7") for name in MODULES},
)


def capture(folder, spoiled=()):
    """Two layers: activations of 8 × 2 × 4, and each layer's weight with its gradient."""
    tensors = []
    values = np.random.default_rng(0)

    def add(stage, name, slot, *placed):
        tensor = values.normal(size=(8, 2, 4)).astype(np.float32)
        if (stage, name, slot) in spoiled:
            tensor[4:] *= 3  # The later half of the sequence.
        micro_batch = None if placed else 0
        tensors.append((TensorKey(stage, name, slot, micro_batch), tensor, *placed))

    for name in MODULES:
        add(CaptureStage.OUTPUTS, name, "input.0")
    for name in reversed(MODULES):
        add(CaptureStage.OUTPUTS, name, "output")
    for name in reversed(MODULES):
        add(CaptureStage.ACTIVATION_GRADIENTS, name, "output")
    for layer in (1, 0):
        name = f"decoder.layers.{layer}.mlp.weight"
        add(CaptureStage.WEIGHTS, name, "weight", Placement(name, (8, 2, 4), (0, 0, 0)))
    return write(folder, [(RANK, tensors)], response=0.0)


@pytest.fixture(scope="module")
def judgements(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures")
    reference = capture(folder / "reference")
    wrong = [
        (CaptureStage.OUTPUTS, "decoder.layers.1.mlp", "output"),
        (CaptureStage.OUTPUTS, "decoder.layers.1", "output"),
        (CaptureStage.ACTIVATION_GRADIENTS, "decoder.layers.0", "output"),
        (CaptureStage.WEIGHTS, "decoder.layers.0.mlp.weight", "weight"),
    ]
    names = {"layout": "tp2", "reference": "baseline", "command": "make verify-tp2-m-2cpu"}
    verifications = judge(reference, capture(folder / "wrong", wrong)), judge(reference, reference)
    return [
        replace(verification, verdict=replace(verification.verdict, **names))
        for verification in verifications
    ]


@pytest.fixture(scope="module")
def differs(judgements):
    return render_page(judgements[0])


def cells(page):
    """The classes of each cell, by name of the row and place of the column."""
    body = re.search(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
    classes_by_row = {}
    for line in body.split("<tr ")[1:]:
        name = re.search(r'title="([^"]*)"', line)[1]
        for index, classes in enumerate(re.findall(r'<td[^>]*class="([^"]*)"', line)):
            classes_by_row[name, index] = set(classes.split())
    return classes_by_row


def is_red(classes):
    return bool(classes & {"c4", "c5", "c6", "c7"})


FORWARD_OUT, BACKWARD_OUT, WEIGHTS = 2, 4, len(COLUMNS) - 1


def test_first_wrong_cell_is_marked_and_every_wrong_one_is_red(differs):
    classes_by_row = cells(differs)
    assert [at for at, classes in classes_by_row.items() if "first" in classes] == [
        ("decoder.layers.1.mlp", FORWARD_OUT)
    ]
    assert {at for at, classes in classes_by_row.items() if is_red(classes)} == {
        ("decoder.layers.1.mlp", FORWARD_OUT),
        ("decoder.layers.1", FORWARD_OUT),
        ("decoder.layers.0", BACKWARD_OUT),
        ("decoder.layers.0.mlp", WEIGHTS),
    }


def test_rows_are_modules_in_forward_order_and_parameters_are_in_their_modules_row(judgements):
    rows = build_map_rows(judgements[0].compared, None)
    assert [(row.name, row.label, row.depth) for row in rows] == [
        ("embedding", "embedding", 0),
        ("decoder", "decoder", 0),
        ("decoder.layers.0", "layers.0", 1),
        ("decoder.layers.0.mlp", "mlp", 2),
        ("decoder.layers.1", "layers.1", 1),
        ("decoder.layers.1.mlp", "mlp", 2),
    ]
    assert [tensor.key[1] for tensor in rows[3].cells[WEIGHTS].tensors] == [
        "decoder.layers.0.mlp.weight"
    ]


def test_head_states_module_error_and_command(differs):
    text = html.unescape(re.sub(r"<[^>]+>", "", differs))
    assert "tp2 differs from baseline at outputs, decoder.layers.1.mlp (output)." in text
    for part in (
        "megatron/decoder.layers.1.mlp.py:7",
        "make verify-tp2-m-2cpu",
        "20 of 20 tensors",
    ):
        assert part in text


def test_difference_names_the_rows_that_are_wrong(differs):
    assert (
        "32 of 64 elements (50.0%) differ by more than the tolerance, all within rows 4–15 of 16,"
        " columns 0–3 of 4." in differs
    )


def test_page_loads_no_other_file(differs, judgements):
    for page in (differs, render_page(judgements[1])):
        assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", page)
        assert all(link.startswith("data:") for link in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_page_that_held_has_no_red_and_counts_every_tensor(judgements):
    page = render_page(judgements[1])
    assert "tp2 computes what baseline computes" in page
    assert not any(is_red(classes) or "first" in classes for classes in cells(page).values())
    assert 'id="difference"' not in page
    assert "Of 20 tensors, each over all ranks and micro batches, 20 have no error" in page
    assert '<div class="c0 zero" style="height:100.0%" title="no error: 20 tensors">' in page


def test_refusal_is_stated_without_map_or_picture(tmp_path):
    write_page(tmp_path, refuse_comparison("The two runs did different work: dtype is <bf16>."))
    page = (tmp_path / "verify.html").read_text()
    assert "The two runs did different work: dtype is &lt;bf16&gt;." in page
    assert "<tbody>" not in page


def test_names_with_markup_are_escaped_in_the_pages_data():
    key = (CaptureStage.OUTPUTS, "</script><b>", "output")
    compared = CaptureComparison(
        (TensorComparison(key, 1e-6, 0, error=1e-7, compared=1),), (), 1, 1
    )
    page = render_page(Judgement(VerifyVerdict(VerifyOutcome.HELD, worst_ratio=0.1), compared))
    assert "</script><b>" not in page


def made(names, wrong=(), not_aligned=()):
    comparisons = [
        TensorComparison(
            (CaptureStage.OUTPUTS, name, "output"), 1.0, index, error=20.0 if name in wrong else 0.5
        )
        for index, name in enumerate(names)
    ]
    return CaptureComparison(tuple(comparisons), not_aligned, len(names), len(names))


def test_long_map_folds_layers_without_errors():
    names = [f"decoder.layers.{n}{part}" for n in range(40) for part in ("", ".attention", ".mlp")]
    rows = build_map_rows(made(names, wrong=["decoder.layers.7.mlp"]), None)
    assert [row.name for row in rows if row.children and row.open] == ["decoder.layers.7"]
    assert sum(row.shown for row in rows) == 42
    assert rows[18].levels_within()[FORWARD_OUT] == 3
    assert rows[21].levels_within()[FORWARD_OUT] == 5


def test_only_the_layer_with_the_first_error_is_open_if_all_layers_are_wrong():
    names = [f"decoder.layers.{n}{part}" for n in range(40) for part in ("", ".attention", ".mlp")]
    first = (CaptureStage.OUTPUTS, "decoder.layers.3.mlp", "output")
    rows = build_map_rows(made(names, wrong=names), first)
    assert [row.name for row in rows if row.children and row.open] == ["decoder.layers.3"]


def test_tensor_that_was_not_compared_is_marked_in_its_row():
    lines = (
        "decoder.mlp.experts input.0 decoder.mlp.experts output.0: its shape follows no known split",
        "decoder.mlp.router.bias: the reference has no such parameter",
    )
    rows = build_map_rows(
        made(["decoder", "decoder.mlp", "decoder.mlp.router"], not_aligned=lines), None
    )
    marked = {
        row.name: [index for index, cell in enumerate(row.cells) if cell.not_compared]
        for row in rows
    }
    assert marked == {
        "decoder": [],
        "decoder.mlp": [],
        "decoder.mlp.router": [6, 7, 9, 10],
        "decoder.mlp.experts": [1, 2, 4, 5],
    }


def drawn(picture):
    from matplotlib.image import imread

    return imread(BytesIO(b64decode(picture.data_uri.partition(",")[2])))


def test_single_wrong_element_is_visible_in_a_reduced_picture():
    reference = np.ones((2000, 30), np.float32)
    ours = reference.copy()
    ours[1234, 5] = 2
    points = drawn(Picture(ComparedTensor(0, None, ours, reference), 1e-6))
    assert points.shape == (500, 30, 4)
    red = np.argwhere(points[..., 3] > 0.9)
    assert red.tolist() == [[308, 5]]
    assert points[308, 5, 0] > 0.8
    assert (points[..., 3] > 0).sum() == 1


def test_sequences_of_a_batch_are_drawn_one_after_another():
    reference = np.ones((8, 2, 4), np.float32)
    ours = reference.copy()
    ours[:, 1] = 3
    picture = Picture(ComparedTensor(0, 0, ours, reference), 1e-6)
    assert np.flatnonzero(picture.matrix.any(1)).tolist() == [*range(8, 16)]
    assert picture.axes[0].text == "dimension 1 (2) × dimension 0 (8)"


def test_not_finite_and_integer_tensors_can_be_drawn():
    reference = np.ones(40, np.float32)
    ours = reference.copy()
    ours[3], ours[4] = np.nan, np.inf
    assert np.argwhere(
        drawn(Picture(ComparedTensor(0, None, ours, reference), 1e-6))[..., 3] > 0.9
    )[:, 1].tolist() == [3, 4]
    ids = np.arange(40)
    picture = Picture(ComparedTensor(0, None, np.roll(ids, 1), ids), 0.0)
    assert picture.extent.startswith("40 of 40 elements (100.0%)")
    assert (drawn(picture)[..., 3] > 0.9).all()


def test_scalar_is_shown_as_numbers():
    picture = Picture(ComparedTensor(0, None, np.float32(2) * np.ones(()), np.ones(())), 1e-6)
    assert not picture.is_drawn
    assert [*picture.worst()] == [("–", "2", "1")]


CHECK = """
<script>
addEventListener("load", () => {
  const about = () => document.querySelector("#about h3").textContent;
  const first = document.querySelector("td.first");
  const press = (key) => document.activeElement.dispatchEvent(
    new KeyboardEvent("keydown", { key, bubbles: true }));
  const result = { start: about(), wide: document.documentElement.scrollWidth > innerWidth };
  first.click(); press("ArrowUp"); result.up = about();
  const rows = () => [...document.querySelectorAll("[role=grid] tbody tr")]
    .filter((row) => !row.hidden).length;
  result.all = rows();
  document.querySelectorAll(".fold")[0].click(); result.folded = rows();
  const outer = [...document.querySelectorAll("tr")].find((row) => row.matches(".folded"));
  result.colour = outer.cells[3].className;
  document.querySelectorAll(".fold")[0].click(); result.again = rows();
  result.colours = ["c0", "c7"].map((name) => getComputedStyle(
    document.querySelector(".legend ." + name)).backgroundColor);
  document.title = "CHECKED " + JSON.stringify(result);
});
</script>
"""


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(420, True), (1600, False)])
def test_page_works_in_a_browser(differs, tmp_path, width, dark):
    path = tmp_path / "verify.html"
    path.write_text(differs.replace("</body>", CHECK + "</body>"))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dumped, console = chromium(*scheme, f"--window-size={width},900", "--dump-dom", path.as_uri())
    assert console == []
    result = json.loads(html.unescape(re.search(r"CHECKED (.*?)</title>", dumped, re.DOTALL)[1]))
    assert result["start"] == "decoder.layers.1.mlp: outputs (of its outputs)"
    assert result["up"] == "decoder.layers.1: outputs (of its outputs)"
    assert not result["wide"], "the page itself must not scroll sideways"
    assert (result["all"], result["folded"], result["again"]) == (6, 2, 6)
    assert "c7" in result["colour"].split() or "c6" in result["colour"].split()
    assert result["colours"][1] == ("rgb(255, 90, 80)" if dark else "rgb(164, 14, 31)")

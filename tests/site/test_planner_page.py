"""The planner's page in a real browser: what it shows is what the command line answers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from parakit.config.files import ROOT
from parakit.config.model import model_names
from parakit.planner.readings.models import find_planned_model
from parakit.site import in_browser
from parakit.site.drawing.figure import draw_figure, resolve_run
from parakit.site.planner_page import TEMPLATES, build_wheel, pack_python_files, write_planner_pages
from tests.chromium import chromium, needs_chromium
from tests.patience import OF_A_RUN

IN_THE_BROWSER = """
import json, sys
folder, calls = sys.argv[1], json.loads(sys.argv[2])
for module in ("curses", "dbm", "grp", "pwd", "readline", "resource", "syslog", "tkinter"):
    sys.modules[module] = None
sys.path.insert(0, folder)
from parakit.site import in_browser
assert in_browser.__file__.startswith(folder), in_browser.__file__
print(json.dumps([json.loads(getattr(in_browser, name)(*options)) for name, *options in calls]))
"""
"""A program that does what worker.js does, without standard modules that Pyodide lacks."""
QUESTION = {"model": "gpt2-large", "gpus": "2", "gpu": "h200", "global-batch": "64"}
SIZES: dict[str, int | str] = {
    "devices": 4,
    "tensor": 1,
    "pipeline": 1,
    "context": 1,
    "expert": 1,
    "virtual": 1,
    "sharding": "zero1",
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ANSWERED = """<img src="/wait" alt=""><script>
new MutationObserver(() => {
  const said = document.getElementById("state").textContent;
  const drawn = document.querySelector("#drawn figure");
  const refused = document.getElementById("refusal").textContent;
  if (/legal strategies/.test(said) || drawn || refused) fetch("/answered");
}).observe(document.body, {subtree: true, childList: true, characterData: true});
</script></html>"""
"""The browser takes a page for loaded when its picture has come: after the planner's answer."""


CASES: list[dict[str, str]] = [
    QUESTION,
    {"model": "llama3-8b", "gpus": "8", "gpu": "h100"},
    {"model": "llama3-8b", "gpus": "8", "gpu": "h100", "seq": "16384"},
    {"model": "gpt2-xl", "gpus": "4", "gpu": "a100", "global-batch": "64", "dtype": "bf16"},
    {"model": "llama3-8b", "gpus": "8", "gpu": "h100", "recompute": "full", "micro-batch": "1"},
    {"model": "mixtral-8x7b", "gpus": "16", "gpu": "h100"},
    {
        "model": "gpt2-large",
        "gpus": "2",
        "gpu": "a100",
        "gpus-per-node": "1",
        "inter": "ib-200g",
    },
    {"model": "gpt3-1.3b", "gpus": "16", "gpu": "a100", "nics": "4"},
    {"config": json.dumps(CONFIG), "gpus": "2", "gpu": "h200"},
    {"model": "gpt3-175b", "gpus": "2", "gpu": "h200"},
]
"""What is asked of the page and of the command. The last one does not fit."""
CASES_PAGE = "cases.html"
DRIVER = """<img src="/wait" alt=""><pre id="collected"></pre><script type="module">
const $ = (id) => document.getElementById(id);
const answered = () => new Promise((resolve) => {
  const timer = setInterval(() => {
    if (/Loading|Searching|Ready/.test($("state").textContent)) return;
    if (!$("state").textContent && !$("refusal").textContent) return;
    clearInterval(timer);
    resolve();
  }, 20);
});
const collected = [];
await answered();
for (const question of CASES) {
  for (const field of $("form").elements) if (field.name && !["model", "gpu"].includes(field.name)) field.value = "";
  $("config").value = question.config ?? "";
  for (const [name, value] of Object.entries(question)) if (name !== "config") $("form").elements[name].value = value;
  $("form").requestSubmit();
  await answered();
  collected.push({
    link: location.search + location.hash,
    ranked: [...$("ranked").tBodies[0].rows]
      .map((row) => [row.querySelector("code").textContent, row.cells[1].textContent]),
    interval: $("interval").textContent,
    refusal: $("refusal").textContent,
    visible: [...$("ranked").tHead.rows[0].cells].filter((cell) => cell.offsetWidth).map((cell) => cell.textContent),
    width: document.documentElement.scrollWidth,
  });
}
$("collected").textContent = JSON.stringify(collected);
fetch("/answered");
</script></html>"""
"""A program that asks the page each case, and writes what it shows."""


def test_the_page_offers_every_model_and_well_known_ones_first() -> None:
    choices = json.loads(in_browser.choices())
    assert choices["models"] == list(model_names())
    assert choices["well_known"][0] == "llama3-8b"


@pytest.mark.parametrize("name", in_browser.WELL_KNOWN)
def test_a_well_known_model_can_be_planned(name: str) -> None:
    assert find_planned_model(name).shape.layers > 0


def test_plan_in_browser_answers_like_the_command_line() -> None:
    options = [word for name, value in QUESTION.items() for word in (f"--{name}", value)]
    answer = json.loads(in_browser.plan(options))
    assert answer["code"] == 0
    assert json.loads(answer["out"]) == _command_line(options)
    refused = json.loads(in_browser.plan(["--model", "gpt2-huge"]))
    assert refused["code"] == 2
    assert "There is no model 'gpt2-huge'" in refused["err"]


def test_sizes_of_the_sliders_are_timed_like_a_named_strategy() -> None:
    options = ["--model", "gpt2-large", "--gpus", "4", "--gpu", "h200", "--global-batch", "64"]
    answer = json.loads(in_browser.resize(options, json.dumps(SIZES | {"tensor": 2})))
    assert answer["code"] == 0
    assert json.loads(answer["out"]) == _command_line([*options, "--strategy", "sp2dp2-zero1"])


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"tensor": 3},
            "TP 3, PP 1 and CP 1 need a multiple of 3 devices, and there are 4.",
        ),
        ({"tensor": 2, "expert": 4}, "EP 4 does not divide the 2 data-parallel ranks."),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(
    sizes: dict[str, int], sentence: str
) -> None:
    answer = json.loads(in_browser.resize([], json.dumps(SIZES | sizes)))
    assert answer == {"code": 2, "out": "", "err": sentence}


def test_pasted_config_is_planned_under_the_name_of_its_folder() -> None:
    options = ["--gpus", "2", "--gpu", "h200"]
    answer = json.loads(in_browser.plan(options, json.dumps(CONFIG)))
    assert answer["err"] == ""
    assert json.loads(answer["out"])["model"] == "mine"
    refused = json.loads(in_browser.plan(options, '{"model_type": "mamba9"}'))
    assert refused["code"] == 2
    assert "'mamba9'" in refused["err"]


def test_what_the_page_loads_plans_and_draws_without_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    archives = re.findall(r'\["(\w+\.zip)", "\w+"\]', (TEMPLATES / "worker.js").read_text())
    assert archives == ["parakit.zip", "msgspec.zip", "pure.zip"]
    build_wheel(tmp_path / "parakit.zip")
    pack_python_files(tmp_path / "pure.zip")
    loaded = tmp_path / "site-packages"
    for name in ("parakit.zip", "pure.zip"):
        with zipfile.ZipFile(tmp_path / name) as packed:
            packed.extractall(loaded)
    # The other archive holds msgspec for WebAssembly; the environment's build takes its place here.
    (loaded / "msgspec").symlink_to(Path(msgspec.__file__).parent, target_is_directory=True)
    question = [part for name, value in QUESTION.items() for part in (f"--{name}", value)]
    calls = (
        ("choices",),
        ("plan", question),
        ("plan", ["--gpus", "2", "--gpu", "h200"], json.dumps(CONFIG)),
        ("resize", question, json.dumps(SIZES | {"devices": 2, "tensor": 2})),
        ("draw", "gpt2-large", "vpp2dp2", "h200", "", "8", "128"),
    )
    # -I and -S leave out this folder, the environment's variables and all its packages.
    clean_python = (sys.executable, "-I", "-S", "-c", IN_THE_BROWSER)
    ended = subprocess.run(
        (*clean_python, str(loaded), json.dumps(calls)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    assert json.loads(answers[1]["out"]) == _command_line(question)
    assert answers == [json.loads(getattr(in_browser, name)(*options)) for name, *options in calls]


class _Page(SimpleHTTPRequestHandler):
    answered: threading.Event

    def do_GET(self) -> None:
        if self.path == "/answered":
            self.answered.set()
        elif self.path == "/wait":
            self.answered.wait(OF_A_RUN)
        if self.path in ("/answered", "/wait"):
            self.send_response(204)
            self.end_headers()
        elif self.path.partition("?")[0].endswith(".html"):
            self.answered.clear()
            name = self.path.partition("?")[0].lstrip("/")
            end = ANSWERED
            if name == CASES_PAGE:
                name, end = "planner.html", DRIVER.replace("CASES", json.dumps(CASES))
            text = Path(self.directory, name).read_text().replace("</html>", end)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("npm") is None:
        pytest.skip("no npm on PATH: the page's runtime was not fetched")
    folder = tmp_path_factory.mktemp("planner")
    write_planner_pages(folder)
    handler = type("Page", (_Page,), {"answered": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
@needs_chromium
def test_the_browser_shows_the_command_lines_ranking(address: str, tmp_path: Path) -> None:
    query = "&".join(f"{name}={value}" for name, value in QUESTION.items())
    picture = tmp_path / "planner.png"
    shown, console = chromium(
        *("--dump-dom", f"--screenshot={picture}", "--window-size=1400,1100"),
        f"{address}/planner.html?{query}",
    )
    assert console == []
    plan = _command_line([w for name, value in QUESTION.items() for w in (f"--{name}", value)])
    assert re.findall(r"<tr><td><code>([^<]+)</code>", shown) == [
        layout["strategy"] for layout in plan["ranked"]
    ]
    milliseconds = f"{1000 * plan['winner']['iteration_seconds']:.0f}"
    assert f'<td class="number">{milliseconds}' in shown
    assert f"<code>{plan['winner']['command']}</code>" in shown


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1400, 400])
def test_ten_cases_are_answered_like_the_command_on_a_desk_and_on_a_phone(
    address: str, width: int, tmp_path: Path
) -> None:
    shown, console = chromium(
        *("--dump-dom", f"--window-size={width},900"), f"{address}/{CASES_PAGE}?"
    )
    assert console == []
    text = shown.partition('<pre id="collected">')[2].partition("</pre>")[0]
    collected = json.loads(html.unescape(text))
    assert len(collected) == 10
    for question, page in zip(CASES, collected, strict=True):
        options = dict(question)
        if config := options.pop("config", ""):
            path = tmp_path / in_browser.OWN_MODEL
            path.parent.mkdir(exist_ok=True)
            path.write_text(config)
            options["model"] = str(path)
            assert "#config=%7B%22model_type" in page["link"]
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        ended = _run_plan(arguments)
        if ended.returncode:
            assert page["refusal"].strip() == ended.stderr.strip()
            assert page["ranked"] == []
            continue
        plan = json.loads(ended.stdout)
        assert page["ranked"] == [
            [layout["strategy"], f"{1000 * layout['iteration_seconds']:.0f}"]
            for layout in plan["ranked"]
        ]
        assert page["interval"] == " ".join(plan["advice"][1:3])
        wanted = ["strategy", "ms per iteration", "GiB"]
        assert [name for name in page["visible"] if name in wanted] == wanted
        assert (len(page["visible"]) == len(wanted)) == (width == 400)


@pytest.mark.slow
@needs_chromium
def test_the_browser_draws_what_python_draws(address: str) -> None:
    query = "model=gpt2-large&strategy=vpp2dp2&device=h200&micro_batch=8&global_batch=128"
    shown, console = chromium("--dump-dom", f"{address}/drawings.html?{query}")
    assert console == []
    spec = resolve_run("gpt2-large", "vpp2dp2", "h200", None, 8, 128)
    sent = re.findall(r'data-rank="(\d+)" data-sends="(\d+)"', draw_figure(spec, "drawn"))
    assert (
        re.findall(r'data-rank="(\d+)" data-sends="(\d+)"', shown.partition('id="drawn"')[2])
        == sent
    )


def _command_line(arguments: list[str]) -> dict[str, list[dict[str, object]]]:
    ended = _run_plan(arguments)
    ended.check_returncode()
    answer: dict[str, list[dict[str, object]]] = json.loads(ended.stdout)
    return answer


def _run_plan(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "parakit", "plan", *arguments, "--json")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

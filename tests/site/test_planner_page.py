"""The planner's page in a real browser: what it shows is what the command line answers."""

from __future__ import annotations

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


def test_the_page_offers_every_model_and_its_batch() -> None:
    models = json.loads(in_browser.choices())["models"]
    assert [model["name"] for model in models] == list(model_names())
    assert {"name": "gpt2-large", "global_batch": 32} in models


def test_plan_in_browser_answers_like_the_command_line() -> None:
    options = [word for name, value in QUESTION.items() for word in (f"--{name}", value)]
    answer = json.loads(in_browser.plan(options))
    assert answer["code"] == 0
    assert json.loads(answer["out"]) == _command_line(options)
    refused = json.loads(in_browser.plan(["--model", "gpt2-huge"]))
    assert refused["code"] == 2
    assert "There is no model 'gpt2-huge'" in refused["err"]


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
            text = Path(self.directory, name).read_text().replace("</html>", ANSWERED)
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
    command = (sys.executable, "-m", "parakit", "plan", *arguments, "--json")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer: dict[str, list[dict[str, object]]] = json.loads(ended.stdout)
    return answer

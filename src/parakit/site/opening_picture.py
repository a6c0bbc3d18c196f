"""Draw the animated picture that README begins with: a line is deleted in a Megatron fork, and verify finds it.

`python -m parakit.site.opening_picture RUN` takes the texts and the wrong modules from a run folder of
`make verify-…`, and stores them in `docs/first-wrong-tensor.json`. Without RUN it draws the stored run again. The
pictures are `docs/first-wrong-tensor.svg` and, for phones, `docs/first-wrong-tensor-narrow.svg`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.config.files import ROOT

RECORD = ROOT / "docs/first-wrong-tensor.json"
PICTURES = {"first-wrong-tensor.svg": 860, "first-wrong-tensor-narrow.svg": 400}
"""Width of each picture in pixels, by its name in `docs/`."""

DELETION = "sed -i 35d megatron/core/tensor_parallel/mappings.py"
"""The command that deletes the line, in the checkout of Megatron-LM."""
CHECKOUT = "~/Megatron-LM"

SECONDS = 15.0
"""Length of the animation, which is shown REPETITIONS times and then stays at its end."""
REPETITIONS = 3
DELETED_AT, STARTED_AT, COMPARED_AT, FOUND_AT = 0.0, 2.4, 5.2, 8.2
"""Seconds at which the commands, the comparison and the verdict begin."""
CELL_SECONDS = 0.06

MODULES = (
    ("embed", ("embedding.word_embeddings", "embedding.position_embeddings")),
    *(
        (
            f"layer {layer}",
            tuple(
                f"decoder.layers.{layer}.{module}"
                for module in (
                    "input_layernorm",
                    "self_attention.linear_qkv",
                    "self_attention.core_attention",
                    "self_attention.linear_proj",
                    "pre_mlp_layernorm",
                    "mlp.linear_fc1",
                    "mlp.linear_fc2",
                )
            ),
        )
        for layer in range(4)
    ),
    ("head", ("decoder.final_layernorm", "output_layer")),
)
"""The drawn modules of gpt2-tiny in the order of forward, by part of the model."""

STYLE = """
  .paper { fill: #f6f8fa; stroke: #d1d9e0 } .ink { fill: #1f2328 } .quiet { fill: #59636e }
  .right { fill: #0a5fb4 } .wrong { fill: #e5a06b } .first { fill: #c62828 } .said { fill: #c62828; font-weight: 600 }
  .ring { fill: none; stroke: #c62828; stroke-width: 2 }
  text { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
  .label { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .strong { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #151b23; stroke: #3d444d } .ink { fill: #e6edf3 } .quiet { fill: #9198a1 }
    .right { fill: #58a6ff } .wrong { fill: #a5673a } .first { fill: #ff6b62 } .said { fill: #ff7b72 }
    .ring { stroke: #ff6b62 }
  }
"""
"""Colours of pages, in a light and a dark scheme."""


@dataclass(frozen=True)
class RecordedFinding:
    """Texts and wrong modules of one run that the picture shows."""

    command: str
    """The verification, with the checkout written as in a home folder."""
    finding: str
    """The first wrong tensor and its kind."""
    changed: str
    """File and line that the fork changed."""
    worst: str
    compared: int
    wrong_modules: tuple[str, ...]
    """Drawn modules whose outputs are outside of their tolerance."""


def record_run(folder: Path) -> RecordedFinding:
    """Return the recording of a run folder of `make verify-…`.

    Raises:
        FileNotFoundError: The folder has no verdict, or no page of one.
    """
    (path,) = sorted(folder.glob("verify/*/verdict.json"))
    verdict = json.loads(path.read_text(encoding="utf-8"))
    page = path.with_name("verify.html").read_text(encoding="utf-8")
    command = re.sub(
        r"(make \S+) MEGATRON_LM=\S+", rf"MEGATRON_LM={CHECKOUT} \1", verdict["command"]
    )
    return RecordedFinding(
        command=command,
        finding=f"{verdict['stage']}, {verdict['module']}: {verdict['kind']}",
        changed=verdict["changed"][0],
        worst=verdict["worst"],
        compared=verdict["compared"],
        wrong_modules=tuple(
            module for _, part in MODULES for module in part if _is_wrong(page, module)
        ),
    )


def _is_wrong(page: str, module: str) -> bool:
    """Return True if the map of a verification's page shows outputs of the module outside of their tolerance.

    Colours `c4` and above are of errors that exceed the tolerance. A module's row has a cell for inputs, then one
    for what goes into the module, then one for its outputs. A module without a row is not wrong.
    """
    row = page.partition(f'title="{module}"')[2].partition("</tr>")[0]
    cells = re.findall(r"<td[^>]*>", row)
    if not cells:
        return False
    output_cell = cells[2]
    colour = re.search(r"\bc(\d)\b", output_cell)
    return colour is not None and int(colour[1]) >= 4


def load_recording(path: Path = RECORD) -> RecordedFinding:
    """Return the stored recording."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return RecordedFinding(**{**fields, "wrong_modules": tuple(fields["wrong_modules"])})


def draw_opening_picture(recording: RecordedFinding, width: int) -> str:
    """Return the animated picture as SVG text of a width in pixels.

    A viewer that does not animate shows the end, as does one whose user asks for little motion.
    """
    picture = _Picture(width)
    picture.write_line("# In a fork of Megatron-LM, one line is deleted.", "quiet", DELETED_AT)
    picture.write_command(DELETION, DELETED_AT)
    picture.y += 10
    picture.write_line("# Does TP 2 still compute what one rank computes?", "quiet", STARTED_AT)
    picture.write_command(recording.command, STARTED_AT + 0.3)
    picture.y += 12
    picture.write_line(
        f"{recording.compared:,} tensors of two CPU ranks, compared with one rank's; outputs in forward order:",
        "quiet label",
        COMPARED_AT,
    )
    picture.draw_modules(recording)
    picture.draw_legend(("first", "first wrong"), ("wrong", "wrong after it"), ("right", "right"))
    picture.write_line(
        "The first wrong tensor, and the line that the fork changed:", "quiet label", FOUND_AT
    )
    picture.write_line(recording.finding, "said", FOUND_AT)
    picture.write_line(f"you changed {recording.changed}", "said", FOUND_AT + 0.8)
    picture.write_line(recording.worst, "ink", FOUND_AT + 1.6)
    picture.write_line(
        "Line 35 is gone; git counts a deletion at the line before it.",
        "quiet label",
        FOUND_AT + 1.6,
    )
    return picture.to_svg()


class _Picture:
    """A terminal that is written from top to bottom. `y` is the baseline of the next line."""

    MARGIN, LINE = 20, 23
    CHARACTER = 9.1
    """Width of a character of 15 pixels, as browsers draw it at most."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.y = 36.0
        self._elements: list[str] = []
        self._keyframes: dict[int, str] = {}

    def write_command(self, text: str, seconds: float) -> None:
        """Write a command after a prompt."""
        self._write(f"$ {text}", "ink strong", seconds, indent="    ")

    def write_line(self, text: str, kind: str, seconds: float) -> None:
        """Write a text, which is wrapped at spaces and slashes, from a second of the animation on."""
        self._write(text, kind, seconds, indent="")

    def _write(self, text: str, kind: str, seconds: float, indent: str) -> None:
        columns = int((self.width - 2 * self.MARGIN) / self.CHARACTER)
        for line in wrap_text(text, columns, indent):
            self._elements.append(
                f'<text x="{self.MARGIN}" y="{self.y:g}" class="{kind} {self._shown_from(seconds)}">'
                f"{_escape(line)}</text>"
            )
            self.y += self.LINE

    def draw_modules(self, recording: RecordedFinding) -> None:
        """Draw a cell per module in forward order, and a ring around the first wrong one."""
        is_wide = self.width > 500
        gap = 3.0 if is_wide else 1.5
        part_gap = 3 * gap
        num_modules = sum(len(part) for _, part in MODULES)
        space = self.width - 2 * self.MARGIN - part_gap * (len(MODULES) - 1)
        step = space / num_modules
        x, top, height = float(self.MARGIN), self.y - 8, 30
        seconds = COMPARED_AT + 0.4
        for title, part in MODULES:
            label = title
            if not is_wide:  # There is room for the names of layers only.
                label = title.replace("layer ", "L") if title.startswith("layer") else ""
            if label:
                self._elements.append(
                    f'<text x="{x:.1f}" y="{top + height + 16:g}" class="quiet label '
                    f'{self._shown_from(COMPARED_AT)}">{label}</text>'
                )
            for module in part:
                kind = _choose_kind(module, recording)
                shown = self._shown_from(seconds)
                width = step - gap
                self._elements.append(
                    f'<rect x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{height}" rx="2" '
                    f'class="{kind} {shown}"><title>{module}</title></rect>'
                )
                if kind == "first":
                    self._elements.append(
                        f'<rect x="{x - 3:.1f}" y="{top - 3:g}" width="{width + 6:.1f}" '
                        f'height="{height + 6}" rx="4" class="ring {self._shown_from(FOUND_AT)}"/>'
                    )
                x += step
                seconds += CELL_SECONDS
            x += part_gap
        self.y = top + height + 40

    def draw_legend(self, *entries: tuple[str, str]) -> None:
        """Draw a line with a coloured square and a text per entry."""
        shown = self._shown_from(FOUND_AT)
        x = float(self.MARGIN)
        for kind, text in entries:
            self._elements.append(
                f'<rect x="{x:g}" y="{self.y - 10:g}" width="11" height="11" rx="2" class="{kind} {shown}"/>'
                f'<text x="{x + 17:g}" y="{self.y:g}" class="quiet label {shown}">{text}</text>'
            )
            x += 38 + 7 * len(text)
        self.y += 36

    def _shown_from(self, seconds: float) -> str:
        """Return the class of elements that are invisible until a second of the animation; empty at its start."""
        if seconds <= 0:
            return ""
        tenths = round(10 * seconds * 10)
        percent = 100 * seconds / SECONDS
        self._keyframes[tenths] = (
            f"@keyframes k{tenths} {{ 0%, {percent:.2f}% {{ opacity: 0 }} "
            f"{percent + 1:.2f}%, 100% {{ opacity: 1 }} }} "
            f".t{tenths} {{ animation: k{tenths} {SECONDS:g}s {REPETITIONS} }}"
        )
        return f"t{tenths}"

    def to_svg(self) -> str:
        """Return the picture as text."""
        height = self.y
        timing = "\n".join(f"    {self._keyframes[key]}" for key in sorted(self._keyframes))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}" '
            f'width="{self.width}" height="{height:g}" role="img">\n'
            "<title>A line is deleted in a fork of Megatron-LM, and verify names the first wrong tensor with file "
            "and line</title>\n"
            f"<style>{STYLE}  @media (prefers-reduced-motion: no-preference) {{\n{timing}\n  }}\n</style>\n"
            f'<rect x=".5" y=".5" width="{self.width - 1}" height="{height - 1:g}" rx="8" class="paper"/>\n'
            + "\n".join(self._elements)
            + "\n</svg>\n"
        )


def _choose_kind(module: str, recording: RecordedFinding) -> str:
    """Return the class of a module's cell: `right`, `wrong`, or `first` for the first wrong module."""
    if module not in recording.wrong_modules:
        return "right"
    return "first" if module == recording.wrong_modules[0] else "wrong"


def wrap_text(text: str, columns: int, indent: str = "") -> list[str]:
    """Return the lines of a text of at most `columns` characters, broken after spaces and slashes.

    Lines after the first begin with `indent`.
    """
    lines = [""]
    for piece in re.findall(r"[^ /]*[ /]?", text):
        if lines[-1].strip() and len(lines[-1]) + len(piece.rstrip()) > columns:
            lines.append(indent)
        lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()]


def _escape(text: str) -> str:
    """Return text with the characters that XML reserves as entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main(arguments: Sequence[str]) -> None:
    """Record the run that the first argument names, if there is one, and write the pictures."""
    if arguments:
        fields = record_run(Path(arguments[0])).__dict__
        RECORD.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    for name, width in PICTURES.items():
        RECORD.with_name(name).write_text(
            draw_opening_picture(load_recording(), width), encoding="utf-8"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

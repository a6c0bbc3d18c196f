"""Draw the decision list of the guide: six questions, and the strategy and the time that answer each.

`python -m parakit.site.decision_picture` writes `docs/which-parallelism.svg` and, for phones,
`docs/which-parallelism-narrow.svg`. Times are read from the sentences of `docs/guide.md`, so that page and picture
show the same numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

from parakit.config.files import ROOT
from parakit.site.opening_picture import wrap_text

GUIDE = ROOT / "docs/guide.md"
PICTURES = {"which-parallelism.svg": 860, "which-parallelism-narrow.svg": 400}
"""Width of each picture in pixels, by its name in `docs/`."""

STYLE = """
  .paper { fill: #ffffff; stroke: #d1d9e0 } .question { fill: #f6f8fa; stroke: #59636e }
  .answer { fill: #ddf0ff; stroke: #0a5fb4 } .arrow { stroke: #59636e; stroke-width: 1.5; fill: none }
  .head { fill: #59636e } .ink { fill: #1f2328 } .quiet { fill: #59636e } .code { fill: #0a4f96 }
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; white-space: pre }
  .strong { font-weight: 600 } .small { font-size: 13px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d } .question { fill: #151b23; stroke: #9198a1 }
    .answer { fill: #12263f; stroke: #58a6ff } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
    .ink { fill: #e6edf3 } .quiet { fill: #9198a1 } .code { fill: #79b8ff }
  }
"""
"""Colours in a light and a dark scheme."""


@dataclass(frozen=True)
class Answer:
    """An answer of the decision list."""

    condition: str
    """The answer to the question, such as `yes`; it labels the arrow."""
    strategy: str
    evidence: str
    """A measured time, or the beginning of the sentence in the guide that predicts it, up to its colon."""


QUESTIONS: tuple[tuple[str, tuple[Answer, ...]], ...] = (
    (
        "Does the model fit one device?",
        (
            Answer(
                "yes",
                "data parallelism: dpN",
                "measured: DP 2 takes 437 ms, one device alone 438 ms",
            ),
        ),
    ),
    (
        "Do the devices of one node hold it together?",
        (
            Answer(
                "yes",
                "ZeRO-2 if it fits: dpN-zero2; else TP 2 or PP 2",
                "gpt3-13b on 8 A100, 512 samples",
            ),
            Answer(
                "yes, but 1 or 2 samples per device",
                "TP with sequence parallelism: spN",
                "gpt3-13b on 8 H100, 8 samples",
            ),
        ),
    ),
    (
        "Which axis comes first across nodes?",
        (
            Answer(
                "always",
                "TP in the node, PP across nodes, DP over the rest",
                "gpt3-175b on 1,024 A100, 1,024 samples",
            ),
        ),
    ),
    (
        "Are the sequences long?",
        (
            Answer(
                "yes",
                "add context parallelism: cpN",
                "llama3-8b on 8 H100, 8 samples of 131,072 tokens",
            ),
        ),
    ),
    (
        "Is it a mixture of experts?",
        (Answer("yes", "add expert parallelism: epN", "mixtral-8x7b on 64 H100, 64 samples"),),
    ),
    (
        "Has the pipeline few micro batches?",
        (
            Answer(
                "yes",
                "more micro batches, or virtual stages",
                "measured: PP 2 with one micro batch takes 817 ms, DP 2 437 ms",
            ),
        ),
    ),
)
"""The questions in their order."""
NUM_SPLIT_QUESTIONS = 3
"""Number of the first questions, which choose a split. The others add to it."""


def read_evidence(answer: Answer, guide: str) -> str:
    """Return the evidence of an answer as the picture shows it.

    Raises:
        LookupError: The guide has no prediction for the case that the answer names.
    """
    if answer.evidence.startswith("measured"):
        return answer.evidence
    sentence = re.search(
        rf"{re.escape(answer.evidence)}: `(\S+)` takes ([\d.,]+) \[[^]]*\] (m?s); `(\S+)` takes ([\d.]+) times",
        " ".join(guide.split()),
    )
    if sentence is None:
        raise LookupError(f"docs/guide.md predicts nothing for '{answer.evidence}'.")
    best, seconds, unit, other, ratio = sentence.groups()
    return f"{answer.evidence}: {best} takes {seconds} {unit}, {other} {ratio} times as long"


def draw_decision_picture(guide: str, width: int) -> str:
    """Return the picture as SVG text of a width in pixels. `guide` is the text of the guide."""
    picture = _Picture(width)
    for number, (question, answers) in enumerate(QUESTIONS, 1):
        if number == 1:
            picture.write_heading("Choose a split:")
        if number == NUM_SPLIT_QUESTIONS + 1:
            picture.write_heading("Then add:")
        evidence = [(answer, read_evidence(answer, guide)) for answer in answers]
        next_label = "no" if number < NUM_SPLIT_QUESTIONS else "also"
        if number in (NUM_SPLIT_QUESTIONS, len(QUESTIONS)):
            next_label = ""
        picture.draw_question(f"{number}. {question}", evidence, next_label)
    return picture.to_svg()


class _Picture:
    """A column of questions with their answers beside them, or below them on a narrow picture."""

    MARGIN, LINE, PADDING, GAP = 16, 19, 10, 22
    CHARACTER, STRONG_CHARACTER = 7.4, 8.6
    """Widths of a character of 14 pixels on average, with a reserve."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.is_wide = width > 500
        self.y = 14.0
        self._elements: list[str] = []

    def write_heading(self, text: str) -> None:
        """Write a line above a group of questions."""
        self.y += 18
        self._write(text, self.MARGIN, self.y, "head strong")
        self.y += 12

    def draw_question(
        self, question: str, answers: list[tuple[Answer, str]], next_label: str
    ) -> None:
        """Draw a question, its answers with their evidence, and an arrow to the next question.

        `next_label` labels the arrow. If it is empty, there is no arrow.
        """
        question_width = 250 if self.is_wide else self.width - 2 * self.MARGIN
        top, question_left = self.y, float(self.MARGIN)
        height = self._draw_box(
            question_left, top, question_width, [(question, "ink strong")], "question"
        )
        answer_left = question_left + question_width + 96 if self.is_wide else question_left + 52
        answer_top = top if self.is_wide else top + height + self.GAP
        for answer, evidence in answers:
            answer_width = self.width - self.MARGIN - answer_left
            lines = [(answer.strategy, "code strong"), (evidence, "quiet small")]
            if answer.condition not in ("yes", "always"):
                lines.insert(0, (f"{answer.condition}:", "ink small"))
            elif answer.condition == "yes" and not self.is_wide:
                lines[0] = (f"yes: {answer.strategy}", "code strong")
            answer_height = self._draw_box(answer_left, answer_top, answer_width, lines, "answer")
            self._draw_branch(
                answer, question_left, top, height, question_width, answer_left, answer_top
            )
            answer_top += answer_height + self.GAP
        bottom = max(top + height + self.GAP, answer_top)
        if next_label:
            self._draw_arrow(question_left + 18, top + height, question_left + 18, bottom)
            self._write(next_label, question_left + 25, bottom - 5, "quiet small")
        self.y = bottom

    def _draw_branch(
        self,
        answer: Answer,
        question_left: float,
        top: float,
        height: float,
        question_width: float,
        answer_left: float,
        answer_top: float,
    ) -> None:
        """Draw the arrow from a question to one of its answers."""
        label = "yes" if answer.condition.startswith("yes") else ""
        y = answer_top + 18
        if self.is_wide:
            start, is_first = question_left + question_width, answer_top == top
            bend = f"M{start} {top + 18} H{start + 22} V{y} H{answer_left - 7}"
            self._elements.append(f'<path class="arrow" d="{bend}" marker-end="url(#tip)"/>')
            if label and is_first:
                self._write(label, start + 34, y - 6, "quiet small")
            return
        # The line that leads on to the next question runs at the left of this one.
        start = question_left + 34
        bend = f"M{start} {top + height} V{y} H{answer_left - 7}"
        self._elements.append(f'<path class="arrow" d="{bend}" marker-end="url(#tip)"/>')

    def _draw_arrow(self, x: float, y: float, end_x: float, end_y: float) -> None:
        self._elements.append(
            f'<path class="arrow" d="M{x} {y:g} L{end_x} {end_y - 7:g}" marker-end="url(#tip)"/>'
        )

    def _draw_box(
        self, x: float, y: float, width: float, texts: list[tuple[str, str]], kind: str
    ) -> float:
        """Draw a box with wrapped texts, each with its class; return the box's height."""
        lines = []
        for text, style in texts:
            character = self.STRONG_CHARACTER if "strong" in style else self.CHARACTER
            columns = int((width - 2 * self.PADDING) / character)
            lines += [(line, style) for line in wrap_text(text, columns)]
        height = len(lines) * self.LINE + 2 * self.PADDING - 4
        self._elements.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6"/>'
        )
        for index, (line, style) in enumerate(lines):
            self._write(line, x + self.PADDING, y + self.PADDING + 11 + index * self.LINE, style)
        return height

    def _write(self, text: str, x: float, y: float, style: str) -> None:
        self._elements.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def to_svg(self) -> str:
        """Return the picture as text."""
        height = self.y + 4
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:g}" '
            f'width="{self.width}" height="{height:g}" role="img">\n'
            "<title>Six questions that choose a parallelism, each with a strategy and a time</title>\n"
            f"<style>{STYLE}</style>\n<defs>{tip}</defs>\n"
            f'<rect x=".5" y=".5" width="{self.width - 1}" height="{height - 1:g}" rx="8" class="paper"/>\n'
            + "\n".join(self._elements)
            + "\n</svg>\n"
        )


def main() -> None:
    """Write both pictures into `docs/`."""
    guide = GUIDE.read_text(encoding="utf-8")
    for name, width in PICTURES.items():
        GUIDE.with_name(name).write_text(draw_decision_picture(guide, width), encoding="utf-8")


if __name__ == "__main__":
    main()

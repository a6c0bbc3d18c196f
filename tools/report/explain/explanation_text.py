"""An explanation as Markdown, and in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from tools.report.explain.explain_tables import Table
from tools.report.explain.explanation import Explanation
from tools.text.table import markdown_rows, markdown_text

NOTHING = (
    "No run here left a ledger (comm.json, memory.json, time.json), so there is nothing to explain: "
    "train with the ledger on, which is the default."
)


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Sentences first, then the tables they rest on."""
    if not explanation.topics and not explanation.tables:
        console.print(Text(NOTHING))
        return
    for topic in explanation.topics:
        console.print(Text(topic.question, style="bold"))
        for sentence in topic.sentences:
            console.print(Text(f"• {sentence}"))
        console.print()
    for found in explanation.tables:
        console.print(_rich(found))


def explanation_markdown(explanation: Explanation) -> str:
    """The same as a Markdown section; empty if there is nothing."""
    if not explanation.topics and not explanation.tables:
        return ""
    parts = ["## Explained"]
    for topic in explanation.topics:
        parts.append(f"### {topic.question}")
        parts.append("\n".join(f"- {markdown_text(sentence)}" for sentence in topic.sentences))
    for found in explanation.tables:
        parts += [f"### {found.title}", markdown_rows(found.header, found.lines)]
    return "\n\n".join(parts) + "\n"


def _rich(table: Table) -> RichTable:
    result = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in table.header:
        result.add_column(name, overflow="fold")
    for line in table.lines:
        result.add_row(*(Text(cell) for cell in line))
    return result

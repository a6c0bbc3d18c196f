"""The console of a command: texts are written in the caller's spelling, tables are not."""

import io

from rich.table import Table

from parakit.formatting.caller import spelled_for_caller
from parakit.formatting.console import CallerConsole


def test_texts_are_rewritten_for_the_caller_and_tables_are_not() -> None:
    table = Table("make")
    console = CallerConsole(file=io.StringIO(), width=40)
    with spelled_for_caller(lambda text: text.replace("make", "parakit")):
        console.print("make report")
        console.print(table)
    console.print("make report")
    printed = console.file.getvalue()  # type: ignore[attr-defined]  # It is the StringIO above.
    assert printed.startswith("parakit report\n")
    assert printed.endswith("make report\n")
    assert printed.count("parakit") == 1

"""`python -m tools.plan audit TABLE`: what a table of performance figures contradicts in itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tools.plan.audit.rules import Audit, audit
from tools.plan.audit.table import TableError, read_table
from tools.plan.parser import RequestError, RequestParser
from tools.spec.settings import program


def main(words: list[str]) -> int:
    """Run the command; 1 with findings, 2 and one sentence on stderr for what is no table."""
    try:
        options = command_line().parse_args(words)
        found = audit(read_table(options.table))
    except (TableError, RequestError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(found), indent=1) if options.json else _text(found, options.table))
    return 1 if found.findings else 0


def command_line() -> RequestParser:
    """The command line, for `--help` and completion."""
    parser = RequestParser(
        prog=program("tools.plan audit"),
        description="Check a table of performance figures (CSV or Markdown) by arithmetic.",
    )
    parser.add_argument("table", type=Path, help="a CSV or Markdown file")
    parser.add_argument("--json", action="store_true", help="1 prints JSON")
    return parser


def _text(found: Audit, path: Path) -> str:
    lines = [
        f"{path}:{item.line}: {item.row + ': ' if item.row else ''}{item.sentence}"
        for item in found.findings
    ]
    bad = len({item.line for item in found.findings})
    outcome = f"{bad:,} of them contradict themselves" if bad else "none contradicts itself"
    few = f"; {found.unchecked:,} state too little to be checked" if found.unchecked else ""
    lines.append(f"{found.rows:,} rows, {found.checks:,} checks: {outcome}{few}.")
    return "\n".join(lines)

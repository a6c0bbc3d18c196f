"""`python -m tools.plan audit TABLE`: what a table of performance figures contradicts in itself."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path

from tools.plan.audit.rules import Audit, audit
from tools.plan.audit.table import read_table


def audit_table(table: Path, json: bool) -> int:
    """Audit a table; 1 with findings.

    Raises:
        TableError: It is no table.
    """
    found = audit(read_table(table))
    print(dumps(asdict(found), indent=1) if json else _text(found, table))
    return 1 if found.findings else 0


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

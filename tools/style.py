"""Count what STYLE.md forbids and Python's syntax tree shows; fail when a count has risen.

Usage: python tools/style.py [--update] [PATH…]. Without paths it compares the counts of the repository with those
of tools/style_counts.json and prints the findings of a rule whose count rose. `--update` writes lower counts down.
With paths it lists the findings in those files and compares nothing.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ROOT / "tools/style_counts.json"
SHOWN = 20
"""Largest number of findings that are printed per rule."""

DOCSTRING, SHORT, PREPOSITION, PRONOUN, CLASS = (
    "docstring that starts without a verb or noun",
    "docstring of three words or fewer",
    "function named by a preposition",
    "pronoun as a variable",
    "class name in several files",
)
RULES = (DOCSTRING, SHORT, PREPOSITION, PRONOUN, CLASS)

_FIRST_WORDS = {
    *(
        "Of",
        "What",
        "That",
        "Those",
        "These",
        "Such",
        "As",
        "Where",
        "By",
        "With",
        "In",
        "On",
        "Its",
    ),
    *("Their", "Whether", "Which", "How", "Why", "From"),
}
_PRONOUNS = {
    *("found", "one", "each", "own", "given", "said", "words", "place", "what", "rest", "others"),
    *("theirs", "left", "most", "such"),
}
_PREPOSITION = re.compile(r"_?(of|by|in|with|from|as)_\w+$")


class StyleFinding(NamedTuple):
    """Line that breaks a rule."""

    rule: str
    file: str
    line: int
    text: str


def find_in_file(name: str, text: str) -> Iterator[StyleFinding]:
    """Yield the findings in one Python file.

    In tests, docstrings and function names are not checked.

    Args:
        name: Path of the file. A file below `tests/` is a test.
        text: Content of the file.
    """
    is_test = name.startswith("tests/")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if is_test:
                continue
            yield from _find_in_docstring(name, node)
            is_function = not isinstance(node, ast.ClassDef)
            if is_function and _PREPOSITION.match(node.name):
                yield StyleFinding(PREPOSITION, name, node.lineno, node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in _PRONOUNS:
                yield StyleFinding(PRONOUN, name, node.lineno, node.id)
        elif isinstance(node, ast.arg) and node.arg in _PRONOUNS:
            yield StyleFinding(PRONOUN, name, node.lineno, node.arg)


def _find_in_docstring(
    name: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> Iterator[StyleFinding]:
    """Yield a finding if a docstring starts with a forbidden word, or has at most three words.

    A missing docstring gives no finding.
    """
    docstring = (ast.get_docstring(node) or "").split()
    if not docstring:
        return
    line = node.body[0].lineno
    if docstring[0].strip("`,.:;") in _FIRST_WORDS or docstring[:2] == ["The", "same"]:
        yield StyleFinding(DOCSTRING, name, line, node.name)
    elif len(docstring) <= 3:
        yield StyleFinding(SHORT, name, line, node.name)


def find_shared_classes(texts: dict[str, str]) -> Iterator[StyleFinding]:
    """Yield a finding for each public class name that several files define. Tests are ignored.

    Args:
        texts: Text of each file by the file's name.
    """
    files_by_class: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        if name.startswith("tests/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_by_class[node.name].add(name)
    for class_name, files in sorted(files_by_class.items()):
        if len(files) > 1:
            yield StyleFinding(CLASS, ", ".join(sorted(files)), 0, class_name)


def read_sources(paths: Sequence[str] = ()) -> dict[str, str]:
    """Return the texts of the Python files under version control, by path.

    With `paths`, only files whose path begins with one of them are read. Patches in docs/ are left out, because they
    have the names of the functions that they replace.
    """
    command = ("git", "-C", str(ROOT), "ls-files", "*.py")
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    chosen = [name for name in names if not name.startswith("docs/")]
    if paths:
        chosen = [name for name in chosen if name.startswith(tuple(paths))]
    return {name: (ROOT / name).read_text() for name in chosen if (ROOT / name).is_file()}


def count_findings(findings: Sequence[StyleFinding]) -> dict[str, int]:
    """Return the number of findings by rule."""
    return {rule: sum(finding.rule == rule for finding in findings) for rule in RULES}


def main(arguments: Sequence[str]) -> int:
    """Print the findings of each rule whose count rose above the stored count, and return 1 if there is such a rule.

    With paths, all findings in these files are printed, and 0 is returned. With `--update`, lower counts are stored.
    """
    paths = [argument for argument in arguments if not argument.startswith("--")]
    texts = read_sources(paths)
    findings = [finding for name, text in texts.items() for finding in find_in_file(name, text)]
    findings += find_shared_classes(texts)
    if paths:
        for finding in findings:
            print(f"{finding.file}:{finding.line}: {finding.rule}: {finding.text}")
        return 0
    counts = count_findings(findings)
    limits = json.loads(COUNTS.read_text())
    risen_rules = [rule for rule in RULES if counts[rule] > limits[rule]]
    for rule in risen_rules:
        print(
            f"{counts[rule]} of: {rule}; at most {limits[rule]} are allowed (STYLE.md). Among them:"
        )
        findings_of_rule = [finding for finding in findings if finding.rule == rule]
        for finding in findings_of_rule[-SHOWN:]:
            print(f"  {finding.file}:{finding.line}: {finding.text}")
    if "--update" in arguments:
        lower = {rule: min(counts[rule], limits[rule]) for rule in RULES}
        COUNTS.write_text(json.dumps(lower, indent=2) + "\n")
    return 1 if risen_rules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

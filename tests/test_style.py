"""tools/style.py: the violations that it counts, and the stored counts."""

from __future__ import annotations

import json

import pytest

from tools import style


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('def f():\n    """Of a run, its name."""', style.DOCSTRING),
        ('def f():\n    """The same for GPUs, in bytes."""', style.DOCSTRING),
        ('class Run:\n    """A run."""', style.SHORT),
        ("def of_make(): ...", style.PREPOSITION),
        ("found = 1", style.PRONOUN),
        ("def f(given): ...", style.PRONOUN),
        ("runs = [one for one in names]", style.PRONOUN),
    ],
)
def test_violations_of_every_rule_are_counted(code: str, rule: str) -> None:
    assert [finding.rule for finding in style.find_in_file("src/a.py", code)] == [rule]


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the name of a run."""',
        "runs = [run for run in names]",
        "import one",
    ],
)
def test_code_that_follows_the_rules_has_no_violations(code: str) -> None:
    assert not list(style.find_in_file("src/a.py", code))


def test_duplicate_class_name_is_counted_except_in_tests() -> None:
    texts = {
        "src/a.py": "class Cell: ...",
        "src/b.py": "class Cell: ...",
        "tests/c.py": "class A: ...",
    }
    (finding,) = style.find_shared_classes(texts)
    assert (finding.file, finding.text) == ("src/a.py, src/b.py", "Cell")
    assert not list(
        style.find_shared_classes({"src/a.py": "class A: ...", **texts, "src/b.py": ""})
    )


def test_stored_counts_contain_every_rule() -> None:
    assert set(json.loads(style.COUNTS.read_text())) == set(style.RULES)

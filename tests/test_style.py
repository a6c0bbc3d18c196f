"""tools/style.py: what it finds, and that the written counts are not exceeded by its own rules."""

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
def test_code_that_breaks_a_rule_is_found(code: str, rule: str) -> None:
    assert [finding.rule for finding in style.find_in_file("src/a.py", code)] == [rule]


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the name of a run."""',
        "runs = [run for run in names]",
        "import one",
    ],
)
def test_code_that_keeps_the_rules_is_not_found(code: str) -> None:
    assert not list(style.find_in_file("src/a.py", code))


def test_a_class_name_in_two_files_is_found_and_one_of_a_test_is_not() -> None:
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


def test_the_written_counts_name_every_rule() -> None:
    assert set(json.loads(style.COUNTS.read_text())) == set(style.RULES)

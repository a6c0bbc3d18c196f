"""Variables of make in a text, written in another spelling."""

import pytest

from parakit.config.settings import SETTINGS, Setting
from parakit.config.spelling import rewrite_variables


def in_brackets(setting: Setting, value: str | None) -> str:
    return f"<{setting.name.lower()}>" if value is None else f"<{setting.name.lower()} {value}>"


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("GPUS=8 and MODEL=mine.args.", "<gpus 8> and <model mine.args>."),
        ("is DATA= right?", "is <data > right?"),
        ("compare A=0.18 with B=0.19", "compare <a 0.18> with <b 0.19>"),
        ("EXTRA has --lr abc", "<extra> has --lr abc"),
        ('WHAT_IF has "GPU=b200"', '<what_if> has "GPU=b200"'),
        ("A has no value", "A has no value"),
        ("the MODEL is large", "the MODEL is large"),
        ("NCCL_DEBUG=INFO shows it", "NCCL_DEBUG=INFO shows it"),
    ],
)
def test_variables_are_rewritten_and_other_words_stay(text: str, rewritten: str) -> None:
    assert rewrite_variables(text, SETTINGS, in_brackets) == rewritten

import sys

import pytest

from megatron_patches.entry import name_entry_in_errors
from parakit.logs.failures import _USAGE


def test_sentence_that_ends_an_entry_begins_with_its_file_name() -> None:
    with (
        pytest.raises(SystemExit) as ended,
        name_entry_in_errors("examples/gpt3/pretrain_native.py"),
    ):
        sys.exit("there is no such flag")
    assert ended.value.code == "pretrain_native.py: error: there is no such flag"
    assert _USAGE.search(str(ended.value.code))


def test_exit_with_a_number_is_unchanged() -> None:
    with pytest.raises(SystemExit) as ended, name_entry_in_errors("entry.py"):
        sys.exit(3)
    assert ended.value.code == 3

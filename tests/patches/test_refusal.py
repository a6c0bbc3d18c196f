import sys

import pytest

from megatron_patches.entry import name_entry_in_errors
from parakit.reporting.read.failures import _USAGE


def test_a_sentence_that_ends_an_entry_names_it_as_the_log_s_reader_looks_for_it() -> None:
    with (
        pytest.raises(SystemExit) as ended,
        name_entry_in_errors("examples/gpt3/pretrain_native.py"),
    ):
        sys.exit("there is no such flag")
    assert ended.value.code == "pretrain_native.py: error: there is no such flag"
    assert _USAGE.search(str(ended.value.code))


def test_an_exit_status_stays_what_it_is() -> None:
    with pytest.raises(SystemExit) as ended, name_entry_in_errors("entry.py"):
        sys.exit(3)
    assert ended.value.code == 3

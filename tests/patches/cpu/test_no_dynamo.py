"""That Megatron loads no compiler with it is seen in `tests/patches/fused/test_in_megatron.py`."""

from megatron_patches.cpu.no_dynamo import not_compiled


def test_a_function_stays_what_it_is_called_or_decorated() -> None:
    assert not_compiled(len) is len
    assert not_compiled(mode="max-autotune")(len) is len

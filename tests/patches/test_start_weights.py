from typing import Any

from megatron_patches import start_weights
from tools.spec import variables


def test_weights_are_copied_in_only_where_a_start_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv(variables.START_WEIGHTS, raising=False)
    assert not start_weights.PATCH.needed(None)  # type: ignore[arg-type]
    monkeypatch.setenv(variables.START_WEIGHTS, "runs/.start/x")
    assert start_weights.PATCH.needed(None)  # type: ignore[arg-type]

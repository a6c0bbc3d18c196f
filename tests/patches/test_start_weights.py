from typing import Any

from megatron_patches import start_weights


def test_weights_are_copied_in_only_where_a_start_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv(start_weights.VARIABLE, raising=False)
    assert not start_weights.PATCH.needed(None)  # type: ignore[arg-type]
    monkeypatch.setenv(start_weights.VARIABLE, "runs/.start/x")
    assert start_weights.PATCH.needed(None)  # type: ignore[arg-type]

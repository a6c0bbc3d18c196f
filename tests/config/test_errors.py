"""Errors about unknown names suggest few similar names, or say where all names are listed."""

import pytest

from parakit.config.errors import suggest_names
from parakit.config.hardware import UnknownHardwareError, device_by_key, load_hardware
from parakit.config.model import UnknownModelError, load_model, model_names
from parakit.config.strategy import EXAMPLE_STRATEGIES, StrategyError, parse_strategy


def test_at_most_three_similar_names_are_suggested() -> None:
    names = [f"model-{number}" for number in range(20)]
    assert suggest_names("model-x", names, "no list").count(" or ") == 2
    assert suggest_names("zzz", names, "'make list' shows all") == "'make list' shows all."


def test_an_unknown_model_without_similar_names_gets_the_list_and_not_all_names() -> None:
    with pytest.raises(UnknownModelError) as refusal:
        load_model("qqq")
    assert "'make list' shows all models" in str(refusal.value)
    assert not any(name in str(refusal.value) for name in model_names())


def test_an_unknown_strategy_gets_at_most_three_strategies() -> None:
    for text in ("xp2", "foo", "tpp2"):
        with pytest.raises(StrategyError) as refusal:
            parse_strategy(text, 2)
        named = str(refusal.value).replace("?", " ").replace(";", " ").split()
        assert sum(name in named for name in EXAMPLE_STRATEGIES) <= 3


def test_an_unknown_gpu_without_similar_names_gets_the_file_that_lists_all() -> None:
    with pytest.raises(UnknownHardwareError) as refusal:
        device_by_key("qqq")
    assert "src/parakit/config/hardware.yaml lists all" in str(refusal.value)
    assert not any(key in str(refusal.value).split() for key in load_hardware().devices)

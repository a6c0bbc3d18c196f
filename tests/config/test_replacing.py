import dataclasses
from dataclasses import dataclass
from functools import cached_property

import msgspec
import pytest

from parakit.config.replacing import replace


@dataclass(frozen=True)
class Pair:
    number: int
    letter: str = "b"

    @cached_property
    def text(self) -> str:
        return f"{self.number}{self.letter}"


@dataclass(frozen=True, slots=True)
class Slotted:
    number: int = 1


def test_replace_equals_dataclasses_replace() -> None:
    pair = Pair(1)
    assert replace(pair, number=2) == dataclasses.replace(pair, number=2) == Pair(2)
    assert replace(Slotted(), number=2) == Slotted(2)
    assert hash(replace(pair, letter="c")) == hash(Pair(1, "c"))


def test_cached_values_are_computed_again_after_replace() -> None:
    pair = Pair(1)
    assert pair.text == "1b"
    assert replace(pair, letter="c").text == "1c"


def test_default_missing_in_a_decoded_record_is_kept() -> None:
    decoded = msgspec.json.decode(b'{"number": 1}', type=Pair)
    assert replace(decoded, number=2) == Pair(2)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="Pair has no three"):
        replace(Pair(1), three=3)  # type: ignore[call-arg]

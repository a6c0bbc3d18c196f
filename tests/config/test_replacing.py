import dataclasses
from dataclasses import dataclass
from functools import cached_property

import msgspec
import pytest

from parakit.config.replacing import replace


@dataclass(frozen=True)
class Pair:
    one: int
    two: str = "b"

    @cached_property
    def text(self) -> str:
        return f"{self.one}{self.two}"


@dataclass(frozen=True, slots=True)
class Slotted:
    one: int = 1


def test_what_is_replaced_is_equal_to_what_dataclasses_make_of_it() -> None:
    pair = Pair(1)
    assert replace(pair, one=2) == dataclasses.replace(pair, one=2) == Pair(2)
    assert replace(Slotted(), one=2) == Slotted(2)
    assert hash(replace(pair, two="c")) == hash(Pair(1, "c"))


def test_what_was_computed_of_the_old_values_is_computed_anew() -> None:
    pair = Pair(1)
    assert pair.text == "1b"
    assert replace(pair, two="c").text == "1c"


def test_a_default_that_a_decoded_record_leaves_to_its_class_is_kept() -> None:
    decoded = msgspec.json.decode(b'{"one": 1}', type=Pair)
    assert replace(decoded, one=2) == Pair(2)


def test_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match="Pair has no three"):
        replace(Pair(1), three=3)  # type: ignore[call-arg]

import os
import signal
import weakref

import pytest

from parakit.launch.supervise.interruption import (
    STOP_SIGNALS,
    Interrupted,
    defer_stop_requests,
    interruptible,
    raise_if_stop_requested,
)


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_request_to_stop_is_heard_once(number: signal.Signals) -> None:
    with pytest.raises(Interrupted), interruptible():
        ask(number)
    with interruptible():
        raise_if_stop_requested()


def test_while_clearing_up_it_waits_for_the_end() -> None:
    done = []

    def clear_up() -> None:
        with interruptible(), defer_stop_requests():
            with defer_stop_requests():
                ask()
                done.append("inner")
            ask()  # Not heard any more.
            done.append("outer")

    with pytest.raises(Interrupted):
        clear_up()
    assert done == ["inner", "outer"]


def test_work_that_can_stop_asks_in_between_and_nothing_is_asked_twice() -> None:
    with interruptible(), defer_stop_requests():
        ask()
        with pytest.raises(Interrupted):
            raise_if_stop_requested()
    raise_if_stop_requested()


class Referent:
    """What a weak reference can point at."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_request_is_not_lost_where_python_drops_what_a_handler_raises() -> None:
    def wait_for_another_node() -> None:
        with interruptible():
            referent = Referent()
            reference = weakref.ref(referent, lambda _: ask())
            del referent
            assert reference() is None  # Nothing was raised out of the callback.
            raise_if_stop_requested()

    with pytest.raises(Interrupted):
        wait_for_another_node()
    raise_if_stop_requested()


def test_what_went_wrong_meanwhile_is_not_hidden() -> None:
    def fail() -> None:
        with interruptible(), defer_stop_requests():
            ask()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    raise_if_stop_requested()

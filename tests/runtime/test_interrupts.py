"""Signals that come while they are held."""

import os
import signal
import threading
from types import FrameType

import pytest

from m3_runtime.interrupts import hold_signals


def test_ctrl_c_waits_for_the_end_of_the_block():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with hold_signals() as held:
            assert not held.pending
            signal.raise_signal(signal.SIGINT)
            steps.append(held.pending)
        steps.append(None)
    assert steps == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_replaces_an_exception_of_the_block_and_keeps_it_as_context():
    with pytest.raises(KeyboardInterrupt) as caught, hold_signals():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_runs_at_once_and_changes_nothing():
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGHUP, note)
    try:
        with hold_signals() as held:
            os.kill(os.getpid(), signal.SIGHUP)
            assert seen == [signal.SIGHUP]
            assert not held.pending
        assert signal.getsignal(signal.SIGHUP) is note
    finally:
        signal.signal(signal.SIGHUP, before)


def test_blocks_nest():
    steps = []
    with pytest.raises(KeyboardInterrupt), hold_signals() as outer:
        with hold_signals():
            signal.raise_signal(signal.SIGINT)
        steps.append(outer.pending)
    assert steps == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone():
    entered = []

    def work() -> None:
        with hold_signals() as held:
            entered.append(held.pending)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [False]

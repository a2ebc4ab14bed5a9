"""A wish to end: what a signal does at each moment, and when it counts as a second one."""

import signal

import pytest

from clozelab.training import checkpoints
from clozelab.training.checkpoints import Stop, Terminated


class Clock:
    """Time that a test lets pass."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(checkpoints, "time", made)
    return made


def test_between_two_phases_it_ends_at_once(clock: Clock) -> None:
    with pytest.raises(Terminated, match="SIGTERM") as met:
        Stop().handle(signal.SIGTERM)
    assert met.value.number == signal.SIGTERM


def test_while_a_step_is_computed_it_waits(clock: Clock) -> None:
    stop = Stop()
    with stop.at_the_end_of_a_step():
        stop.handle(signal.SIGINT)
        assert stop.number == signal.SIGINT
    assert not stop.waits


def test_two_signals_of_one_wish_are_one(clock: Clock) -> None:
    """Slurm tells every process of a job, and the supervisor passes it on as well."""
    stop = Stop()
    with stop.at_the_end_of_a_step():
        stop.handle(signal.SIGTERM)
        clock.now += 1.9
        stop.handle(signal.SIGTERM)
        clock.now += 0.2
        with pytest.raises(Terminated):
            stop.handle(signal.SIGTERM)


def test_a_wish_that_was_heard_is_not_answered_twice_while_the_state_is_written(clock: Clock) -> None:
    stop = Stop()
    with stop.at_the_end_of_a_step():
        stop.handle(signal.SIGTERM)
    clock.now += 1.0
    stop.handle(signal.SIGTERM)  # out of the loop already
    assert stop.number == signal.SIGTERM

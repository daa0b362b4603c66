"""The answers of all processes are the same at each step, and they exchange them about once a second."""

import pytest

from canonlm.core import distributed
from canonlm.core.distributed import Votes


class Together:
    """A world of `size` processes on one clock."""

    def __init__(self, size, monkeypatch):
        self.size, self.now, self.exchanges, self.given = size, 0.0, 0, []
        monkeypatch.setattr(distributed.time, "monotonic", lambda: self.now)
        self.votes = [Votes(self, step=0) for _ in range(size)]

    def max(self, numbers):
        self.given.append(numbers)
        return [max(column) for column in zip(*self.given, strict=True)]

    def answers(self, step, wants):
        """Each process's answer at a step. `max` answers the first one before the others call it: so it knows what all
        want, and all have taken as long."""
        self.given = [[float(flag), 0.0] for flag in wants]
        answers = [vote.any(flag, step) for vote, flag in zip(self.votes, wants, strict=True)]
        self.exchanges += len(self.given) > self.size
        return answers


@pytest.mark.parametrize(("seconds", "exchanges"), [(0.001, 13), (0.1, 106), (3.0, 1000)])
def test_exchanges_by_the_length_of_steps(monkeypatch, seconds, exchanges):
    """1,000 steps: at most every hundredth, at least once a second, every one."""
    together = Together(3, monkeypatch)
    for step in range(1, 1001):
        together.now += seconds
        assert together.answers(step, [False] * 3) == [False] * 3
    assert together.exchanges == pytest.approx(exchanges, abs=3)


@pytest.mark.parametrize("seconds", [0.001, 0.1, 3.0])
def test_all_learn_of_it_at_one_step_within_a_second(monkeypatch, seconds):
    together, wants = Together(3, monkeypatch), [False] * 3
    for step in range(1, 400):
        together.now += seconds
        wants[1] = wants[1] or step >= 150
        if any(found := together.answers(step, wants)):
            break
    assert found == [True] * 3
    assert (step - 150) * seconds <= 1.0 + seconds


def test_a_single_process_does_not_wait(monkeypatch):
    alone = Together(1, monkeypatch)
    assert [alone.votes[0].any(flag, step) for step, flag in enumerate([False, True, False])] == [False, True, False]
    assert not alone.given

"""Measurements of time, with a clock that only the test moves."""

import contextlib
import itertools
import math

import pytest

from canonlm.train.clock import Clock

TOKENS = 100  # per step


def a_run(step_seconds, wait_seconds=0.0, **options):
    """A clock, `passes(seconds)`, and `steps(count)`, which makes at most that many steps: each waits, then works."""
    now = 1000.0

    def passes(seconds):
        nonlocal now
        now += seconds

    def source():
        for seconds in step_seconds:
            passes(wait_seconds)
            yield seconds

    def steps(count):
        for seconds in itertools.islice(waiting, count):
            passes(seconds)
            clock.tick()

    clock = Clock(TOKENS, now=lambda: now, **options)
    waiting = clock.waiting(source())
    return clock, passes, steps


def test_rows_have_the_recent_speed_and_the_result_the_overall_speed():
    """In a resumed run, too: its time continues, and its speed is measured again."""
    clock, _, steps = a_run([50.0, 9.0, 9.0, *[2.0] * 7, *[4.0] * 10], before_s=500.0)
    steps(10)
    assert clock.reading()["tokens_per_s"] == TOKENS / 2
    steps(10)
    reading, result = clock.reading(), clock.result()
    assert reading["tokens_per_s"] == TOKENS / 4
    assert result["tokens_per_s"] == TOKENS * 17 / (7 * 2 + 10 * 4)  # three steps warm up
    assert result["train_seconds"] == reading["elapsed_s"] == 500 + 68 + 14 + 40


def test_evaluations_and_checkpoints_count_as_time_but_not_speed():
    clock, passes, steps = a_run([2.0] * 20)
    steps(10)
    clock.reading()
    steps(3)
    with clock.paused():
        passes(500)
    steps(2)
    with contextlib.suppress(RuntimeError), clock.paused():
        passes(500)
        raise RuntimeError
    reading = clock.reading()
    assert reading["tokens_per_s"] == TOKENS / 2
    assert reading["elapsed_s"] == 1030


def test_no_speed_is_reported_during_warm_up():
    clock, _, steps = a_run([2.0] * 3, 1.0, flops_per_token=1.0, peak_flops=1.0)
    for _ in range(3):
        steps(1)
        reading = clock.reading()
        elapsed = reading.pop("elapsed_s")
        assert set(reading.values()) == {None}
    assert elapsed == 9.0
    assert clock.result() == {"tokens_per_s": None, "train_seconds": 9.0}


@pytest.mark.parametrize("every", [1, 2, 5, 12])
def test_the_result_does_not_depend_on_the_row_interval(every):
    clock, _, steps = a_run([7.0, 7.0, 7.0, *range(1, 10)], 0.5)
    for _ in range(0, 12, every):
        steps(every)
        clock.reading()
    assert clock.result()["tokens_per_s"] == pytest.approx(TOKENS * 9 / (45 + 9 * 0.5))


def test_waiting_for_data():
    clock, _, steps = a_run([3.0] * 8, wait_seconds=1.0)
    steps(4)
    clock.reading()
    steps(99)  # it ends with its source
    reading = clock.reading()
    assert reading["data_wait_s"] == 4.0
    assert reading["data_wait_share"] == 0.25


def test_mfu():
    clock, _, steps = a_run([2.0] * 5, flops_per_token=6e9, peak_flops=2e11, devices=8)
    steps(5)
    assert math.isclose(clock.reading()["mfu"], 50 * 6e9 / (8 * 2e11))
    for unknown in ({"flops_per_token": 6e9}, {"peak_flops": 2e11}):
        clock, _, steps = a_run([2.0] * 5, **unknown)
        steps(5)
        assert clock.reading()["mfu"] is None

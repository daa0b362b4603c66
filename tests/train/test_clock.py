"""Measurements of time, with a clock that only the test moves."""

import contextlib
import math

import pytest

from canonlm.train.clock import Clock

TOKENS = 100  # per step


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def a_run(time, clock, step_seconds, wait_seconds=0.0):
    """One step per entry: wait, then work."""

    def source():
        for seconds in step_seconds:
            time.passes(wait_seconds)
            yield seconds

    for seconds in clock.waiting(source()):
        time.passes(seconds)
        clock.tick()
        yield


def steps(run, count):
    for _ in range(count):
        next(run)


def test_rows_have_the_recent_speed_and_the_result_the_overall_speed():
    clock = Clock(TOKENS, now=(time := Time()))
    run = a_run(time, clock, [50.0, 9.0, 9.0, *[2.0] * 7, *[4.0] * 10])
    steps(run, 10)
    assert clock.reading()["tokens_per_s"] == TOKENS / 2
    steps(run, 10)
    assert clock.reading()["tokens_per_s"] == TOKENS / 4
    result = clock.result()
    assert result["tokens_per_s"] == TOKENS * 17 / (7 * 2 + 10 * 4)  # three steps warm up
    assert result["train_seconds"] == 68 + 14 + 40


def test_evaluations_and_checkpoints_count_as_time_but_not_speed():
    clock = Clock(TOKENS, now=(time := Time()))
    run = a_run(time, clock, [2.0] * 20)
    steps(run, 10)
    clock.reading()
    steps(run, 3)
    with clock.paused():
        time.passes(500)
    steps(run, 2)
    with contextlib.suppress(RuntimeError), clock.paused():
        time.passes(500)
        raise RuntimeError
    reading = clock.reading()
    assert reading["tokens_per_s"] == TOKENS / 2
    assert reading["elapsed_s"] == 1030


def test_no_speed_is_reported_during_warm_up():
    clock = Clock(TOKENS, now=(time := Time()), flops_per_token=1.0, peak_flops=1.0)
    for _ in zip(range(3), a_run(time, clock, [2.0] * 3, 1.0), strict=True):
        reading = clock.reading()
        elapsed = reading.pop("elapsed_s")
        assert set(reading.values()) == {None}
    assert elapsed == 9.0
    assert clock.result() == {"tokens_per_s": None, "train_seconds": 9.0}


@pytest.mark.parametrize("every", [1, 2, 5, 12])
def test_the_result_does_not_depend_on_the_row_interval(every):
    clock = Clock(TOKENS, now=(time := Time()))
    for step, _ in enumerate(a_run(time, clock, [7.0, 7.0, 7.0, *range(1, 10)], 0.5), 1):
        if step % every == 0 or step == 12:
            clock.reading()
    assert clock.result()["tokens_per_s"] == pytest.approx(TOKENS * 9 / (45 + 9 * 0.5))


def test_waiting_for_data():
    clock = Clock(TOKENS, now=(time := Time()))
    run = a_run(time, clock, [3.0] * 8, wait_seconds=1.0)
    steps(run, 4)
    clock.reading()
    steps(run, 4)
    reading = clock.reading()
    assert reading["data_wait_s"] == 4.0
    assert reading["data_wait_share"] == 0.25
    assert list(run) == []  # it ends with its source


def test_mfu():
    clock = Clock(TOKENS, now=(time := Time()), flops_per_token=6e9, peak_flops=2e11, devices=8)
    steps(a_run(time, clock, [2.0] * 5), 5)
    assert math.isclose(clock.reading()["mfu"], 50 * 6e9 / (8 * 2e11))
    for unknown in ({"flops_per_token": 6e9}, {"peak_flops": 2e11}):
        clock = Clock(TOKENS, now=(time := Time()), **unknown)
        steps(a_run(time, clock, [2.0] * 5), 5)
        assert clock.reading()["mfu"] is None


def test_a_resumed_run_continues_its_count():
    clock = Clock(TOKENS, now=(time := Time()), before_s=500.0)
    steps(a_run(time, clock, [2.0] * 5), 5)
    assert clock.reading()["elapsed_s"] == 510
    assert clock.result() == {"tokens_per_s": TOKENS / 2, "train_seconds": 510}

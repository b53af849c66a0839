"""Times of functions: what is dropped and why, what is compared, how much memory; the clock is replaced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.tuning import measure

GIB = 1 << 30


def make(key, integers):
    if integers:
        return [jax.random.randint(key, (16, 16), -2, 3).astype(jnp.float32) for _ in range(2)]
    return [jax.random.normal(key, (16, 16)) for _ in range(2)]


INPUTS = measure.Inputs(make, l2_bytes=1 << 12)


def right(a, b):
    return [a @ b]


def wrong_in_one_element(a, b):
    return [(a @ b).at[3, 5].add(1.0)]


def failing_to_trace(a, b):
    raise ValueError("no\nkernel")


def slow(a, b):
    return [jnp.einsum("ij,jk->ik", a, b)]


class Clock:
    """A clock by which every program takes as long as its turn says: the first 1 us, the second 2 us, and so on."""

    def __init__(self, monkeypatch, microseconds):
        self.now, self.microseconds = 0.0, microseconds
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        compiled = measure._compiled

        def programs(functions, chosen):
            return {name: self.wrap(name, program) for name, program in compiled(functions, chosen).items()}

        monkeypatch.setattr(measure, "_compiled", programs)

    def wrap(self, name, program):
        if isinstance(program, Exception):
            return program

        def timed(sets):
            self.now += 1e-6 * self.microseconds[name] * len(sets)
            return program(sets)

        return timed


def test_times_and_reasons(monkeypatch):
    Clock(monkeypatch, {"fast": 3.0, "slow": 5.0, "wrong": 1.0})
    functions = {"fast": right, "slow": slow, "wrong": wrong_in_one_element, "none": failing_to_trace}
    found = measure.times(functions, INPUTS, right, measure.equal)
    assert found.us == {"fast": pytest.approx(3.0), "slow": pytest.approx(5.0)}
    assert found.dropped == {"wrong": "ArithmeticError: its result is wrong", "none": "ValueError: no kernel"}


def test_what_is_trusted_is_not_dropped(monkeypatch):
    Clock(monkeypatch, {"right": 3.0, "trusted": 1.0})
    functions = {"right": right, "trusted": wrong_in_one_element}
    found = measure.times(functions, INPUTS, right, measure.equal, trusted=("trusted",))
    assert (set(found.us), found.dropped) == ({"right", "trusted"}, {})


def test_last_rounds_are_of_the_fastest_and_of_those_kept(monkeypatch):
    names = {f"f{i}": 1.0 + i for i in range(8)}
    Clock(monkeypatch, names)
    functions = {name: (lambda a, b: [a @ b]) for name in names}
    found = measure.times(functions, INPUTS, right, measure.equal, keep=["f7", "absent"])
    assert set(found.us) == {"f0", "f1", "f2", "f3", "f7"}
    assert min(found.us, key=found.us.__getitem__) == "f0"


@pytest.mark.parametrize(("seconds", "finalists", "windows"), [(np.inf, measure.FINALISTS, measure.WINDOWS), (1, 2, 1)])
def test_long_calls_are_timed_in_windows(monkeypatch, seconds, finalists, windows):
    microseconds = {f"f{i}": 500.0 + i for i in range(6)}
    clock, runs = Clock(monkeypatch, microseconds), []
    wrap = clock.wrap
    monkeypatch.setattr(clock, "wrap", lambda name, f: lambda sets: (runs.append(name), wrap(name, f)(sets))[1])
    found = measure.times(dict.fromkeys(microseconds, right), INPUTS, right, measure.equal, ["f5"], seconds=seconds)
    last = {f"f{i}" for i in (*range(finalists), 5)}
    assert found.us == {name: pytest.approx(microseconds[name]) for name in last}
    for name, us in microseconds.items():
        held_s = runs.count(name) * us * measure.MOST_CALLS / 1e6
        assert (held_s >= windows * measure.WINDOW_SECONDS) == (name in last)


def test_a_program_that_fails_later_is_dropped(monkeypatch):
    Clock(monkeypatch, {"a": 1.0, "b": 2.0})
    compiled, calls = measure._compiled, []

    def breaking(functions, chosen):
        programs = compiled(functions, chosen)
        inner = programs["a"]

        def program(sets):
            calls.append(1)
            if len(calls) > 2 + measure.FIRST_ROUNDS:
                raise RuntimeError("launch failed")
            return inner(sets)

        return {**programs, "a": program}

    monkeypatch.setattr(measure, "_compiled", breaking)
    monkeypatch.setattr(measure, "MOST_RUNS", 1)
    found = measure.times({"a": right, "b": right}, INPUTS, right, measure.equal)
    assert set(found.us) == {"b"}
    assert found.dropped == {"a": "RuntimeError: launch failed"}


def test_calls_are_not_merged():
    """Each call of a program stays one, though several have the same inputs."""
    chosen = [make(jax.random.key(0), False)] * 4
    (program,) = measure._compiled({"f": right}, chosen).values()
    assert program.as_text().count(" dot(") == 4


@pytest.mark.parametrize(
    ("in_bytes", "out_bytes", "free", "expected"),
    [
        (1 << 10, 1 << 10, 8 * GIB, (32, 32)),  # tiny: as many sets as there are calls
        (60 << 20, 32 << 20, 80 * GIB, (3, 30)),  # three sets pass twice the L2, ten rotations
        (1 << 30, 1 << 30, 8 * GIB, (2, 2)),
        (6 << 30, 1 << 20, 8 * GIB, (1, 32)),  # one set is over the quarter: what is not there cannot be rotated
        (1 << 20, 6 << 30, 8 * GIB, (1, 1)),
        (0, 0, GIB, (32, 32)),
    ],
)
def test_memory_bounds_sets_and_calls(in_bytes, out_bytes, free, expected):
    assert measure._counts(in_bytes, out_bytes, measure.Inputs(make, 50 << 20), free) == expected


def test_slow_calls_make_short_programs():
    assert [measure.enough_calls(us) for us in (0.0, 1.0, 1000.0, 4000.0, 1e9)] == [32, 32, 10, 3, 1]
    assert measure._counts(60 << 20, 1, measure.Inputs(make, 50 << 20, calls=1), 80 * GIB) == (3, 3)
    assert measure._counts(60 << 20, 1, measure.Inputs(make, 50 << 20, calls=10), 80 * GIB) == (3, 9)


def test_runs_are_bound_by_time_and_memory(monkeypatch):
    monkeypatch.setattr(measure, "_free_bytes", lambda: 8 * GIB)
    assert measure._runs(seconds=1.0, out_bytes=1) == 1
    assert measure._runs(seconds=1e-6, out_bytes=1) == measure.MOST_RUNS
    assert measure._runs(seconds=measure.SAMPLE_SECONDS / 3.5, out_bytes=1) == 4
    assert measure._runs(seconds=1e-6, out_bytes=2 * GIB) == 2


@pytest.mark.parametrize(
    ("got", "expected", "right", "verdict"),
    [
        ([1.0, 2.0], [1.0, 2.0], measure.equal, True),
        ([1.0, 2.0], [1.0, 2.0001], measure.equal, False),
        ([100.0, 200.0], [100.0, 200.1], measure.close, True),  # a rounding of 16 bits
        ([100.0, 200.0], [100.0, 216.0], measure.close, False),
        ([np.nan, np.inf], [np.nan, np.inf], measure.equal, True),
        ([np.nan, np.inf], [np.nan, np.inf], measure.close, True),
        ([np.nan, 1.0], [1.0, 1.0], measure.close, False),
        ([np.inf, 1.0], [1.0, 1.0], measure.close, False),
        ([100.0, 1.0], [100.0, 5.0], measure.near, True),  # 4 of a norm of 100
        ([100.0, 1.0], [100.0, 7.0], measure.near, False),
        ([np.nan, 1.0], [1.0, 1.0], measure.near, False),
        ([0.0, 0.0], [0.0, 0.0], measure.near, True),
        ([1.0, 1.0], [np.inf, 1.0], measure.close, False),
    ],
)
def test_what_is_right(got, expected, right, verdict):
    assert bool(right([jnp.array(got)], [jnp.array(expected)])) == verdict


def test_integers_that_are_close_are_equal():
    assert not measure.close([jnp.array([1000, 7])], [jnp.array([1001, 7])])


@pytest.mark.parametrize("right", [measure.equal, measure.close, measure.near])
def test_every_result_is_looked_at(right):
    one, two = jnp.ones(4), jnp.full(4, 2.0)
    assert not right([one, two], [one, one])

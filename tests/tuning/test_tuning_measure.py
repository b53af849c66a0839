"""Times of functions: what is dropped and why, what is compared, how much memory; the clock is replaced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutjax.tuning import measure

GIB = 1 << 30


def make(seed, integers):
    return [measure.random_array(seed + np.uint32(i), (16, 16), np.dtype(np.float32), integers) for i in range(2)]


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
    """A device's clock by which a call of each program takes as long as it is told, in so many kernels."""

    def __init__(self, monkeypatch, us, kernels=1):
        self.calls, self.us, self.kernels = [], list(us), kernels
        monkeypatch.setattr(measure.clock, "spans", self.spans)
        compiled = measure._compiled

        def watched(jitted, arguments, options):
            program = compiled(jitted, arguments, options)
            number = getattr(jitted, "__name__", "").removeprefix("cutjax_timed_")
            if isinstance(program, Exception) or not number.isdecimal():
                return program
            return lambda *args: (self.calls.append(int(number)), program(*args))[1]

        monkeypatch.setattr(measure, "_compiled", watched)

    def spans(self, run):
        before = len(self.calls)
        run()
        found = {}
        for i in self.calls[before:]:
            found.setdefault(measure._program(i), []).extend([self.us[i] / self.kernels] * self.kernels)
        return found


@pytest.mark.parametrize("kernels", [1, 3])
def test_times_and_reasons(monkeypatch, kernels):
    functions = {"fast": right, "slow": slow, "wrong": wrong_in_one_element, "none": failing_to_trace}
    Clock(monkeypatch, (3.0, 5.0, 1.0, 1.0), kernels)
    found = measure.times(functions, INPUTS, right, measure.equal)
    assert found.us == {"fast": pytest.approx(3.0), "slow": pytest.approx(5.0)}
    assert found.dropped == {"wrong": "ArithmeticError: its result is wrong", "none": "ValueError: no kernel"}
    assert found.clock == "device"


def test_what_is_trusted_is_not_dropped(monkeypatch):
    Clock(monkeypatch, (3.0, 1.0))
    functions = {"right": right, "trusted": wrong_in_one_element}
    found = measure.times(functions, INPUTS, right, measure.equal, trusted=("trusted",))
    assert (set(found.us), found.dropped) == ({"right", "trusted"}, {})


def test_last_rounds_are_of_the_fastest_and_of_those_kept(monkeypatch):
    Clock(monkeypatch, range(1, 9))
    functions = {f"f{i}": right for i in range(8)}
    found = measure.times(functions, INPUTS, right, measure.equal, keep=["f7", "absent"])
    assert set(found.us) == {"f0", "f1", "f2", "f3", "f7"}
    assert min(found.us, key=found.us.__getitem__) == "f0"


@pytest.mark.parametrize(("seconds", "finalists"), [(np.inf, measure.FINALISTS), (1, measure.FEW)])
def test_long_calls_are_timed_in_windows(monkeypatch, seconds, finalists):
    clock = Clock(monkeypatch, [500.0 + i for i in range(6)])
    functions = {f"f{i}": right for i in range(6)}
    found = measure.times(functions, INPUTS, right, measure.equal, ["f5"], seconds=seconds)
    last = {*range(finalists), 5}
    assert found.us == {f"f{i}": pytest.approx(500.0 + i) for i in last}
    for i in range(6):
        held_s = clock.calls.count(i) * (500.0 + i) / 1e6
        assert (held_s >= 2 * measure.WINDOW_SECONDS) == (i in last)


@pytest.mark.parametrize("seconds", [np.inf, 0.2])
@pytest.mark.parametrize("trusted", ["f0", "f1"])
def test_where_time_is_short_long_calls_that_xla_leads_have_no_windows(monkeypatch, trusted, seconds):
    clock = Clock(monkeypatch, [500.0, 510.0])
    found = measure.times({"f0": right, "f1": right}, INPUTS, right, measure.equal, trusted=(trusted,), seconds=seconds)
    assert found.us == {"f0": 500.0, "f1": 510.0}
    assert (len(clock.calls) < 10) == (trusted == "f0" and seconds < np.inf)


@pytest.mark.parametrize("us", [5.0, 150.0, 20_000.0])
def test_the_device_is_held_for_so_many_seconds(monkeypatch, us):
    """And for six calls of each function at most beside it."""
    clock = Clock(monkeypatch, [us] * 4)
    measure.times({f"f{i}": right for i in range(4)}, INPUTS, right, measure.equal, seconds=0.2)
    assert len(clock.calls) * us / 1e6 <= 0.2 + 6 * 4 * us / 1e6


def test_first_halves_of_windows_do_not_count_nor_a_cool_card(monkeypatch):
    """What is called in the first 0.07 s is three times as fast, and the first call after another function's too."""
    clock = Clock(monkeypatch, (200.0, 210.0))

    def spans(run):
        before = len(clock.calls)
        run()
        found, at, last = {}, 0.0, None
        for i in clock.calls[before:]:
            cool = at < 0.07 or i != last
            found.setdefault(measure._program(i), []).append(clock.us[i] / (3 if cool else 1))
            at, last = at + clock.us[i] / 1e6, i
        return found

    monkeypatch.setattr(measure.clock, "spans", spans)
    monkeypatch.setattr(measure, "LONG_US", 50.0)
    found = measure.times({"f": right, "g": right}, INPUTS, right, measure.equal, seconds=0.2)
    assert found.us == {"f": 200.0, "g": 210.0}


def test_a_program_that_fails_later_is_dropped(monkeypatch):
    Clock(monkeypatch, (1.0, 2.0))
    compiled, calls = measure._compiled, []

    def breaking(jitted, arguments, options):
        inner = compiled(jitted, arguments, options)

        def program(*args):
            calls.append(1)
            if len(calls) > 2 + measure.FIRST_ROUNDS:
                raise RuntimeError("launch failed")
            return inner(*args)

        return program if getattr(jitted, "__name__", "") == "cutjax_timed_0" else inner

    monkeypatch.setattr(measure, "_compiled", breaking)
    found = measure.times({"a": right, "b": right}, INPUTS, right, measure.equal)
    assert set(found.us) == {"b"}
    assert found.dropped == {"a": "RuntimeError: launch failed"}


def test_without_a_trace_long_calls_are_timed_by_the_hosts_clock(monkeypatch):
    """And short ones not at all: what it takes to launch them would choose."""
    functions = {"f": right, "g": slow}
    monkeypatch.setattr(measure, "HOST_US", 0.0)
    found = measure.times(functions, INPUTS, right, measure.equal)
    assert found.clock == "host"
    assert set(found.us) == {"f", "g"}
    assert min(found.us.values()) > 0
    monkeypatch.setattr(measure, "HOST_US", 1e9)
    found = measure.times(functions, INPUTS, right, measure.equal)
    assert (found.us, set(found.dropped)) == ({}, {"f", "g"})
    assert "too short for the host's clock" in found.dropped["f"]


def test_where_the_trace_missed_a_kernel_a_mean_is_left():
    assert measure._sums([1.0, 2.0, 3.0, 4.0], 2) == [3.0, 7.0]
    assert measure._sums([1.0, 2.0, 3.0], 2) == [3.0]


def test_a_program_has_the_name_by_which_a_trace_is_read():
    arguments = make(np.uint32(0), False)
    program = measure._compiled(measure._named(right, 7), arguments, measure._TIMED)
    assert program.as_text().startswith(f"HloModule {measure._program(7)},")
    assert not isinstance(measure._compiled(jax.jit(right), arguments, measure._CHECK), Exception)


@pytest.mark.parametrize(
    ("in_bytes", "free", "expected"),
    [
        (1 << 10, 8 * GIB, 32),  # tiny: as many as there may be
        (60 << 20, 80 * GIB, 3),  # three sets pass twice the L2
        (1 << 30, 8 * GIB, 2),
        (6 << 30, 8 * GIB, 1),  # one set is over the quarter: what is not there cannot be rotated
        (0, GIB, 32),
    ],
)
def test_memory_bounds_sets(in_bytes, free, expected):
    assert measure._sets(in_bytes, 50 << 20, free) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64", "float8_e4m3fn"])
def test_random_numbers(dtype):
    """Nearly normal ones, and small integers; others of another seed."""
    with jax.enable_x64(dtype == "float64"):
        x, other, small = (
            np.asarray(measure.random_array(np.uint32(seed), (300, 500), jnp.dtype(dtype), integers)).astype(complex)
            for seed, integers in ((1, False), (2, False), (1, True))
        )
    assert abs(x.mean()) < 0.02
    assert x.std() == pytest.approx(2**0.5 if dtype.startswith("complex") else 1, abs=0.02)
    assert 3 < np.abs(x).max() < 6
    assert (abs(x.real) < 1).mean() == pytest.approx(0.68, abs=0.05)
    assert abs((x * other).mean()) < 0.02
    assert abs((x[1:] * x[:-1]).mean()) < 0.02
    assert set(np.unique(small)) == {-2, -1, 0, 1, 2}
    assert np.std(small) == pytest.approx(2**0.5, abs=0.02)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("int8", range(4)), ("uint32", range(4)), ("bool", range(2)), ("float8_e8m0fnu", (0.25, 0.5, 1, 2, 4))],
)
def test_random_integers(dtype, values):
    x = measure.random_array(np.uint32(1), (300, 500), jnp.dtype(dtype), False)
    assert x.dtype == dtype
    assert set(np.unique(np.asarray(x).astype(float))) == set(values)


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

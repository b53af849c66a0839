"""The choice of a kernel: a pinned one, a measured one, the predicted fastest, or XLA.

Everything here is arithmetic on frozen dataclasses: no GPU, no compiler, no JAX tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from cutjax import dot_precision
from cutjax.dot_precision import Canonical
from cutjax.kernels import convolution, gather, tuned, xla
from cutjax.kernels.families import concerned, config_of, fastest, ranked, resolve
from cutjax.kernels.family import Kernel
from cutjax.kernels.prepared import applied, converted_us, moved_us, passing_us, wide, widened
from cutjax.kernels.problem import Problem
from cutjax.kernels.sums import alone, summands
from cutjax.runtime import choice
from cutjax.runtime.launch import Call

# How many times as fast as XLA's product a kernel must be predicted to be, to run under "auto"; measured ones must lead
# by as much. Of 374 products that the model was not fitted to, kernels run in 72, of which none is under 0.98 of XLA,
# at a mean of 1.056; at 1 / 1.03, before, 104, 11 and 1.063. Of 304 of attention, in batches, none of 31 is.
LEAD = tuned.SURE


@dataclasses.dataclass(frozen=True)
class Choice(choice.Choice[Problem, Kernel]):
    """The kernel of a product, or XLA, and why.

    Attributes:
      xla_us: predicted time of XLA's own product in microseconds; None where nobody asked, or none is known.
      of_matrices: whether the operation's arrays are matrices of other shapes, in the same order, to the kernel.
    """

    xla_us: float | None = None
    of_matrices: bool = False

    @property
    def config(self) -> Any:
        """Config of the kernel; None when XLA runs."""
        return None if self.resolved is None else self.resolved.config

    def call(self) -> Call:
        """Returns the compiled kernel and the plan of its launch.

        Raises:
          ValueError: XLA runs.
        """
        call = super().call()
        if not self.of_matrices or (call.prepare is None and call.finish is None):
            return call
        prepare, finish, as_matrices = call.prepare, call.finish, functools.partial(convolution.as_read, self.problem)
        return dataclasses.replace(
            call,
            prepare=lambda xs: as_matrices(xs) if prepare is None else prepare(as_matrices(xs)),
            finish=finish and (lambda written, xs: finish(written, as_matrices(xs))),
        )


def reasons(config: Any, problem: Problem) -> tuple[str, ...]:
    """Returns every reason why a config cannot serve a problem.

    Args:
      config: of any family: ``cutjax.Config``, ``MmaConfig``, ``DirectConfig`` or ``HaloConfig``.
      problem: the product.

    Returns:
      The reasons, each a sentence; empty where the config serves the problem.

    Raises:
      TypeError: if the config is of no family, or the problem no ``cutjax.Problem``.

    Examples:
      >>> import cutjax
      >>> cutjax.reasons(cutjax.Config(bm=128, bn=256), cutjax.Problem.of(4096, 4096, 4096))
      ()
    """
    found = resolve(_checked(problem, "reasons"), config)
    return found if isinstance(found, tuple) else ()


def candidates(problem: Problem) -> tuple[Any, ...]:
    """Returns all shipped configs that serve a problem, the predicted fastest first.

    Those of kernels that have not run on a device yet are left out.

    Args:
      problem: the product.

    Returns:
      The configs, each for ``config=`` of the operation; empty where no kernel serves the problem.

    Raises:
      TypeError: if the problem is no ``cutjax.Problem``.

    Examples:
      >>> import cutjax
      >>> cutjax.candidates(cutjax.Problem.of(4096, 4096, 4096))[0].bm
      128
    """
    into = applied(_checked(problem, "candidates"))
    own = (offer.prices.config(i) for offer, i in ranked(problem))
    return tuple(dict.fromkeys((*own, *(candidates(into) if into else ()))))


def _checked(problem: Any, where: str) -> Problem:
    if not isinstance(problem, Problem):
        raise TypeError(f"{where}: expected a cutjax.Problem, got {problem!r}")
    return problem


@functools.lru_cache(maxsize=4096)
def in_precision(problem: Problem, precision: Canonical) -> Problem | Choice:
    """Returns the problem with its products computed as a precision says, or the choice of XLA where no kernel does."""
    into = applied(problem) or problem
    both = into.bs[0].dtype == into.a.dtype and into.a.scale is None  # sums of blocks are added in float32
    into = wide(into) or into  # a narrow a is multiplied as b is
    way = dot_precision.math(precision, into.a.dtype, problem.accumulator, problem.device.tf32, both)
    if isinstance(way, tuple):
        return Choice(problem, (*_problem_reasons(problem), *way))
    return problem if way == problem.math else dataclasses.replace(problem, math=way)


def choose(
    problem: Problem,
    config: Any = None,
    platform: str = "cuda",
    backend: str = "auto",
    lead: float = LEAD,
    moved: int = 0,
) -> Choice:
    """Picks what runs: a pinned config if it serves, else a tuned one, else the cost model's first, else XLA.

    Where XLA was measured to be faster than every kernel, or no kernel is predicted to be ``lead`` times as fast, it
    runs, but for the backend "cuda". A larger lead than `LEAD` is asked of what was measured, too. So many bytes are
    moved beside a kernel, and not by XLA's product.

    A prologue runs in JAX before what is chosen for what it makes, or in a kernel that computes it itself, whichever is
    predicted to be faster; XLA's pass before XLA's product counts as both. Of kernels that were not measured that is
    for the backend "cuda", a pinned config and a tuned one.
    """
    if platform != "cuda":
        return Choice(problem, (f"platform {platform}: the kernels are for cuda",))
    if (into := applied(problem)) is not None:
        after = _after(problem, into, choose(into, config, platform, backend, lead, moved))
        least = 0.0 if backend == "cuda" else lead
        return _within(problem, config, after, least, moved_us(moved, problem.device)) or after
    entries = tuned.find(problem) if config is None else ()
    more_us = moved_us(moved, problem.device)
    return _choose(problem, config, 0.0 if backend == "cuda" else lead, entries, more_us)


def in_parts(choice: Choice, way: str, config: Any, backend: str, lead: float, moved: int) -> Choice:
    """Returns the choice of a kernel that multiplies float32 by parts, where it leads that for IEEE products.

    Args:
      choice: for IEEE products.
      way: "bf16x9" or "bf16x6".
      config: as ``choose`` has it, as ``backend``, ``lead`` and ``moved``.
    """
    problem = choice.problem
    dtypes = {problem.accumulator, *(x.made.dtype for x in (problem.a, *problem.bs))}
    if problem.math or dtypes != {np.dtype(np.float32)}:
        return choice
    parts = choose(dataclasses.replace(problem, math=way), config, "cuda", "cuda", lead, moved)
    if parts.resolved is None or (parts.resolved.unmeasured and backend != "cuda"):
        return choice
    assert parts.time_us is not None
    ieee_us = choice.time_us if choice.served else xla.time_us(problem)
    if not leads(parts.time_us + moved_us(moved, problem.device) * (not choice.served), ieee_us, lead):
        return choice
    instead = f"IEEE products take {ieee_us:.1f} us" if ieee_us else "nobody knows what IEEE products take"
    return dataclasses.replace(parts, reasons=(*parts.reasons, f'use_highest("{way}"): {instead}'))


def unless_copied(choice: Choice) -> Choice:
    """Returns the choice for a product of gathered rows, or of none where copying them first is predicted faster."""
    problem, a = choice.problem, choice.problem.a
    if not a.gathered or choice.time_us is None:
        return choice
    copied = choose(dataclasses.replace(problem, a=dataclasses.replace(a, view=None)))
    rows, columns = problem.shapes[0]
    copy_us = gather.copied_us(rows, a.bytes(columns), problem.device)
    if copied.time_us is None or choice.time_us <= copied.time_us + copy_us:
        return choice
    why = f"predicted: {choice.time_us:.1f} us, of copied rows {copied.time_us:.1f} and their copy {copy_us:.1f}"
    return Choice(problem, (why,))


def _within(problem: Problem, config: Any, after: Choice, lead: float, more_us: float) -> Choice | None:
    """Returns the choice of a kernel that computes prologues itself; None where there is none, or it is not faster.

    Args:
      problem: with its prologues.
      config: pinned, or None.
      after: the choice with the prologues before it.
      lead: as in ``choose``, but for 0 where kernels that were not measured run too, and XLA is out of the question.
      more_us: of what is moved beside a kernel.
    """
    if config is not None:
        kernel = resolve(problem, config)
        if isinstance(kernel, tuple):
            return None
        return _chosen(problem, kernel, kernel.time_us(problem.device), f"pinned by config=, {_saved(problem)}")
    for entry in tuned.find(problem):
        if choice := _tuned(problem, entry, lead and LEAD, 0.0):
            return choice
    found = fastest(problem, unmeasured=not lead)
    if found is None:
        return None
    kernel, time_us, count = found
    of_xla = xla.time_us(problem)
    faster = after.time_us is None or time_us <= after.time_us
    if not faster or (lead and not leads(time_us + more_us, of_xla, lead)):
        return None
    return _chosen(problem, kernel, time_us, f"predicted fastest of {count} configs, {_saved(problem)}", of_xla)


def _saved(problem: Problem) -> str:
    """Returns the words for what is not moved where a kernel computes prologues."""
    size = sum(
        count * made.bytes(length * problem.k)
        for operand, count, length in zip(
            (problem.a, *problem.bs), problem.matrices, (problem.m, *[problem.n] * problem.products), strict=False
        )
        if (made := operand.made) != operand
    )
    return f"with the prologue in its loads: {2 * size / 1e6:.3g} MB less are moved"


def _after(problem: Problem, into: Problem, choice: Choice) -> Choice:
    """Returns the choice for what prologues make of operands, with these before it."""
    kernel = choice.resolved
    if kernel is None:
        return dataclasses.replace(choice, problem=problem, reasons=(*choice.reasons, "the prologue runs before it"))
    made = widened(problem, (wide(into) or into) if kernel.converted else into)
    time_us = (choice.time_us or 0.0) + converted_us(widened(problem, into), problem.device)
    kernel = kernel.after(made)
    share = min(1.0, floor_us(problem) / time_us)
    reasons = dict.fromkeys((*choice.reasons, *kernel.notes))
    return dataclasses.replace(
        choice, problem=problem, reasons=tuple(reasons), time_us=time_us, roofline=share, resolved=kernel
    )


@functools.lru_cache(maxsize=4096)
def _choose(
    problem: Problem, config: Any, lead: float, entries: tuple[tuned.Entry, ...], more_us: float = 0.0
) -> Choice:
    if config is not None:
        kernel = resolve(problem, config)
        if isinstance(kernel, tuple):
            return Choice(problem, kernel)
        return _chosen(problem, kernel, kernel.time_us(problem.device), "pinned by config=")
    for entry in entries:
        if choice := _tuned(problem, entry, lead, more_us):
            return choice
    if found := fastest(problem, unmeasured=not lead):
        kernel, time_us, count = found
        time_us = max(time_us, _least_us(problem) if kernel.family == xla.OURS else 0.0)
        # Products of which each has a kernel, too. Who asks for a kernel of several with an epilogue gets that.
        one_by_one = bool(alone(problem)) and (lead > 0 or problem.epilogue.identities or len(summands(problem)) > 1)
        of_xla = xla.alone_us(problem, kernels=not lead) if one_by_one else xla.time_us(problem)
        if not leads(time_us + more_us, of_xla, lead or float(one_by_one)):
            more = f", and {more_us:.1f} us of transposes" if more_us else ""
            other = "its products one by one" if one_by_one else "XLA"
            why = f"predicted: {other} {of_xla:.1f} us, the fastest of {count} kernels {time_us:.1f} us{more}"
            why = why, *_of_lead(lead), *_dequantized(problem), *_unmeasured(problem, kernel)
            return Choice(problem, why, xla_us=of_xla)
        found = _chosen(problem, kernel, time_us, f"predicted fastest of {count} configs", of_xla)
        return dataclasses.replace(found, reasons=(*found.reasons, *_unmeasured(problem, kernel)))
    why = _unmeasured(problem) or _config_reasons(problem)
    return Choice(problem, (*why, *_dequantized(problem)))


def _unmeasured(problem: Problem, chosen: Kernel | None = None) -> tuple[str, ...]:
    """Returns a sentence on the kernel that would be faster than the one chosen, had it run on a device."""
    kernel, *_ = fastest(problem, unmeasured=True) or (None,)
    if kernel is None or kernel is chosen or not kernel.unmeasured:
        return ()
    return (f'{kernel.unmeasured}: that was not faster on a device yet, and is for backend="cuda"',)


def _dequantized(problem: Problem) -> tuple[str, ...]:
    """Returns a sentence for each operand with scales, which XLA multiplies into it before its product."""
    named = ("a", problem.a), *(("b", b) for b in problem.bs)
    return tuple(dict.fromkeys(f"XLA multiplies {name} dequantized" for name, operand in named if operand.scale))


def _chosen(problem: Problem, kernel: Kernel, time_us: float, why: str, xla_us: float | None = None) -> Choice:
    share = min(1.0, floor_us(problem) / time_us)
    new = (f"{kernel.unmeasured}: that was not faster on a device yet",) * bool(kernel.unmeasured)
    return Choice(problem, (why, *kernel.notes, *new), kernel, time_us, share, xla_us)


def leads(time_us: float, xla_us: float | None, lead: float) -> bool:
    """True if a kernel is so many times as fast as XLA, or nobody knows XLA's time."""
    return xla_us is None or time_us * lead <= xla_us


# Kernels of wgmma read at the rate of a copy at most and write at 0.96 of it, at 0.85 where results are most of the
# bytes, besides a launch: the formula tells those that do little else up to a sixth less, as it adds up what they take
# to multiply and to move (sweeps/attention-h200.json and auto-again-h200.json).
WRITE_SHARE, MOSTLY_WRITE_SHARE, LEAST_US = 0.96, 0.85, 2.0


def _least_us(problem: Problem) -> float:
    """Returns the time that a kernel takes at least: of its bytes, where each is read once; 0 where some may not be."""
    once = not (problem.groups or problem.symmetric or problem.a.view)
    write = MOSTLY_WRITE_SHARE if 2 * problem.result_bytes > problem.bytes else WRITE_SHARE
    return LEAST_US + passing_us(problem, write=write) if once else 0.0


def floor_us(problem: Problem) -> float:
    """Returns the time at the device's roofline: of the multiplications, or of the bytes."""
    device = problem.device
    multiplied = problem.flops / device.peak(problem.a.made.dtype, problem.math)
    return 1e6 * max(multiplied, problem.bytes / device.bytes_per_second)


def _of_lead(lead: float) -> tuple[str, ...]:
    """Returns the reason for a lead that an operation asks for."""
    return (f"a kernel must be {lead} times as fast: XLA may fuse its product with what is around it",) * (lead > LEAD)


def _tuned(problem: Problem, entry: tuned.Entry, lead: float, more_us: float) -> Choice | None:
    """Returns the choice of a measured entry; None if its kernel is gone, or it is XLA and a kernel must run."""
    kernel = None
    if entry.config:
        config = config_of(dict(entry.config))
        kernel = None if config is None else resolve(problem, config)
        if kernel is None or isinstance(kernel, tuple):
            return None
    if lead and entry.xla_wins:
        return Choice(problem, (entry.why,))
    asks = lead > LEAD or (lead and more_us)
    if asks and entry.time_us and not leads(entry.time_us + more_us, entry.xla_us, lead):
        return Choice(problem, (entry.why, *_of_lead(lead)))
    return None if kernel is None or entry.time_us is None else _chosen(problem, kernel, entry.time_us, entry.why)


def _problem_reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the families' reasons against a problem."""
    return tuple(dict.fromkeys(reason for family in concerned(problem) for reason in family.reasons(problem)))


def _config_reasons(problem: Problem) -> tuple[str, ...]:
    """Returns the reasons against every config: each family's, or those of its first config, the smallest."""
    found = []
    for family in concerned(problem):
        first = () if (why := family.reasons(problem)) else itertools.islice(family.configs(problem), 1)
        found += why or (reason for config in first for reason in reasons(config, problem))
    return tuple(dict.fromkeys(found))

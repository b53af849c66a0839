"""cutjax.autotune: measures kernels for every product in a function, and keeps the fastest of each."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.binding import lowering, walk
from cutjax.epilogue.expression import identity
from cutjax.kernels import tuned
from cutjax.kernels.choose import Choice, candidates, choose, floor_us, in_precision
from cutjax.kernels.families import fields_of
from cutjax.kernels.keys import key
from cutjax.kernels.problem import Problem
from cutjax.primitives.accumulators import accumulator
from cutjax.runtime import compiler, tuning_file
from cutjax.tuning import measure
from cutjax.tuning.progress import Progress
from cutjax.tuning.report import Report, Row, Skipped

XLA = "XLA"


def autotune(
    fn: Callable[..., Any],
    *,
    candidates: int = 16,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Callable[..., Report]:
    """Makes of a function one that times kernels for every product in it on this GPU, and keeps the fastest of each.

    Products are found wherever they are, as by ``cutjax.explain``; the function is neither compiled nor run. To tune a
    backward pass, tune the gradient or the training step. Each distinct problem is measured once: the kernels that the
    cost model expects to be fastest, the one that runs today and, without groups, XLA, on random data that is not in
    L2, rows divided evenly over groups. A kernel whose result is wrong, or that fails, is left out.

    The fastest of each goes to a file, and from then on before the cost model's choice, in this process and later
    ones. Functions that were jitted before are compiled again when they are called (``jax.clear_caches()`` is called);
    what ``jax.jit(f).lower(...).compile()`` returned stays as it is.

    Args:
      fn: any function that ``jax.jit`` takes, jitted or not.
      candidates: how many kernels are measured for a problem, beside the one that runs today.
      path: the file, which ``cutjax.use_tuning`` reads; by default the user's, which every process reads.
      progress: whether to show progress on stderr, where that is a terminal.

    Returns:
      A function of ``fn``'s arguments (arrays, or ``jax.ShapeDtypeStruct``) that returns a report. Printing it gives a
      table, ``.plot()`` a picture by matplotlib. Times are in microseconds: ``.before_us`` and ``.after_us`` those of
      all products in one call. ``.rows`` has one for each distinct problem: the ``problem``, the ``count`` in one call
      (of one iteration or of every branch where ``exact`` is False), ``before`` and ``after``, a kernel's name or
      "XLA", with ``before_us``, ``after_us`` and ``xla_us``, None where it failed or was not measured, ``roofline``,
      the share of the device's that is reached, the ``config`` that runs from now on, None where XLA does, the number
      ``tried``, and those ``dropped``, as pairs of a name and why. ``.skipped`` are products that were not measured,
      each with ``problem``, ``why`` and ``count``; ``.device`` is the GPU, ``.path`` the file, and ``.clock`` "device",
      or "host" where the device could not be traced and what is short was not timed.

    Raises:
      ValueError: if ``candidates`` is less than 1; when called, if the file has another version's format.
      RuntimeError: when called, if there is no NVIDIA GPU or no compiler.

    Examples:
      >>> import cutjax, jax
      >>> step = jax.jit(jax.grad(lambda w, x: cutjax.gemm(x, w).sum()))
      >>> tune = cutjax.autotune(step, candidates=32)
      >>> # report = tune(w, x); print(report)
    """

    if candidates < 1:
        raise ValueError(f"autotune: candidates must be 1 or more, got {candidates}")

    def tuning(*args: Any, **kwargs: Any) -> Report:
        require_device()
        target = tuning_file.user_path() if path is None else pathlib.Path(path).expanduser().absolute()
        tuning_file.check_writable(target)
        found, _ = walk.products(fn, args, kwargs, "cuda")
        return run(found, candidates, target, progress)

    return tuning


def require_device() -> None:
    """Raises a RuntimeError unless kernels can be compiled and timed here."""
    if not lowering.on_cuda():
        raise RuntimeError(
            "autotune: kernels are timed on an NVIDIA GPU, and JAX computes on "
            f"{jax.default_backend()!r} here; with a GPU, install jax[cuda13] or jax[cuda12]"
        )
    if missing := compiler.compiler_missing():
        raise RuntimeError(f"autotune: {missing}")


@dataclasses.dataclass
class Task:
    """One problem of a program, and a product that is one.

    Attributes:
      problem: what is measured.
      product: the first product of the program that asks for it.
      before: the choice as it stands.
      configs: the kernels to measure.
      count: how often it runs in one call of the program.
      exact: whether that is known.
    """

    problem: Problem
    product: walk.Found
    before: Choice
    configs: list[Any]
    count: int
    exact: bool

    @functools.cached_property
    def functions(self) -> dict[Any, measure.Function]:
        """The candidates: by config, and XLA where its time counts."""
        found: dict[Any, measure.Function] = {config: self._bound("cuda", config) for config in self.configs}
        if not self.problem.groups:  # XLA has no product of rows in groups; cutjax's reference is a loop
            found[XLA] = self._bound("xla", None)
        return found

    def _bound(self, backend: str, config: Any, **more: Any) -> measure.Function:
        eqn = self.product.eqn
        # In place, a kernel would write into inputs that the next call reads: XLA would copy them before.
        params = {**eqn.params, "in_place": (), "backend": backend, "config": config, **more}
        params["epilogue"] = params["epilogue"].primal
        if not self.problem.strided:
            return lambda *arrays: eqn.primitive.bind(*arrays, **params)
        of_results = [() if out.reduce else self.problem.order for out in params["epilogue"].outputs]

        def function(*arrays: jax.Array) -> list[jax.Array]:
            """Takes and returns arrays whose axes are in the order in which they lie in memory, so that none moves."""
            asked = [x.transpose(np.argsort(order)) for x, order in zip(arrays, self._orders(arrays), strict=True)]
            results = eqn.primitive.bind(*asked, **params)
            return [x.transpose(order) if order else x for x, order in zip(results, of_results, strict=True)]

        return function

    def _orders(self, arrays: Sequence[Any]) -> list[tuple[int, ...]]:
        """Returns the memory orders of the axes of the product's operands."""
        given = tuple(x.order for x in (self.problem.a, *self.problem.bs)) if self.problem.strided else ()
        given += ((),) * (len(arrays) - len(given))
        return [order or tuple(range(x.ndim)) for order, x in zip(given, arrays, strict=True)]

    @property
    def reference(self) -> measure.Function:
        """The product by XLA; a plain one in float32, where sums of small integers are exact in any order, rounded."""
        if not self.problem.plain:
            return self._bound("xla", None)
        dtype, wide = self.problem.out_dtype, np.dtype(np.float32)
        inner = self._bound("xla", None, epilogue=identity(wide, accumulator(self.problem.a.dtype, wide)))
        return lambda *arrays: [x.astype(dtype) for x in inner(*arrays)]

    def inputs(self, seed: jax.Array, integers: bool) -> list[jax.Array]:
        """Returns random arrays: normal numbers or -2 to 2, groups of even sizes."""
        params, avals = self.product.eqn.params, self.product.avals
        factors, _ = params["product"].unpack([*range(len(avals))], params["epilogue"])
        arrays = []
        orders = self._orders(avals)
        for i in range(len(avals)):
            aval, shape = avals[i], [avals[i].shape[axis] for axis in orders[i]]
            arrays.append(
                self._sizes(aval)
                if i in factors.context
                else measure.random_array(seed * np.uint32(len(avals)) + np.uint32(i), shape, aval.dtype, integers)
            )
        return arrays

    def _sizes(self, aval: Any) -> jax.Array:
        groups = self.problem.groups
        assert groups is not None
        rows, count = getattr(self.problem, groups.axis), groups.count
        sizes = [0] * groups.leading + [rows // count + (i < rows % count) for i in range(count)]
        return jnp.broadcast_to(jnp.array(sizes, aval.dtype), aval.shape)


def tasks(found: Iterable[walk.Found], most: int) -> tuple[list[Task], list[Skipped]]:
    """Returns the problems to measure, and the products for which there is no choice, with the reasons."""
    todo: dict[Problem, Task] = {}
    skipped: dict[tuple[str, str], int] = {}
    for product in found:
        eqn, params = product.eqn, product.eqn.params
        before = lowering.choosers[eqn.primitive](*product.avals, target=lowering.target(), **params)
        if not isinstance(before, Choice):  # a kernel of the user's own
            continue
        problem = before.problem
        if why := _why_not(product, problem):
            skipped[str(problem), why] = skipped.get((str(problem), why), 0) + product.count
        elif task := todo.get(problem):
            task.count += product.count
            task.exact &= product.exact
        else:
            configs = configs_of(problem, most)
            if before.config is not None and before.config not in configs:
                configs.append(before.config)
            todo[problem] = Task(problem, product, before, configs, product.count, product.exact)
    return list(todo.values()), [Skipped(*what, count) for what, count in skipped.items()]


def configs_of(problem: Problem, most: int) -> list[Any]:
    """Returns so many configs, the predicted fastest first, and where products are long one in a cluster of two.

    Those read less through L2, which takes power: XLA never runs without, there.
    """
    found = candidates(problem)
    pair = [config for config in found if getattr(config, "cluster_m", 1) * getattr(config, "cluster_n", 1) == 2]
    add = floor_us(problem) > measure.LONG_US and not set(pair) & {*found[:most]}
    return [*found[:most], *pair[:add]]


def _why_not(product: walk.Found, problem: Problem) -> str:
    """Returns the reason why there is no choice for a product; "" where there is one."""
    params = product.eqn.params
    if params["config"] is not None:
        return "pinned by config="
    if params["backend"] == "xla":
        return "backend 'xla'"
    if problem.flops == 0:
        return "nothing to compute"
    if product.divided and params["backend"] != "cuda":
        return lowering.PARTITIONED
    asked = in_precision(problem, params["precision"])
    choice = asked if isinstance(asked, Choice) else choose(asked, backend="cuda")
    return "" if choice.served else "; ".join(choice.reasons)


def run(
    found: Iterable[walk.Found],
    most: int,
    path: pathlib.Path | None,
    progress: bool,
    *,
    seconds: float = math.inf,
    again: bool = True,
) -> Report:
    """Measures products; the fastest of each goes to a file, none where ``path`` is None.

    A product is timed for about so many seconds. ``again``: functions that were jitted before are compiled again.
    """
    todo, skipped = tasks(found, most)
    ahead = todo if len(todo) > 1 else []  # one alone is compiled where it is timed, beside XLA's
    shown = Progress(sum(len(task.configs) for task in ahead) + len(todo), progress)
    with shown:
        compile_all(ahead, shown)
        rows, changed, clock = [], False, measure.DEVICE
        try:
            for task in todo:
                shown.step(f"timing {task.problem}")
                try:
                    times = timed(task, seconds)
                except Exception as error:  # this problem's: out of memory, say
                    skipped.append(Skipped(str(task.problem), measure.reason(error), task.count))
                    continue
                clock = measure.HOST if times.clock == measure.HOST else clock
                row, entry = _row(task, times)
                rows.append(row)
                if entry and path:
                    stored = entry.encoded(**_provenance())
                    tuning_file.merge(path, {task.problem.device.name: {key(task.problem): stored}})
                    changed = True
        finally:  # what was measured before an interruption counts
            if changed:
                tuned.read_again()
                if again:
                    jax.clear_caches()
    return Report(tuple(rows), tuple(skipped), lowering.target().kind, path, clock)


def compile_all(todo: Sequence[Task], shown: Progress) -> None:
    """Compiles the kernels of all tasks in parallel, into the caches; who asks for one again gets its error again."""

    def compile_one(task: Task, config: Any) -> None:
        with contextlib.suppress(Exception):
            choose(task.problem, config).call()
        shown.step("compiling")

    measure.parallel(lambda pair: compile_one(*pair), [(task, config) for task in todo for config in task.configs])


def timed(task: Task, seconds: float = math.inf) -> measure.Times:
    """Times the candidates of a task on this device, for about so many seconds."""
    inputs = measure.Inputs(task.inputs, task.problem.device.l2_bytes)
    keep = [XLA, *([] if task.before.config is None else [task.before.config])]
    # XLA may add up parts in 16 bits: a product that users have anyway, and not exact.
    right = measure.equal if task.problem.plain else measure.close
    return measure.times(task.functions, inputs, task.reference, right, keep, (XLA,), seconds)


def _row(task: Task, times: measure.Times) -> tuple[Row, tuned.Entry | None]:
    """Returns the report's row of a problem, and the entry of the file; None where nothing ran."""
    problem, us = task.problem, times.us
    names = {config: choose(problem, config).kernel for config in task.configs} | {XLA: XLA}
    best = min((config for config in us if config != XLA), key=us.__getitem__, default=None)
    fields = () if best is None else tuple(sorted(fields_of(best).items()))
    # A kernel that ran before has the model's word, or an earlier measurement's, too.
    lead = tuned.ONCE if task.before.config is None else tuned.SURE
    entry = tuned.Entry(fields, None if best is None else us[best], us.get(XLA), lead) if us else None
    strict = task.product.eqn.params["backend"] == "cuda"
    after = XLA if entry and entry.xla_wins and not (strict and best) else best
    before = XLA if task.before.config is None else task.before.config
    after_us = us.get(after)
    return Row(
        problem=problem,
        count=task.count,
        exact=task.exact,
        before=names[before],
        before_us=us.get(before),
        after=names.get(after, "nothing ran"),
        after_us=after_us,
        xla_us=us.get(XLA),
        roofline=None if after_us is None else floor_us(problem) / after_us,
        config=None if after == XLA else after,
        tried=len(task.functions),
        dropped=tuple((names[name], why) for name, why in times.dropped.items()),
    ), entry


def _provenance() -> dict[str, str]:
    import cutjax

    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"cutjax": cutjax.__version__, "jax": jax.__version__, "date": date}

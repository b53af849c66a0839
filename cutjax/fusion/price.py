"""The decision: a region stays XLA's, its product alone becomes a kernel, or all of it becomes one.

Each is priced by the model that chooses kernels. What is not predicted to be faster by 1% stays as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cutjax.binding import lowering
from cutjax.epilogue.expression import Epilogue, Output, identity
from cutjax.fusion.form import Form
from cutjax.fusion.jaxprs import byte_count
from cutjax.kernels import choose, tuned, xla
from cutjax.kernels.device import Device, device_of
from cutjax.kernels.families import fastest
from cutjax.kernels.problem import Problem
from cutjax.kernels.staging import instructions
from cutjax.kernels.xla_tails import library_has
from cutjax.ops.dot_general import LEAD
from cutjax.primitives.convolution import Convolution
from cutjax.primitives.product import Product

# Faster than XLA by less stays XLA's; of a product alone LEAD, as of a drop-in. Of 144 recorded fused products, the
# decisions give 1.138 over XLA with 7 slower at 1.01, 1.134 with 4 at 1.03.
GAIN = 1.01
_PASS_US = 1.0  # of a launch of XLA's
# Of 160 fused products (benchmarks/results/experiments/fused-sweep-h200.json): of a copy's bandwidth, what XLA's passes
# reach (0.55 to 0.9; the less the more they compute), and XLA's own products over their predicted time, which is low on
# purpose: a kernel alone must beat the fastest that XLA may be.
_PASS_BANDWIDTH = 0.7
# Of those that add up rows and compute much, one sum and several. GELU's derivative with the sum of a bias took 1.6 to
# 2 times what a copy of as many bytes takes, 15 of ConvNeXt-T's; SiLU's with a batch norm's sums 2.0 to 3.3 times,
# seven of EfficientNet-B0's, and another pass of a third of the bytes adds up the rest.
_REDUCING_BANDWIDTH, _MUCH = (0.57, 0.35), 20  # instructions, with XLA's functions
EXPECTED = 1.09
# That of few rows is told as it is: XLA took 1.015 of it in the median of the 173 such products that ship as measured.
_EXPECTED_FEW = 1.015


@dataclasses.dataclass(frozen=True)
class Price:
    """The time of a region, in predicted microseconds; None where there is no kernel.

    Attributes:
      runs: "XLA", "kernel" (for the product alone) or "fused".
      xla_us: XLA's product and its pass over the result.
      plain_us: a kernel for the product, and XLA's pass.
      fused_us: one kernel.
      why: why there is no kernel, where there is none.
      measured: of a kernel that was measured, its time over the predicted one.
      measured_xla: True if XLA's time was measured.
      merged: how many products XLA makes one of; its time is this one's share.
    """

    runs: str
    xla_us: float | None = None
    plain_us: float | None = None
    fused_us: float | None = None
    why: str = ""
    measured: float = 1.0
    measured_xla: bool = False
    merged: int = 1

    def of_xla(self, part: float, merged: int) -> Price:
        """Returns the price where XLA takes a part of that time, because it merges so many products into one."""
        assert self.xla_us is not None
        assert self.plain_us is not None
        xla_us = part * self.xla_us
        runs = "kernel" if choose.leads(self.plain_us, xla_us, LEAD) else "XLA"
        return dataclasses.replace(self, runs=runs, xla_us=xla_us, merged=merged)

    def after(self, us: float) -> Price:
        """Returns the price where arrays are transposed for the kernel, which takes so long."""
        if self.xla_us is None or self.plain_us is None:
            return self
        plain_us = self.plain_us + us
        runs = "kernel" if choose.leads(plain_us, self.xla_us, LEAD) else "XLA"
        return dataclasses.replace(self, runs=runs, plain_us=plain_us)

    def in_a_row(self, count: int, one: Price) -> Price:
        """Returns the price of one of so many equal products, told that of the one product of all their columns.

        Long products are limited by power, so each is slower then.
        """
        if None in (self.xla_us, self.plain_us, one.xla_us, one.plain_us):
            return self
        longer = {name: max(getattr(self, name), getattr(one, name) / count) for name in ("xla_us", "plain_us")}
        return dataclasses.replace(self, **longer)

    def __str__(self) -> str:
        if self.why:
            return self.why
        parts = [("XLA", self.xla_us), ("kernel and XLA's pass", self.plain_us), ("fused", self.fused_us)]
        text = ", ".join(f"{name} {us:.1f} us" for name, us in parts if us is not None)
        return f"{text} (XLA's share of {self.merged} products merged)" if self.merged > 1 else text


def of_product(found: Form, eqn: Any) -> Price:
    """Returns the predicted times of an equation's product, by XLA and by a kernel."""
    (out,), dtypes = (x.aval.dtype for x in eqn.outvars), (x.aval.dtype for x in eqn.invars)
    chosen = _problem(found, device_of(lowering.target()), out, *dtypes)
    if isinstance(chosen, choose.Choice):
        return _by_xla(chosen)
    price = _of_problem(chosen, tuned.find(chosen))
    return price.after(pass_us(2 * found.moved, chosen.device)) if found.moved else price


@functools.lru_cache(maxsize=4096)
def _problem(found: Form, device: Device, out: Any, *dtypes: Any) -> Problem | choose.Choice:
    """Returns the same problem each time, which is hashed once, or the choice of XLA; told the arrays' dtypes."""
    product, _, avals = _merged(found.product, identity(out), found.avals(*dtypes))
    problem = product.problem(*avals, out_dtype=out, device=found.hints.device(device))
    return choose.in_precision(product.in_order(problem), found.precision)


def _merged(product: Product, epilogue: Epilogue, avals: Sequence[Any]) -> tuple[Product, Epilogue, Sequence[Any]]:
    """Returns a product, its epilogue and its arrays with batch axes merged into rows, as a device merges its part's.

    Under a mesh they are not merged before the program is divided.
    """
    if product.axes != (2, 2) or avals[0].ndim == 2 or math.prod(avals[1].shape[:-2]) > 1:
        return product, epilogue, avals
    found: tuple[Product, Epilogue] = product, epilogue

    def fold(*arrays: Any) -> list[Any]:
        nonlocal found
        folded = product.fold(epilogue, *product.unpack(arrays, epilogue))
        if folded is None:
            return list(arrays)
        specs = folded.product.specs(folded.factors.a, folded.operands)
        found = folded.product, dataclasses.replace(folded.epilogue, operands=specs)
        return [*folded.factors.arrays, *folded.operands]

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        avals = jax.make_jaxpr(fold)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)).out_avals
    return *found, avals


def _by_xla(choice: choose.Choice) -> Price:
    return Price("XLA", why=f"no kernel for {choice.problem}: {'; '.join(choice.reasons)}")


@functools.lru_cache(maxsize=4096)
def _of_problem(problem: Problem, entries: tuple[tuned.Entry, ...]) -> Price:
    found = fastest(problem)
    if found is None:
        return _by_xla(choose.choose(problem))
    _, time_us, _ = found
    xla_us, kernel_us = xla.time_us(problem), time_us
    measured_xla = bool(entries and entries[0].xla_us)
    for entry in entries[:1]:
        xla_us, kernel_us = entry.xla_us or xla_us, entry.time_us or kernel_us
    if xla_us is None:
        return Price("XLA", why=f"no prediction of XLA's time for {problem}")
    runs = "kernel" if choose.leads(kernel_us, xla_us, LEAD) else "XLA"
    return Price(runs, xla_us, kernel_us, measured=kernel_us / time_us, measured_xla=measured_xla)


def of_grouped(eqn: Any) -> Price:
    """Returns the predicted time of a grouped product by its kernel; XLA's, unknown, is far longer."""
    choice = _choice(eqn)
    if not choice.served:
        return Price("XLA", why=f"no kernel for {choice.problem}: {'; '.join(choice.reasons)}")
    return Price("kernel", plain_us=choice.time_us)


def _choice(eqn: Any) -> Any:
    params, avals = eqn.params, [x.aval for x in eqn.invars]
    product, epilogue, avals = _merged(params["product"], params["epilogue"], avals)
    params = {**params, "product": product, "epilogue": epilogue}
    return lowering.choosers[eqn.primitive](*avals, target=lowering.target(), **params)


def _as_xla_computes(epilogue: Epilogue) -> Epilogue:
    """Returns the epilogue with results of 32 bits, for which functions are as accurate as XLA's."""

    def wide(out: Output) -> Output:
        return dataclasses.replace(out, dtype="float32") if np.dtype(out.dtype).itemsize < 4 else out

    return dataclasses.replace(epilogue, outputs=tuple(map(wide, epilogue.outputs)))


def of_region(plain: Price, eqn: Any, passes: int, moved: int, copied: int) -> Price:
    """Returns the predicted times of a region: by XLA, with a kernel for the product alone, and as one kernel.

    Args:
      plain: one of its products alone.
      eqn: that of our product, with the tail for its epilogue.
      passes: XLA's passes that it saves.
      moved: the bytes that these move, beside those of the tail's operands.
      copied: the bytes that copies beside the kernel move.
    """
    assert plain.plain_us is not None
    choice = _choice(eqn)
    problem, epilogue = choice.problem, eqn.params["epilogue"].primal
    read = sum(map(byte_count, eqn.invars[len(eqn.invars) - len(epilogue.operands) :]))
    sums = sum("row" in out.axes for out in epilogue.outputs)
    reduces = sums and instructions(_as_xla_computes(epilogue)) >= _MUCH
    share = _REDUCING_BANDWIDTH[sums > 1] if reduces else _PASS_BANDWIDTH
    passes_us = pass_us(moved + read, problem.device, share) + passes * _PASS_US
    plain_us = problem.products * plain.plain_us + passes_us
    xla_us = None
    if plain.xla_us is not None:
        windows = eqn.params["product"] if isinstance(eqn.params["product"], Convolution) else None
        by_library = problem.products == 1 and library_has(epilogue, windows.form if windows else "")
        expected = _EXPECTED_FEW if xla.reads_weights(problem) else EXPECTED
        xla_us = problem.products * plain.xla_us * (1.0 if plain.measured_xla or windows else expected)
        xla_us += 1e6 * read / problem.device.bytes_per_second if by_library else passes_us
    alone = "kernel" if choose.leads(plain_us, xla_us, LEAD) else "XLA"
    if not choice.served or choice.time_us is None:
        why = f"no kernel has its tail: {'; '.join(choice.reasons)}"
        return Price(alone, xla_us, plain_us, why=why, merged=plain.merged)
    # A kernel without a tail may have been measured to be slower than predicted; what the tail adds is predicted. One
    # that was faster may not be the one that the tail gets. Nor is that of several products: over 17 recorded gates the
    # fastest takes 0.98 of what is predicted, give or take 6%.
    fused_us = choice.time_us * (max(plain.measured, 1.0) if problem.products == 1 else 1.0)
    fused_us += pass_us(copied, problem.device)
    fused = choose.leads(fused_us, xla_us, GAIN) and (alone == "XLA" or fused_us <= plain_us)
    return Price("fused" if fused else alone, xla_us, plain_us, fused_us, merged=plain.merged)


def of_several(alone: Sequence[Price], eqn: Any) -> Price:
    """Returns the predicted times of products of one left operand, each by itself and as one kernel."""
    choice = _choice(eqn)
    if not choice.served:
        return Price("XLA", why="; ".join(choice.reasons))
    times = [(price.xla_us or 0.0, price.plain_us or 0.0) for price in alone]
    xla_us, plain_us = map(math.fsum, zip(*times, strict=True))
    apart = math.fsum(pair[price.runs == "kernel"] for pair, price in zip(times, alone, strict=True))
    # They may have been measured, and there is no tail that one kernel saves: it is priced as if it had been too.
    predicted = math.fsum(us / price.measured for (_, us), price in zip(times, alone, strict=True))
    fused_us = choice.time_us * plain_us / predicted
    runs = "fused" if choose.leads(fused_us, apart, GAIN) else "XLA"
    return Price(runs, xla_us, plain_us, fused_us, merged=alone[0].merged)


def pass_us(nbytes: int, device: Device, share: float = _PASS_BANDWIDTH) -> float:
    """Returns the time in which a pass of XLA's moves so many bytes, told its share of a copy's bandwidth."""
    return device.moving_us(nbytes, share)

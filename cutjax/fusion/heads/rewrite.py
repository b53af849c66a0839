"""Heads in a program: each whose losses and gradients are computed chunk by chunk becomes one equation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cutjax.binding import lowering, walk
from cutjax.binding.rules import varying_axes
from cutjax.fusion import price
from cutjax.fusion.build import Template, placed
from cutjax.fusion.contraction import contraction
from cutjax.fusion.heads.head import Head
from cutjax.fusion.heads.parts import Dot
from cutjax.fusion.heads.region import Found, found
from cutjax.fusion.jaxprs import Graph, byte_count, opened, with_equations
from cutjax.fusion.keys import Keys
from cutjax.fusion.region import Region
from cutjax.fusion.report import Report
from cutjax.kernels import xla
from cutjax.kernels.device import device_of
from cutjax.primitives import vocabulary
from cutjax.runtime import backends

# Whether fuse takes heads by default. Kernels took 17.7, 21.3 and 8.8 ms where plain JAX took 20.8, 26.2 and 10.0, but
# whole steps 22.0, 26.2 and 10.0 by the host's clock (benchmarks/results/experiments/cross-entropy-h200.json).
BY_DEFAULT = False
# Of products that may be a head's: smaller ones gain less than a search for their losses takes.
_LEAST_COLUMNS, _LEAST_BYTES = 2048, 1 << 25
_WORTH = 1.03  # of XLA's time, which the memory of the logits is worth


@dataclasses.dataclass(frozen=True)
class Price:
    """The time of a head, in predicted microseconds, and the bytes that it does without.

    Attributes:
      runs: "fused" or "XLA".
      xla_us: XLA's products and its passes over the logits; None where it is not known.
      fused_us: the kernels; None where one has none.
      products: of the head's size that it takes.
      saved: the bytes of logits and of their gradient, less those that are kept of a chunk.
      why: why there are no kernels.
    """

    runs: str
    xla_us: float | None
    fused_us: float | None
    products: int
    saved: int
    why: str = ""

    def __str__(self) -> str:
        times = [("XLA", self.xla_us), ("fused", self.fused_us)]
        parts = [f"{name} {us:.1f} us" for name, us in times if us is not None]
        count = "one product" if self.products == 1 else f"{self.products} products"
        memory = f"{self.saved / 2**20:.0f} MiB of logits less in memory"
        return ", ".join([f"a head and its losses in {count}", *parts, memory, *filter(None, [self.why])])


def headed(
    jaxpr: Any, always: bool, keys: Keys, template: Callable[[Hashable, Any, Sequence[Any]], Template]
) -> tuple[Any, list[Report]]:
    """Returns a program with its heads as equations of their own, and a report of each product of theirs.

    Args:
      jaxpr: the program.
      always: whether they are replaced whatever that costs.
      keys, template: the rewriter's, which builds each equation once.
    """
    if not (always or BY_DEFAULT or backends.resolve(None, "fuse") == "cuda"):
        return jaxpr, []

    def wanted(dot: Dot) -> bool:
        large = dot.vocabulary >= _LEAST_COLUMNS and byte_count(dot.out) >= _LEAST_BYTES
        return always or large

    if not any(eqn.primitive.name == "dot_general" for eqn in opened(jaxpr).eqns):
        return jaxpr, []
    graph, reports = Graph(opened(jaxpr)), []
    for one in found(graph, wanted):
        region = one.region
        try:
            made = template((keys.region(graph, region), one.key(keys)), one.function, region.inputs)
        except NotImplementedError:
            continue
        if not _fits(made, region):
            continue
        cost = None if always else _price(graph, one, made)
        if cost is not None and cost.runs != "fused":
            continue
        eqns = [graph.eqns[i] for i in region.members]
        region.made, _ = placed(made, region.inputs, region.results, graph.eqns[one.head.dot.at])
        graph.replace(region)
        cost = cost or Price("fused", None, None, one.head.products, _saved(one.head))
        reports += [Report(eqn, "fused", cost) for eqn in eqns if eqn.primitive.name == "dot_general"]
    return (with_equations(jaxpr, graph.equations()) if reports else jaxpr), reports


def _fits(made: Template, region: Region) -> bool:
    """True if an equation makes arrays of the types that a region's results have."""
    pairs = [(x.aval, y.aval) for x, y in zip(made.eqn.outvars, region.results, strict=True)]
    return all((x.shape, x.dtype, varying_axes(x)) == (y.shape, y.dtype, varying_axes(y)) for x, y in pairs)


def _saved(head: Head) -> int:
    """Returns the bytes of logits that are not in memory: they, and their gradient where there is one."""
    dot = head.dot
    each, size = dot.x.aval.dtype.itemsize, dot.out.aval.size
    chunk = min(size * each, vocabulary.CHUNK_BYTES) if head.ends else 0
    return size * (dot.out.aval.dtype.itemsize + (each if head.ends else 0)) - chunk


def _price(graph: Graph, one: Found, made: Template) -> Price:
    """Returns the predicted times of a head, as it stands and in chunks."""
    head, device = one.head, device_of(lowering.target())
    dot, size = head.dot, head.dot.out.aval.size
    of_logits, of_gradient = dot.out.aval.dtype.itemsize, dot.x.aval.dtype.itemsize
    moved = of_logits if not head.ends else 2 * of_logits + of_gradient
    xla_us: float | None = price.pass_us(size * moved, device)
    for eqn in (graph.eqns[i] for i in one.region.members):
        if eqn.primitive.name == "dot_general":
            us = _xla_us(eqn)
            xla_us = None if us is None or xla_us is None else xla_us + price.EXPECTED * us
    # Beside the products: rows of x that are scaled, read and written, and sums for the gradient of a bias.
    read = 2 * byte_count(dot.x) if head.ends else 0
    read += sum(size * of_gradient for end in head.ends if end.kind == "sum")
    fused_us, why = price.pass_us(read, device), ""
    for product in walk.within(opened(made.eqn.params["jaxpr"])):
        if not product.exact:  # once more, of logits that spread too far
            continue
        choice = lowering.choosers[product.eqn.primitive](
            *product.avals, target=lowering.target(), **product.eqn.params
        )
        us = choice.time_us if choice.served else xla.time_us(choice.problem)
        if us is None:
            why = f"no kernel for {choice.problem}: {'; '.join(choice.reasons)}"
            return Price("XLA", xla_us, None, head.products, _saved(head), why)
        fused_us += product.count * us
    runs = "fused" if xla_us is not None and fused_us <= _WORTH * xla_us else "XLA"
    return Price(runs, xla_us, fused_us, head.products, _saved(head))


def _xla_us(eqn: Any) -> float | None:
    """Returns the predicted time of XLA's product of an equation."""
    form = contraction(eqn)
    if isinstance(form, str):  # of two dtypes: it multiplies them as if both were the narrower
        narrow = min((x.aval for x in eqn.invars), key=lambda aval: aval.dtype.itemsize).dtype
        invars = [x if x.aval.dtype == narrow else type(x)(x.aval.update(dtype=narrow)) for x in eqn.invars]
        eqn = eqn.replace(invars=invars)
        form = contraction(eqn)
    return None if isinstance(form, str) else price.of_product(form, eqn).xla_us

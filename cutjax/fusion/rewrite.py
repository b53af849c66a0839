"""A program rewritten: the same jaxpr with an equation of a fused product in the place of each region worth it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutjax.binding import lowering
from cutjax.fusion import price
from cutjax.fusion.build import build, build_plain
from cutjax.fusion.contraction import PRODUCTS, RAGGED, Contraction, contraction
from cutjax.fusion.jaxprs import (
    BODIES,
    MOVES,
    Graph,
    bodies,
    byte_count,
    full_size,
    inlined,
    is_literal,
    opened,
    with_bodies,
    with_equations,
)
from cutjax.fusion.region import NOTHING, Finder, Region
from cutjax.fusion.report import Report
from cutjax.runtime import backends

POLICIES = ("auto", "always")


class Rewriter:
    """Rewrites one program, with all programs inside.

    Attributes:
      reports: one for each product found, in their order.
    """

    def __init__(self, policy: str):
        self.policy = policy
        self.reports: list[Report] = []
        mesh = jax.sharding.get_abstract_mesh()
        self.divided = lowering.leaves_axes(mesh, ())
        self._done: dict[int, tuple[Any, Any]] = {}  # by the program's id, which is kept
        self._built: dict[Hashable, tuple[Any, Any, price.Price | None]] = {}
        self._prices: dict[Hashable, price.Price] = {}
        self._kept: list[Any] = []  # of which the ids are part of keys
        self._has: dict[int, bool] = {}

    @property
    def refuses(self) -> str:
        """The reason for which every product stays as it is at this place; "" where each has its price."""
        if backends.resolve(None, "fuse") == "xla":
            return "backend 'xla'"
        return lowering.PARTITIONED if self.divided else ""

    def rewrite(self, jaxpr: Any) -> Any:
        """Returns the program, closed or open as it is; itself where nothing changes."""
        if id(jaxpr) not in self._done:
            self._done[id(jaxpr)] = jaxpr, self._rewritten(jaxpr)
        return self._done[id(jaxpr)][1]

    def _rewritten(self, jaxpr: Any) -> Any:
        if not self._multiplies(jaxpr):
            return jaxpr
        jaxpr = inlined(jaxpr, self._multiplies)
        eqns = [self._inside(eqn) if any(map(self._multiplies, bodies(eqn))) else eqn for eqn in opened(jaxpr).eqns]
        if any(eqn.primitive.name in PRODUCTS for eqn in eqns):
            eqns = self._fused(opened(with_equations(jaxpr, eqns)))
        return with_equations(jaxpr, eqns)

    def _inside(self, eqn: Any) -> Any:
        """Returns an equation with its programs rewritten."""
        if eqn.primitive.name != "shard_map":
            return with_bodies(eqn, self.rewrite)
        params, found = eqn.params, []

        axes = params.get("newly_manual_axes", params.get("manual_axes"))  # renamed after jax 0.10
        mesh, spec, divided = params["mesh"], jax.sharding.PartitionSpec(), self.divided

        def body() -> jax.Array:  # where the mesh's axes are known
            self.divided = lowering.leaves_axes(mesh, axes)
            found.append(with_bodies(eqn, self.rewrite))
            self.divided = divided
            return jnp.zeros(())

        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(), out_specs=spec, axis_names=set(axes), check_vma=params["check_vma"]
        )
        jax.make_jaxpr(mapped)()
        return found[0]

    def _multiplies(self, jaxpr: Any) -> bool:
        """True if there is a product in a program, however deep."""
        if id(jaxpr) not in self._has:
            self._kept.append(jaxpr)
            self._has[id(jaxpr)] = any(
                eqn.primitive.name in PRODUCTS
                or (eqn.primitive.name in BODIES and any(map(self._multiplies, bodies(eqn))))
                for eqn in opened(jaxpr).eqns
            )
        return self._has[id(jaxpr)]

    def _fused(self, jaxpr: Any) -> list[Any]:
        """Returns the equations of a program with its own products fused."""
        graph = Graph(jaxpr)
        found: dict[int, Contraction] = {}
        reports: dict[int, Report] = {}
        prices: dict[int, price.Price] = {}
        for i, eqn in enumerate(graph.eqns):
            if eqn.primitive.name not in PRODUCTS or i not in graph.live:
                continue
            form = contraction(eqn)
            reports[i] = _report(eqn, form)
            ragged = eqn.primitive.name == RAGGED
            if isinstance(form, str) and not (ragged and self.policy == "auto"):
                continue
            if self.policy == "auto":
                if self.refuses:
                    reports[i].why = self.refuses
                    continue
                if isinstance(form, str) or ragged:
                    prices[i] = price.of_grouped(self._plain(eqn, form)[1])
                else:
                    prices[i] = self._price(form, eqn)
                if prices[i].why:
                    reports[i].why = prices[i].why
                    continue
            if isinstance(form, str):
                self._replace_product(graph, i, form, reports[i], prices[i])
            else:
                found[i] = form
        finder = Finder(graph, found)
        for i in sorted(found, reverse=True):
            if i in finder.products:
                self._product(graph, finder, i, reports, prices)
        self.reports += reports.values()
        return graph.equations()

    def _product(
        self, graph: Graph, finder: Finder, i: int, reports: dict[int, Report], prices: dict[int, price.Price]
    ) -> None:
        """Puts a region in the place of a product and what is around it, where that is worth it."""
        region = finder.region(i)
        report, plain = reports[i], prices.get(i)
        if isinstance(region, Region) and all(graph.eqns[j].primitive.name in MOVES for j in region.tail):
            region = region.stops or [NOTHING]
        if isinstance(region, Region):
            report.stops = tuple(region.stops)
            try:
                eqn, inner, cost = self._build(graph, region, plain)
            except (NotImplementedError, TypeError, ValueError) as error:
                report.why = str(error)
            else:
                report.why = "" if cost is None else str(cost)
                if cost is None or cost.runs == "fused":
                    region.made = eqn
                    graph.replace(region)
                    for j in region.products:
                        del finder.products[j]
                        reports[j].fused(region, inner, report.why)
                    return
                if cost.runs == "XLA":
                    return
        else:
            report.stops = tuple(region)
        if plain is None or plain.runs != "kernel":
            report.why = report.why or ("" if plain is None else str(plain))
            return
        self._replace_product(graph, i, finder.products.pop(i), report, plain)

    def _replace_product(self, graph: Graph, i: int, form: Any, report: Report, cost: price.Price) -> None:
        """Puts a kernel in the place of a product alone."""
        eqn = graph.eqns[i]
        inputs = [x for x in eqn.invars if not is_literal(x)]
        made = self._plain(eqn, form)[0]
        made = made.replace(invars=inputs, outvars=eqn.outvars, source_info=eqn.source_info)
        graph.replace(Region((i,), set(), form, (), [i], inputs, list(eqn.outvars), [], made))
        report.runs, report.why = "kernel", str(cost)

    def _price(self, form: Contraction, eqn: Any) -> price.Price:
        """Returns what a dense product takes."""
        key = form, eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if key not in self._prices:
            self._prices[key] = price.of_product(form, eqn)
        return self._prices[key]

    def _plain(self, eqn: Any, form: Any) -> tuple[Any, Any]:
        """Returns the equation of a product alone as a kernel, and that of the product within."""
        literals = tuple(id(x) for x in eqn.invars if is_literal(x))
        avals = (x.aval for x in (*eqn.invars, *eqn.outvars))
        key = form, *map(self._param, eqn.params.values()), *avals, literals
        if key not in self._built:
            self._kept.append(eqn)
            self._built[key] = *build_plain(eqn, form), None
        return self._built[key][:2]

    def _build(self, graph: Graph, region: Region, plain: price.Price | None) -> tuple[Any, Any, price.Price | None]:
        """Returns the equation of a region, that of the product within and the price, as for the same region before."""
        key = self._key(graph, region)
        if key not in self._built:
            eqn, inner = build(graph, region)
            cost = None if plain is None else price.of_region(plain, inner, *_passes(graph, region))
            self._built[key] = eqn, inner, cost
        eqn, inner, cost = self._built[key]
        site = graph.eqns[region.members[-1]].source_info
        return eqn.replace(invars=region.inputs, outvars=region.results, source_info=site), inner, cost

    def _key(self, graph: Graph, region: Region) -> Hashable:
        """Returns what two regions share that become equal equations."""
        number: dict[Any, int] = {x: i for i, x in enumerate(region.inputs)}
        rows: list[Hashable] = [(region.found, _passes(graph, region))]
        rows += [x.aval for x in region.inputs]
        for i in region.members:
            eqn = graph.eqns[i]
            args = tuple(
                (np.asarray(x.val).tobytes(), x.aval.dtype) if is_literal(x) else number[x] for x in eqn.invars
            )
            params = tuple((name, self._param(value)) for name, value in sorted(eqn.params.items()))
            rows.append((eqn.primitive, args, params, i in region.products))
            for x in eqn.outvars:
                number[x] = len(number)
        rows.append(tuple(number[x] for x in region.results))
        return tuple(rows)

    def _param(self, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            self._kept.append(value)
            return id(value)
        return value


def _report(eqn: Any, form: Contraction | str) -> Report:
    return Report(eqn, runs="XLA", why=form if isinstance(form, str) else "")


def _passes(graph: Graph, region: Region) -> tuple[int, int]:
    """Returns how many of XLA's passes a region saves, and the bytes that these move beside operands of the tail."""
    products = sum(byte_count(graph.eqns[i].outvars[0]) for i in region.products)
    made = [x for x in region.results if full_size(x) == region.size and x not in region.accumulators]
    written = [x for x in made if graph.in_memory(x, before=True)]
    if written:
        return 1, products + sum(map(byte_count, written))
    # What reads the result reads the product instead, and the operands of the tail with it.
    return 0, sum(byte_count(x) for x in made if len(graph.consumers.get(x, ())) > 1)

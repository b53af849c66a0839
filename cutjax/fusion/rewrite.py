"""A program rewritten: the same jaxpr with an equation of a fused product in the place of each region worth it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cutjax.binding import lowering, rules
from cutjax.fusion import memory, price, reductions
from cutjax.fusion.attention.rewrite import attended
from cutjax.fusion.build import Template, function, placed, plain_function, product_of, template, with_product
from cutjax.fusion.contraction import OWN, RAGGED, Contraction, contraction, is_divided, is_product, planned
from cutjax.fusion.dequantized import requantized
from cutjax.fusion.flips import flip
from cutjax.fusion.form import Form
from cutjax.fusion.fp8 import Recipes, may_be_float8, quantized
from cutjax.fusion.gathered import Given, gathered, moves_rows, sorts, unknown
from cutjax.fusion.growth import MOST_PRODUCTS, NOTHING, Finder
from cutjax.fusion.heads.rewrite import headed
from cutjax.fusion.inline import inlined
from cutjax.fusion.jaxprs import BODIES, MOVES, Graph, bodies, is_literal, opened, with_bodies, with_equations
from cutjax.fusion.keys import Keys, argument
from cutjax.fusion.moves import matrices, moved
from cutjax.fusion.narrow import narrowed
from cutjax.fusion.norms import reordered
from cutjax.fusion.region import Region
from cutjax.fusion.report import Report
from cutjax.fusion.siblings import beside, merged_by_xla
from cutjax.fusion.signs import of_results
from cutjax.fusion.transpositions import cancelled
from cutjax.runtime import backends

POLICIES = ("auto", "always")


class Rewriter:
    """Rewrites one program, with all programs inside.

    Attributes:
      reports: one for each product found, in their order.
    """

    def __init__(self, policy: str, fp8: Recipes = None):
        self.policy, self.fp8 = policy, fp8
        self._scope = ""  # the names of the scopes that the program is in
        self._wide: dict[Any, str] = {}  # by the result of a product: why it is none of float8
        self.reports: list[Report] = []
        mesh = jax.sharding.get_abstract_mesh()
        self.divided = is_divided(mesh, ())
        self._done: dict[Hashable, tuple[Any, Any]] = {}  # by the program's id, which is kept
        self._costs: dict[Hashable, price.Price] = {}
        self._templates: dict[Hashable, Template | Exception] = {}
        self._reusing: dict[tuple[Any, tuple[tuple[int, int], ...]], Any] = {}
        self._forms: dict[Hashable, Any] = {}  # by what makes equal ones, and by themselves
        self._prices: dict[Hashable, price.Price] = {}
        self._keys = Keys()
        self._has: dict[int, tuple[Any, bool]] = {}  # by the program's id, which is kept
        self._given: dict[int, Given] = {}  # what is known of the arguments of programs inside, by their ids

    def _refuses(self, jaxpr: Any) -> str:
        """Returns the reason against any kernel at this place of a program, or ""."""
        if backends.resolve(None, "fuse") == "xla":
            return "backend 'xla'"
        if self.divided:
            return lowering.PARTITIONED
        made = (x for eqn in jaxpr.eqns for x in eqn.outvars)
        shaped = (x for x in itertools.chain(jaxpr.constvars, jaxpr.invars, made) if hasattr(x.aval, "shape"))
        return "the program has sizes that are not known" if any(rules.symbolic(x.aval) for x in shaped) else ""

    def rewrite(self, jaxpr: Any, donated: tuple[bool, ...] = ()) -> Any:
        """Returns the program, closed or open as it is; itself where nothing changes.

        Args:
          jaxpr: the program.
          donated: of its first arguments, whether a result may take their memory.
        """
        given = self._given.get(id(jaxpr), ())
        key = id(jaxpr), donated, self._scope if self.fp8 else "", given
        if key not in self._done:
            self._done[key] = jaxpr, self._rewritten(jaxpr, donated, given)
        return self._done[key][1]

    def _rewritten(self, jaxpr: Any, donated: tuple[bool, ...], given: Given) -> Any:
        if not self._multiplies(jaxpr):
            return jaxpr
        follows = any(given) or sorts(jaxpr)
        jaxpr = inlined(jaxpr, lambda body: self._multiplies(body) or (follows and moves_rows(body)))
        why = self._refuses(opened(jaxpr))
        jaxpr, inside = (jaxpr, unknown(jaxpr)) if why else gathered(jaxpr, given)
        self._given |= inside
        eqns = [
            self._inside(eqn) if eqn.primitive.name in BODIES and any(map(self._multiplies, bodies(eqn))) else eqn
            for eqn in opened(jaxpr).eqns
        ]
        if any(map(self._is_product, eqns)):
            jaxpr = with_equations(jaxpr, eqns)
            if why:
                graph = Graph(opened(jaxpr))
                products = (graph.eqns[i] for i in sorted(graph.live) if is_product(graph.eqns[i]))
                self.reports += (Report(eqn, "XLA", why) for eqn in products if eqn.primitive.name not in OWN)
                return jaxpr
            jaxpr = of_results(narrowed(requantized(cancelled(jaxpr))))
            jaxpr, attention = attended(jaxpr, self.policy == "always", self._keys, self._template)
            self.reports += attention
            jaxpr, heads = headed(jaxpr, self.policy == "always", self._keys, self._template)
            self.reports += heads
            if self.fp8 is not None:
                jaxpr, reports, wide = quantized(jaxpr, self.fp8, self._scope)
                self.reports += reports
                self._wide |= wide
            return reordered(with_equations(jaxpr, self._fused(opened(jaxpr), donated)))
        return with_equations(jaxpr, eqns)

    def _inside(self, eqn: Any) -> Any:
        """Returns an equation with its programs rewritten."""
        scope, self._scope = self._scope, f"{self._scope}/{eqn.source_info.name_stack}"
        try:
            return self._mapped(eqn) if eqn.primitive.name == "shard_map" else with_bodies(eqn, self.rewrite)
        finally:
            self._scope = scope

    def _mapped(self, eqn: Any) -> Any:
        """Returns the equation of a shard_map with its program rewritten."""
        params, found = eqn.params, []

        axes = params.get("newly_manual_axes", params.get("manual_axes"))  # renamed after jax 0.10
        mesh, spec, divided = params["mesh"], jax.sharding.PartitionSpec(), self.divided

        def body() -> jax.Array:  # where the mesh's axes are known
            self.divided = is_divided(mesh, axes)
            found.append(with_bodies(eqn, self.rewrite))
            self.divided = divided
            return jnp.zeros(())

        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(), out_specs=spec, axis_names=set(axes), check_vma=params["check_vma"]
        )
        jax.make_jaxpr(mapped)()
        return found[0]

    def _is_product(self, eqn: Any) -> bool:
        """True of a product that may be fused, or multiplied in float8 where that is asked for."""
        return is_product(eqn) or (self.fp8 is not None and may_be_float8(eqn))

    def _multiplies(self, jaxpr: Any) -> bool:
        """True if there is a product in a program, however deep."""
        if id(jaxpr) not in self._has:
            found = any(
                self._is_product(eqn) or (eqn.primitive.name in BODIES and any(map(self._multiplies, bodies(eqn))))
                for eqn in opened(jaxpr).eqns
            )
            self._has[id(jaxpr)] = jaxpr, found
        return self._has[id(jaxpr)][1]

    def _fused(self, jaxpr: Any, donated: tuple[bool, ...]) -> list[Any]:
        """Returns the equations of a program with its own products fused."""
        graph = Graph(jaxpr, donated)
        found: dict[int, Form] = {}
        reports: dict[int, Report] = {}
        prices: dict[int, price.Price] = {}
        for i, eqn in enumerate(graph.eqns):
            if i not in graph.live or not is_product(eqn):
                continue
            if (flipped := flip(graph, i)) is not None:
                graph.flips[i] = flipped
            form = self._form(graph.product(i))
            reports[i] = _report(eqn, form)
            reports[i].wide = self._wide.get(eqn.outvars[0], "")
            ragged = eqn.primitive.name == RAGGED
            if isinstance(form, str) and not (ragged and self.policy == "auto"):
                continue
            if self.policy == "auto":
                if isinstance(form, str) or ragged:
                    prices[i] = price.of_grouped(self._plain(eqn, form)[1])
                else:
                    prices[i] = self._price(form, eqn)
                if prices[i].why:
                    reports[i].reason = prices[i].why
                    continue
            if isinstance(form, str):
                self._replace_product(graph, [i], form, reports[i], prices[i], graph.eqns[i])
            else:
                found[i] = form
        if self.policy == "auto":
            prices |= merged_by_xla(graph, found, prices, self._price_beside)
        finder = Finder(graph, found)
        for i in sorted(reports, reverse=True):
            if i in finder.products:
                self._product(graph, finder, i, reports, prices)
            elif i not in found and self.policy == "auto" and i in graph.live:
                self._moved(graph, i, reports[i])
        self._alone(graph, finder, reports, prices)
        count = len(graph.regions)
        self._sums(graph)
        # A product of ours that stays as it is needs no report: explain shows it anyway.
        self.reports += (x for x in reports.values() if x.eqn.primitive.name not in OWN or x.runs == "fused")
        for node, region in enumerate(graph.regions[:count], len(graph.eqns)):
            region.made = self._in_place(graph, node, region.made)
        return graph.equations()

    def _product(
        self,
        graph: Graph,
        finder: Finder,
        i: int,
        reports: dict[int, Report],
        prices: dict[int, price.Price],
        sums: bool = True,
    ) -> None:
        """Puts a region in the place of a product and what is around it, where that is worth it.

        What has a region that is not worth it, or transpositions around it, is settled with that. Where no kernel has
        the region, one without ``sums`` is tried.
        """
        region = finder.region(i, sums)
        report, plain = reports[i], prices.get(i)
        if isinstance(region, Region) and all(graph.eqns[j].primitive.name in MOVES for j in region.tail):
            region = region.stops or [NOTHING]
        elif isinstance(region, Region) and self.policy == "auto" and (why := memory.grows(graph, region)):
            region = [why, *region.stops]
        if isinstance(region, Region):
            report.ends = region.stops
            try:
                eqn, inner, cost = self._build(graph, region, plain)
            except NotImplementedError as error:
                report.reason = str(error)
            else:
                report.reason = cost or ""
                if cost is None or cost.runs == "fused":
                    region.made = eqn
                    graph.replace(region)
                    for j in region.products:
                        del finder.products[j]
                        reports[j].fused(region, inner, report.reason)
                    return
                if cost.why and sums and region.reduces:
                    self._product(graph, finder, i, reports, prices, sums=False)
                    return
                if cost.runs == "XLA":
                    finder.settled.add(i)
                    return
        else:
            report.ends = region
        if plain is not None and self._moved(graph, i, report):
            finder.settled.add(i)
            return
        report.reason = report.reason or plain or ""

    def _alone(self, graph: Graph, finder: Finder, reports: dict[int, Report], prices: dict[int, price.Price]) -> None:
        """Puts kernels in the places of products that no region has: of several at once, and of one."""
        free = {i for i in finder.products if i in prices and i in graph.live and i not in finder.settled}
        for group in finder.siblings.values():
            left = [i for i in group if i in free]
            for at in range(0, len(left), MOST_PRODUCTS):
                self._several(graph, finder, tuple(left[at : at + MOST_PRODUCTS]), reports, prices)
        for i in sorted(free & set(finder.products), reverse=True):
            if prices[i].runs == "kernel" and graph.eqns[i].primitive.name not in OWN:
                self._replace_product(graph, [i], finder.products.pop(i), reports[i], prices[i], graph.product(i))

    def _sums(self, graph: Graph) -> None:
        """Puts kernels in the places of sums over rows that no product makes, where that is worth it."""
        always = self.policy == "always"
        for sums in reductions.search(graph, 0 if always else reductions.LEAST_BYTES):
            if graph.reaches(sums.inputs, sums.results):
                continue
            try:
                make = functools.partial(reductions.function, graph, sums)
                made = self._template(self._keys.region(graph, sums), make, sums.inputs)
            except NotImplementedError:  # no kernel has its expression
                continue
            if made.product is None or not (always or reductions.pays(graph, sums, made.product)):
                continue
            sums.made, _ = placed(made, sums.inputs, sums.results, graph.eqns[sums.reductions[-1]])
            graph.replace(sums)

    def _several(
        self,
        graph: Graph,
        finder: Finder,
        products: tuple[int, ...],
        reports: dict[int, Report],
        prices: dict[int, price.Price],
    ) -> None:
        """Puts one kernel in the place of products of one left operand, where that is worth it."""
        found = finder.products[products[0]]
        if len(products) < 2 or found.grouped or not isinstance(found, Contraction):
            return
        region = finder.together(products)
        if region is None:
            return
        made = self._template(self._keys.region(graph, region), lambda: function(graph, region), region.inputs)
        eqn, inner = placed(made, region.inputs, region.results, graph.eqns[products[-1]])
        cost = price.of_several([prices[i] for i in products], inner)
        if cost.runs != "fused":
            return
        region.made = eqn
        graph.replace(region)
        for i in products:
            del finder.products[i]
            reports[i].fused(region, inner, cost)

    def _moved(self, graph: Graph, i: int, report: Report) -> bool:
        """Puts a kernel in the place of a product and of transpositions around it; True if it is priced with these."""
        if graph.eqns[i].primitive.name != "dot_general":
            return False
        # An axis of rows that is walked as one of the batch would fix the order of a result that XLA is free to choose:
        # beside grouped queries' scores, its softmax then took four times as long as the product gained.
        left, (_, (batch, _)) = graph.eqns[i].invars[0].aval, graph.eqns[i].params["dimension_numbers"]
        most = math.prod(left.shape[axis] for axis in batch)
        for eqn, permutation, members in moved(graph, i):
            form = self._form(eqn, permutation)
            if isinstance(form, str) or matrices(form) > most:
                continue
            cost = self._price(form, eqn)
            report.reason = cost
            if cost.runs == "kernel":
                self._replace_product(graph, members, form, report, cost, eqn)
            return True
        return False

    def _in_place(self, graph: Graph, node: int, eqn: Any) -> Any:
        """Returns the equation of a region with results in the memory of operands that nothing reads afterwards."""
        body, product = eqn.params["jaxpr"], product_of(eqn)
        pairs = memory.in_place(graph, node, eqn, product)
        if not pairs:
            return eqn
        if (body, pairs) not in self._reusing:
            new = product.replace(params={**product.params, "in_place": pairs})
            self._reusing[body, pairs] = with_product(body, product, new)
        return eqn.replace(params={**eqn.params, "jaxpr": self._reusing[body, pairs]})

    def _replace_product(
        self, graph: Graph, members: list[int], form: Any, report: Report, cost: price.Price, eqn: Any
    ) -> None:
        """Replaces a product without a tail, or one with its transposition, by a kernel; the equation says which."""
        inputs = [x for x in eqn.invars if not is_literal(x)]
        made = self._plain(eqn, form)[0]
        graph.replace(Region((members[0],), set(), form, (), members, inputs, list(eqn.outvars), [], made))
        report.runs, report.reason = "kernel", cost

    def _form(self, eqn: Any, permutation: tuple[int, ...] | None = None) -> Form | str:
        """Returns a product as a kernel has it, or why none has; equal ones are one object."""
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        key = permutation, eqn.primitive, self._keys.params(eqn), *avals
        form = self._forms.get(key)
        if form is None:
            form = contraction(eqn) if permutation is None else planned(eqn, permutation)
            form = self._forms[key] = self._forms.setdefault(form, form)
        return form

    def _price(self, form: Form, eqn: Any) -> price.Price:
        """Returns the price of a dense product; its form is one of those of `_form`."""
        key = id(form), *[x.aval for x in (*eqn.invars, *eqn.outvars)]
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = price.of_product(form, eqn)
        return found

    def _price_beside(self, form: Form, eqn: Any) -> price.Price:
        """Returns the price of several products merged into one."""
        return self._price(self._forms.setdefault(form, form), eqn)

    def _plain(self, eqn: Any, form: Any) -> tuple[Any, Any]:
        """Returns the equation of a product alone as a kernel, and that of the product within."""
        inputs = [x for x in eqn.invars if not is_literal(x)]
        key = form, self._keys.params(eqn), *(x.aval for x in eqn.outvars), *map(argument, eqn.invars)
        return placed(self._template(key, lambda: plain_function(eqn, form), inputs), inputs, eqn.outvars, eqn)

    def _build(self, graph: Graph, region: Region, plain: price.Price | None) -> tuple[Any, Any, price.Price | None]:
        """Returns the equation of a region, that of the product within and the price.

        Raises:
          NotImplementedError: if no epilogue can be its tail.
        """
        made = self._template(self._keys.region(graph, region), lambda: function(graph, region), region.inputs)
        eqn, inner = placed(made, region.inputs, region.results, graph.eqns[region.products[-1]])
        if plain is None:
            return eqn, inner, None
        count, found = len(region.products), region.found
        if count > 1 and isinstance(found, Contraction) and not found.grouped and found.plan is None:
            one = self._price_beside(beside(0, [found] * count), graph.eqns[region.products[0]])
            plain = plain.in_a_row(count, one)
        passes, nbytes, copied = memory.passes(graph, region)
        key = id(inner), passes, nbytes, copied + 2 * found.moved, plain
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = price.of_region(plain, inner, *key[1:4])
        return eqn, inner, cost

    def _template(self, key: Hashable, make: Callable[[], Any], inputs: Sequence[Any]) -> Template:
        """Returns the template for a key, built once for this program and each mesh of its parts.

        Raises:
          NotImplementedError: if it is of a tail that no epilogue can have.
        """
        mesh = _mesh(inputs)
        made = self._templates.get((key, mesh))
        if made is None:
            try:
                with jax.sharding.use_abstract_mesh(mesh):
                    made = template(key, make, inputs)
            except (NotImplementedError, TypeError, ValueError) as error:
                made = error
            self._templates[key, mesh] = made
        if isinstance(made, Exception):
            raise NotImplementedError(str(made)) from made
        return made


def _mesh(inputs: Sequence[Any]) -> Any:
    """The mesh around an equation of these arrays: theirs, inside ``jax.sharding.auto_axes`` not the program's."""
    here = jax.sharding.get_abstract_mesh()
    meshes = [] if here.empty else [x.aval.sharding.mesh for x in inputs]
    return next((mesh for mesh in meshes if not mesh.empty), here)


def _report(eqn: Any, form: Form | str) -> Report:
    return Report(eqn, runs="XLA", reason=form if isinstance(form, str) else "")

"""Memory of fused regions: none may need more than the program that it replaces."""

from __future__ import annotations

import collections
import weakref
from typing import Any

from cutjax.epilogue.jaxpr import IDENTITIES, MEANING
from cutjax.fusion.build import program_of
from cutjax.fusion.jaxprs import BODIES, MOVES, Graph, byte_count, full_size, is_literal, opened, variables
from cutjax.fusion.region import Region

_SAME_MEMORY = MOVES | IDENTITIES | MEANING | {"broadcast_in_dim"}


def grows(graph: Graph, region: Region) -> str:
    """Returns the reason against a region that leaves more results in memory than the program without it; else "".

    Without it there are the results that must lie in memory whatever XLA computes in one pass, and the products that
    passes make all others of.
    """
    full = [x for x in region.results if full_size(x.aval) == region.size]
    needed = [x for x in full if graph.in_memory(x, before=True)]
    products = [x for x in region.accumulators if x not in needed]
    more = len(full) - len(needed) - len(products)
    return f"it would keep {more} results of full size more in memory than XLA" if more > 0 else ""


def in_place(graph: Graph, node: int, eqn: Any, product: Any) -> tuple[tuple[int, int], ...]:
    """Returns pairs of an operand of the tail and a result that may share memory, as they do in XLA's passes.

    Args:
      graph: the program, with all regions in their places.
      node: the region's.
      eqn: its equation.
      product: that of the product within.
    """
    operands, results = _shareable(program_of(eqn), product)
    free = {j: eqn.invars[at] for j, at in operands if _is_last(graph, node, eqn, eqn.invars[at])}
    found: list[tuple[int, int]] = []
    for i, at in results if free else ():
        out, result = product.outvars[i].aval, None if at is None else eqn.outvars[at]
        for j, x in free.items():
            operand = product.invars[j - len(product.params["epilogue"].primal.operands)].aval
            like = operand.shape == out.shape and operand.dtype == out.dtype
            if like and graph.takes.get(x, result) is result:  # another result is to have it otherwise
                found.append((j, i))
                del free[j]
                break
    return tuple(found)


_Places = list[tuple[int, Any]]
_shared: weakref.WeakKeyDictionary[Any, tuple[_Places, _Places]] = weakref.WeakKeyDictionary()


def _shareable(call: Any, product: Any) -> tuple[_Places, _Places]:
    """Returns the operands of a called product's tail that nothing else reads, and its results, each with its place.

    The place is the argument or result of the call that it is but for its shape; None where it is none.
    """
    if call not in _shared:
        body = opened(call)
        readers = collections.Counter(x for inner in body.eqns for x in variables(inner))
        readers.update(x for x in body.outvars if not is_literal(x))
        moves = [inner for inner in body.eqns if inner.primitive.name in ("reshape", "name")]
        made = {inner.outvars[0]: inner.invars[0] for inner in moves}
        makes = {inner.invars[0]: inner.outvars[0] for inner in moves}
        arguments = {x: at for at, x in enumerate(body.invars)}
        results = {x: at for at, x in enumerate(body.outvars)}
        last = len(product.params["epilogue"].primal.operands)
        free: _Places = []
        for j, x in enumerate(product.invars[len(product.invars) - last :]):
            while readers[x] == 1 and x in made:
                x = made[x]
            if readers[x] == 1 and x in arguments:
                free.append((j, arguments[x]))
        outs = [(i, _first(out, makes, results)) for i, out in enumerate(product.outvars)]
        _shared[call] = free, outs
    return _shared[call]


def _first(x: Any, makes: dict[Any, Any], known: dict[Any, int]) -> int | None:
    """Returns the number that is known of a variable, or of what it is moved to make."""
    while x not in known and x in makes:
        x = makes[x]
    return known.get(x)


def copied(graph: Graph, region: Region) -> int:
    """Returns the bytes that XLA copies if arguments are donated of which the program does not say so.

    A kernel's result may not lie where it reads, unless that was said. So where a result of the program is to take the
    memory of an argument that this region reads, as the update of a state does, XLA copies the argument before. Of 16
    bits that moves what the product's own pass did: those are not counted.
    """
    wide = [x for x in region.results if x in graph.outvars and getattr(x.aval.dtype, "itemsize", 0) > 2]
    if not wide:
        return 0
    likes = collections.Counter((x.aval.shape, x.aval.dtype) for x in wide)
    found = 0
    for x in region.inputs:
        like = x.aval.shape, x.aval.dtype
        if graph.given.get(x) is False and likes[like]:
            likes[like] -= 1
            found += 2 * byte_count(x)
    return found


def _is_last(graph: Graph, node: int, eqn: Any, x: Any) -> bool:
    """True if the equation is the last to read a variable, which has memory of its own."""
    if is_literal(x) or list(eqn.invars).count(x) != 1 or not _is_read_before(graph, node, x):
        return False
    if x in graph.definition or graph.given.get(x, False):
        return True
    i = graph.producer.get(x, -1)
    if i < 0:
        return False
    name = graph.eqns[i].primitive.name
    return name not in _SAME_MEMORY and (name not in BODIES or graph.is_pointwise(i))


def _is_read_before(graph: Graph, node: int, x: Any) -> bool:
    """True if all that reads a variable, but for one node, has run before that.

    What is pointwise of it may be computed anew wherever that is read: it must have been read before, too.
    """
    seen, todo = set(), [x]
    while todo:
        x = todo.pop()
        readers = graph.consumers.get(x, set()) - {node} - seen
        passes = {i for i in readers if i < len(graph.eqns) and graph.is_pointwise(i)}
        if x in graph.outvars or not graph.is_after(node, readers - passes):
            return False
        todo += [out for i in passes for out in graph.eqns[i].outvars]
        seen |= readers
    return True


def passes(graph: Graph, region: Region) -> tuple[int, int, int]:
    """Returns the passes of XLA that a region saves, the bytes they move beside operands, and those of new copies."""
    copies = copied(graph, region)
    products = sum(byte_count(graph.eqns[i].outvars[0]) for i in region.products)
    made = [x for x in region.results if full_size(x.aval) == region.size and x not in region.accumulators]
    written = [x for x in made if graph.in_memory(x, before=True)]
    if written:
        return 1, products + sum(map(byte_count, written)), copies
    if region.found.rows > 1 and region.reduces:
        return 1, products, copies
    # What reads the result reads the product instead, and the operands of the tail with it.
    return 0, sum(byte_count(x) for x in made if len(graph.consumers.get(x, ())) > 1), copies

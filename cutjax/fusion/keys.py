"""Keys of equations and regions: equal where equal kernels take their places."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cutjax.fusion.jaxprs import Graph, is_literal
from cutjax.fusion.reductions import Sums
from cutjax.fusion.region import Region


class Keys:
    """Makes keys, and keeps the parameters whose ids are part of them."""

    def __init__(self):
        self._kept: list[Any] = []

    def region(self, graph: Graph, region: Region | Sums) -> Hashable:
        """Returns a key that is equal for regions that become equal equations."""
        number: dict[Any, int] = {x: i for i, x in enumerate(region.inputs)}
        rows: list[Hashable] = [region.found, *(x.aval for x in region.inputs)]
        for i in region.members:
            eqn = graph.eqns[i]
            args = tuple([argument(x) if is_literal(x) else number[x] for x in eqn.invars])
            rows += (eqn.primitive, args, self.params(eqn), i in region.products)
            for x in eqn.outvars:
                number[x] = len(number)
        rows.append(tuple(number[x] for x in region.results))
        return tuple(rows)

    def params(self, eqn: Any) -> Hashable:
        """Returns the parameters of an equation as part of a key."""
        if not eqn.params:
            return ()
        values = tuple(eqn.params.values())
        try:
            hash(values)
        except TypeError:
            return tuple(map(self._param, values))
        return values

    def _param(self, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            self._kept.append(value)  # what is built for the key keeps it longer
            return id(value)
        return value


def argument(x: Any) -> Hashable:
    """Returns an argument of an equation as part of a key: a number, or a shape and a dtype."""
    return (np.asarray(x.val).tobytes(), x.aval) if is_literal(x) else x.aval

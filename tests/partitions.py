"""Helpers of the tests of division over devices: arrays that lie on a mesh, and what a compiled program moves."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from checks import mesh_of

MESH = mesh_of(data=2, tensor=4)
D, T = "data", "tensor"
_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (.*?) ({'|'.join(_OPS)})(?:-start)?\(")


def laid(arrays: Any, specs: Any) -> list[jax.Array]:
    """Arrays on the mesh, each by its tuple of axes."""
    return [jax.device_put(x, jax.NamedSharding(MESH, jax.P(*s))) for x, s in zip(arrays, specs, strict=True)]


def moved(text: str) -> dict[str, int]:
    """Elements that each kind of collective in a compiled program passes on; one that adds everywhere does so twice."""
    found: dict[str, int] = {}
    for shapes, op in _LINE.findall(text):
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\w\[([\d,]*)\]", shapes)]
        kind = "reduce" if op in ("all-reduce", "reduce-scatter") else op
        found[kind] = found.get(kind, 0) + sum(sizes) * (2 if op == "all-reduce" else 1)
    return found


def at_most(ours: dict[str, int], plain: dict[str, int], more: int = 0) -> bool:
    """True if one program moves no more than another, but for so many elements and a fourth.

    Versions of XLA choose otherwise between a gather of an operand and a sum of results for what is around products,
    and so for those of jnp: 9% in all between jax 0.10.2 and 0.12. An operand that is gathered in vain is far more.
    """
    return sum(ours.values()) <= 1.25 * sum(plain.values()) + more

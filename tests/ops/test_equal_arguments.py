"""Arguments that are equal and not the same, 1, 1.0 and True: a call never answers for another, in either order."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cutjax
from cutjax import dot_precision
from cutjax.ops import dot_general, einsum

VALUES = (1, 1.0, True, np.int64(1), np.float32(1), np.bool_(True))
X, B = jnp.ones((4, 4)), jnp.ones((4, 2, 4))
CALLS = {
    "tensordot": lambda m, v: m.tensordot(X, X, axes=v),
    "tensordot, axes": lambda m, v: m.tensordot(X, X, axes=((v,), (0,))),
    "einsum of lists": lambda m, v: m.einsum(X, [0, v], X, [v, 2], [0, 2]),
    "einsum, optimize": lambda m, v: m.einsum("ij,jk,kl->il", X, X, X, optimize=v),
    "einsum, path": lambda m, v: m.einsum("ij,jk,kl->il", X, X, X, optimize=((0, v), (0, 1))),
    "matmul, precision": lambda m, v: m.matmul(X, X, precision=v),
    "dot, precisions": lambda m, v: m.dot(X, X, precision=(v, v)),
    "dot, preferred_element_type": lambda m, v: m.dot(X, X, preferred_element_type=v),
    "dot, out_sharding": lambda m, v: m.dot(X, X, out_sharding=v),
    "dot_general": lambda m, v: (lax if m is jnp else m).dot_general(X, X, (((v,), (0,)), ((), ()))),
    "dot_general, batch": lambda m, v: (lax if m is jnp else m).dot_general(B, B, (((2,), (2,)), ((v,), (v,)))),
    "gemm, precision": lambda m, v: m.matmul(X, X, precision=v) if m is jnp else m.gemm(X, X, precision=v),
}


def outcome(call, module, value):
    """The shape of the result, or that it is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(module, value).shape
    except Exception:
        return "refused"


@pytest.mark.parametrize("name", CALLS)
def test_no_call_answers_for_another(name):
    call = CALLS[name]
    expected = {}
    for i, value in enumerate(VALUES):
        jax.clear_caches()
        expected[i] = outcome(call, jnp, value)
    for order in [pair for i in range(1, len(VALUES)) for pair in ((0, i), (i, 0))]:
        jax.clear_caches()
        for cache in (dot_general._of_lax, einsum._of_arrays, dot_precision._canonical):
            cache.cache_clear()
        for i in (*order, *order):
            assert outcome(call, cutjax, VALUES[i]) == expected[i], (VALUES[i], order)

"""However many operands, results and products a call has, it is lowered: one launch is told only so much."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import cutjax

H = jnp.bfloat16
X, W = jnp.ones((64, 64), H), jnp.ones((4, 64, 64), H)
SIZES = jnp.array([16, 0, 32, 16], jnp.int32)
COUNTS = (1, 8, 9, 31, 40)


def operands(shape, n):
    return (lambda acc, *xs: sum(xs, acc)), tuple(jnp.full(shape, float(i)) for i in range(n))


KINDS = {
    "columns": lambda n: operands((64,), n),
    "rows": lambda n: operands((64, 1), n),
    "scalars": lambda n: operands((), n),
    "tiles": lambda n: operands((64, 64), n),
    "results": lambda n: (lambda acc: tuple(acc * i for i in range(n)), ()),
    "reductions": lambda n: (lambda acc: (acc, *((acc * i).sum(1) for i in range(n))), ()),
    "both": lambda n: (lambda acc, *xs: tuple(acc * x for x in xs), operands((64,), n)[1]),
}


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("kind", "grouped"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in ("columns", "reductions"))]
)
def test_any_number_is_lowered(kind, grouped):
    served = []
    for n in COUNTS:
        epilogue, args = KINDS[kind](n)
        for backend in ("auto", "cuda") if n in COUNTS[::2] else ("cuda",):

            def fn(x, args, epilogue=epilogue, backend=backend):
                how = {"epilogue": epilogue, "operands": args, "backend": backend}
                return cutjax.grouped_gemm(x, W, SIZES, **how) if grouped else cutjax.gemm(x, x, **how)

            (row,) = cutjax.explain(fn, platform="cuda")(X, args).rows
            if row.runs == "error":
                with pytest.raises(NotImplementedError) as error:
                    lowered(fn, X, args)
                assert row.why in str(error.value)
            else:
                assert (f'kernel = "{row.runs}"' in lowered(fn, X, args)) == (row.runs != "XLA")
        served.append(row.choice.config is not None)
        assert served[-1] == bool(cutjax.candidates(row.choice.problem))
        assert row.runs == (row.choice.kernel if served[-1] else "error")
        if not served[-1]:
            assert cutjax.explain(fn, platform="cpu")(X, args).rows[0].choice.reasons
    assert served == sorted(served, reverse=True)
    assert served[0]
    assert not (served[-1] and kind != "reductions")


def test_a_pinned_config_lists_it_too():
    epilogue, args = operands((64,), 9)
    with pytest.raises(NotImplementedError, match=r"too many or too large for one launch .* more than 48"):
        lowered(lambda x: cutjax.gemm(x, x, epilogue=epilogue, operands=args, config=cutjax.Config(64, 32)), X)


def test_products():
    for n in range(1, 6):
        ws = (X,) * n
        if n in (2, 3):
            assert "cutjax_launch" in lowered(lambda x, ws=ws: cutjax.gemm(x, ws, epilogue=lambda *accs: sum(accs)), X)
        else:
            with pytest.raises(ValueError, match="two or three"):
                lowered(lambda x, ws=ws: cutjax.gemm(x, ws, epilogue=lambda *accs: sum(accs)), X)

"""The canonical form of a dot_general: its value, what it copies, and where batch axes lie in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from contractions import equation, random_contraction
from jax import lax

from cutjax.ops.contraction import contraction, contractions


def moved(move, x):
    """The move by numpy, which compiles nothing."""
    return x.reshape(move.split).transpose(move.permutation).reshape(move.shape)


def multiplied(plan, lhs, rhs):
    """dot_general by the plan, and the shape of the product, which numpy computes."""
    a, b = (moved(plan.a, rhs), moved(plan.b, lhs)) if plan.swapped else (moved(plan.a, lhs), moved(plan.b, rhs))
    d = (a if plan.layout[0] == "n" else a.swapaxes(-1, -2)) @ (b if plan.layout[1] == "n" else b.swapaxes(-1, -2))
    for x, order in zip((a, b, d), plan.orders, strict=True):
        assert order == () or (sorted(order) == list(range(x.ndim)) and order[-1] == x.ndim - 1)
        assert order != tuple(range(x.ndim))
    return moved(plan.d, d), d.shape


def in_memory(x, order):
    """The elements as they lie in memory, if that has the array's axes in an order."""
    return x.transpose(order or range(x.ndim)).ravel()


def exactly(shape, seed):
    return np.random.default_rng(seed).integers(-3, 4, shape)


def to_tuples(dims):
    return tuple(tuple(tuple(axes) for axes in pair) for pair in dims)


def test_every_plan_is_dot_general_permuted_and_moves_what_it_says():
    rng, copies, orders = np.random.default_rng(0), 0, 0
    for i in range(1500):
        lhs, rhs, dims = random_contraction(rng, sizes=(1, 2, 3, 5))
        x, y = exactly(lhs, 2 * i), exactly(rhs, 2 * i + 1)
        want = reference(x, y, dims)
        permutation = tuple(int(p) for p in rng.permutation(want.ndim)) if i % 2 else None
        want = want.transpose(permutation) if permutation else want
        plans = contractions(lhs, rhs, to_tuples(dims), permutation)
        assert plans[0] == contraction(lhs, rhs, to_tuples(dims), permutation)
        for plan in plans[:: 1 if i % 4 == 0 else len(plans)]:
            got, d_shape = multiplied(plan, x, y)
            assert got.shape == want.shape, (lhs, rhs, dims, permutation)
            assert (got == want).all(), (lhs, rhs, dims, permutation)
            of_a, of_b = (y, x) if plan.swapped else (x, y)
            for move, of in ((plan.a, of_a), (plan.b, of_b)):
                assert move.copied == (2 * of.size if move.copied else 0)
                places = np.arange(of.size)
                assert move.copied or (in_memory(moved(move, places.reshape(of.shape)), move.order) == places).all()
            d = np.arange(want.size).reshape(d_shape)
            assert plan.d.copied or (moved(plan.d, d).ravel() == in_memory(d, plan.d.order)).all()
            assert sum(map(bool, plan.copies)) == sum(bool(move.copied) for move in (plan.a, plan.b, plan.d))
            copies, orders = copies + bool(plan.copied), orders + any(plan.orders)
            # Every axis of the product is the axes of the result that it is said to merge.
            full = want.shape if permutation is None else np.empty(want.shape).transpose(np.argsort(permutation)).shape
            assert d_shape == tuple(int(np.prod([full[j] for j in axes], initial=1)) for axes in plan.axes)
    assert 100 < copies < 1400, copies  # the generator makes both
    assert 100 < orders < 1400, orders


def reference(x, y, dims):
    """dot_general of integers by numpy."""
    rank = x.ndim + y.ndim - 2 * len(dims[0][0]) - len(dims[1][0])
    return np.einsum(equation(x.shape, y.shape, dims, range(rank)), x, y)


def of(spec: str, sizes: dict[str, int], **kwargs):
    """The plan of an einsum of two arrays."""
    (x, y), out = (part := spec.split("->"))[0].split(","), part[1]
    both, shared = [c for c in x if c in y and c in out], [c for c in x if c in y and c not in out]
    dims = tuple(tuple(tuple(names.index(c) for c in axes) for names in (x, y)) for axes in (shared, both))
    natural = both + [c for c in x if c not in y] + [c for c in y if c not in x]
    permutation = tuple(natural.index(c) for c in out)
    shapes = (tuple(sizes[c] for c in names) for names in (x, y))
    return contraction(*shapes, dims, permutation, **kwargs)


SIZES = {"b": 4, "h": 8, "q": 96, "k": 80, "d": 64, "s": 128, "e": 256, "f": 512, "g": 2}
FREE = {  # no array is copied: layout, swapped, orders
    "se,ef->sf": ("nn", False, ((), (), ())),
    "bse,ef->bsf": ("nn", False, ((), (), ())),
    "bse,fe->bsf": ("nt", False, ((), (), ())),
    "bse,bsf->ef": ("tn", False, ((), (), ())),
    "bse,bsf->fe": ("tn", True, ((), (), ())),
    "bse,ehd->bshd": ("nn", False, ((), (), ())),  # heads of a DenseGeneral
    "bshd,hde->bse": ("nn", False, ((), (), ())),
    "bhqd,bhkd->bhqk": ("nt", False, ((), (), ())),
    "bqhd,bkhd->bhqk": ("nt", False, ((0, 2, 1, 3), (0, 2, 1, 3), ())),
    "bhqk,bkhd->bqhd": ("nn", False, ((), (0, 2, 1, 3), (0, 2, 1, 3))),
    "bhgqk,bkhd->bqhgd": ("nn", False, ((), (2, 0, 3, 1, 4), (0, 3, 1, 2, 4))),  # heads in groups
    "sbe,sbf->bef": ("tn", False, ((1, 0, 2), (1, 0, 2), ())),
    "gse,gef->gsf": ("nn", False, ((), (), ())),
    "gse,gef->sgf": ("nn", False, ((), (), (1, 0, 2))),
    "e,ef->f": ("nn", False, ((), (), ())),
    "se,e->s": ("nt", True, ((), (), ())),
    "s,e->se": ("tn", False, ((), (), ())),
    "s,s->": ("nt", False, ((), (), ())),
    "ef,->ef": ("nn", True, ((), (), ())),
    "bsef,efk->bsk": ("nn", False, ((), (), ())),
    "besf,bef->bs": None,  # e and f are no neighbours in one operand
    "ef,fes->s": None,
    "seb,efb->sfb": None,  # the last axis is a batch axis
}


@pytest.mark.parametrize("spec", FREE)
def test_telling_contractions(spec):
    plan, want = of(spec, SIZES), FREE[spec]
    if want is None:
        assert plan.copied > 0
    else:
        assert (plan.layout, plan.swapped, plan.orders) == want
        assert plan.copied == 0
        assert plan.copies == ("", "", "")


def test_heads_in_groups_are_a_batch_axis_along_which_b_broadcasts():
    # [b, h, g, q, d] x [b, k, h, d]: g and q are rows where they are neighbours.
    plan = of("bhgqd,bkhd->bhgqk", SIZES)
    assert (plan.a.shape, plan.b.shape) == ((4, 8, 192, 64), (4, 8, 80, 64))
    plan = of("bqhgd,bkhd->bhgqk", SIZES)
    assert plan.copied == 0
    assert (plan.a.shape, plan.b.shape) == ((4, 8, 2, 96, 64), (4, 8, 1, 80, 64))
    assert plan.axes == ((0,), (1,), (3,), (2,), (4,))


def test_plans_copy_more_for_fewer_matrices():
    """The outer product of AlphaFold: by strides a matrix of 32 x 32 for each pair, by copies one product."""
    shapes, dims = ((1, 512, 128, 32), (1, 512, 128, 32)), (((1,), (1,)), ((0,), (0,)))
    found = contractions(*shapes, dims, (0, 1, 3, 2, 4))
    assert [plan.copied for plan in found] == sorted({plan.copied for plan in found})
    matrices = [math.prod(plan.a.shape[:-2]) * math.prod(plan.b.shape[:-2]) for plan in found]
    assert matrices == sorted({*matrices}, reverse=True)
    assert (found[0].copied, matrices[-1]) == (0, 1)
    few = contractions((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,))))
    assert len(few) == 1  # nothing has fewer matrices than the batch


def test_the_smaller_operand_is_copied_and_the_reason_names_it():
    apart, size = "its contracted axes do not lie as the other operand's", 2 * 256 * 512
    assert of("ef,fes->s", SIZES).copies == (f"lhs is copied ({size:,} bytes): {apart}", "", "")
    assert of("ksfe,ef->ks", SIZES).copies == (f"rhs is copied ({size:,} bytes): {apart}", "", "")  # a is made of rhs
    assert "its contracted axes are not neighbours" in of("esf,ef->s", SIZES).copies[1]
    assert "its last axis is a batch axis" in "".join(of("seb,eb->sb", SIZES).copies)
    result = "the result is copied (2,097,152 bytes): its axes do not lie as the operands'"
    assert of("hk,kef->hfe", SIZES).copies == ("", "", result)


@pytest.mark.versions
def test_the_plan_on_jax_arrays_is_lax_dot_general():
    dims = (((2, 1), (0, 2)), ((0,), (1,)))
    x, y = exactly((3, 4, 5), 0).astype(np.float32), exactly((5, 3, 4), 1).astype(np.float32)
    plan = contraction(x.shape, y.shape, dims)
    a, b = plan.operands(x, y)
    d = (a if plan.layout[0] == "n" else a.mT) @ (b if plan.layout[1] == "n" else b.mT)
    want = lax.dot_general(x, y, dims)
    assert (np.asarray(plan.result(d)) == want).all()
    assert (reference(x, y, dims) == want).all()

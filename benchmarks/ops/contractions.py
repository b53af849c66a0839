"""Contractions of two tensors beside ``jnp.einsum``: ``python -m benchmarks run --op contractions --tag all``.

They are steps of what people compute: coupled clusters and integrals of quantum chemistry, tensor networks, equivariant
networks and spectral layers, attention in its variants, decompositions. Beside ours runs every way to multiply that
there is a choice of: each plan (cutjax/ops/contraction.py) by a kernel and by XLA; ``--peers xla`` leaves them out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cutjax
from benchmarks.suite import Peer, Product, Suite
from cutjax.ops.contraction import Contraction, contractions
from cutjax.ops.einsum import product_of
from cutjax.primitives.dense import Dense
from cutjax.primitives.product import multiply

# A result's distance from float32's or float64's at the highest precision, by the norm: of how inputs are rounded.
TOLERANCE = {"bfloat16": 2e-2, "float32": 3e-3, "float64": 1e-12, "complex64": 3e-3}
WHERE = {"chemistry": "float32", "networks": "float32", "equivariant": "float32", "attention": "bfloat16"}
WHERE |= {"decompositions": "float32"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One contraction.

    Attributes:
      equation: as einsum takes it.
      sizes: of its letters, by letter.
      dtype: of both operands and the result.
      of: the method and step it was taken from.
      tags: the field.
    """

    equation: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    of: str
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The equation and the sizes, in the order of the letters."""
        return f"{self.equation} {','.join(f'{letter}{size}' for letter, size in self.sizes)} {self.dtype}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of both operands and the result."""
        of = dict(self.sizes)
        return tuple(tuple(of[x] for x in part) for part in self.equation.replace("->", ",").split(","))

    @property
    def flops(self) -> int:
        """Operations, of complex numbers four of real ones each."""
        return 2 * math.prod(size for _, size in self.sizes) * (4 if self.dtype.startswith("complex") else 1)

    @property
    def bytes(self) -> int:
        """Bytes of all three tensors."""
        return sum(map(math.prod, self.shapes)) * np.dtype(jnp.dtype(self.dtype)).itemsize

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random normal."""
        keys = jax.random.split(jax.random.key(seed, impl="rbg"))
        dtype = jnp.dtype(self.dtype)

        def drawn(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            if dtype.kind != "c":
                return jax.random.normal(key, shape, dtype)
            real, imag = (jax.random.normal(part, shape) for part in jax.random.split(key))
            return lax.complex(real, imag).astype(dtype)

        return tuple(drawn(key, shape) for key, shape in zip(keys, self.shapes[:2], strict=True))


def _cases() -> list[Case]:
    found = []

    def add(where: str, of: str, equation: str, dtype: str = "", **sizes: int) -> None:
        letters = [x for x in dict.fromkeys(equation) if x.isalpha()]
        pairs = tuple((x, sizes[x] if x in sizes else sizes[x.lower() * 2]) for x in letters)
        found.append(Case(equation, pairs, dtype or WHERE[where], of, (where,)))

    # Closed-shell coupled clusters: 32 occupied (i j k l m n) and 96 virtual orbitals (a to f); T2 is [i, j, a, b].
    o, v = dict.fromkeys("ijklmn", 32), dict.fromkeys("abcdef", 96)
    chemistry = functools.partial(add, "chemistry", **o, **v)
    chemistry("CCSD, particle ladder", "ijef,abef->ijab", e=64, f=64)
    chemistry("CCSD, hole ladder", "mnij,mnab->ijab")
    chemistry("CCSD, ring", "imae,mbej->ijab")
    chemistry("CCSD, ring, exchanged", "imae,mbie->mbae", b=32)
    chemistry("CCSD, ring of integrals", "mnef,jnfb->mbej")
    chemistry("CCSD, Fae", "mnaf,mnef->ae")
    chemistry("CCSD, Fmi", "inef,mnef->mi")
    chemistry("CCSD, Wmnij", "ijef,mnef->mnij")
    chemistry("CCSD, Fae T2", "ijeb,ae->ijab")
    chemistry("CCSD, Fmi T2", "mjab,mi->ijab")
    chemistry("CCSD, T1 dressing", "ie,abej->ijab", dtype="float64", a=64, b=64, e=64)
    chemistry("CCSD, ring", "imae,mbej->ijab", dtype="float64", i=16, j=16, m=16, a=64, b=64, e=64)
    chemistry("CCSD, particle ladder", "ijef,abef->ijab", dtype="float64", i=16, j=16, a=48, b=48, e=48, f=48)
    chemistry("(T), particles", "iad,bcdk->ikabc", i=8, k=8)
    chemistry("(T), holes", "imab,mkjc->ijkabc", i=8, j=8, k=8, a=32, b=32, c=32)
    add("chemistry", "integrals, first quarter", "pqrs,pi->iqrs", p=112, q=112, r=112, s=112, i=32)
    add("chemistry", "integrals, second quarter", "iqrs,qj->ijrs", i=112, q=112, r=112, s=112, j=32)
    add("chemistry", "integrals, third quarter", "ijrs,rk->ijks", i=112, j=112, r=112, s=112, k=32)
    add("chemistry", "density fitting, half transformed", "Qpq,qi->Qpi", Q=1536, p=320, q=320, i=64)
    add("chemistry", "density fitting, transformed", "Qpi,pa->Qia", Q=1536, p=320, i=64, a=256)
    add("chemistry", "density fitting, integrals", "Qia,Qjb->iajb", dtype="float64", Q=768, i=24, j=24, a=96, b=96)
    add("chemistry", "density fitting, exchange", "Qpi,Qqi->pq", Q=1536, p=320, q=320, i=64)

    # A bond of 512, a physical index of 4, an operator's bond of 16; layers of PEPS and corners of 64 and 256.
    mps = functools.partial(add, "networks", x=512, y=512, a=512, b=512, s=4, t=4, u=4, w=16, v=16)
    mps("DMRG, left environment", "xwa,astb->xwstb", s=2, t=2)
    mps("DMRG, operator", "xwstb,wvsu->xvutb", x=256, b=256, s=2, t=2, u=2)
    mps("DMRG, right environment", "xvutb,yvb->xuty", x=512, u=2, t=2)
    mps("MPS, two sites", "asb,btc->astc", c=512)
    mps("MPS, overlap", "xa,asb->xsb", s=16)
    mps("MPS, transfer", "xsb,xsy->by", s=16)
    add("networks", "PEPS, corner and edge", "ab,bdc->adc", a=512, b=512, c=512, d=36)
    add("networks", "PEPS, edges", "auc,cle->aule", a=256, u=16, c=256, l=16, e=256)
    add("networks", "PEPS, site", "aule,uldr->adre", a=128, u=16, l=16, e=128, d=16, r=16)
    add("networks", "PEPS, two layers", "uldrp,efghp->ueldfgrh", u=8, l=8, d=8, r=8, p=16, e=8, f=8, g=8, h=8)
    add("networks", "HOTRG, two tensors", "abcd,efgb->aecfdg", a=24, b=24, c=24, d=24, e=24, f=24, g=24)
    add("networks", "MERA, disentangler", "abcd,aebf->cdef", a=40, b=40, c=40, d=40, e=40, f=40)
    gate = {"x": 64, "y": 256, "z": 512} | dict.fromkeys("abcd", 2)
    add("networks", "circuit, gate of two qubits", "xaybz,abcd->xcydz", dtype="complex64", **gate)
    add("networks", "circuit, slices", "abcde,cgbh->adegh", dtype="complex64", a=32, b=32, c=32, d=16, e=32, g=32, h=16)

    # Nodes n, edges e, channels u v and components i j of irreducible representations; degrees and orders of spheres.
    add("equivariant", "e3nn, linear of vectors", "nui,uv->nvi", n=16384, u=128, i=3, v=128)
    add("equivariant", "e3nn, linear, components first", "niu,uv->niv", n=16384, u=128, i=5, v=128)
    add("equivariant", "NequIP, messages", "euv,eui->evi", e=8192, u=32, v=32, i=9)
    add("equivariant", "MACE, symmetric contraction", "ncij,nci->ncj", n=512, c=128, i=16, j=16)
    add("equivariant", "MACE, coupling", "ijk,kcn->ijcn", i=16, j=16, k=23, c=128, n=64)
    add("equivariant", "eSCN, convolution of orders", "nmi,mio->nmo", n=8192, m=9, i=256, o=256)
    add("equivariant", "eSCN, rotation", "eij,ejc->eic", e=8192, i=32, j=32, c=128)
    add("equivariant", "spherical network, degrees", "blmi,lio->blmo", b=64, l=16, m=31, i=128, o=128)
    operator = functools.partial(add, "equivariant", dtype="complex64", b=32, x=32, y=17, i=64, o=64)
    operator("neural operator, channels last", "bxyi,xyio->bxyo")
    operator("neural operator", "bixy,ioxy->boxy")

    heads = functools.partial(add, "attention", b=8, q=1024, k=1024, s=1024, t=1024, h=16, d=128, m=2048)
    heads("scores", "bqhd,bkhd->bhqk")
    heads("values", "bhqk,bkhd->bqhd")
    heads("grouped heads, scores", "bqhgd,bkhd->bhgqk", h=4, g=4)
    heads("grouped heads, values", "bhgqk,bkhd->bqhgd", h=4, g=4)
    heads("latent, queries", "bshd,hdc->bshc", c=512, h=64, b=2)
    heads("latent, scores", "bshc,btc->bhst", c=512, h=64, b=2)
    heads("heads to the model", "bshd,hdm->bsm")
    heads("weights of heads, gradient", "bsm,bshd->mhd")
    heads("talking heads", "bhqk,hg->bgqk", g=16)
    heads("AlphaFold, triangle", "bikc,bjkc->bijc", b=1, i=256, k=256, j=256, c=128)
    heads("AlphaFold, outer product", "bsic,bsjd->bijcd", b=1, s=512, i=128, j=128, c=32, d=32)
    heads("linear attention, state", "bshd,bshe->bhde", e=128, s=4096, b=4)

    add("decompositions", "Tucker, first mode", "ijk,ia->ajk", i=512, j=512, k=512, a=64)
    add("decompositions", "Tucker, second mode", "ijk,jb->ibk", i=512, j=512, k=512, b=64)
    return found


CASES = tuple(_cases())


def plan_of(case: Case) -> tuple[tuple[Contraction, ...], Any]:
    """Returns the plans of a case, and its dimension numbers with the permutation after them."""
    lhs, rhs, _ = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in case.shapes)
    found = product_of(case.equation, lhs, rhs)
    assert found is not None
    dims, permutation = found
    sizes = (np.dtype(jnp.dtype(case.dtype)).itemsize,) * 3
    return contractions(lhs.shape, rhs.shape, dims, permutation, itemsizes=sizes), found


def by_plan(plan: Contraction, backend: str) -> Callable[..., jax.Array]:
    """Returns a contraction as a plan has it."""

    def contract(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        a, b = plan.operands(lhs, rhs)
        product = Dense(plan.layout, plan.orders)
        return plan.result(multiply(product, a, b, out_dtype=lhs.dtype, precision=None, backend=backend))

    return contract


def products(case: Case) -> list[Product]:
    """The contraction; by norm it must be near what it is at the highest precision."""

    def look(args: Any, out: Any, theirs: Any) -> Any:
        wide = np.dtype(np.float32) if case.dtype == "bfloat16" else jnp.dtype(case.dtype)
        lhs, rhs = (x.astype(wide) for x in args)
        exact = jnp.einsum(case.equation, lhs, rhs, precision=lax.Precision.HIGHEST)
        off = out.astype(wide) - exact
        return jnp.linalg.norm(off.ravel()) / jnp.linalg.norm(exact.ravel())

    def judge(seen: Any) -> tuple[float, str]:
        error = float(seen)
        return error, "" if error <= TOLERANCE[case.dtype] else f"wrong: off by {error:.2g} of the norm"

    def peers() -> Mapping[str, Peer]:
        found = {"xla": Peer(lambda: functools.partial(jnp.einsum, case.equation), check=False)}
        for i, plan in enumerate(plan_of(case)[0]):
            for backend in ("cuda", "xla"):
                found[f"plan {i} {backend}"] = Peer(functools.partial(by_plan, plan, backend))
        return found

    return [
        Product(
            "",
            case.flops,
            case.bytes,
            lambda config: functools.partial(cutjax.einsum, case.equation),
            peers(),
            look,
            judge,
            targets={"xla": 1.3},
        )
    ]


SUITE = Suite("contractions", CASES, Case.inputs, products, reps=(8, 100), timed_us=120e3, x64=True)

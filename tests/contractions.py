"""Random contractions: shapes, dimension numbers, dtypes and everything else of dot_general."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cutjax.primitives.accumulators import converted

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def random_contraction(
    rng: np.random.Generator, sizes: tuple[int, ...] = (1, 2, 3, 5), rank: int = 5
) -> tuple[tuple[int, ...], tuple[int, ...], Dims]:
    """Shapes of lhs and rhs, up to a rank, and dimension numbers; every second time most axes lie in order."""
    contracted, batch = (int(rng.integers(0, n)) for n in (3, 3))
    free = [int(rng.integers(0, rank - contracted - batch + 1)) for _ in range(2)]
    mixed = rng.random() < 0.5
    of = {name: int(rng.choice(sizes)) for name in range(contracted + batch + sum(free))}
    names = list(of)
    shared_c, shared_b = names[:contracted], names[contracted : contracted + batch]
    own = [names[contracted + batch :][: free[0]], names[contracted + batch + free[0] :]]
    arrays: list[list[int]] = []
    for i in range(2):
        groups = [shared_b, *([own[i], shared_c] if rng.random() < 0.5 else [shared_c, own[i]])]
        axes = [name for group in groups for name in group]
        swaps = 4 if mixed else int(rng.integers(0, 2))
        for _ in range(swaps if len(axes) > 1 else 0):
            p, q = rng.choice(len(axes), 2, replace=False)
            axes[p], axes[q] = axes[q], axes[p]
        arrays.append(axes)

    def places(group: list[int]) -> Any:
        shuffled = [group[i] for i in rng.permutation(len(group))]
        return tuple(tuple(axes.index(name) for name in shuffled) for axes in arrays)

    lhs, rhs = (tuple(of[name] for name in axes) for axes in arrays)
    return lhs, rhs, (places(shared_c), places(shared_b))


def equation(lhs: tuple[int, ...], rhs: tuple[int, ...], dims: Dims, permutation: tuple[int, ...]) -> str:
    """The einsum of a contraction, its result permuted."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names = [[""] * len(lhs), [""] * len(rhs)]
    (l_contract, r_contract), (l_batch, r_batch) = dims
    for i, j in (*zip(l_batch, r_batch, strict=True), *zip(l_contract, r_contract, strict=True)):
        names[0][i] = names[1][j] = next(letters)
    names = [[c or next(letters) for c in of] for of in names]
    out = [names[0][i] for i in l_batch]
    out += [c for of, other in (names, names[::-1]) for c in of if c not in other]
    return f"{''.join(names[0])},{''.join(names[1])}->{''.join(out[i] for i in permutation)}"


FLOATS = ("bfloat16", "float16", "float32", "float64")
NARROW = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int32", "int64", "bool")
COMPLEX = ("complex64", "complex128")
PRECISIONS = (None, None, "highest", lax.Precision.HIGH, ("default", "highest"), lax.DotAlgorithmPreset.DEFAULT)


@dataclasses.dataclass(frozen=True)
class Case:
    """A random dot_general; ``vmaps`` are the places of a mapped axis, None of an operand without."""

    seed: int
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dims: Dims
    dtypes: tuple[str, str]
    weak: tuple[bool, bool]
    preferred: str | None
    precision: Any
    vmaps: tuple[int | None, int | None]
    permutation: tuple[int, ...]

    @property
    def wide(self) -> bool:
        """True if it needs jax_enable_x64."""
        return not {*self.dtypes, self.preferred}.isdisjoint(("int64", "float64", "complex128"))


def random_case(seed: int) -> Case:
    """A case of any dtypes: one of two has floats of 16 or 32 bits, one of eight two dtypes."""
    rng = np.random.default_rng(seed)
    sizes = (1, 2, 3, 4) if seed % 20 else (0, 1, 2, 3)
    lhs, rhs, dims = random_contraction(rng, sizes)
    kinds = [FLOATS[:3], FLOATS[:3], FLOATS, NARROW, INTEGERS, COMPLEX]
    kind = kinds[int(rng.integers(len(kinds)))]
    dtype = str(rng.choice(kind))
    other = str(rng.choice([*FLOATS, *INTEGERS[:-1]] if kind is not NARROW else NARROW)) if seed % 8 == 3 else dtype
    wider = {
        FLOATS[:3]: FLOATS[:3],
        FLOATS: FLOATS[2:],
        NARROW: (*NARROW[:1], *FLOATS[:3]),
        INTEGERS: ("int32",),
        COMPLEX: COMPLEX,
    }
    preferred = str(rng.choice(wider[kind])) if rng.random() < 0.4 and dtype == other not in ("bool", "int64") else None
    preferred = "complex128" if dtype == "complex128" and preferred else preferred  # lax takes none that is narrower
    precision = PRECISIONS[int(rng.integers(len(PRECISIONS)))]
    places: list[int | None] = [int(rng.integers(len(shape) + 1)) for shape in (lhs, rhs)]
    if (gone := int(rng.integers(3))) < 2:
        places[gone] = None
    rank = len(lhs) + len(rhs) - 2 * len(dims[0][0]) - len(dims[1][0])
    return Case(
        seed,
        lhs,
        rhs,
        dims,
        (dtype, other),
        (bool(rng.random() < 0.2), bool(rng.random() < 0.2)),
        preferred,
        precision,
        (places[0], places[1]),
        tuple(int(p) for p in rng.permutation(rank)),
    )


def checked(case: Case, ours: Any) -> Any:
    """A function of lhs, rhs, the result's cotangent and mapped operands: what ours does with them, all it can do."""

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = (converted(z, z.dtype, weak) for z, weak in zip((x, y), case.weak, strict=True))
        return ours(x, y, case.dims, case.precision, case.preferred)

    def everything(x: jax.Array, y: jax.Array, g: jax.Array, *mapped: jax.Array) -> dict[str, Any]:
        value = product(x, y)
        found: dict[str, Any] = {"value": value, "vmap": jax.vmap(product, case.vmaps)(*mapped)}
        if jnp.issubdtype(value.dtype, jnp.inexact):
            floats = [i for i, z in enumerate((x, y)) if jnp.issubdtype(z.dtype, jnp.inexact)]

            def of(*zs: jax.Array) -> jax.Array:
                args = [x, y]
                for i, z in zip(floats, zs, strict=True):
                    args[i] = z
                return product(*args)

            zs = [(x, y)[i] for i in floats]
            found["gradient"] = jax.vjp(of, *zs)[1](g)
            found["tangent"] = jax.jvp(of, zs, zs)[1]
        return found

    return everything


def arguments(case: Case) -> list[jax.Array]:
    """Small integers, of which every sum is exact: lhs, rhs, a cotangent of the result, and mapped operands."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip((case.lhs, case.rhs), case.dtypes, strict=True)]
    out = jax.eval_shape(lambda x, y: lax.dot_general(x, y, case.dims, case.precision, case.preferred), *avals)
    shapes = [list(x.shape) for x in avals]
    for shape, at in zip(shapes, case.vmaps, strict=True):
        if at is not None:
            shape.insert(at, 2)
    of = [*((x.shape, x.dtype) for x in (*avals, out)), *zip(map(tuple, shapes), case.dtypes, strict=True)]
    rng = np.random.default_rng(case.seed)
    return [jax.device_put(rng.integers(0 if str(t)[0] in "ub" else -2, 3, shape).astype(t)) for shape, t in of]

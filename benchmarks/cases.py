"""The problems that benchmarks, GPU tests and the tuner share."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    import cutjax


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM with both operands batched alike.

    Attributes:
      m, n, k, layout, batch, dtype: the problem; the result has the dtype of the inputs.
      tags: the sets this case belongs to.
      target: the least ratio to XLA we ask for (above 1 is faster than XLA), or None where we only report.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    batch: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    tags: tuple[str, ...] = ()
    target: float | None = None

    @property
    def name(self) -> str:
        """A short unique name, e.g. ``64x2048x2048x64 nt``: batch sizes first."""
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        return f"{sizes} {self.layout}" + ("" if self.dtype == "bfloat16" else f" {self.dtype}")

    @property
    def a_shape(self) -> tuple[int, ...]:
        """``[..., m, k]``, or ``[..., k, m]`` when the layout begins with "t"."""
        return (*self.batch, *((self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)))

    @property
    def b_shape(self) -> tuple[int, ...]:
        """``[..., k, n]``, or ``[..., n, k]`` when the layout ends with "t"."""
        return (*self.batch, *((self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)))

    @property
    def problem(self) -> cutjax.Problem:
        """The same as a ``cutjax.Problem``."""
        import cutjax

        dtype = np.dtype(jnp.dtype(self.dtype))
        return cutjax.Problem(
            self.m, self.n, self.k, self.layout, dtype, dtype, dtype, self.batch, self.batch, self.batch
        )


# (m, n, k, target): the products of language models, from one full wave to many, and the shapes where waves run out.
_DENSE = (
    (8192, 8192, 8192, 0.97),
    (4096, 4096, 4096, 0.97),
    (2048, 2048, 2048, 0.97),
    (1024, 1024, 1024, 0.90),
    (8192, 14336, 4096, 0.97),
    (8192, 4096, 14336, 0.97),
    (16384, 16384, 4096, 0.97),
    (4096, 28672, 8192, 0.97),
    (512, 4096, 14336, 0.90),
    (128, 28672, 4096, 0.90),
    (16384, 1024, 1024, 0.97),
)

# Bound by reading b, or by too few tiles: split-K and skinny kernels are still to come, so no target.
_SKINNY = ((1, 14336, 4096), (16, 14336, 4096), (256, 256, 65536))

_LAYOUTS = ((8192, 8192, 8192), (8192, 14336, 4096), (2048, 2048, 2048))

# Attention's first product, q @ k^T: heads times sequences in the batch, a short contraction.
_BATCHED = (
    (1024, 128, 128, 64),
    (1024, 256, 256, 64),
    (512, 512, 512, 64),
    (512, 512, 512, 128),
    (256, 1024, 1024, 64),
    (256, 1024, 1024, 128),
    (64, 2048, 2048, 64),
    (64, 2048, 2048, 128),
    (128, 2048, 2048, 128),
)

# Attention's second product, p @ v: reported, no target.
_PV = ((256, 1024, 64, 1024), (256, 1024, 128, 1024), (64, 2048, 128, 2048))


def _all() -> tuple[Case, ...]:
    cases = []
    for m, n, k, target in _DENSE:
        tags = ("suite", "layouts") if (m, n, k) in _LAYOUTS else ("suite",)
        cases.append(Case(m, n, k, tags=tags, target=target))
    cases += [Case(m, n, k, tags=("suite", "skinny")) for m, n, k in _SKINNY]
    for m, n, k in _LAYOUTS:
        cases += [Case(m, n, k, layout, tags=("layouts",), target=0.97) for layout in ("nt", "tn", "tt")]
    for batch, m, n, k in _BATCHED:
        cases += [Case(m, n, k, layout, (batch,), tags=("batched",), target=0.95) for layout in ("nn", "nt")]
    cases += [Case(m, n, k, batch=(batch,), tags=("pv",)) for batch, m, n, k in _PV]
    return tuple(cases)


CASES = _all()
TAGS = ("suite", "skinny", "layouts", "batched", "pv")


def select(tags: str) -> tuple[Case, ...]:
    """The cases of one tag or of several joined by commas; "all" is every case.

    Raises:
      ValueError: an unknown tag.
    """
    wanted = set(tags.split(","))
    if unknown := wanted - {*TAGS, "all"}:
        raise ValueError(f"unknown tag {sorted(unknown)}, expected some of {(*TAGS, 'all')}")
    return tuple(case for case in CASES if "all" in wanted or wanted & set(case.tags))


def find(name: str) -> Case:
    """The case of that name.

    Raises:
      ValueError: there is none.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case named {name!r}")


@dataclasses.dataclass(frozen=True)
class Fused:
    """Products with more around them, on the same inputs; bf16 throughout.

    Attributes:
      kind: "epilogue" (several of one product), "gated" (two products), "layer" or "mlp" (forward and backward).
      sizes: m, n, k; of an mlp tokens, hidden, model.
      target: the least ratio to XLA we ask for, or None where we only report.
      plain_target: the most time we allow over that of the plain product, or None.
    """

    kind: str
    sizes: tuple[int, int, int]
    target: float | None = None
    plain_target: float | None = None

    @property
    def name(self) -> str:
        """The sizes, as in ``Case``."""
        return "x".join(map(str, self.sizes))


FUSED = (
    *(
        Fused("epilogue", sizes, target, plain_target=1.03)
        for sizes, target in (
            ((8192, 14336, 4096), 1.10),
            ((8192, 8192, 8192), 1.05),
            ((2048, 2048, 2048), 1.20),
            ((4096, 4096, 4096), None),
            ((16384, 1024, 1024), None),
        )
    ),
    *(Fused("gated", sizes, 1.10) for sizes in ((8192, 14336, 4096), (8192, 8192, 8192), (2048, 2048, 2048))),
    Fused("layer", (8192, 14336, 4096), 1.10),
    Fused("layer", (16384, 16384, 4096), 1.20),
    Fused("layer", (2048, 8192, 2048), 1.20),
    Fused("mlp", (16384, 16384, 4096), 1.08),
    Fused("mlp", (2048, 8192, 2048), 1.08),
)
FUSED_TAGS = tuple(dict.fromkeys(case.kind for case in FUSED))


def select_fused(tags: str) -> tuple[Fused, ...]:
    """The fused cases of some kinds joined by commas; "suite" and "all" are every case.

    Raises:
      ValueError: an unknown kind.
    """
    wanted = set(tags.split(","))
    if unknown := wanted - {*FUSED_TAGS, "suite", "all"}:
        raise ValueError(f"unknown tag {sorted(unknown)}, expected some of {(*FUSED_TAGS, 'all')}")
    return tuple(case for case in FUSED if wanted & {case.kind, "suite", "all"})


PRODUCTS = ("forward", "dx", "dw")


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rows sorted by group, each group with its own weights: x [m, k], w [groups, k, n]; bf16 throughout.

    Attributes:
      groups, m, n, k: the problem.
      tokens: how many tokens a model routes to these rows, or 0 where the case is of no model.
      nonempty: how many groups have rows, 0 for all.
      tags: the sets this case belongs to.
    """

    groups: int
    m: int
    n: int
    k: int
    tags: tuple[str, ...] = ()
    tokens: int = 0
    nonempty: int = 0

    @property
    def name(self) -> str:
        """A short unique name, e.g. ``8g 16384x14336x4096``."""
        groups = f"{self.groups}g" if not self.nonempty else f"{self.nonempty} of {self.groups}g"
        return f"{groups} {self.m}x{self.n}x{self.k}"

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Uneven sizes that add up to m, the same every time: shares drawn from a Dirichlet distribution of 2."""
        rng = np.random.default_rng([self.groups, self.m, self.n, self.k])
        count = self.nonempty or self.groups
        sizes = np.zeros(self.groups, np.int32)
        sizes[rng.permutation(self.groups)[:count]] = rng.multinomial(self.m, rng.dirichlet(np.full(count, 2.0)))
        return sizes

    @property
    def flops(self) -> int:
        """Of each of the three products."""
        return 2 * self.m * self.n * self.k

    def bytes(self, product: str) -> int:
        """The least that device memory moves: rows, and the weights that are read, or all that are written."""
        groups = self.groups if product == "dw" else int(np.count_nonzero(self.sizes))
        return 2 * (self.m * (self.k + self.n) + groups * self.k * self.n)

    def problem(self, product: str) -> cutjax.Problem:
        """``y = x w``, ``dx = dy w^T`` or ``dw = x^T dy`` as a ``cutjax.Problem``."""
        import cutjax

        sizes = {"forward": (self.m, self.n, self.k), "dx": (self.m, self.k, self.n), "dw": (self.k, self.n, self.m)}
        layout = {"forward": "nn", "dx": "nt", "dw": "tn"}[product]
        return cutjax.Problem(*sizes[product], layout, groups=self.groups, ragged="k" if product == "dw" else "m")

    def targets(self, product: str) -> dict[str, float]:
        """The least ratios we ask for, by what our time is compared with.

        "dense": a dense product of the same FLOP; of dw where that takes longer than moving the bytes on an H200, of
        the others where groups have 1024 rows on average; "peers": the fastest of them; "torch": it alone; "copy": the
        measured copy bandwidth, where a model decodes.
        """
        targets = {"peers": 1.0}
        if product == "dw":
            targets["torch"] = 1.25
            if self.flops / 830e12 > self.bytes(product) / 4.3e12:
                targets["dense"] = 0.85
        elif self.m >= 1024 * (self.nonempty or self.groups):
            targets["dense"] = 0.90
        if "decode" in self.tags and product != "dw":
            targets["copy"] = 0.88
        return targets


def _grouped() -> tuple[Grouped, ...]:
    anchors = ((8, 16384, 14336, 4096), (64, 16384, 1408, 2048), (16, 16384, 16384, 2048), (128, 8192, 1536, 4096))
    cases = [Grouped(*sizes, tags=("anchors",)) for sizes in anchors]
    cases.append(Grouped(8, 128, 14336, 4096, ("anchors", "decode")))
    # Experts, their width and that of the model, experts per token.
    models = {"mixtral": (8, 14336, 4096, 2), "deepseek": (256, 2048, 7168, 8), "qwen": (128, 768, 2048, 8)}
    for model, (groups, n, k, each) in models.items():
        for tokens in (16384, 4096, 128):
            tags = ("models", model, *(["decode"] if tokens == 128 else []))
            cases.append(Grouped(groups, tokens * each, n, k, tags, tokens))
    cases.append(Grouped(128, 4096 * 8, 768, 2048, ("models", "sparse"), 4096, nonempty=8))
    return tuple(cases)


GROUPED = _grouped()
GROUPED_TAGS = tuple(dict.fromkeys(tag for case in GROUPED for tag in case.tags))


def select_grouped(tags: str) -> tuple[tuple[Grouped, ...], tuple[str, ...]]:
    """The cases and the products of some tags joined by commas: "decode,dw" is the weight gradients of decoding.

    Raises:
      ValueError: an unknown tag.
    """
    wanted = set(tags.split(",")) - {"suite", "all"}
    if unknown := wanted - {*GROUPED_TAGS, *PRODUCTS}:
        raise ValueError(f"unknown tag {sorted(unknown)}, expected some of {(*GROUPED_TAGS, *PRODUCTS, 'all')}")
    products = tuple(product for product in PRODUCTS if product in wanted) or PRODUCTS
    wanted -= set(PRODUCTS)
    return tuple(case for case in GROUPED if not wanted or wanted & set(case.tags)), products


def find_grouped(name: str) -> tuple[Grouped, str]:
    """The case and the product of a name such as ``8g 16384x14336x4096 dx``.

    Raises:
      ValueError: there is none.
    """
    of_case, _, product = name.rpartition(" ")
    for case in GROUPED:
        if case.name == of_case and product in PRODUCTS:
            return case, product
    raise ValueError(f"no grouped product named {name!r}")


@dataclasses.dataclass(frozen=True)
class Moe:
    """A layer of gated experts: x [tokens, d], each token to k experts, whose hidden axis has h; bf16.

    Attributes:
      name: a short unique name.
      target: the least ratio to XLA asked for of the forward and backward pass, or None.
    """

    name: str
    experts: int
    tokens: int
    d: int
    h: int
    k: int
    target: float | None = None

    @property
    def flops(self) -> int:
        """Of the three products of the forward pass; with the backward pass three times that."""
        return 3 * 2 * self.tokens * self.k * self.d * self.h


MOE = (
    Moe("deepseek", 256, 16384, 7168, 2048, 8, target=3.0),
    Moe("mixtral", 8, 4096, 4096, 14336, 2, target=3.0),
)


def select_moe(tags: str) -> tuple[Moe, ...]:
    """The layers of those names, joined by commas; "suite" and "all" are every one.

    Raises:
      ValueError: an unknown name.
    """
    wanted = set(tags.split(","))
    if unknown := wanted - {*(case.name for case in MOE), "suite", "all"}:
        raise ValueError(f"unknown tag {sorted(unknown)}, expected some of {(*(case.name for case in MOE), 'all')}")
    return tuple(case for case in MOE if wanted & {case.name, "suite", "all"})

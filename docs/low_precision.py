"""Makes the tables of errors of docs/low-precision.md: products in low precision on the CPU, against float64.

``python docs/low_precision.py`` writes them into the page anew.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout

import cutjax  # noqa: E402

PAGE = ROOT / "docs" / "low-precision.md"
BEGIN, END = "<!-- errors of recipes -->", "<!-- end of errors of recipes -->"
BEGIN_TRAINING, END_TRAINING = "<!-- errors of training -->", "<!-- end of errors of training -->"
M, K, N = 128, 1024, 256
HEAD = "| recipe | x | w | normal: whole | its arithmetic | outliers: whole | its arithmetic |"

HEAD_TRAINING = "| recipe | gradients | normal: y | dx | dw | outliers: y | dx | dw |"
TRAINING = (
    ("bfloat16", "bfloat16"),
    *((recipe, f"float8_{kind}") for recipe in ("tensor", "row", "block") for kind in ("e4m3fn", "e5m2")),
)


class Recipe(NamedTuple):
    """A way to quantize x and w: arguments of ``cutjax.quantize``; none stands for bfloat16."""

    name: str
    x: dict[str, Any] | None
    w: dict[str, Any]


def _q(dtype: str, *block: int, **how: Any) -> dict[str, Any]:
    return {"dtype": dtype, "block": block or None, **how}


E8M0, E4M3 = {"scale_dtype": "float8_e8m0fnu"}, {"scale_dtype": "float8_e4m3fn"}
RECIPES = (
    Recipe("w8a16", None, _q("int8", -1, 1)),
    Recipe("w8a8", _q("int8", 1, -1), _q("int8", -1, 1)),
    Recipe("w4a16", None, _q("int4", 128, 1)),
    Recipe("w4a16, AWQ and GPTQ", None, _q("uint4", 128, 1, zero_point=True)),
    Recipe("w4a16, groups of 32", None, _q("int4", 32, 1)),
    Recipe("mxfp4 weights (gpt-oss)", None, _q("float4_e2m1fn", 32, 1, **E8M0)),
    Recipe("w4a8", _q("float8_e4m3fn", 1, -1), _q("int4", 128, 1)),
    Recipe("fp8, tensor", _q("float8_e4m3fn"), _q("float8_e4m3fn")),
    Recipe("fp8, row", _q("float8_e4m3fn", 1, -1), _q("float8_e4m3fn", -1, 1)),
    Recipe("fp8, block (DeepSeek-V3)", _q("float8_e4m3fn", 1, 128), _q("float8_e4m3fn", 128, 128)),
    Recipe("fp8, e5m2 by e4m3", _q("float8_e5m2", 1, 128), _q("float8_e4m3fn", 128, 128)),
    Recipe("mxfp8", _q("float8_e4m3fn", 1, 32, **E8M0), _q("float8_e4m3fn", 32, 1, **E8M0)),
    Recipe("nvfp4, one level", _q("float4_e2m1fn", 1, 16, **E4M3), _q("float4_e2m1fn", 16, 1, **E4M3)),
)


def data(outliers: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and w: normal, or 8 of 1024 channels of x 50 times as large, and weights of Student's t, 4 degrees."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((M, K)), rng.standard_normal((K, N)) / K**0.5
    if outliers:
        x[:, rng.choice(K, 8, replace=False)] *= 50
        w = rng.standard_t(4, (K, N)) / K**0.5
    return x.astype(np.float32), w.astype(np.float32)


def _wide(q: Any) -> np.ndarray:
    if not isinstance(q, cutjax.Quantized):
        return np.asarray(q, np.float64)
    found = [np.asarray(x, np.float64) for x in (q.values, q.scale, 0.0 if q.zero_point is None else q.zero_point)]
    for axis, size in enumerate(found[0].shape):
        found[1:] = [np.repeat(x, size // x.shape[axis], axis) if x.ndim else x for x in found[1:]]
    return (found[0] - found[2]) * found[1]


def errors(recipe: Recipe, x: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """Returns the relative error of a product in all, and that of its arithmetic: against the numbers it multiplies."""

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> Any:
        a = x.astype(jnp.bfloat16) if recipe.x is None else cutjax.quantize(x, **recipe.x)
        b = cutjax.quantize(w, **recipe.w)
        return a, b, cutjax.gemm(a, b, out_dtype=jnp.float32)

    a, b, d = run(x, w)
    found, exact, multiplied = (
        np.asarray(d, np.float64),
        x.astype(np.float64) @ w.astype(np.float64),
        _wide(a) @ _wide(b),
    )
    return tuple(float(np.linalg.norm(found - y) / np.linalg.norm(y)) for y in (exact, multiplied))  # pyright: ignore


def _operand(how: dict[str, Any] | None) -> str:
    if how is None:
        return "bfloat16"
    block = "" if how["block"] is None else f", {' x '.join('all' if n == -1 else str(n) for n in how['block'])}"
    scale = f", {how['scale_dtype']}" if "scale_dtype" in how else ""
    return f"{how['dtype']}{block}{scale}{', zero points' if how.get('zero_point') else ''}"


def rows() -> list[tuple[Recipe, list[float]]]:
    """Returns the four errors of each recipe."""
    kinds = [data(outliers) for outliers in (False, True)]
    return [(recipe, [error for kind in kinds for error in errors(recipe, *kind)]) for recipe in RECIPES]


def text() -> str:
    """Returns the table."""
    lines = [HEAD, "|---|---|---|--:|--:|--:|--:|"]
    for recipe, found in rows():
        shown = " | ".join(f"{error:.1e}" for error in found)
        lines.append(f"| {recipe.name} | {_operand(recipe.x)} | {_operand(recipe.w)} | {shown} |")
    return "\n".join(lines)


def cotangents(outliers: bool) -> np.ndarray:
    """Returns dy: normal, or with rows whose magnitudes are log-normal, over some four decades, as of tokens."""
    rng = np.random.default_rng(1)
    dy = rng.standard_normal((M, N))
    return (dy * np.exp(2 * rng.standard_normal((M, 1))) if outliers else dy).astype(np.float32)


def of_training(recipe: str, gradients: str, outliers: bool) -> list[float]:
    """Returns the relative errors of y, dx and dw, float32 at the end, of a product of float32 in a recipe."""
    (x, w), dy = data(outliers), cotangents(outliers)
    if recipe == "bfloat16":
        dot: Any = jax.lax.dot_general
        rounded = [jnp.asarray(y).astype(jnp.bfloat16).astype(jnp.float32) for y in (x, w, dy)]
    else:
        dot, rounded = cutjax.fp8_dot_general(recipe, gradients=gradients, policy="always"), [x, w, dy]

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w)
        return y, *back(dy)

    found = [np.asarray(y, np.float64) for y in run(*rounded)]
    x, w, dy = (y.astype(np.float64) for y in (x, w, dy))
    exact = (x @ w, dy @ w.T, x.T @ dy)
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]


def training() -> str:
    """Returns the table of training."""
    lines = [HEAD_TRAINING, "|---|---|--:|--:|--:|--:|--:|--:|"]
    for recipe, gradients in TRAINING:
        found = [error for outliers in (False, True) for error in of_training(recipe, gradients, outliers)]
        lines.append(f"| {recipe} | {gradients} | {' | '.join(f'{error:.1e}' for error in found)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Returns the page with the tables between their marks."""
    for begin, table, end in ((BEGIN, text, END), (BEGIN_TRAINING, training, END_TRAINING)):
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

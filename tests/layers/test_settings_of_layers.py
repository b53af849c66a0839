"""What is no entry of the battery under jax's own settings: Flax, quantized weights, fuse, several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from checks import mesh_of, normal
from flax import nnx
from operations import OPERATIONS, main, of_floats, operands

import cutjax
import cutjax.flax.linen
import cutjax.flax.nnx

P = jax.P
T, D, E, OUT = 6, 8, 4, 16


@contextlib.contextmanager
def everything():
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS.values():
            if setting is not everything:
                stack.enter_context(setting())
        yield


SETTINGS: dict[str, Callable[[], Any]] = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "64 bits": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "everything": everything,
}
EINSUMS = {
    "a product": ("btd,dhk->bthk", (D, 2, E), (2, E)),
    "no product": ("btd,dk->bk", (D, OUT), (OUT,)),
}
H = jnp.bfloat16
CASES: list[tuple[str, dict[str, Any]]] = [  # a setting, and the options of a layer
    ("ranks", {"dtype": jnp.float16}),  # where Flax promotes, dtypes cannot be strict
    ("everything", {}),
    ("everything", {"dtype": H, "param_dtype": H}),
]


def of_nnx(make: Callable[..., nnx.Module], **call: Any) -> Callable[..., Any]:
    """The value and the gradients of a layer, made under the settings."""

    def run(x: jax.Array, **options: Any) -> Any:
        layer = make(**options, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def value(params: Any, x: jax.Array) -> Any:
            return nnx.merge(graph, params, rest)(x, **call)

        return value(params, x), jax.grad(lambda *args: total(value(*args)), (0, 1))(params, x)

    return run


def of_linen(make: Callable[..., nn.Module]) -> Callable[..., Any]:
    def run(x: jax.Array, **options: Any) -> Any:
        layer = make(**options)
        variables = layer.init(jax.random.key(0), x)

        def value(variables: Any, x: jax.Array) -> Any:
            return layer.apply(variables, x, mutable=["losses", "intermediates"])

        return value(variables, x), jax.grad(lambda *args: total(value(*args)), (0, 1))(variables, x)

    return run


def total(tree: Any) -> jax.Array:
    return sum(y.astype(jnp.float32).sum() for y in jax.tree.leaves(tree) if jnp.issubdtype(y.dtype, jnp.floating))


def gelu(**how: Any) -> dict[str, Any]:
    return {"activation": jax.nn.gelu, **how}


our_nnx, our_linen = cutjax.flax.nnx, cutjax.flax.linen
experts = {"num_experts": E, "num_groups": 2, "groups_per_token": 1, "k": 2, "use_selection_bias": True}
LAYERS: dict[str, Callable[..., Any]] = {
    "nnx.Linear": of_nnx(lambda **o: our_nnx.Linear(D, OUT, **o)),
    "nnx.Linear, gelu": of_nnx(lambda **o: our_nnx.Linear(D, OUT, **gelu(**o))),
    "nnx.LinearGeneral": of_nnx(lambda **o: our_nnx.LinearGeneral((3, D), (2, OUT), axis=(-2, -1), **gelu(**o))),
    "nnx.Conv": of_nnx(lambda **o: our_nnx.Conv(D, OUT, (3,), padding="CIRCULAR", **gelu(**o))),
    "nnx.ConvTranspose": of_nnx(lambda **o: our_nnx.ConvTranspose(D, OUT, (2,), (2,), **gelu(**o))),
    "nnx.MLP": of_nnx(lambda **o: our_nnx.MLP(D, OUT, D, **o)),
    "nnx.GatedMLP": of_nnx(lambda **o: our_nnx.GatedMLP(D, OUT, D, use_bias=True, **o)),
    "nnx.MoE": of_nnx(lambda **o: our_nnx.MoE(D, OUT, **experts, **o), return_aux=True),
    "nnx.MoE, sigmoid": of_nnx(lambda **o: our_nnx.MoE(D, OUT, **experts, scoring="sigmoid", **o)),
    "linen.Dense": of_linen(lambda **o: our_linen.Dense(OUT, **o)),
    "linen.Dense, gelu": of_linen(lambda **o: our_linen.Dense(OUT, **gelu(**o))),
    "linen.DenseGeneral": of_linen(lambda **o: our_linen.DenseGeneral((2, OUT), axis=(-2, -1), **gelu(**o))),
    "linen.Conv": of_linen(lambda **o: our_linen.Conv(OUT, (3,), strides=2, **gelu(**o))),
    "linen.ConvTranspose": of_linen(lambda **o: our_linen.ConvTranspose(OUT, (3,), padding="CIRCULAR", **gelu(**o))),
    "linen.MLP": of_linen(lambda **o: our_linen.MLP(OUT, D, **o)),
    "linen.GatedMLP": of_linen(lambda **o: our_linen.GatedMLP(OUT, D, use_bias=True, **o)),
    "linen.MoE": of_linen(lambda **o: our_linen.MoE(OUT, **experts, **o)),
}
for name, (equation, kernel, bias) in EINSUMS.items():
    LAYERS[f"nnx.Einsum of {name}"] = of_nnx(lambda e=equation, k=kernel, b=bias, **o: our_nnx.Einsum(e, k, b, **o))
    LAYERS[f"linen.Einsum of {name}"] = of_linen(lambda e=equation, k=kernel, **o: our_linen.Einsum(k, e, **o))


# One of three each, and of a layer of nnx another than of linen's.
TURNS = [(name, *CASES[(turn + name.startswith("linen")) % 3]) for turn, name in enumerate(LAYERS)]


def check(fn: Callable[..., Any], setting: str, *args: Any) -> None:
    """Shapes and dtypes are what they are without the setting; references are traced too."""
    expected = jax.eval_shape(fn, *args)
    with SETTINGS[setting]():
        lowered = jax.jit(fn).lower(*args)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.out_info) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


@pytest.fixture(autouse=True)
def jax_own_settings():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("name", "setting", "options"), TURNS, ids=str)
def test_layers(name, setting, options):
    x = normal(0, (2, 3, D)).astype(options.get("dtype", jnp.float32))
    check(lambda x: LAYERS[name](x, **options), setting, x)


def quantized(x: jax.Array, w: jax.Array) -> Any:
    found = [cutjax.quantize(w, dtype, block=(-1, 1)) for dtype in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)]
    return [(cutjax.gemm(x, q), q.dequantize(), q.dequantize(x.dtype)) for q in found]


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w)
    return h @ w.T + x


def over_devices(fn: Callable[..., Any], x: Any, w: Any, out: Any) -> Callable[..., Any]:
    """The value and the gradients of a function of shards on two devices."""

    def run(*args: jax.Array) -> Any:
        divided = jax.shard_map(fn, mesh=mesh_of(i=2), in_specs=(x, w), out_specs=out)
        return divided(*args), jax.grad(lambda *args: total(divided(*args)), (0, 1))(*args)

    return run


ROWS, COLUMNS = P("i"), P(None, "i")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantized": quantized,
    "fuse": cutjax.fuse(block, policy="always"),
    "gradient of fuse": jax.grad(lambda x, w: total(cutjax.fuse(block, policy="always")(x, w)), (0, 1)),
    "fuse of gradient": cutjax.fuse(jax.grad(lambda x, w: total(block(x, w)), (0, 1)), policy="always"),
    "all_gather_gemm": over_devices(lambda x, w: cutjax.all_gather_gemm(x, w, axis_name="i"), ROWS, COLUMNS, COLUMNS),
    "gemm_reduce_scatter": over_devices(
        lambda x, w: cutjax.gemm_reduce_scatter(x, w, axis_name="i"), COLUMNS, ROWS, ROWS
    ),
    "mlp over devices": over_devices(lambda x, w: cutjax.mlp(x, w, w.T, axis_name="i"), ROWS, COLUMNS, ROWS),
    "moe over devices": over_devices(
        lambda x, w: cutjax.moe(x, x[:, :E], *[jnp.stack([w, w])] * 2, jnp.stack([w.T, w.T]), expert_axis="i"),
        ROWS,
        P(),
        ROWS,
    ),
}


@pytest.mark.parametrize(
    ("name", "setting", "dtype"),
    [
        (name, *(("everything", "float32"), ("everything", H), ("dtypes", "float16"))[i])
        for turn, name in enumerate(FUNCTIONS)
        for i in {turn % 3, 1}
    ],
)
def test_functions(name, setting, dtype):
    check(FUNCTIONS[name], setting, normal(0, (T, D)).astype(dtype), normal(1, (D, OUT)).astype(dtype))


@pytest.mark.parametrize("name", [x for x, op in OPERATIONS.items() if "bfloat16" in op.dtypes and main(x)])
def test_operations_of_16_bits(name):
    """The battery's own tests of settings are of float32."""
    names = OPERATIONS[name].operands.split()  # a router's logits stay in float32
    casts = [x.dtype == jnp.float32 and of != "logits" for of, x in zip(names, operands(name), strict=True)]
    args = [x.astype(jnp.bfloat16) if cast else x for cast, x in zip(casts, operands(name), strict=True)]
    of, floats = of_floats(OPERATIONS[name].fn, args)
    check(lambda *xs: (of(*xs), jax.grad(lambda *xs: total(of(*xs)), range(len(xs)))(*xs)), "everything", *floats)

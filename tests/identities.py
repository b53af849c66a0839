"""Functions that are identities in value, or nearly, and mean something; and what of them a program keeps."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from cutjax.binding.rules import live

policies = jax.checkpoint_policies
OF_OURS = {f"cutjax_{x}" for x in ("gemm", "conv", "grouped_gemm", "grouped_outer")}
OF_LAX = "dot_general", "conv_general_dilated", "ragged_dot_general"
MESH = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDING = jax.NamedSharding(MESH, jax.P())


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def lowered(fn, *args):
    """The equations that a function needs."""
    jaxpr = jax.jit(fn).trace(*args).jaxpr
    return list(equations(live(getattr(jaxpr, "jaxpr", jaxpr))))


def products(fn, *args):
    """Returns the number of products in a program."""
    return sum(eqn.primitive.name in (*OF_LAX, *OF_OURS) for eqn in lowered(fn, *args))


def names(fn, *args):
    """The names that policies see, but for those of this package."""
    found = {eqn.params["name"] for eqn in lowered(fn, *args) if eqn.primitive.name == "name"}
    return {name for name in found if not name.startswith("cutjax_")}


@jax.custom_jvp
def straight(x):
    return x * x


straight.defjvp(lambda primals, dots: (straight(*primals), 3 * dots[0]))


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), checkpoint_name(x, "c")), lambda x, g: (jnp.clip(g, -0.01, 0.01) * x,))


def estimator(x):
    """A straight-through estimator, without a step where rounding would decide."""
    return x + lax.stop_gradient(0.5 * x * x - x)


def scoped(x):
    with jax.named_scope("scope"):
        return jnp.tanh(x)


def remat(x):
    return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "a")), policy=policies.everything_saveable)(x)


MEANING = {
    "stop_gradient": lax.stop_gradient,
    "estimator": estimator,
    "name": lambda x: checkpoint_name(x, "a"),
    "named twice": lambda x: checkpoint_name(checkpoint_name(x * 2, "b"), "a"),
    "barrier": lambda x: lax.optimization_barrier(x),
    "barrier of two": lambda x: sum(lax.optimization_barrier((x, jnp.sin(x)))),
    "precision": lambda x: lax.reduce_precision(x, 8, 20),
    "constraint": lambda x: lax.with_sharding_constraint(x, SHARDING),
    "placed": jax.jit(jnp.sin, out_shardings=SHARDING),
    "custom_jvp": straight,
    "relu": jax.nn.relu,
    "scope": scoped,
    "remat": remat,
    "jit": jax.jit(lambda x: lax.stop_gradient(x) * checkpoint_name(x, "b")),
    "custom_vjp": clipped,  # the last: it has no forward mode
}

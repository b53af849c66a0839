"""Functions with derivatives of their own: one for each way in which a rule may differ from the derivative."""

import jax
import jax.numpy as jnp

B = jax.random.normal(jax.random.key(5), (4,))


def vjp_rule(forward, backward):
    """A custom_vjp of one argument whose backward rule is ``backward(x, g)``."""
    fn = jax.custom_vjp(forward)
    fn.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return fn


clip = vjp_rule(lambda x: x, lambda _, g: jnp.clip(g, -1.0, 1.0))
quantized = vjp_rule(lambda x: x * 2, lambda _, g: jnp.round(8 * g) / 8)
guarded = vjp_rule(jnp.log, lambda x, g: jnp.where(jnp.isfinite(g / x), g / x, 0.0))
straight = vjp_rule(lambda x: jnp.round(x), lambda _, g: g)


@jax.custom_jvp
def straight_jvp(x):
    return jnp.round(x)


straight_jvp.defjvps(lambda t, out, x: t)


@jax.custom_jvp
def straight_anew(x):
    return jnp.round(x)


straight_anew.defjvp(lambda primals, tangents: (jnp.round(*primals), *tangents))


@jax.custom_vjp
def lsq(x, s):
    """Learned step size (Esser et al., 2020): the cotangent of the step is a sum over all of x."""
    return jnp.round(x / s) * s


lsq.defvjp(
    lambda x, s: (jnp.round(x / s) * s, (x, s)),
    lambda kept, g: (g, jnp.sum(g * (jnp.round(kept[0] / kept[1]) - kept[0] / kept[1]))),
)


@jax.custom_vjp
def delayed(x, scale, history):
    """Scaled by what was, as fp8 layers are: the cotangents of scale and history are their next values."""
    return jnp.clip(x / scale, -2.0, 2.0) * scale


def _delayed_forward(x, scale, history):
    largest = jnp.max(jnp.abs(x))
    return delayed(x, scale, history), (largest, scale, jnp.roll(history, 1).at[0].set(largest))


delayed.defvjp(_delayed_forward, lambda kept, g: (g, kept[0] / 2.0, kept[2]))


@jax.custom_jvp
def normed(x):
    return x * 2


@normed.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return x * 2, t - jnp.mean(t, -1, keepdims=True)


@jax.custom_jvp
def two_results(x):
    return x + 1, x * x


@two_results.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return two_results(x), (2 * t, t * x)


ELEMENTWISE = {
    "clip": clip,
    "quantized": quantized,
    "guarded": lambda v: guarded(jnp.maximum(v, 0.0)),
    "straight": straight,
    "straight_jvp": straight_jvp,
    "straight_anew": straight_anew,
    "twice of one value": lambda v: jax.jit(clip)(v) + 2 * jax.jit(clip)(v),  # one trace, two calls
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "two results": lambda v: (lambda y: y[0] * jnp.sin(y[1]))(two_results(v)),
    "one of another": lambda v: clip(straight_jvp(quantized(v))),
}
counted = jax.custom_vjp(lambda v, s: v * s)
counted.defvjp(lambda v, s: (v * s, s), lambda s, g: (g * s, s + 1))  # what it says of s is no sum over v
OTHERS = {
    "a number that counts": (counted, (jnp.float32(0.5),)),
    "forward rule with a mean": (normed, ()),
    "a step size": (lsq, (jnp.float32(0.3),)),
    "a step size that was captured": (lambda v, s: lsq(v, 2 * s) + lsq(v, s), (jnp.float32(0.3),)),
    "scales of fp8": (delayed, (jnp.float32(0.5), jnp.arange(5.0))),
    "an operand alone": (lambda v, b: v * clip(b), (B,)),
    "a bias": (lambda v, b: clip(v + b) + straight(b), (B,)),
    "an operand of full size": (lambda v, r: v + clip(r), (jnp.outer(jnp.arange(5.0), B),)),
    "of both": (lambda v, b: jnp.logaddexp(v, b), (B,)),
}

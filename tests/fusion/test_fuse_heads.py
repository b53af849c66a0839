"""cutjax.fuse on heads of language models: losses and gradients without logits in memory, beside plain JAX."""

from __future__ import annotations

import functools

import flax.linen as nn
import flax.nnx
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from checks import close, mesh_of, normal
from head_cases import CASES, TOKENS, D, V, hard, inputs, picked
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import cutjax
from cutjax.fusion.heads import rewrite
from cutjax.fusion.inline import inlined
from cutjax.fusion.keys import Keys
from cutjax.primitives import vocabulary

P = jax.P
always = functools.partial(cutjax.fuse, policy="always")
ALL = (0, 1, 3)


def products(fn, *args):
    """The numbers of products of the heads that fuse finds."""
    found = cutjax.explain(always(fn))(*args).fusion
    return {report.reason.products for report in found if isinstance(report.reason, rewrite.Price)}


def is_untouched(fn, *args):
    """Whether the search for heads returns the program that it was given."""
    program = inlined(jax.make_jaxpr(fn)(*args), lambda _: True)
    return rewrite.headed(program, True, Keys(), None)[0] is program


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_as_people_write_it(name):
    args, gradient = inputs(), jax.value_and_grad(CASES[name], ALL)
    counts = {3} if name not in head_cases.AGAIN else {4}
    assert products(gradient, *args) == counts | ({1} if name in ("in_chunks", "remat") else set())
    close(jax.jit(always(gradient))(*args), jax.jit(gradient)(*args), 1e-5)


def test_labels_beyond_the_vocabulary_that_are_indices():
    """Plain JAX takes the nearest column, and drops its cotangent."""

    def loss(x, w, y, b):
        logits = (x @ w + b).astype(jnp.float32).reshape(y.size, -1)
        return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(y.size), y.reshape(-1)]).sum()

    x, w, y, b = inputs()
    args, gradient = (x, w, y.at[0, :3].set(jnp.array([1000, -1000, -100])), b), jax.value_and_grad(loss, ALL)
    assert products(gradient, *args) == {3}
    close(jax.jit(always(gradient))(*args), jax.jit(gradient)(*args), 1e-5)


@pytest.mark.parametrize("name", ["smoothed", "masked", "z_loss", "softcap", "padded_vocabulary", "t5x", "shifted"])
def test_forward_alone(name):
    args, fn = inputs(), CASES[name]
    assert products(fn, *args) == {1}
    close(jax.jit(always(fn))(*args), jax.jit(fn)(*args), 1e-5)


# Of a loss in 16 bits plain JAX rounds logits, and what is made of them, by so much.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", ["integers", "in_its_dtype", "wide", "smoothed", "softcap"])
def test_16_bits(name, dtype):
    args, gradient = inputs(dtype), jax.value_and_grad(CASES[name], ALL)
    wide = [x.astype(jnp.float32) if x.dtype == dtype else x for x in args]
    loss, gradients = jax.jit(always(gradient))(*args)
    exact, expected = jax.jit(jax.value_and_grad(CASES[name], ALL))(*wide)
    assert [x.dtype for x in gradients] == [dtype] * 3
    assert products(gradient, *args) == {4 if dtype == jnp.float16 else 3}  # 16 bits of float16 hold not all powers
    rounding = 2.0**-8 if name == "in_its_dtype" else 1e-6  # of the loss's own dtype
    assert abs(float(loss) - float(exact)) < rounding * abs(float(exact))
    for mine, theirs in zip(gradients, expected, strict=True):
        off = np.abs(np.asarray(mine, np.float32) - np.asarray(theirs)).max()
        assert off <= 2.0**-6 * np.abs(np.asarray(theirs)).max()


@pytest.mark.parametrize("scale", [1, 100], ids=["near", "far"])  # of logits, from those of the first columns
@pytest.mark.parametrize("name", ["masked", "smoothed", "softcap", "by_the_batch", "shifted"])
def test_chunks(name, scale):
    """Of 128 rows: three, the first of which has 44."""
    x, w, y, _ = inputs(scale=scale)
    x, y = (jnp.concatenate([v] * 25, 1) for v in (x, y))  # 300 tokens
    w = jnp.concatenate([w, 4 * normal(1, (D, 300))], 1)

    def loss(x, w, y):
        return CASES[name](x, w, y, jnp.zeros(V + 300))

    with pytest.MonkeyPatch.context() as patch:
        for name_, value in {"V": V + 300, "TOKENS": y.size, "S": y.shape[1]}.items():
            patch.setattr(head_cases, name_, value)
        patch.setattr(vocabulary, "CHUNK_BYTES", 128 * (V + 300) * 4)
        gradient = jax.value_and_grad(loss, (0, 1))
        assert "scan" in str(jax.make_jaxpr(always(gradient))(x, w, y))
        close(jax.jit(always(gradient))(x, w, y), jax.jit(gradient)(x, w, y), 1e-5)


@pytest.mark.parametrize("name", ["integers", "mapped", "one_hot_sum", "indexed"])
def test_labels_outside_of_the_vocabulary(name):
    """Those from the end count; of others losses are NaN where plain JAX has NaN, and gradients what it has."""
    x, w, y, b = inputs()
    y = y.at[0].set(jnp.array([0, V - 1, V, -1, -V, -V - 1]))
    gradient = jax.value_and_grad(CASES[name], ALL)
    mine, theirs = jax.jit(always(gradient))(x, w, y, b), jax.jit(gradient)(x, w, y, b)
    if name == "indexed":  # promised to be inside
        mine, theirs = mine[1], theirs[1]
        close(mine[0][1], theirs[0][1], 1e-5)
    else:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), mine, theirs)


def test_losses_of_tokens_and_metrics_are_results():
    x, w, y, _ = inputs()

    def loss(x, w):
        logits = (x @ w).astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, -1)
        losses = lse - picked(logits, y)
        sharpest = jnp.exp(logits.max(-1) - lse).max()
        return (losses * jnp.arange(TOKENS, dtype=jnp.float32).reshape(y.shape)).sum(), (
            losses,
            jnp.exp(losses.mean()),
            sharpest,
        )

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    assert products(gradient, x, w) == {3}
    close(jax.jit(always(gradient))(x, w), jax.jit(gradient)(x, w), 1e-5)


def test_tokens_without_weight_have_no_gradient():
    """And those whose weight is no number make all gradients of w none, as in plain JAX."""
    x, w, y, _ = inputs()
    weights = (jnp.arange(TOKENS) % 2).astype(jnp.float32).reshape(y.shape)

    def loss(x, w, weights):
        return (hard(x @ w, y) * weights).sum()

    mine = jax.jit(always(jax.grad(loss)))(x, w, weights)
    assert (np.asarray(mine).reshape(TOKENS, D)[::2] == 0).all()
    for tiny in (1e-30, -1e-30):
        close(jax.jit(always(jax.grad(loss, 1)))(x, w, weights * tiny) / tiny, jax.grad(loss, 1)(x, w, weights), 1e-5)


def test_certain_tokens_keep_the_digits_of_their_gradients():
    """The element at the label is a small difference: it is computed in float32, and rounded then."""
    x = jnp.ones((8, 16), jnp.bfloat16)
    w = jnp.zeros((16, 64), jnp.bfloat16).at[:, 0].set(1)  # the label's logit is 16

    def loss(x, w):
        return hard(x @ w, jnp.zeros(8, jnp.int32)).sum()

    mine = jax.jit(always(jax.grad(loss)))(x, w)
    exact = jax.grad(loss)(x.astype(jnp.float32), w.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(mine, np.float32), exact, rtol=2e-2)


def accuracy(x, w, y, b):
    logits = x @ w
    return hard(logits, y).mean(), (logits.argmax(-1) == y).mean()


def returned(x, w, y, b):
    logits = x @ w
    return hard(logits, y).mean(), logits


def named(x, w, y, b):
    return hard(jax.ad_checkpoint.checkpoint_name(x @ w, "logits"), y).mean()


def barrier(x, w, y, b):
    return hard(lax.optimization_barrier(x @ w), y).mean()


def callback(x, w, y, b):
    logits = x @ w
    jax.debug.callback(lambda _: None, logits)
    return hard(logits, y).mean()


def distilled(x, w, y, b):
    teacher = jax.nn.softmax(jnp.cos(jnp.arange(TOKENS * V, dtype=jnp.float32)).reshape(*y.shape, V))
    return optax.softmax_cross_entropy(x @ w, teacher).mean()


def entropy(x, w, y, b):
    logp = jax.nn.log_softmax(x @ w)
    return (jnp.exp(logp) * logp).sum(-1).mean()


def probabilities(x, w, y, b):
    return jax.nn.softmax(x @ w)


def beams(x, w, y, b):
    return lax.top_k(jax.nn.log_softmax(x @ w), 2)


def over_tokens(x, w, y, b):
    return jax.nn.logsumexp(x @ w, 0).sum() + hard(x @ w, y).sum()


def largest_gradient(x, w, y, b):
    """A maximum that has a derivative."""
    logits = x @ w
    shifted = logits - logits.max(-1, keepdims=True)
    return (jnp.log(jnp.exp(shifted).sum(-1)) - picked(shifted, y)).mean()


def no_powers(x, w, y, b):
    return ((x @ w).max(-1) - picked(x @ w, y)).mean()


def precise(x, w, y, b):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32, precision="highest")
    return hard(logits, y).mean()


def ensemble(x, w, y, b):
    return hard(jnp.einsum("bsd,bdv->bsv", x, jnp.stack([w, w])), y).mean()


ESCAPES = (accuracy, returned, named, barrier, callback, distilled, entropy, probabilities, beams, ensemble)


@pytest.mark.versions
@pytest.mark.parametrize("fn", ESCAPES, ids=lambda fn: fn.__name__)
def test_what_needs_logits_is_untouched(fn):
    assert is_untouched(fn, *inputs())


@pytest.mark.versions
@pytest.mark.parametrize("fn", [over_tokens, largest_gradient, no_powers, precise], ids=lambda fn: fn.__name__)
def test_gradients_that_need_logits_are_untouched(fn):
    args, gradient = inputs(), jax.value_and_grad(fn, (0, 1))
    if fn is not over_tokens:  # of which one product has a head's losses
        assert is_untouched(gradient, *args)
    close(jax.jit(always(gradient))(*args), jax.jit(gradient)(*args), 2e-3 if fn is precise else 1e-5)


def test_heads_are_taken_where_they_are_asked_for(monkeypatch):
    def loss(x, w, y):
        return hard(x @ w, y).mean()

    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 1024), (1024, 50304))]
    args = *avals, jax.ShapeDtypeStruct((8192,), jnp.int32)

    def explained(*args):
        return cutjax.explain(cutjax.fuse(jax.value_and_grad(loss, (0, 1))), device="NVIDIA H200")(*args)

    assert rewrite.BY_DEFAULT or all("head" not in report.why for report in explained(*args).fusion)
    monkeypatch.setattr(rewrite, "BY_DEFAULT", True)
    found = explained(*args)
    reports = [report for report in found.fusion if "a head and its losses in 3 products" in report.why]
    assert len(reports) == 3
    assert "XLA" in str(found)
    assert "MiB of logits less in memory" in str(found)
    cost = reports[0].reason
    assert cost.fused_us < rewrite._WORTH * cost.xla_us
    assert cost.saved == 8192 * 50304 * 4 - vocabulary.CHUNK_BYTES
    small = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 64), (64, 256))]
    assert all("head" not in x.why for x in explained(*small, jax.ShapeDtypeStruct((64,), jnp.int32)).fusion)
    with cutjax.use_backend("xla"):
        assert all("head" not in report.why for report in explained(*args).fusion)


def test_kernels_are_lowered():
    """The first product is a kernel with its epilogue, in the body of a loop over chunks too."""

    def loss(x, w, y):
        return hard(x @ w, y).mean()

    gradient = always(jax.value_and_grad(loss, (0, 1)))
    args = jnp.ones((512, 64), jnp.bfloat16), jnp.ones((64, 1024), jnp.bfloat16), jnp.zeros(512, jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_BYTES", 256 * 1024 * 2)
        text = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @cutjax_launch") >= 4


@pytest.mark.versions
@pytest.mark.parametrize("name", ["integers", "smoothed", "t5x"])
def test_derivatives_on_either_side(name):
    args, fn = inputs(), CASES[name]
    grad = jax.jit(jax.value_and_grad(fn, ALL))
    expected = grad(*args)
    close(jax.jit(jax.value_and_grad(always(fn), ALL))(*args), expected, 1e-5)
    close(always(always(grad))(*args), expected, 1e-5)
    if name != "t5x":  # whose rule is for reverse mode alone
        dots = [jnp.cos(x) if x.dtype == jnp.float32 else np.zeros(x.shape, jax.dtypes.float0) for x in args]
        close(jax.jvp(always(fn), args, tuple(dots)), jax.jvp(fn, args, tuple(dots)), 1e-5)


@pytest.mark.versions
def test_batches():
    x, w, y, b = inputs()
    gradient = jax.value_and_grad(CASES["masked"], (0, 1))
    args = jnp.stack([x, 2 * x]), w, jnp.stack([y, (y + 1) % V]), b
    axes = (0, None, 0, None)
    close(jax.vmap(always(gradient), axes)(*args), jax.vmap(gradient, axes)(*args), 1e-5)
    close(always(jax.vmap(gradient, axes))(*args), jax.vmap(gradient, axes)(*args), 1e-5)


@pytest.mark.parametrize("donate", [(), 1])
def test_steps_of_training_in_a_loop(donate):
    x, w, y, _ = inputs()

    def step(x, w, y):
        loss, gradient = jax.value_and_grad(lambda w: hard(x @ w, y).mean())(w)
        return w - 0.1 * gradient, loss

    def train(x, w, y):
        return lax.scan(lambda w, _: step(x, w, y), w, None, length=3)

    expected = jax.jit(train)(x, w, y)
    close(always(train)(x, w, y), expected, 1e-5)
    close(always(step, donate_argnums=donate)(x, jnp.array(w), y), jax.jit(step)(x, w, y), 1e-5)


@pytest.mark.versions
@pytest.mark.parametrize("check_vma", [True, False])
def test_tokens_divided_by_shard_map(check_vma):
    x, w, y, b = inputs()
    mesh = mesh_of(data=2)
    specs = {"in_specs": (P("data"), P(), P("data"), P()), "out_specs": (P(), P()), "check_vma": check_vma}

    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def step(x, w, y, b):
        loss, gradient = jax.value_and_grad(lambda w: CASES["integers"](x, w, y, b))(w)
        found = lax.pmean(loss, "data")
        return found, gradient / 2 if check_vma else lax.pmean(gradient, "data")

    assert products(step, x, w, y, b) == {2}
    close(jax.jit(always(step))(x, w, y, b), jax.jit(step)(x, w, y, b), 1e-5)


@pytest.mark.versions
def test_a_divided_vocabulary_and_meshes_stay_as_they_are():
    x, w, y, b = inputs()
    mesh = mesh_of(model=2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "model"), P()), out_specs=P())
    def loss(x, w, y):
        logits = x @ w
        most = lax.pmax(lax.stop_gradient(logits).max(-1), "model")
        lse = most + jnp.log(lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "model"))
        at = y - lax.axis_index("model") * logits.shape[-1]
        mine = (at >= 0) & (at < logits.shape[-1])
        label = picked(logits, jnp.where(mine, at, 0))
        return (lse - lax.psum(jnp.where(mine, label, 0), "model")).mean()

    gradient, labels = jax.value_and_grad(loss, (0, 1)), jnp.abs(y)
    close(jax.jit(always(gradient))(x, w, labels), jax.jit(gradient)(x, w, labels), 1e-5)
    with jax.set_mesh(mesh):
        lying = jax.device_put(w, P(None, "model"))
        whole = jax.value_and_grad(CASES["integers"], (0, 1))
        assert is_untouched(whole, x, lying, y, b)
        close(jax.jit(always(whole))(x, lying, y, b), jax.jit(whole)(x, w, y, b), 1e-5)


def test_float8_leaves_logits():
    x, w, y, b = inputs(jnp.bfloat16)
    gradient = jax.value_and_grad(CASES["integers"], (0, 1))
    reports = cutjax.explain(always(gradient, fp8="tensor"))(x, w, y, b).fusion
    assert [report.runs for report in reports] == ["fused"] * 3


def test_layers_of_flax():
    x, _, y, _ = inputs(jnp.bfloat16)
    linear = flax.nnx.Linear(D, V, dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0))
    graph, state = flax.nnx.split(linear)
    dense = nn.Dense(V, dtype=jnp.bfloat16)
    embed = nn.Embed(V, D, dtype=jnp.bfloat16)

    def of_nnx(state, x):
        return hard(flax.nnx.merge(graph, state)(x), y).mean()

    def of_linen(params, x):
        return hard(dense.apply(params, x), y).mean()

    def attended(params, x):
        return hard(embed.apply(params, x, method="attend"), y).mean()

    makers = (of_nnx, state), (of_linen, dense.init(jax.random.key(0), x))
    for fn, params in (*makers, (attended, embed.init(jax.random.key(0), y))):
        gradient = jax.value_and_grad(fn)
        assert products(gradient, params, x) == {2}  # none for the gradient of x
        close(jax.jit(always(gradient))(params, x), jax.jit(gradient)(params, x), 2e-2)


@jax.numpy_dtype_promotion("standard")
def test_gpt2_of_transformers():
    config = transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 8), _do_init=False)
    params = jax.jit(model.init_weights, static_argnums=1)(jax.random.PRNGKey(0), (1, 8))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 8)))

    def loss(params):
        logits = model(ids, params=params, train=False)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    assert 3 in products(jax.value_and_grad(loss), params)


# Random losses of rows: what kernels find, and operations on it, into weighted sums. 150 are worth it after a change.
STATISTICS = {
    "lse": lambda logits, y: jax.nn.logsumexp(logits, -1),
    "label": lambda logits, y: picked(logits, y),
    "logp": lambda logits, y: picked(jax.nn.log_softmax(logits), y),
    "p": lambda logits, y: picked(jax.nn.softmax(logits), y),
    "mean": lambda logits, y: logits.mean(-1),
    "soft": lambda logits, y: (jax.nn.one_hot((y + 3) % V, V) * jax.nn.log_softmax(logits)).sum(-1),
}
STEPS = {
    "square": lambda a, b: a * a,
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + 0.5 * b,
    "quotient": lambda a, b: a / (2 + b * b),
    "tanh": lambda a, b: jnp.tanh(a),
    "kept": lambda a, b: jnp.where(b > 0, a, 0.1 * a),
    "mean": lambda a, b: a - a.mean(),
    "stop": lambda a, b: a * lax.stop_gradient(b),
}


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STATISTICS)), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    st.sampled_from(["plain", "bias", "cap", "scaled", "float16"]),
)
def test_random_losses_of_rows(statistics, steps, kind):
    x, w, y, b = inputs(jnp.float16 if kind == "float16" else jnp.float32)

    def loss(x, w, b):
        logits = (x @ w + b if kind == "bias" else x @ w).astype(jnp.float32)
        logits = {"cap": 2 * jnp.tanh(logits / 2), "scaled": logits / 1.7}.get(kind, logits)
        found = [STATISTICS["lse"](logits, y), *(STATISTICS[name](logits, y) for name in statistics)]
        value = found[-1]
        for name, other in zip(steps, found * 3, strict=False):
            value = STEPS[name](value, other)
        return (value * jnp.sin(jnp.arange(TOKENS, dtype=jnp.float32).reshape(y.shape))).sum() + 0.1 * found[0].sum()

    gradient = jax.value_and_grad(loss, (0, 1, 2))
    assert products(gradient, x, w, b) <= {3, 4}
    tolerance = 3e-3 if kind == "float16" else 2e-5
    close(jax.jit(always(gradient))(x, w, b), jax.jit(gradient)(x, w, b), tolerance)

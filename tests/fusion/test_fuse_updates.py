"""Updates of parameters, fused with the products that make their gradients."""

import jax
import jax.numpy as jnp
import pytest
from checks import close, scaled
from fuse_cases import initial, step

import cutjax
from cutjax.binding import walk

BF16, F32 = jnp.bfloat16, jnp.float32
BIG = {"w": jax.ShapeDtypeStruct((4096, 14336), F32), "v": jax.ShapeDtypeStruct((4096, 14336), F32)}


def made(shape=(32, 48)):
    params = {"w": scaled(1, shape, F32), "v": scaled(2, shape, F32)}
    return initial(params), scaled(3, (64, shape[0]), BF16)


def big():
    state = jax.eval_shape(initial, BIG)
    return state, jax.ShapeDtypeStruct((8192, 4096), BF16)


def updates(function, *args):
    """Returns, of each kernel that writes parameters and both moments, what it writes over."""
    found, _ = walk.products(function, args, {}, "cuda")
    ours = [x.eqn.params for x in found]
    return [x["in_place"] for x in ours if [out.dtype for out in x["epilogue"].primal.outputs] == ["float32"] * 3]


def on_h200(function, *args):
    """Returns the reports of a program's products, as it would be on an H200."""
    return cutjax.explain(function, platform="cuda", device="NVIDIA H200")(*args).fusion


@pytest.mark.versions
def test_an_update_is_one_kernel_with_the_gradient():
    state, x = made()
    fused = cutjax.fuse(step, policy="always", donate_argnums=0)
    found = updates(fused, state, x)
    assert len(found) == 2
    assert all(sorted(i for _, i in pairs) == [0, 1, 2] for pairs in found)
    expected, wanted = jax.jit(step)(state, x)
    results, value = jax.jit(fused)(state, x)
    close(value, wanted, 1e-2)
    close(results, expected, 2e-2)


@pytest.mark.versions
def test_parameters_that_are_the_callers_are_not_written_over():
    state, x = made()
    assert updates(cutjax.fuse(step, policy="always"), state, x) == [(), ()]


def test_nothing_is_written_over_that_is_read_later():
    def twice(state, x):
        new, value = step(state, x)
        return new, value, jax.tree.map(jnp.sin, state)

    state, x = made()
    fused = cutjax.fuse(twice, policy="always", donate_argnums=0)
    assert updates(fused, state, x) == [(), ()]
    close(fused(*made()), jax.jit(twice)(state, x), 2e-2)


@pytest.mark.parametrize("donated", [(), 0, (0,)])
def test_float32_states_are_updated_by_kernels_only_where_they_may_be(donated):
    """An H200's times: copies of what turns out to be donated would cost more than is saved."""
    reports = on_h200(cutjax.fuse(step, donate_argnums=donated), *big())
    found = [report for report in reports if "0.999" in str(report)]
    assert len(found) == (2 if donated != () else 0)


@pytest.mark.versions
def test_each_result_takes_the_memory_that_jit_gives_it():
    """jax.jit pairs what is donated with results in order; a kernel that paired them otherwise would cost copies."""

    def reversed_state(state, x):
        params, m, v, count = state
        (params, m, v, count), value = step((v, m, params, count), x)
        return (v, m, params, count), value

    state, x = made()
    found = updates(cutjax.fuse(reversed_state, policy="always", donate_argnums=0), state, x)
    assert [len(pairs) for pairs in found] == [3, 3]
    compiled = jax.jit(cutjax.fuse(reversed_state, policy="always", donate_argnums=0), donate_argnums=0).lower(state, x)
    assert compiled.compile().memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state)[:6])


def test_a_loop_gives_what_it_carries():
    def train(state, xs):
        return jax.lax.scan(step, state, xs)

    state, x = made()
    xs = jnp.stack([x, x[::-1]])
    fused = cutjax.fuse(train, policy="always")
    assert [len(pairs) for pairs in updates(fused, state, xs)] == [3, 3]
    close(fused(state, xs), jax.jit(train)(state, xs), 2e-2)

    def repeated(state, x):
        return jax.lax.fori_loop(0, 2, lambda _, state: step(state, x)[0], state)

    fused = cutjax.fuse(repeated, policy="always")
    assert [len(pairs) for pairs in updates(fused, state, x)] == [3, 3]


@pytest.mark.versions
def test_donated_arguments_are_gone():
    state, x = made()
    fused = cutjax.fuse(step, policy="always", donate_argnums=(0,))
    (params, *_), _ = fused(state, x)
    assert state[0]["w"].is_deleted()
    assert not x.is_deleted()
    assert not params["w"].is_deleted()


def test_what_is_donated_must_be_there():
    state, x = made()
    with pytest.raises(ValueError, match=r"donate_argnums has \[2\], but step was called with 2 positional arguments"):
        cutjax.fuse(step, donate_argnums=(0, 2))(state, x)
    cutjax.fuse(step, donate_argnums=-2)(state, x)
    assert state[0]["w"].is_deleted()
    with pytest.raises(TypeError, match="donate_argnums are positions of arguments, got 'state'"):
        cutjax.fuse(step, donate_argnums="state")

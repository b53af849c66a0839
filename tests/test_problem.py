"""Problem: what it is made of, whether it is a plain product, and the key by which it is known elsewhere."""

import dataclasses
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.epilogue.trace import trace
from cutjax.kernels import device
from cutjax.kernels.choose import choose
from cutjax.kernels.problem import Operand, identity

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def epilogue(fn, *operands):
    return trace(fn, [jax.ShapeDtypeStruct((8, 16), F32)], [jnp.zeros(*x) for x in operands]).epilogue.primal


def problem(**fields):
    return cutjax.Problem(**{"m": 256, "n": 512, "k": 128, **fields})


BATCHED = {"batch": (4,), "a_batch": (4,), "b_batch": (1,)}
GROUPED = {"groups": 4, "ragged": "m"}
ADDED = {"epilogue": epilogue(lambda acc, x: acc + x, ((8, 16), F32))}
VARIANTS = {
    "as it is": {},
    "m": {"m": 264},
    "layout": {"layout": "nt"},
    "inputs": {"a_dtype": np.float16, "b_dtype": np.float16},
    "result": {"out_dtype": F32},
    "batch": BATCHED,
    "batch of b too": {**BATCHED, "b_batch": (4,)},
    "groups": GROUPED,
    "leading": {**GROUPED, "leading": True},
    "depth": {"groups": 4, "ragged": "k", "layout": "tn"},
    "gelu": {"epilogue": epilogue(jax.nn.gelu)},
    "a half": {"epilogue": epilogue(lambda acc: acc * 0.5)},
    "a third": {"epilogue": epilogue(lambda acc: acc / 3)},
    "infinity": {"epilogue": epilogue(lambda acc: jnp.where(acc > 0, acc, -jnp.inf))},
    "added": ADDED,
    "added in place": {**ADDED, "in_place": ((0, 0),)},
}


def test_keys_are_as_different_as_problems():
    problems = [problem(**fields) for fields in VARIANTS.values()]
    assert len(set(problems)) == len({p.key() for p in problems}) == len(VARIANTS)
    for fields, p in zip(VARIANTS.values(), problems, strict=True):
        again = problem(**fields)
        assert (again, hash(again), again.key()) == (p, hash(p), p.key())


def test_a_key_is_of_no_device():
    h100 = device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 114)
    assert problem(device=h100) != problem()
    assert problem(device=h100).key() == problem().key() == problem(arch="sm_80").key()


@pytest.mark.parametrize("name", ["as it is", "infinity", "batch"])
def test_a_key_is_the_same_in_another_process(name):
    p = problem(**VARIANTS[name])
    program = (
        "import dataclasses, pickle, sys; p = pickle.load(sys.stdin.buffer); assert {p: 1}[dataclasses.replace(p)];"
        "print(p.key())"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    hash(p)  # of strings among others, which are salted anew in each process: nothing to send along
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(p), env=env, capture_output=True)
    assert done.stdout.decode().strip() == p.key(), done.stderr.decode()


def test_the_key_of_a_release():
    """What a tuning database of another version holds is found."""
    assert problem(**ADDED).key() == (
        '{"m":256,"n":512,"k":128,"layout":"nn","a_dtype":"bfloat16","b_dtype":"bfloat16","out_dtype":"bfloat16",'
        '"batch":[],"a_batch":[],"b_batch":[],"groups":0,"ragged":"","leading":false,"sizes_batch":[],"in_place":[],'
        '"epilogue":"bbe709639a839f19ece9c594670b8a61659b947e30f679acf6fa6a91a1c95b54"}'
    )


def test_operands():
    p = problem(layout="tn", **BATCHED)
    assert p.a == Operand(BF16, "mn", (4,))
    assert p.bs == (Operand(BF16, "mn", (1,)),)
    assert problem(layout="nt").a.contiguous == problem(layout="nt").bs[0].contiguous == "k"


@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype(np.float16)], ids=str)
def test_the_identity_is_a_plain_product(dtype):
    plain = problem(out_dtype=dtype)
    fused = problem(epilogue=identity(dtype))
    assert plain == fused
    assert plain.plain
    assert choose(fused).kernel == choose(plain).kernel
    assert "_e" not in choose(fused).kernel
    assert not problem(epilogue=epilogue(jax.nn.relu)).plain
    assert fused.out_dtype == dtype


def test_memory_shared_in_place():
    with pytest.raises(ValueError, match="in_place"):
        problem(in_place=((0, 0),))
    with pytest.raises(ValueError, match="in_place"):
        problem(**ADDED, in_place=((0, 1),))


def test_a_device_says_the_architecture():
    assert problem().device == device.reference("sm_90a")
    old = device.device_of_kind("NVIDIA A100-SXM4-40GB", "sm_80", 108)
    assert problem(device=old).arch == "sm_80"
    assert problem().on(old) == problem(device=old) == problem(device=old, arch="sm_80")
    with pytest.raises(ValueError, match="arch='sm_90a', but NVIDIA A100-SXM4-40GB is sm_80"):
        dataclasses.replace(problem(), device=old)

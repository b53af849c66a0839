"""Problem: what it is made of, whether it is a plain product, and the key by which it is known elsewhere."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutjax
from cutjax.epilogue.expression import identity
from cutjax.epilogue.trace import trace
from cutjax.kernels import arguments, convolution, device, keys
from cutjax.kernels.choose import choose
from cutjax.kernels.families import concerned
from cutjax.kernels.keys import key
from cutjax.kernels.operand import Im2col, Operand, Scale, Taps
from cutjax.kernels.problem import Problem

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def epilogue(fn, *operands):
    return trace(fn, [jax.ShapeDtypeStruct((8, 16), F32)], [jnp.zeros(*x) for x in operands]).epilogue.primal


def problem(**fields):
    return cutjax.Problem.of(**{"m": 256, "n": 512, "k": 128, **fields})


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
    assert len(set(problems)) == len({key(p) for p in problems}) == len(VARIANTS)
    for fields, p in zip(VARIANTS.values(), problems, strict=True):
        again = problem(**fields)
        assert (again, hash(again), key(again)) == (p, hash(p), key(p))


def test_a_key_is_of_no_device():
    h100 = device.device_of_kind("NVIDIA H100 PCIe", "sm_90a", 114)
    assert problem(device=h100) != problem()
    assert key(problem(device=h100)) == key(problem()) == key(problem(arch="sm_80"))


def test_a_key_is_the_same_in_another_process():
    asked = [problem(**fields) for fields in VARIANTS.values()]
    program = (
        "import dataclasses, pickle, sys; asked = pickle.load(sys.stdin.buffer);"
        "assert all({p: 1}[dataclasses.replace(p)] for p in asked);"
        "from cutjax.kernels.keys import key; print([key(p) for p in asked])"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    for p in asked:
        hash(p)  # of strings among others, which are salted anew in each process: nothing to send along
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(asked), env=env, capture_output=True)
    assert done.stdout.decode().strip() == str([key(p) for p in asked]), done.stderr.decode()


def test_the_key_of_a_release():
    """What a tuning database of another version holds is found: it says the defaults too."""
    released = (
        '{"m":256,"n":512,"k":128,"layout":"nn","a_dtype":"bfloat16","b_dtype":"bfloat16","out_dtype":"float32",'
        '"batch":[],"a_batch":[],"b_batch":[],"groups":0,"ragged":"","leading":false,"sizes_batch":[],"in_place":[],'
        '"epilogue":"bbe709639a839f19ece9c594670b8a61659b947e30f679acf6fa6a91a1c95b54"}'
    )
    found = key(problem(**ADDED))
    assert keys.recorded(released) == keys.recorded(found) == found
    assert json.loads(found).items() <= json.loads(released).items()
    assert key(problem()) == '{"m":256,"n":512,"k":128}'


def test_operands():
    p = problem(layout="tn", **BATCHED)
    assert p.a == Operand(BF16, "mn", (4,))
    assert p.bs == (Operand(BF16, "mn", (1,)),)
    assert problem(layout="nt").a.contiguous == problem(layout="nt").bs[0].contiguous == "k"


# Operands that most families do not load, and the reason.
BEYOND = {
    "scales": ({"scale": Scale(F32, 1, 128)}, "with scales of 1 x 128 elements"),
    "zero points": ({"scale": Scale(BF16, 1, 64, np.dtype(np.int8))}, "with scales and zero points of 1 x 64 elements"),
    "windows": ({"view": Taps((3, 3), (3, 3), (0, 0), (1, 1))}, "as taps"),
    "four bits": ({"dtype": np.dtype(jnp.int4), "bits": 4}, "in 4 bits an element"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("name", BEYOND)
def test_operands_that_a_family_does_not_load_are_told(name, which, arch):
    fields, why = BEYOND[name]
    p = problem(arch=arch)
    found = dataclasses.replace(p.a if which == "a" else p.bs[0], **fields)
    p = dataclasses.replace(p, **({"a": found} if which == "a" else {"bs": (found,)}))
    refusals = [family.reasons(p) for family in concerned(p)]
    assert any(reason.startswith(f"{which} {why}") for reasons in refusals for reason in reasons)


def test_each_b_is_its_own():
    gated = problem(epilogue=trace(lambda x, y: x * y, [jax.ShapeDtypeStruct((8, 16), F32)] * 2, []).epilogue.primal)
    first, second = gated.bs
    mixed = dataclasses.replace(gated, bs=(first, dataclasses.replace(second, contiguous="k")))
    assert choose(gated, backend="cuda").served
    assert any("matrices b of several kinds" in reason for reason in choose(mixed).reasons)
    assert mixed.bytes == gated.bytes
    assert dataclasses.replace(gated, bs=(first, second.of(F32))).bytes - gated.bytes == 2 * gated.k * gated.n
    with pytest.raises(ValueError, match="1 operands b of an epilogue of 2 products"):
        dataclasses.replace(gated, bs=(first,))


def test_keys_say_what_operands_are():
    """Those of operands that older versions had not are of version 2, and differ from all others."""
    p = problem()
    kinds = [dataclasses.replace(p.a, **fields) for fields, _ in BEYOND.values()]
    kinds += [dataclasses.replace(p.a, scale=Scale(F32, 128, 128)), dataclasses.replace(p.a, scale=Scale(BF16, 1, 128))]
    found = [key(dataclasses.replace(p, a=kind)) for kind in kinds]
    found += [key(dataclasses.replace(p, bs=(dataclasses.replace(p.bs[0], scale=Scale(F32, 1, 128)),)))]
    assert len({key(p), *found}) == 1 + len(found)
    assert all(json.loads(text)["version"] == 2 for text in found)


def test_scales_come_after_what_is_multiplied_and_told():
    """Of a, then of each b, as launches name their pointers; swapped operands' arrays stay where they are."""
    p = problem(m=256, n=512, k=384, layout="nt")
    of_a = dataclasses.replace(p.a, dtype=np.dtype(jnp.float8_e4m3fn), bits=0, scale=Scale(F32, 1, 128))
    of_b = dataclasses.replace(p.bs[0], dtype=np.dtype(jnp.int4), bits=0, scale=Scale(BF16, 1, 32, np.dtype(jnp.int4)))
    p = dataclasses.replace(p, a=of_a, bs=(of_b,))
    assert (p.arrays, of_b.bits, of_b.blocks(512, 384)) == (5, 4, (512, 12))
    assert of_b.read(512, 384) == 512 * 384 // 2 + 512 * 12 * 2 + 512 * 12 // 2
    found = {x.name: x.value for x in arguments.scales(p)}
    names = ("scale_a", "scale_b0", "zero_b0")
    assert [found[name].buffer for name in names] == [2, 3, 4]
    assert (found["scale_row_a"].value, found["scale_matrix_a"].value, found["scale_row_b0"].value) == (3, 768, 12)
    turned = {x.name: x.value for x in arguments.scales(p.transposed, swap=True)}
    assert [turned[name].buffer for name in ("scale_b0", "scale_a", "zero_a")] == [2, 3, 4]
    grouped = problem(groups=4, ragged="m")
    grouped = dataclasses.replace(grouped, bs=(dataclasses.replace(grouped.bs[0], scale=Scale(F32, 128, 128)),))
    assert next(arguments.scales(grouped)).value.buffer == 3  # after a, b and the sizes of groups


def test_fields_of_a_key_make_the_problem_again():
    for fields in VARIANTS.values():
        p = problem(**fields)
        assert Problem.of(**{**keys.fields(p), "epilogue": p.epilogue, "device": p.device}) == p


def test_what_is_no_operand_is_told():
    with pytest.raises(TypeError, match="takes dtypes"):
        cutjax.Problem(256, 256, 256, "nt")  # pyright: ignore[reportArgumentType]
    assert cutjax.Problem(256, 512, 128) == problem()


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
        problem(device=old, arch="sm_90a")


def test_bytes_of_a_convolution_are_those_of_its_arrays():
    view = Im2col(8, (56, 56), (28, 28), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 64)
    arrays = 2 * (8 * 56 * 56 * 64 + 9 * 64 * 128 + 8 * 28 * 28 * 128)
    turned = convolution.forward(view, 128, Taps((3, 3), (3, 3), (2, 2), (-1, -1)), transposed=True)
    asked = convolution.forward(view, 128), turned, convolution.weight_gradient(view, 128)
    assert [p.bytes for p in asked] == [arrays] * 3
    assert [p.bs[0].array(p.n, p.k) for p in asked] == [(576, 128), (9 * 128, 64), (6272, 128)]
    assert all(p.a.array(p.m, p.k) == (8 * 56 * 56, 64) for p in asked)
    assert str(turned).endswith("nt bf16 x bf16 -> bf16, windows 3x3 strides 2x2 of a 8x56x56x64, taps 3x3 of b 3x3")
    apart = dataclasses.replace(view, window=(1, 1), grid=(14, 14), strides=(4, 4), low=(0, 0))
    assert convolution.forward(apart, 128).bytes == 2 * (8 * 14 * 14 * (64 + 128) + 64 * 128)

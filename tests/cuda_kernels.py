"""Kernels that the tests of cutjax.cuda_kernel share, and the plan of a function's launch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax import _ffi
from cutjax.runtime.launch import FORMAT

AXPY = r"""extern "C" __global__ void axpy(const float* x, const float* y, float* z, float a, int n, long long x_stride,
                                long long y_stride) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[blockIdx.z * n + i] = a * x[blockIdx.z * x_stride + i] + y[blockIdx.z * y_stride + i];
}"""


def axpy_launch(x, y, z, a):
    return cutjax.CudaLaunch(
        grid=-(-x.size // 128), block=128, arguments=(x, y, z, a, x.size, x.batch_stride, y.batch_stride)
    )


def axpy_reference(x, y, a):
    return a * x + y


def make(**changes):
    given = {"out": lambda x, y, a: x, "launch": axpy_launch, "reference": axpy_reference, "vmap": "grid"} | changes
    source = given.pop("source", AXPY)
    return cutjax.cuda_kernel(source, given.pop("entry", "axpy"), **given)


def simple(launch=None, source=None, **changes):
    """A kernel of one operand and no keywords, with the launch a test asks about."""
    source = source or 'extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    launch = launch or (lambda x, y: cutjax.CudaLaunch(1, x.size))
    return cutjax.cuda_kernel(
        source, "copy", **({"out": lambda x: x, "launch": launch, "reference": jnp.copy} | changes)
    )


X, Y = jnp.arange(300.0), jnp.linspace(-1.0, 1.0, 300)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def mlir_bytes(text: str, name: str) -> bytes:
    (escaped,) = re.findall(rf'\b{name} = "((?:[^"\\]|\\.)*)"', text)
    pieces = re.findall(r"\\([0-9A-Fa-f]{2}|.)|([^\\])", escaped)
    return b"".join((bytes.fromhex(e) if len(e) == 2 else e.encode()) if e else c.encode() for e, c in pieces)


def plan(fn, *args) -> list[str]:
    """The one launch of a function, as the native launcher reads it."""
    text = lowered(fn, *args)
    (words,) = re.findall(r"plan = dense<\[?([-\d, ]+)\]?> : tensor", text) or re.findall(
        r"plan = array<i64: ([-\d, ]+)>", text
    )
    words = np.array([int(word) for word in words.split(",")])
    kernel = mlir_bytes(text, "kernel").decode()
    described = _ffi.check_plan(kernel=kernel, cubin=mlir_bytes(text, "cubin"), plan=words, format=FORMAT)
    return re.sub(r"cubin=\S+ ", "", described).splitlines()

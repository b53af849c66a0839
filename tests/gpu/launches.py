"""One kernel on one problem, launched alone: on the device, or, of the mma family, on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems

import cutjax
from cutjax.kernels.mma import kernel as mma
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime.launch import TARGET, Call

Execute = Callable[[Call, list[np.ndarray], list[np.ndarray]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One kernel on one problem.

    Attributes:
      problem, config: which.
      data: makes what the kernel reads, in the order of its plan, and the results it is to have.
      label: what is special about it.
      walks: of how many tiles a block takes one after the other, at least; 0 leaves it to the device, which has many.
    """

    problem: cutjax.Problem
    config: Any
    data: Callable[[], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]
    label: str
    walks: int = 0

    def __str__(self) -> str:
        return f"{self.kernel.name}  {self.label}"

    @functools.cached_property
    def kernel(self) -> mma.Kernel | sm90.Kernel:
        """The config, resolved."""
        return (mma if isinstance(self.config, cutjax.MmaConfig) else sm90).resolved(self.problem, self.config)

    def prepare(self) -> tuple[Call, Sequence[np.ndarray], Sequence[np.ndarray]]:
        """Makes what takes the time of a CPU core alone: the compiled kernel, and the data."""
        call = self.kernel.call()
        if self.walks:  # fewer blocks than tiles: each begins with the next one before it has stored the last
            (launch,) = call.launches
            launch = dataclasses.replace(launch, grid=(-(-launch.grid[0] // self.walks), 1, 1))
            call = dataclasses.replace(call, launches=(launch,))
        return call, *self.data()


def wide(dtypes: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The scope of arrays of 64-bit numbers, where there are such."""
    return jax.enable_x64(True) if any(np.dtype(x).name[-2:] in ("64", "28") for x in dtypes) else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


def on_device(launch: Call, arrays: list[np.ndarray], memory: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a launch in the memory given for them."""
    shared = dict(launch.aliases)

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def call(arrays, memory):
        for argument, result in shared.items():
            arrays[argument] = memory[result]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in memory]
        return jax.ffi.ffi_call(TARGET, results, input_output_aliases=shared)(*arrays, **launch.attributes())

    return [np.asarray(x) for x in call(*jax.device_put((arrays, memory)))]


def on_host(kernel: mma.Kernel, folder: pathlib.Path) -> Execute:
    """Returns a function that launches a kernel on the host, compiled by g++ in a folder."""
    import kernel_host

    def execute(launch: Call, arrays: list[np.ndarray], memory: list[np.ndarray]) -> list[np.ndarray]:
        given = [kernel_host.aligned(x) for x in (*arrays, *memory)]
        for argument, result in launch.aliases:
            given[argument] = given[len(arrays) + result]
        kernel_host.run(kernel, given, folder)
        return given[len(arrays) :]

    return execute


def run(
    problem: cutjax.Problem, launch: Call, arrays: Sequence[np.ndarray], execute: Execute = on_device
) -> list[np.ndarray]:
    """The kernel alone, on NaN for results; what it leaves to XLA, before and after, is done on the CPU."""
    outs = [np.dtype(out.dtype) for out in problem.epilogue.outputs]
    with wide([*outs, *(x.dtype for x in arrays), *(x.dtype for x in launch.results or ())]):
        cpu, given = jax.devices("cpu")[0], arrays
        if launch.prepare:
            with jax.default_device(cpu):
                arrays = [np.asarray(x) for x in launch.prepare(list(map(jnp.asarray, arrays)))]
        shape = (*problem.batch, *[problem.groups_along("k")] * (problem.divided == "k"), problem.m, problem.n)
        results = launch.results or [jax.ShapeDtypeStruct(shape, out) for out in outs]
        shared = {result: argument for argument, result in launch.aliases}
        memory = [arrays[shared[i]] if i in shared else poison(x.shape, x.dtype) for i, x in enumerate(results)]
        got = execute(launch, list(arrays), memory)
        with jax.default_device(cpu):
            if launch.finish:
                got = launch.finish(list(map(jnp.asarray, got)), list(map(jnp.asarray, given)))
            return [np.asarray(x) for x in got]


def poison(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """NaN, or of integers the greatest."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    return np.full(shape, np.iinfo(dtype).max if integer else np.nan, dtype)


def wrong(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str | None:
    """Describes the difference of results from those expected after rounding, or returns None."""
    for i, (out, ref) in enumerate(zip(got, expected, strict=True)):
        if not np.array_equal(out, ref := ref.astype(out.dtype)):
            return f"result {i}: {problems.mismatch(out, ref)}"
    return None

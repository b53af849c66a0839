"""The test of an installation, with nothing but cutjax and what it needs: run by `python -P tests/smoke.py`.

Products and their gradients are those of numpy, the native launcher reads a plan, and the device text is there.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import cutjax
from cutjax.runtime import launch, sources
from cutjax.tuning import bench_table


def main() -> None:
    """Raises unless all is well."""
    package = pathlib.Path(cutjax.__file__).parent
    assert pathlib.Path(__file__).resolve().parents[1] not in package.resolve().parents, f"{package} is a source tree"
    assert cutjax.__version__ == importlib.metadata.version("cutjax")

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((32, 48), np.float32), rng.standard_normal((48, 64), np.float32)
    y = cutjax.gemm(x, w, epilogue=lambda acc: jnp.maximum(acc, 0))
    np.testing.assert_allclose(y, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda w: cutjax.matmul(x, w).sum()))(w)
    np.testing.assert_allclose(gradient, np.tile(x.sum(0)[:, None], (1, 64)), rtol=1e-5, atol=1e-5)
    problem = cutjax.Problem.of(4096, 4096, 4096)
    assert cutjax.reasons(cutjax.candidates(problem)[0], problem) == ()
    assert (sources.DEVICE / "sm90" / "gemm.cuh").exists()
    assert bench_table.recorded()["8192x8192x8192:bfloat16"]["us"] > 0
    one = launch.Launch("kernel", b"cubin", (1, 1, 1), (32, 1, 1), params=(launch.Pointer(0),))
    plan = launch._ffi.check_plan(**launch.Call((one,)).attributes())
    assert plan.startswith("kernel cubin=0+5 grid=1x1x1")
    print(f"cutjax {cutjax.__version__} of {package}, jax {jax.__version__}, Python {sys.version.split()[0]}: ok")


if __name__ == "__main__":
    main()

"""A process that is forked before anything is computed computes; one forked while kernels compile compiles them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cutjax.runtime import compiler

needs_nvrtc = pytest.mark.skipif(compiler.compiler_missing() is not None, reason=str(compiler.compiler_missing()))

FORKED = """
import os
import cutjax
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    import jax.numpy as jnp
    y = cutjax.grouped_gemm(jnp.ones((4, 8)), jnp.ones((2, 8, 4)), jnp.array([1, 2]))
    os._exit(int(y.sum()) - 96)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_before_anything_is_computed():
    """Importing the package starts no thread that a fork would lose."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", FORKED], env=env, check=True, timeout=600)


COMPILING = """
import os, threading
from cutjax.runtime import compiler
begun, run = threading.Event(), compiler._run_nvrtc
parent = os.getpid()

def slow(*args, **options):
    begun.set()
    threading.Event().wait(3 if os.getpid() == parent else 0)
    return run(*args, **options)

compiler._run_nvrtc = slow
asked = ('extern "C" __global__ void one() {}',), dict(name="one", arch="sm_90a")
thread = threading.Thread(target=lambda: compiler.compile_kernel(*asked[0], **asked[1]))
thread.start()
begun.wait()
pid = os.fork()
if pid:
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(not compiler.compile_kernel(*asked[0], **asked[1]).image)
"""


@needs_nvrtc
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_a_thread_compiles(tmp_path):
    """The child does not wait for a thread that it does not have."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUTJAX_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILING], env=env, check=True, timeout=120)

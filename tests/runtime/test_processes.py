"""A process that is forked before anything is computed computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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

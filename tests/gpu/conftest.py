"""GPU tests: skipped, with the reason, where JAX sees no GPU."""

from __future__ import annotations

import jax
import problems
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpus():
    """The CUDA devices."""
    try:
        return jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")


def pytest_terminal_summary(terminalreporter):
    for kind, share in sorted(problems.WORST.items()):
        terminalreporter.write_line(f"worst {kind}: {share:.2f} of what is allowed")

"""GPU tests: skipped, with the reason, where JAX sees no GPU."""

from __future__ import annotations

import faulthandler

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


@pytest.fixture(autouse=True)
def limited(request):
    """A kernel that hangs ends the run, in files that say of how many SECONDS a test takes fewer."""
    seconds = getattr(request.module, "SECONDS", None)
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter):
    for kind, share in sorted(problems.WORST.items()):
        terminalreporter.write_line(f"worst {kind}: {share:.2f} of what is allowed")

"""The emulator needs g++ and NVRTC."""

from __future__ import annotations

import gxx
import pytest

from cutjax.runtime import compiler


@pytest.fixture(scope="session", autouse=True)
def needs():
    """Skips where there is none, with the reason."""
    if not gxx.installed():
        pytest.skip("needs g++")
    if missing := compiler.compiler_missing():
        pytest.skip(missing)

"""Fixtures of the tests of fuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cutjax.fusion import price


@pytest.fixture
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product that has a kernel becomes one."""
    monkeypatch.setattr(price, "LEAD", 0.0)
    price._of_problem.cache_clear()
    yield
    price._of_problem.cache_clear()

"""A pytest plugin: the tests of JAX and Flax see the drop-ins of cutjax in place of the originals. See run.sh.

Modules of the originals are not changed, since cutjax calls them. Each test module, and each module of Flax, gets
others in place of ``jax``, ``jax.lax`` and ``jax.numpy``, which differ in these functions alone.
"""

from __future__ import annotations

import collections
import functools
import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cutjax

CALLS: collections.Counter[str] = collections.Counter()
FLAX = ("flax.linen.linear", "flax.linen.attention", "flax.nnx.nn.linear", "flax.nnx.nn.attention")


class Like(types.ModuleType):
    """A module that is like another but for some names."""

    def __init__(self, other: types.ModuleType, names: dict[str, Any]):
        super().__init__(other.__name__)
        self.__dict__.update(names)
        self.__dict__["_other"] = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def _counted(name: str) -> Any:
    function = getattr(cutjax, name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **kwargs)

    return called


NAMES = {lax: ("dot_general", "conv_general_dilated", "conv_transpose"), jnp: ("dot", "matmul", "tensordot", "einsum")}
OURS = {module: {name: _counted(name) for name in names} for module, names in NAMES.items()}
LAX, NUMPY = (Like(module, ours) for module, ours in OURS.items())
PLACES = {id(jax): Like(jax, {"lax": LAX, "numpy": NUMPY}), id(lax): LAX, id(jnp): NUMPY}
PLACES |= {id(getattr(module, name)): ours for module, found in OURS.items() for name, ours in found.items()}


def substitute(module: types.ModuleType) -> None:
    """Puts the drop-ins into a module: its globals, and the defaults of what it defines."""
    for name, value in list(vars(module).items()):
        if id(value) in PLACES:
            setattr(module, name, PLACES[id(value)])
        for function in (value, *vars(value).values()) if isinstance(value, type) else (value,):
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                if function.__defaults__:
                    function.__defaults__ = tuple(PLACES.get(id(x), x) for x in function.__defaults__)
                for key, default in (function.__kwdefaults__ or {}).items():
                    function.__kwdefaults__[key] = PLACES.get(id(default), default)


def pytest_sessionstart() -> None:
    for name in FLAX:
        try:
            substitute(importlib.import_module(name))
        except ModuleNotFoundError:  # JAX's tests run without Flax
            return


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        substitute(module)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    shown = ", ".join(f"{name} {count}" for name, count in sorted(CALLS.items()))
    terminalreporter.write_line(f"calls of cutjax: {shown or 'none'}")


def pytest_sessionfinish(session: Any) -> None:
    if not CALLS and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was substituted

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
FLAX = (
    *("flax.linen.linear", "flax.linen.attention", "flax.linen.fp8_ops"),
    *("flax.nnx.nn.linear", "flax.nnx.nn.attention"),
)


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


def conv(
    lhs: Any, rhs: Any, window_strides: Any, padding: Any, precision: Any = None, preferred_element_type: Any = None
):
    """Computes jax.lax.conv by ours."""
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    return OF_LAX["conv_general_dilated"](lhs, rhs, window_strides, padding, **how)


def conv_with_general_padding(
    lhs: Any, rhs: Any, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, **how: Any
):
    """Computes jax.lax.conv_with_general_padding by ours."""
    return OF_LAX["conv_general_dilated"](lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, **how)


OF_LAX = {name: _counted(name) for name in ("dot_general", "conv_general_dilated", "conv_transpose")}
OF_LAX |= {"conv": conv, "conv_with_general_padding": conv_with_general_padding}
OF_NUMPY = {name: _counted(name) for name in ("dot", "matmul", "tensordot", "einsum")}
LAX, NUMPY = Like(lax, OF_LAX), Like(jnp, OF_NUMPY)
PLACES = {id(jax): Like(jax, {"lax": LAX, "numpy": NUMPY}), id(lax): LAX, id(jnp): NUMPY}
PLACES |= {id(getattr(of, name)): f for of, ours in ((lax, OF_LAX), (jnp, OF_NUMPY)) for name, f in ours.items()}


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

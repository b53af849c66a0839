"""Kernels of a program, compiled by threads while it is traced and lowered: NVRTC takes most of a first compilation."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import partial_eval

from cutjax.binding import lowering, rules, walk

_MOST = 8  # threads
_by_jit_alone = contextvars.ContextVar("_by_jit_alone", default=False)


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(_MOST, max(1, (os.cpu_count() or 1) - 1)), "cutjax-nvrtc")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no such threads


@contextlib.contextmanager
def called_with(arguments: Iterable[Any]) -> Iterator[None]:
    """Inside, a program is called whose kernels are sure to be lowered, if no argument says that it is transformed."""
    by_jit = getattr(partial_eval, "DynamicJaxprTracer", ())
    token = _by_jit_alone.set(all(isinstance(x, by_jit) for x in arguments if isinstance(x, Tracer)))
    try:
        yield
    finally:
        _by_jit_alone.reset(token)


def compile_kernels(program: Any) -> None:
    """Starts to compile the kernels of a program for this process's one CUDA device; lowering waits for them.

    Not where it is transformed later: a derivative, or a mapped program, has other kernels.
    """
    if not _by_jit_alone.get() or not lowering.on_cuda() or jax.device_count() > 1:
        return
    for found in walk.within(rules.live(walk.opened(program))):
        asked = found.eqn.primitive, found.avals, found.eqn.params
        decided = lowering.decide(*asked, platform="cuda", divided=False)
        if decided.runs not in ("XLA", "error") and decided.choice:
            _pool().submit(decided.choice.call)  # what it raises, lowering raises

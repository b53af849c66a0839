"""cutjax.patch: the products of programs that others wrote, by a jax.jit that fuses what it is given."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from cutjax.fusion.fuse import fuse
from cutjax.fusion.report import collected

# While a program is traced to be fused, which opens the jitted functions that it calls. A JAX user context is part of
# jit's cache key: what such a function is inside of another program is never run by itself.
_inside = jax.make_user_context(False)
_KEPT = "__cutjax_patched__"  # of a function: what was made of it, so that jitting it again does not trace it again


class Program(NamedTuple):
    """One program that was traced to be fused.

    Attributes:
      name: the function's.
      products: how many products it has.
      kernels: how many of these are computed by kernels of this package.
    """

    name: str
    products: int
    kernels: int


class Patched:
    """The functions that were jitted in a block of ``cutjax.patch``; ``print`` lists their programs.

    Where there is none with a product, it says so, and that functions which were jitted before are unaffected.
    """

    def __init__(self) -> None:
        self._of_functions: list[list[Program]] = []

    @property
    def programs(self) -> list[Program]:
        """The programs with products that have been traced so far, in the order in which functions were jitted."""
        return [program for programs in self._of_functions for program in programs]

    def add(self, programs: list[Program]) -> None:
        """Notes a function, told the list of its programs, which grows."""
        if not any(programs is known for known in self._of_functions):
            self._of_functions.append(programs)

    def __str__(self) -> str:
        lines = [f"  {name}: {kernels} of {products} products" for name, products, kernels in self.programs]
        if lines:
            return "\n".join(["cutjax.patch: kernels for", *lines])
        return (
            "cutjax.patch: no product was seen in a function that was jitted in the block\n"
            "  functions that were jitted before the block are unaffected: jit them in it, or import there what does"
        )


class _Blocks(threading.local):
    """The blocks that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.open: tuple[Patched, ...] = ()


_blocks = _Blocks()
_lock = threading.Lock()
_users = 0  # blocks of all threads, while there is one of which jax.jit is ours
_original: Callable[..., Any] = jax.jit


@contextlib.contextmanager
def patch() -> Iterator[Patched]:
    """Fuses, in a ``with`` block, every function that is given to ``jax.jit``, as ``jax.jit(cutjax.fuse(fn))`` would.

    So a program that others wrote runs on kernels without a change: ``x @ w``, ``jnp.einsum``, ``jax.lax``'s
    ``dot_general``, ``ragged_dot`` and ``conv_general_dilated``, in layers of any library, forward and backward,
    wherever ``fuse`` predicts a kernel to be faster. The block counts where ``jax.jit`` is called: what is jitted in it
    stays fused, wherever it is called later; what was jitted before, and what other threads jit, stays plain JAX. At
    the end of the block, also by an exception, ``jax.jit`` is what it was. Blocks may be nested, and mean the same.

    Returns:
      A context manager; with ``as``, a record of what was fused, which ``print`` shows. Its ``programs`` are a list, in
      the order in which functions were jitted, of the programs with products that have been traced so far, each with
      the function's ``name``, how many ``products`` it has, and how many of these ``kernels`` compute.

    Raises:
      TypeError: by ``jax.jit`` in the block, as anywhere, if it is given no function. The block itself raises nothing.

    Examples:
      >>> import cutjax, jax, jax.numpy as jnp
      >>> with cutjax.patch() as patched:
      ...     layer = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
      >>> layer(jnp.ones((8, 16)), jnp.ones((16, 32))).shape
      (8, 32)
      >>> patched.programs[0].products
      1
    """
    global _users, _original
    made, before = Patched(), _blocks.open
    with _lock:
        if _users == 0:
            _original, jax.jit = jax.jit, _jit
        _users += 1
    _blocks.open = (*before, made)
    try:
        yield made
    finally:
        _blocks.open = before
        with _lock:
            _users -= 1
            if _users == 0 and jax.jit is _jit:  # not what another library has put around it since
                jax.jit = _original


@functools.wraps(jax.jit)
def _jit(*args: Any, **kwargs: Any) -> Any:
    """jax.jit while there is a block: that of jax for other threads."""
    if not _blocks.open:
        return _original(*args, **kwargs)
    if not args:  # as a decorator with options
        return functools.partial(_jit, **kwargs)
    fn, *rest = args
    if not callable(fn):
        return _original(*args, **kwargs)  # says what is wrong
    traced, programs = _fused(fn, _donated(fn, **kwargs))
    for block in _blocks.open:
        block.add(programs)
    return _original(traced, *rest, **kwargs)


def _donated(fn: Callable[..., Any], donate_argnums: Any = None, donate_argnames: Any = None, **_: Any) -> Any:
    """Returns the positions of the arguments that are donated."""
    argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums or ())
    if names := {donate_argnames} if isinstance(donate_argnames, str) else set(donate_argnames or ()):
        with contextlib.suppress(ValueError, TypeError):  # of what has no signature: those are not known
            parameters = inspect.signature(fn).parameters
            argnums += tuple(i for i, name in enumerate(parameters) if name in names)
    return argnums


def _fused(fn: Callable[..., Any], donated: tuple[int, ...]) -> tuple[Callable[..., Any], list[Program]]:
    """Returns the function that is jitted in place of another, and its programs, which are added when it is traced.

    The same ones for the same function, as long as that lives.
    """
    of, kept = vars(fn).get(_KEPT, (None, {})) if isinstance(fn, types.FunctionType) else (fn, {})
    if of is not fn:  # functools.wraps has copied it, or there is none yet
        kept = {}
        vars(fn)[_KEPT] = fn, kept
    if donated in kept:
        return kept[donated]
    programs: list[Program] = []

    @functools.wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        if _inside.value:
            return fn(*args, **kwargs)
        places = [i for i, x in enumerate(args) if _is_traced(x)]
        named = {name: x for name, x in kwargs.items() if _is_traced(x)}

        @functools.wraps(fn, updated=())
        def of_traced(*given: Any, **named: Any) -> Any:  # what is static for jit is as it is, numpy's numbers too
            whole = dict(enumerate(args)) | dict(zip(places, given, strict=True))
            return fn(*whole.values(), **{**kwargs, **named})

        of_args = {i % len(args) for i in donated if -len(args) <= i < len(args)}  # others came by name, or not at all
        argnums = [at for at, i in enumerate(places) if i in of_args]
        with _inside(True), collected() as reports:
            out = fuse(of_traced, donate_argnums=argnums)(*(args[i] for i in places), **named)
        if reports:
            kernels = sum(report.runs != "XLA" for report in reports)
            programs.append(Program(getattr(fn, "__name__", type(fn).__name__), len(reports), kernels))
        return out

    kept[donated] = traced, programs
    return kept[donated]


def _is_traced(x: Any) -> bool:
    """True of an argument that jax.jit traces, which has a tracer for each array."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))

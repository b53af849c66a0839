"""Movement of rows among the devices of a mesh axis, a device's share at a time, so that products run beside it.

Chunks are in the order of the ring: the first is of this device, the others of those at growing distances, both ways.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cutjax.binding.rules import match_varying, varying_axes
from cutjax.parallel.chunks import assemble_p, divide_p
from cutjax.parallel.links import direct_us, pieces_us, product_us, whole_us
from cutjax.primitives.accumulators import accumulator
from cutjax.primitives.hints import NO_HINTS, Hints
from cutjax.primitives.product import Product

ROUTES = ("auto", "whole", "pieces", "direct")
PIECES = (4, 2)  # of each device's rows, tried in this order


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices of one mesh axis.

    Attributes:
      axis: its name.
      size: how many they are.
      route: "whole", shares move by one collective, and there is one chunk, of all of them; "pieces", by one for each
        piece of the shares, a chunk each; "direct", a share goes straight to its device, which suits a switch; or
        "auto", not yet chosen.
      pieces: how many, of the route of that name.
    """

    axis: str
    size: int
    route: str
    pieces: int = 1

    @property
    def shifts(self) -> tuple[int, ...]:
        """The distance of each chunk's device, where chunks move from one to another: 0, 1, -1, 2, -2, ..."""
        return (0, *(s // 2 * (1 if s % 2 == 0 else -1) for s in range(2, self.size + 1)))

    @property
    def collective(self) -> bool:
        """True if shares move by collectives of all devices, rather than from one to another."""
        return self.route in ("whole", "pieces")

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.pieces if self.collective else self.size

    @property
    def hints(self) -> list[Hints]:
        """The hints for each chunk's product: it runs beside transfers, which take SMs, but for the last.

        That one is the last to arrive, and the first whose part of a sum is computed.
        """
        return [Hints(lead=0.0, beside=True)] * (self.chunks - 1) + [NO_HINTS]

    def chosen(self, product: Product, x: Any, ws: Sequence[Any], then: Any = None, travel: Any = None) -> Ring:
        """Returns the ring with a route: that predicted to be the fastest of products of one device's rows.

        Args:
          product: of x and each of ws.
          x, ws: avals; x of one device's rows.
          then: the second matrix of an mlp, whose product is added up over devices; None for none.
          travel: dtype of the parts of sums, which are of the last product; None where nothing is added up.
        """
        rows = -2 if getattr(product, "layout", "n")[0] == "n" else -1
        cuts = [Ring(self.axis, self.size, "pieces", count) for count in PIECES if x.shape[rows] % count == 0]
        whole = dataclasses.replace(self, route="whole")
        if self.route == "pieces":
            return next(iter(cuts), whole)
        if self.route != "auto":
            return self
        if self.size == 1:
            return whole

        def stages(ring: Ring) -> tuple[list[list[float]], Any]:
            """Returns the times of a chunk's products, beside transfers and alone, and the last one's result."""
            shape = list(x.shape)
            shape[rows] = shape[rows] * self.size // ring.chunks
            aval, kinds = x.update(shape=tuple(shape)), (ring.hints[0], NO_HINTS)
            last, tile = travel or x.dtype, product.tile(aval, *ws)
            dtype = last if then is None else x.dtype
            found = [[sum(product_us(product, kind, aval, w, dtype=dtype) for w in ws) for kind in kinds]]
            if then is not None:
                found.append([product_us(product, kind, tile, then, dtype=last) for kind in kinds])
                tile = product.tile(tile, then)
            return found, tile

        direct = dataclasses.replace(self, route="direct")
        times, tile = stages(direct)
        part = math.prod(tile.shape) * (travel or x.dtype).itemsize
        scattered = 0 if travel is None else part * (self.size - 1)
        gathered = 0 if travel is not None and then is None else x.size * x.dtype.itemsize * (self.size - 1)
        one = sum(alone for _, alone in stages(whole)[0])
        # The results put together, or the operand cut and the parts added up; between two products nothing is.
        passes = (self.size + 1) * part if travel is not None else 2 * self.size * part
        passes += 2 * self.size * x.size * x.dtype.itemsize if then is None and travel is not None else 0
        sends = [gathered, scattered] if then is not None else [gathered if travel is None else scattered]
        us: dict[Ring, float] = {whole: whole_us(gathered, scattered, one)}
        us[direct] = direct_us(times, sends, self.size, passes)
        for ring in cuts:
            beside = sum(ring.pieces * each for each, _ in stages(ring)[0])
            us[ring] = pieces_us(gathered, scattered, max(one, beside), ring.pieces)
        return min(us, key=us.__getitem__)

    def _moved(self, x: jax.Array, by: int) -> jax.Array:
        """Sends to the device so far on."""
        return lax.ppermute(x, self.axis, [(i, (i + by) % self.size) for i in range(self.size)])

    def varying(self, x: jax.Array) -> jax.Array:
        """Returns the array as one that differs between the devices, in the types of shard_map."""
        return x if self.axis in varying_axes(jax.typeof(x)) else lax.pcast(x, self.axis, to="varying")

    def gather(self, x: jax.Array, rows: int = -2) -> list[jax.Array]:
        """Returns the shares of all devices, in the order of the ring; ``rows`` is the axis that they are parts of."""
        return self.arriving(lambda chunk: (), x, rows)[0]

    def arriving(
        self,
        f: Callable[..., Any],
        x: jax.Array,
        rows: int,
        *others: Sequence[Any],
        keep: Callable[[jax.Array], jax.Array] = lambda chunk: chunk,
    ) -> tuple[list[jax.Array], list[Any]]:
        """Gathers shares as ``gather`` does, ``f`` applied to each as it arrives: returns those kept, and results.

        One transfer follows another: XLA would make one collective of all-gathers that do not wait for each other, and
        of permutes that do not it makes all but one synchronous. And each starts when the function of the last chunk
        but one is computed, so beside that of the last: XLA, which does not know how long kernels take, gathers all
        first where it may.
        """
        x, at = self.varying(x), x.ndim + rows
        pieces = lax.split(x, [x.shape[at] // self.pieces] * self.pieces, at)
        chunks: list[jax.Array] = []
        found: list[Any] = []
        for i, rest in enumerate(zip(*others, strict=True) if others else [()] * self.chunks):
            source = pieces[i] if self.collective else x
            if i:
                two = slice(max(i - 2, 0), i - 1)
                source, chunks[-1], *found[two] = lax.optimization_barrier((source, chunks[-1], *found[two]))
            if self.collective:
                arrived = lax.all_gather(source, self.axis, axis=at, tiled=True)
            else:
                arrived = self._moved(source, -self.shifts[i]) if i else source
            chunk = keep(arrived)
            if i:  # or XLA may wait for what arrives before it computes what it could compute beside
                chunk, found[-1] = lax.optimization_barrier((chunk, found[-1]))
            chunks.append(chunk)
            found.append(f(chunk, *rest))
        return chunks, found

    def paced(
        self, f: Callable[..., Any], chunks: Sequence[jax.Array], *others: Sequence[Any], until: Any = None
    ) -> list[Any]:
        """Returns a function of each chunk and of its part of the others, one after the other.

        A chunk is used when that of the one before is computed, or what ``until`` takes of it, and so arrives beside
        it: of what may run in any order, XLA waits for all that is sent first.
        """
        chunks, found = list(chunks), []
        for i, rest in enumerate(zip(*others, strict=True) if others else [()] * len(chunks)):
            found.append(f(chunks[i], *rest))
            if i + 1 < len(chunks):
                if until:
                    chunks[i + 1], _ = lax.optimization_barrier((chunks[i + 1], until(found[i])))
                else:  # its result in place of what went in: the transpose of one that nothing uses adds zeros
                    chunks[i + 1], found[i] = lax.optimization_barrier((chunks[i + 1], found[i]))
        return found

    def part_dtypes(self, wide: np.dtype, travel: np.dtype) -> list[np.dtype]:
        """Returns the dtype of each part of sums that ``scatter`` takes: as it travels, if nothing is added before."""
        if self.collective:
            return [travel] * self.chunks
        return [wide, *[travel] * (self.chunks - 1)]

    def leaving(self, f: Callable[..., jax.Array], dtype: np.dtype, chunks: Sequence[Any], *others: Any) -> jax.Array:
        """Returns ``scatter`` of a function, linear in its chunk, of each chunk and of its part of the others.

        A piece is sent beside the function of the next, which waits for what was sent before that. So the transpose
        gathers a piece when that of the last but one is computed, as ``arriving`` does.
        """
        if not self.collective:
            reverse = [each[::-1] for each in (chunks, *others)]
            return self.scatter(self.paced(f, *reverse)[::-1], dtype)
        sums: list[jax.Array] = []
        for chunk, *rest in reversed(list(zip(chunks, *others, strict=True))):
            if len(sums) > 1:
                chunk, sums[-2] = lax.optimization_barrier((chunk, sums[-2]))
            x = self.varying(f(chunk, *rest)).astype(dtype)
            if sums:
                x, sums[-1] = lax.optimization_barrier((x, sums[-1]))
            sums.append(lax.psum_scatter(x, self.axis, scatter_dimension=x.ndim - 2, tiled=True))
        return lax.concatenate(sums[::-1], sums[0].ndim - 2).astype(accumulator(dtype))

    def summed(self, f: Any, chunks: Sequence[Any], wide: np.dtype, travel: np.dtype) -> jax.Array:
        """Applies ``f`` to each chunk and adds the results up over devices, each device's part on that device."""
        dtypes = self.part_dtypes(wide, travel)
        parts = self.paced(f, chunks[::-1], dtypes[::-1], self.hints[::-1])
        return self.scatter(parts[::-1], travel)

    def scatter(self, chunks: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """Returns the sum of what all devices have for this one; parts of it travel in ``dtype``, and add up wider.

        As one collective they add up as they travel.
        """
        wide = accumulator(dtype)
        if self.collective:
            return self.leaving(lambda chunk: chunk, dtype, chunks)
        parts = {s: self.varying(x) for s, x in zip(self.shifts, chunks, strict=True)}
        moved: list[jax.Array] = []
        for s in reversed(self.shifts[1:]):
            x = parts[s].astype(dtype)
            if moved:
                x, moved[-1] = lax.optimization_barrier((x, moved[-1]))
            moved.append(self._moved(x, s))
        return functools.reduce(lax.add, [x.astype(wide) for x in moved], parts[0].astype(wide))

    def assembled(self, chunks: Sequence[jax.Array], axis: int) -> jax.Array:
        """Returns chunks as one array along an axis, counted from the last one, in the order of the devices."""
        if len(chunks) == 1:
            return chunks[0]
        if self.route == "pieces":
            at, shape = chunks[0].ndim + axis, chunks[0].shape
            before, rows, after = shape[:at], shape[at] // self.size, shape[at + 1 :]
            apart = [lax.reshape(x, (*before, self.size, rows, *after)) for x in match_varying(*chunks)]
            return lax.reshape(lax.concatenate(apart, at + 1), (*before, self.chunks * shape[at], *after))
        args = match_varying(self._index(), *chunks)
        return assemble_p.bind(*args, shifts=self.shifts, axis=axis)

    def divided(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """Returns the array in chunks: the inverse and the transpose of ``assembled``."""
        if self.chunks == 1:
            return [x]
        if self.route == "pieces":
            at, shape = x.ndim + axis, x.shape
            before, rows, after = shape[:at], shape[at] // self.size // self.chunks, shape[at + 1 :]
            apart = lax.reshape(x, (*before, self.size, self.chunks * rows, *after))
            parts = lax.split(apart, [rows] * self.chunks, at + 1)
            return [lax.reshape(part, (*before, self.size * rows, *after)) for part in parts]
        return divide_p.bind(*match_varying(self._index(), x), shifts=self.shifts, axis=axis)

    def _index(self) -> jax.Array:
        return lax.axis_index(self.axis).astype(np.int32)


def ring_of(axis_name: Any, route: str, where: str, argument: str = "axis_name") -> Ring:
    """Returns the ring of a mesh axis; raises an error that says what came."""
    if not isinstance(axis_name, str):
        raise TypeError(f"{where}: {argument} must be the name of one mesh axis, got {axis_name!r}")
    if route not in ROUTES:
        raise ValueError(f"{where}: unknown route {route!r}, expected one of {ROUTES}")
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{where}: axis {axis_name!r} is not bound here; call it inside jax.shard_map over a mesh with that axis"
        ) from None
    return Ring(axis_name, size, route)

"""The arrays of a user's kernel, as its launch sees them: pointers into them, and tensor maps of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

import numpy as np

from cutjax.runtime.launch import Pointer, TensorMap
from cutjax.runtime.tensor_map import ELEMENTS, Im2col, bits_of


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or a result of a ``cutjax.cuda_kernel``, as the function ``launch`` sees it: of one example.

    Attributes:
      shape, dtype: of one example, without the axes of ``jax.vmap``; row-major in memory.
      index: the number of the buffer, operands before results.
      batch: the number of examples in memory, one after the other; 1 outside ``jax.vmap``.
      batch_stride: elements from one example to the next; 0 where all examples share one.
      batch_axis: True if tensor maps have an axis of examples: where ``vmap="grid"``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    index: int
    batch: int = 1
    batch_stride: np.int64 = dataclasses.field(default_factory=np.int64)
    batch_axis: bool = False

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of one example."""
        return self.size * self.dtype.itemsize

    def pointer(self, offset: int = 0) -> Pointer:
        """Returns the kernel argument that points to an element, the first by default."""
        return Pointer(self.index, operator.index(offset) * self.dtype.itemsize)

    def tensor_map(
        self,
        box: Sequence[int],
        *,
        shape: Sequence[int] | None = None,
        element_strides: Sequence[int] = (),
        element: str = "",
        swizzle: int | str = 128,
        fill: str = "zeros",
        l2_bytes: int = 128,
    ) -> TensorMap:
        """Returns the kernel argument with which TMA moves boxes of the array: a ``const __grid_constant__ TensorMap``.

        Coordinates in the kernel count elements, the last axis first. Where ``vmap="grid"`` there is one more, the
        example's: ``blockIdx.z``, or 0 where all examples share the array. There are at most five.

        Args:
          box: elements of one copy along each of the last axes, up to 256; 1 along those before.
          shape: the array is seen as one of this shape, as by a reshape.
          element_strides: for each of the last axes, 1 to 8: a copy moves one of so many elements, so that a box of 64
            with a stride of 2 moves 32; 1 along those before. The last axis has none.
          element: the type of the elements to TMA, where it is not the dtype's: "tfloat32" rounds float32, and
            "float32_ftz" makes its subnormal numbers zero; those of "16u4_align8b", "16u4_align16b" and "16u6_align16b"
            have 4 or 6 bits, and boxes and coordinates count those (from sm_100 on).
          swizzle: how rows of the box lie in shared memory: the span in bytes, 128, 64, 32 or 0; or "128_atom_32",
            "128_atom_32_flip_8", "128_atom_64" (from sm_100 on).
          fill: what lies outside the array reads as, "zeros" or "nan".
          l2_bytes: how much of a line L2 fetches: 0, 64, 128 or 256 bytes.

        Raises:
          ValueError: if TMA cannot move such boxes, with the rule it breaks.
        """
        shape = self.shape if shape is None else tuple(shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"launch: an array of shape {self.shape} cannot be seen as one of shape {shape}")
        if not 1 <= len(box) <= len(shape):
            raise ValueError(f"launch: a box {tuple(box)} does not fit an array of shape {shape}")
        if len(element_strides) > len(shape):
            raise ValueError(f"launch: element strides {tuple(element_strides)} do not fit an array of shape {shape}")
        dims, strides = self._lying(shape, element)
        if self.batch_axis:
            dims = (*dims, self.batch)
            if self.batch == 1:
                strides = (*strides[:-1], -(-strides[-1] // 16) * 16)  # of one alone any will do
        boxes, steps = ((*x[::-1], *[1] * (len(dims) - len(x))) for x in (box, element_strides))
        kinds = {"element": element, "fill": fill, "element_strides": steps if element_strides else ()}
        strides = strides[: len(dims) - 1]
        return TensorMap(self.index, self.dtype, dims, strides, boxes, swizzle, l2_bytes=l2_bytes, **kinds)

    def im2col_map(
        self,
        lower: Sequence[int],
        upper: Sequence[int],
        channels: int,
        pixels: int,
        *,
        pixel_strides: Sequence[int] = (),
        wide: str = "",
        element: str = "",
        swizzle: int | str = 128,
        fill: str = "zeros",
        l2_bytes: int = 128,
    ) -> TensorMap:
        """Returns the kernel argument with which TMA moves columns of pixels, as convolutions read them.

        The array is of images ``[n, w, c]``, ``[n, h, w, c]`` or ``[n, d, h, w, c]``. A copy begins at a pixel of the
        bounding box, takes the next ones of it, row after row and image after image, and moves of each the pixel that
        the instruction's offsets lead to. Coordinates in the kernel are the last axis's first, offsets the w axis's.
        Where ``vmap="grid"`` the images of all examples follow each other: the first has the number
        ``blockIdx.z * n``, or 0 where all examples share the array.

        Args:
          lower: from an image's first pixel to the bounding box's, for each of its axes: ``-low`` for a convolution
            whose padding is ``low`` and ``high``.
          upper: from an image's last pixel to the bounding box's: ``high - (window - 1) * dilation``.
          channels: elements of each pixel that one copy moves, up to 256.
          pixels: in a column, up to 1024.
          pixel_strides: for each axis of an image, 1 to 8: the strides of the convolution; by default 1.
          wide: "w" or "w128" keeps columns in a row, see ``cp.async.bulk.tensor`` in PTX (from sm_100 on); the corners
            are then of the w axis alone.
          element: as for ``tensor_map``, and so are the next.
          swizzle: bytes, see there.
          fill: of what lies outside.
          l2_bytes: prefetched into L2.

        Raises:
          ValueError: if TMA cannot move such columns, with the rule it breaks.
        """
        if not 3 <= len(self.shape) <= 5:
            raise ValueError(f"launch: im2col is of arrays of 3 to 5 axes, n, d, h, w and c, not of shape {self.shape}")
        axes = len(self.shape) - 2
        if len(pixel_strides) not in (0, axes):
            raise ValueError(f"launch: an image has {axes} axes, got pixel strides {tuple(pixel_strides)}")
        (*dims, images), (*strides, _) = self._lying(self.shape, element)
        walk = Im2col(tuple(lower[::-1]), tuple(upper[::-1]), channels, pixels, wide)
        steps = (1, *pixel_strides[::-1], 1) if pixel_strides else ()
        kinds = {"element": element, "fill": fill, "element_strides": steps}
        dims = (*dims, images * self.batch)
        return TensorMap(self.index, self.dtype, dims, tuple(strides), walk, swizzle, l2_bytes=l2_bytes, **kinds)

    def _lying(self, shape: tuple[int, ...], element: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the dimensions of a tensor map in TMA's elements, and the bytes of each: strides, and the whole."""
        bits = bits_of(self.dtype)
        row, left = divmod(shape[-1] * bits, ELEMENTS.get(element, bits))
        if left:
            raise ValueError(f"launch: rows of {shape[-1]} {self.dtype} are no whole number of {element}")
        strides = [shape[-1] * bits // 8]
        for size in shape[-2::-1]:
            strides.append(strides[-1] * size)
        return (row, *shape[-2::-1]), tuple(strides)

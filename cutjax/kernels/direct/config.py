"""The config of a direct convolution: what a thread has, and what a block."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel of the direct family: products a thread adds up, places of a row, rows, threads of a block.

    Attributes:
      pairs: of channels, an input and a result's each, that a thread multiplies: neighbours in memory.
      strip: places along the last axis that it has at once.
      rows: that it goes down, at most.
      lanes: threads of a block that have other channels.
      threads: of a block, about: `lanes` of them for each strip.
      ahead: rows of a result for which pixels are loaded at once; of a weight gradient 1.
      blocks: that share an SM: registers are divided among them.
      toeplitz: whether the tensor cores multiply, by Toeplitz matrices: ``pairs`` is 2, ``strip`` is 8, ``lanes`` are
        warps of a block, and ``ahead`` times two rows of pixels in shared memory.
      parts: of a weight gradient, sums over so many parts of the places, which are added up in order; of a result by
        Toeplitz matrices, blocks that have the same channels; 0 of another result.

    Raises:
      ValueError: a field is outside its range; lists every reason.

    Examples:
      >>> import cutjax, jax.numpy as jnp
      >>> x, w = jnp.ones((1, 16, 16, 64), jnp.bfloat16), jnp.ones((3, 3, 1, 64), jnp.bfloat16)
      >>> config = cutjax.DirectConfig(pairs=1, strip=8)
      >>> cutjax.conv(x, w, feature_group_count=64, config=config).shape
      (1, 16, 16, 64)
    """

    pairs: int = 2
    strip: int = 4
    rows: int = 16
    lanes: int = 32
    threads: int = 256
    ahead: int = 1
    blocks: int = 2
    parts: int = 0
    toeplitz: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            expected = bool if field.name == "toeplitz" else int
            if type(value) is not expected:
                raise ValueError(f"DirectConfig: {field.name}={value!r}, expected {expected.__name__}")
        bounds = {"pairs": 32, "strip": 32, "rows": 1 << 20, "lanes": 256, "threads": 1024, "ahead": 16, "blocks": 32}
        found = [
            f"{name}={getattr(self, name)}, expected 1 to {most}"
            for name, most in bounds.items()
            if not 1 <= getattr(self, name) <= most
        ]
        if self.lanes > self.threads:
            found.append(f"lanes={self.lanes} of threads={self.threads}")
        if not 0 <= self.parts <= 4096:
            found.append(f"parts={self.parts}, expected 0 to 4096")
        if found:
            raise ValueError(f"DirectConfig: {'; '.join(found)}")

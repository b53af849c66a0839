"""The view of an operand that is several arrays along k: what makes a product a sum of products."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Joined:
    """Arrays alike beside each other along k. ``[a0 a1] @ [b0; b1]`` is ``a0 @ b0 + a1 @ b1``.

    Attributes:
      ks: the part of the contraction that each array has.
    """

    ks: tuple[int, ...]

    def text(self, name: str) -> str:
        """Returns the words for the operand of that name."""
        return f"{name} of {len(self.ks)} arrays, k = {' + '.join(map(str, self.ks))}"

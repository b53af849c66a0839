"""The order of tiles: bands of rows of tiles, walked column by column."""

from __future__ import annotations

import math


def band(rows: int, at_once: float, height: int, width: int, widest: float = 1.4) -> int:
    """Returns the width of a band for which the tiles in flight read the fewest bytes through L2.

    With C tiles in flight, a band of w rows spans C / w columns and reads w * height + C / w * width: least at
    w = sqrt(C * width / height). Near there, the width that leaves the least ragged last band is taken.

    Args:
      rows: of tiles, in a result.
      at_once: tiles in flight.
      height, width: of a tile.
      widest: the most it may be, in multiples of the best width.
    """
    best = math.sqrt(at_once * width / height)
    near = range(max(1, round(best * 0.7)), max(1, round(best * widest)) + 1)
    return min(near, key=lambda w: (-(-rows // w) * w - rows, abs(w - best)))

"""Batches of bytes: every window of the text once an epoch, shuffled, from any position on."""

from __future__ import annotations

import pathlib

import numpy as np

TEXT = pathlib.Path(__file__).parent / "romeo_and_juliet.txt"  # Shakespeare's play, in the public domain
VOCABULARY = 256


def encode(text: str) -> np.ndarray:
    """Returns the bytes of a text as int32."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """Returns the text of some bytes."""
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


class Batches:
    """An endless iterator of int32 ``[batch, context + 1]``.

    The text is cut into windows at an offset of the epoch's own, and the windows are shuffled. The position is the
    number of batches given so far, and all of the state: an iterator made with it goes on where the other one was.
    """

    def __init__(self, text: np.ndarray, batch: int, context: int, *, seed: int = 0, position: int = 0):
        self.text, self.batch, self.context, self.seed, self.position = text, batch, context, seed, position
        self.windows = (len(text) - context) // context  # at any offset below the context
        self.per_epoch = self.windows // batch
        if self.per_epoch < 1:
            raise ValueError(
                f"a batch of {batch} windows of {context} bytes needs a text longer than {len(text)} bytes"
            )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> np.ndarray:
        epoch, at = divmod(self.position, self.per_epoch)
        self.position += 1
        rng = np.random.default_rng((self.seed, epoch))
        offset = rng.integers(self.context)
        order = rng.permutation(self.windows)
        starts = offset + self.context * order[at * self.batch : (at + 1) * self.batch]
        return self.text[starts[:, None] + np.arange(self.context + 1)]

"""Hints for a product: the wishes of policy, and sentences for ``cutjax.explain``; no value depends on any."""

from __future__ import annotations

import dataclasses

from cutjax.kernels.choose import LEAD
from cutjax.kernels.device import Device


@dataclasses.dataclass(frozen=True)
class Hints:
    """Hints for a product that change no value: a parameter of its primitive, beside the product.

    They are no part of the product, so two are equal that multiply alike. But they are compared as all parameters are,
    the sentences too: programs are lowered by ``lead`` and ``beside``, and ``explain`` reads ``copies`` from a program,
    so JAX must not take a program kept for some hints where others were given. An eager call is not explained, and is
    compiled without the sentences (``silent``).

    Attributes:
      copies: sentences for explain, of a, b and the result: that a transpose beside the product copies it, "" if not.
      lead: how many times as fast as XLA's product a kernel must be to run under "auto"; of its cotangents too.
      beside: whether it runs beside transfers, which take SMs; its cotangent in the first operand does too.
      moved: bytes that transposes around the product move, where XLA's own needs none.
    """

    copies: tuple[str, str, str] = ("", "", "")
    lead: float = LEAD
    beside: bool = False
    moved: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for explain, beside the reason of a choice."""
        return tuple(text for text in self.copies if text)

    @property
    def silent(self) -> Hints:
        """The hints without what only explain prints."""
        return dataclasses.replace(self, copies=Hints.copies) if self.notes else self

    def device(self, device: Device) -> Device:
        """Returns a device as the product has it."""
        return device.beside_transfers() if self.beside else device

    def of_cotangent(self, i: int, first: bool) -> Hints:
        """Returns the hints of the product that is the cotangent of a (i = 0) or b (1), with g ``first`` or second."""
        of_factor, of_d = (text and f"the cotangent of {text}" for text in (self.copies[i], self.copies[2]))
        kept = Hints() if self.beside and i > 0 else self
        return dataclasses.replace(kept, copies=(of_d, "", of_factor) if first else ("", of_d, of_factor))


NO_HINTS = Hints()

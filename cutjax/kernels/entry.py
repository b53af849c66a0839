"""One launch of a call that has several: its device text, its arguments and its blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

from cutjax.kernels.arguments import Argument
from cutjax.runtime.compiler import Cubin, compile_kernel
from cutjax.runtime.launch import Launch


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One launch: a device function, and what it is given.

    Attributes:
      problem: whose, a `Problem` or what else has a device.
      name: the entry symbol.
      source: the device text.
      arguments: that it takes, in order.
      blocks, threads: of the launch.
      shared_bytes: of a block.
    """

    problem: Any
    name: str
    source: str
    arguments: tuple[Argument, ...]
    blocks: int
    threads: int
    shared_bytes: int

    def compile(self) -> Cubin:
        """Compiles it, or takes it from the cache."""
        return compile_kernel(self.source, name=self.name, arch=self.problem.arch)

    def launch(self, cubin: bytes) -> Launch:
        """Returns the launch of a cubin."""
        return Launch(
            kernel=self.name,
            cubin=cubin,
            grid=(self.blocks, 1, 1),
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            params=tuple(argument.value for argument in self.arguments),
        )

"""A progress bar on stderr, of plain text; none where that is no terminal."""

from __future__ import annotations

import sys
import threading
import time

WIDTH = 24


class Progress:
    """Counts steps of a known number, of any thread, and shows them; a context manager that ends the line."""

    def __init__(self, total: int, shown: bool):
        self._total, self._done = max(total, 1), 0
        self._shown = shown and sys.stderr.isatty()
        self._lock, self._start, self._columns = threading.Lock(), time.monotonic(), 0

    def step(self, what: str) -> None:
        """Counts a step, and shows what it is."""
        with self._lock:
            self._done += 1
            if not self._shown:
                return
            filled = WIDTH * self._done // self._total
            bar = "#" * filled + "." * (WIDTH - filled)
            seconds = time.monotonic() - self._start
            self._write(f"[{bar}] {self._done}/{self._total} {seconds:.0f} s  {what}"[:118])

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._columns))
        sys.stderr.flush()
        self._columns = len(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

"""Compiles C++ text by g++, which reads the standard headers that tests/native includes once a process."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import subprocess
import tempfile

NATIVE = pathlib.Path(__file__).parent / "native"
# Optimized little: compiling takes the time. nvcc may fuse a multiplication and an addition; here nothing may, so that
# bits can be compared.
FLAGS = ["-std=c++20", "-Og", "-ffp-contract=off", "-fPIC"]


@functools.cache
def installed() -> bool:
    """True where there is a g++."""
    try:
        return subprocess.run(["g++", "--version"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@functools.cache
def _headers() -> tempfile.TemporaryDirectory[str]:
    """The folder of the compiled headers: they take over half the time of a kernel."""
    folder = tempfile.TemporaryDirectory(prefix="cutjax-headers-")
    texts = (path.read_text() for path in sorted(NATIVE.glob("*_shim.h")))
    names = dict.fromkeys(name for text in texts for name in re.findall("^#include <.*>$", text, re.M))
    header = pathlib.Path(folder.name) / "std.h"
    header.write_text("\n".join(names))
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


def build(folder: pathlib.Path, text: str, *flags: str, name: str = "text") -> ctypes.CDLL:
    """A library of C++ text."""
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text(text)
    flags = (*FLAGS, "-include", f"{_headers().name}/std.h", "-shared", "-Wall", "-Wno-unused", *flags)
    subprocess.run(["g++", *flags, source, "-o", library], check=True, timeout=600)
    return ctypes.CDLL(str(library))

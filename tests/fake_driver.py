"""A libcuda that only records (tests/native/fake_cuda.cc), built and read."""

from __future__ import annotations

import ctypes
import json
import pathlib
import shutil
import struct
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def fake_cubin(payload: bytes) -> bytes:
    return b"FAKE" + struct.pack("<I", 8 + len(payload)) + payload


def build(folder: pathlib.Path) -> pathlib.Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the stand-in libcuda")
    found = subprocess.run(
        [sys.executable, ROOT / "ffi/launcher/find_cuda_h.py"], capture_output=True, text=True, check=True
    )
    includes = [f"-I{folder}" for folder in found.stdout.strip().split(";") if folder]
    if not includes:
        pytest.skip("needs cuda.h: pip install nvidia-cuda-runtime")
    path = folder / "libfakecuda.so"
    source = ROOT / "tests/native/fake_cuda.cc"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *includes, source, "-o", path], check=True)
    return path


class Fake:
    """The stand-in driver as a test sees it."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        library.fake_log.restype = ctypes.c_char_p

    def calls(self, name: str | None = None) -> list[dict]:
        lines = [json.loads(line) for line in self.library.fake_log().decode().splitlines()]
        return [line for line in lines if name in (None, line["call"])]

    def fail(self, call: str, status: int) -> None:
        self.library.fake_fail(call.encode(), status)

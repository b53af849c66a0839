"""Reading a cubin, an ELF file of 64 bits: the kernels in it and the sizes of their parameters."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_INFO = b".nv.info."  # and the kernel: records of what the driver must know of it
_PARAM_SIZE, _PARAM = 0x19, 0x17  # bytes of all parameters together; ordinal, offset and size of one


def kernels(image: bytes) -> dict[str, tuple[int, ...] | None]:
    """Returns for each kernel the bytes of its parameters, in order; None where the records are of another kind."""
    found = {}
    for name, data in _sections(image):
        if name.startswith(_INFO):
            records = list(_records(data))
            params = [struct.unpack("<IHHI", payload) for kind, payload in records if kind == _PARAM]
            sizes = tuple(word >> 18 for _, _, _, word in sorted(params, key=lambda param: param[1]))
            known = params or not any(kind == _PARAM_SIZE for kind, _ in records)
            found[name.removeprefix(_INFO).decode()] = sizes if known else None
    return found


def _sections(image: bytes) -> Iterator[tuple[bytes, bytes]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    # Of each section: where its name is, ..., where it lies, how long it is.
    headers = [struct.unpack_from("<I20xQQ", image, table + i * size) for i in range(count)]
    start = headers[names][1]
    for name, at, length in headers:
        yield image[start + name : image.index(b"\0", start + name)], image[at : at + length]


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        length = value if form == 4 else 0  # the other forms hold their value in these four bytes
        yield kind, data[at + 4 : at + 4 + length]
        at += 4 + length

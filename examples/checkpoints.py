"""Safetensors files of quantized linear layers: random ones as others' tools write them, and operands of theirs.

A linear layer from k to n features is, by the names of Hugging Face's checkpoints, in bf16 ``NAME.weight [n, k]``; GPTQ
and AWQ have ``NAME.qweight``, ``.scales`` and ``.qzeros``; mxfp4 of gpt-oss ``NAME_blocks`` and ``NAME_scales``; fp8 of
DeepSeek ``NAME.weight`` and ``NAME.weight_scale_inv``.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cutjax

FILES = ("bf16", "gptq", "awq", "mxfp4", "fp8")  # what is in a file
WEIGHTS = (*FILES, "int8", "int4")  # and what is made of bf16 when it is read
GROUP = 128
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "U8": "uint8",
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = dict[str, np.ndarray]
Operand = jax.Array | cutjax.Quantized


def save(path: pathlib.Path, tensors: Tensors) -> None:
    """Writes a safetensors file: the length of a header, the header in JSON, then the arrays as they are in memory."""
    header, end = {}, 0
    for name, x in tensors.items():
        offsets, end = [end, end + x.nbytes], end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(x.tobytes())


def load(path: pathlib.Path) -> Tensors:
    """Returns the arrays of a safetensors file, which the system reads when they are looked at."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)

    def array(entry):
        first, end = entry["data_offsets"]
        return data[start + first : start + end].view(jnp.dtype(DTYPES[entry["dtype"]])).reshape(entry["shape"])

    return {name: array(entry) for name, entry in header.items()}


def random_linear(rng: np.random.Generator, name: str, n: int, k: int, weights: str) -> Tensors:
    """Returns the arrays of a linear layer with random weights, whose results are as large as its inputs."""

    def words(*shape):
        return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)

    def same_word(word, *shape):
        return np.full(shape, word, np.uint32).view(np.int32)

    scales = np.full((k // GROUP, n), k**-0.5 / 4.6, np.float16)  # 4.6 is the deviation of -8 to 7
    if weights == "gptq":  # zero points of 8, less one
        zeros = same_word(0x77777777, k // GROUP, n // 8)
        return {f"{name}.qweight": words(k // 8, n), f"{name}.scales": scales, f"{name}.qzeros": zeros}
    if weights == "awq":
        zeros = same_word(0x88888888, k // GROUP, n // 8)
        return {f"{name}.qweight": words(k, n // 8), f"{name}.scales": scales, f"{name}.qzeros": zeros}
    if weights == "mxfp4":  # 2.9 is the deviation of its values
        exponent = np.full((n, k // 32), 127 + round(math.log2(k**-0.5 / 2.9)), np.uint8)
        blocks = rng.integers(0, 256, (n, k // 32, 16), np.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponent}
    normal = rng.standard_normal((n, k), np.float32)
    if weights == "fp8":
        factors = np.full((-(-n // 128), -(-k // 128)), k**-0.5 / 64, np.float32)
        values = (64 * normal).astype(jnp.float8_e4m3fn)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": factors}
    return {f"{name}.weight": (normal * k**-0.5).astype(jnp.bfloat16)}


def linear(tensors: Tensors, name: str, weights: str = "") -> tuple[Operand, str]:
    """Returns a layer's weights as an operand, and the layout of ``x @ w``; the names of the arrays say the format.

    Args:
      tensors: those of a file.
      name: the layer's.
      weights: "int8" and "int4" quantize weights that are bf16 in the file, by rows and in groups.
    """
    found = {key.removeprefix(name).lstrip("._"): x for key, x in tensors.items() if key.startswith(name)}
    if "blocks" in found:
        return cutjax.formats.mxfp4(found["blocks"], found["scales"]), "nn"
    if "weight_scale_inv" in found:
        return cutjax.formats.deepseek_fp8(found["weight"], found["weight_scale_inv"]), "nt"
    if "qweight" not in found:
        w = jnp.asarray(found["weight"])
        if weights not in ("int8", "int4"):
            return w, "nt"
        # Of 4 bits kernels read weights that lie as [k, n].
        w, block, layout = (w, (1, -1), "nt") if weights == "int8" else (w.T, (GROUP, 1), "nn")
        return cutjax.quantize(w, weights, block=block, scale_dtype=jnp.bfloat16), layout
    # GPTQ packs k into words, AWQ n: of the two sizes the one that scales and zero points have says which.
    if found["qweight"].shape[-1] == found["scales"].shape[-1]:
        zeros = found.get("qzeros")
        zeros = None if zeros is None or (zeros == 0x77777777).all() else zeros
        return cutjax.formats.gptq(found["qweight"], found["scales"], zeros, found.get("g_idx")), "nn"
    return cutjax.formats.awq(found["qweight"], found["scales"], found["qzeros"]), "nn"


def bytes_of(params: Any) -> int:
    """Returns how many bytes parameters take where values of 4 bits are two in a byte, as on a GPU."""
    four = ("int4", "uint4", "float4_e2m1fn")
    return sum(x.size * (4 if x.dtype.name in four else 8 * x.dtype.itemsize) for x in jax.tree.leaves(params)) // 8

"""The machine code of the mainloop: what runs beside the tensor cores for each block of k is little, and uniform."""

import collections
import re

import pytest
from cubin import disassembly, nvdisasm

import cutjax
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.runtime import compiler

needs_tools = pytest.mark.skipif(
    compiler.compiler_missing() is not None or nvdisasm() is None, reason="needs NVRTC and nvidia-cuda-nvdisasm"
)


def innermost_loop(text):
    """Returns the opcodes, each with its modifiers, of the shortest loop that multiplies."""
    labels, opcodes, loops = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line):
            opcodes.append(instruction[1])
            target = re.search(r"\.L_\w+", instruction[2])
            if instruction[1].startswith("BRA") and target and labels.get(target[0], len(opcodes)) < len(opcodes):
                loops.append(opcodes[labels[target[0]] :])
    return min((loop for loop in loops if any(re.match("[HIQ]GMMA", x) for x in loop)), key=len)


CONFIGS = [
    cutjax.Config(128, 192, schedule="pingpong"),
    cutjax.Config(128, 128, schedule="pingpong", cluster_n=2),
    cutjax.Config(128, 256, cluster_m=2),
    cutjax.Config(256, 128, cluster_n=2),
    cutjax.Config(64, 256),
    cutjax.Config(256, 192, stages=3, cluster_n=2, evict_first="bd"),
]


@needs_tools
@pytest.mark.parametrize(
    ("config", "layout"),
    list(zip(CONFIGS, ("nt", "nn", "tn", "tt", "nn", "nn"), strict=True)),
    ids=lambda x: x if isinstance(x, str) else x.name(cutjax.Problem.of(64, 64, 64)),
)
def test_the_mainloop_is_uniform(config, layout):
    kernel = sm90.resolved(cutjax.Problem.of(4096, 4096, 4096, layout), config)
    cubin = compiler.compile_kernel(kernel.source, name=kernel.name, arch="sm_90a")
    text = disassembly(cubin.image)
    loop = innermost_loop(text)
    counts = collections.Counter(opcode.split(".")[0] for opcode in loop)
    k_blocks = counts["HGMMA"] // (config.m_blocks * config.bk // 16)  # the compiler may unroll
    assert k_blocks >= 1
    # A descriptor or an address in registers of the threads would be moved for every wgmma, which waits for that.
    assert counts["R2UR"] == 0, loop
    # Two instructions a wgmma for each descriptor that changes, and some 30 for barriers and the next stage.
    assert len(loop) <= k_blocks * 75, loop
    # No fence waits for memory.
    assert counts["MEMBAR"] == 0, loop
    assert not [opcode for opcode in loop if opcode.startswith(("LDL", "STL"))], loop
    # Nor does a cluster's barrier wait for the device.
    assert ("UCGABAR_ARV" in text) == (config.cluster > 1)
    assert "MEMBAR.ALL.GPU" not in text
    assert "MEMBAR" in text  # the one that orders staging before TMA, within the block

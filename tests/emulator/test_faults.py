"""What the emulator says of kernels that are wrong: small ones, and cutjax's own with a line taken out."""

from __future__ import annotations

import dataclasses
import re

import launches
import numpy as np
import pytest
from products import Item

from cutjax import Config
from cutjax.kernels import families
from cutjax.runtime.launch import Call, Launch, Pointer
from cutjax.runtime.tensor_map import TensorMap
from emulator import device

# Each is the body of a kernel of float* x, 32 elements, and a tensor map of it, and what is to be said.
SMALL = {
    "fine": ("x[threadIdx.x % 32] = threadIdx.x;", None),
    "beyond a buffer": ("x[threadIdx.x + 1] = 0;", "of buffer 0, which has 128"),
    "before a buffer": ("x[-1] = 0;", r"in no buffer|4 bytes at -4 of"),
    "no buffer": ("*reinterpret_cast<float*>(64) = 0;", "in no buffer"),
    "beyond shared memory": ("volatile float* v = s; v[threadIdx.x * 5] = 0;", "of shared memory, which has 512"),
    "misaligned": ("reinterpret_cast<float4*>(x + 1)[0] = float4{};", "16 bytes are written at"),
    "unwritten": ("x[threadIdx.x % 32] = s[threadIdx.x];", "which nobody has written"),
    "no barrier": ("s[threadIdx.x] = 1; x[threadIdx.x % 32] = s[threadIdx.x ^ 32];", "which nobody has written"),
    "a barrier": ("s[threadIdx.x] = 1; __syncthreads(); x[threadIdx.x % 32] = s[threadIdx.x ^ 32];", None),
    "who does not come": ('asm volatile("bar.sync 1, 96;");', "deadlock(.|\n)*bar.sync"),
    "half a warp": (
        "if (threadIdx.x < 16) __syncwarp(); else __syncwarp(0xffff0000);",
        "threads that have exited|deadlock",
    ),
    "no end": ("while (*(volatile float*)x == 0) {}", "it still runs"),
    "no expectation": ("if (threadIdx.x == 0) { init(1); load(); wait(0); }", "deadlock(.|\n)*-128 bytes"),
    "too much expected": (
        "if (threadIdx.x == 0) { init(1); expect(160); load(); wait(0); }",
        "deadlock(.|\n)*32 bytes",
    ),
    "no wait": ("if (threadIdx.x == 0) { init(1); expect(128); load(); x[0] = s[0]; }", "a copy is about to write"),
    "gone too early": ("if (threadIdx.x == 0) { init(1); expect(128); load(); }", "in flight"),
    "no mbarrier": ("wait(0);", "is not initialised"),
    "a load": ("if (threadIdx.x == 0) { init(1); expect(128); load(); wait(0); x[0] = s[31]; }", None),
    "arrives too often": (
        "init(1); if (threadIdx.x == 0) arrive(), arrive(); if (threadIdx.x == 0) expect(4), arrive();",
        "more threads arrive",
    ),
    "no proxy fence": (
        "if (threadIdx.x == 0) { for (int i = 0; i < 32; ++i) s[i] = 1; store(); "
        'asm volatile("cp.async.bulk.wait_group 0;"); }',
        "without fence.proxy.async",
    ),
    "store not awaited": ("if (threadIdx.x == 0) { fill(); store(); }", "exits while its bulk stores"),
    "a store": ('if (threadIdx.x == 0) { fill(); store(); asm volatile("cp.async.bulk.wait_group 0;"); }', None),
}
TEXT = """
extern "C" __global__ void small(float* x, const __grid_constant__ Map map) {
  __shared__ __align__(128) float s[128];
  __shared__ unsigned long long b[1];
  unsigned at = __cvta_generic_to_shared(s), barrier = __cvta_generic_to_shared(b);
  auto init = [&](int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n)); };
  auto expect = [&](int n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
  };
  auto arrive = [&] { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); };
  auto wait = [&](int phase) {
    asm volatile("{.reg .pred p;\\nretry:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@!p bra retry;\\n}"
                 ::"r"(barrier), "r"(phase) : "memory");
  };
  auto load = [&] {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];"
                 ::"r"(at), "l"(&map), "r"(0), "r"(barrier) : "memory");
  };
  auto fill = [&] {
    for (int i = 0; i < 32; ++i) s[i] = i;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };
  auto store = [&] {
    asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%1}], [%2];" ::"l"(&map), "r"(0), "r"(at)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  };
  BODY
}
"""


@pytest.mark.parametrize("name", SMALL)
def test_small(name):
    body, said = SMALL[name]
    text = "struct __align__(64) Map { unsigned long long opaque[16]; };" + TEXT.replace("BODY", body)
    image = device.compile_ptx(text, name="small", arch="sm_90a").image
    box = TensorMap(0, np.dtype(np.float32), (32,), (), (32,), swizzle=0)
    launch = Launch("small", image, (1, 1, 1), (64, 1, 1), params=(Pointer(0), box))
    machine = device.Machine(limit=10_000_000)
    if said is None:
        machine.launch(launch, [np.zeros(32, np.float32)])
    else:
        with pytest.raises(device.Fault, match=said):
            machine.launch(launch, [np.zeros(32, np.float32)])


@pytest.mark.parametrize("bytes", [3, 5])
def test_the_last_word_of_an_array(bytes):
    """Of bytes that fill no whole words: all of it may be read, and what is not the array's is not written."""
    text = 'extern "C" __global__ void small(unsigned char* x) { x[threadIdx.x] += ((unsigned*)x)[0] & 1; }'
    image = device.compile_ptx(text, name="small", arch="sm_90a").image
    for threads, said in ((bytes, None), (bytes + 1, "is no more what it was"), (9, "which has")):
        call = Call((Launch("small", image, (1, 1, 1), (threads, 1, 1), params=(Pointer(0),)),))
        arrays = [np.arange(1, bytes + 1, dtype=np.uint8)]
        if said is None:
            np.testing.assert_array_equal(device.execute(call, [], arrays)[0], np.arange(2, bytes + 2))
        else:
            with pytest.raises(device.Fault, match=said):
                device.execute(call, [], arrays)


DENSE = Item("bf16", "dense", "nn", 200, 128, 264, out="bfloat16")
CONFIGS = {
    "one": Config(64, 64, 64, 2),
    "pair": Config(64, 64, 64, 2, cluster_m=2),
    "turns": Config(64, 64, 64, 2, schedule="pingpong"),
}
# A line of the device text that is taken out, what stands there then, what is said of which kernel; "" is anything.
BROKEN = {
    "nobody waits for loads": (
        "mbarrier_wait(pipe.full_barrier(), pipe.phase);",
        "",
        "about to write|nobody has written",
    ),
    "nobody waits for wgmma": ("  wgmma_wait_group<0>();", "", "exits while wgmma"),
    "no wgmma.fence": ("wgmma_fence();", "", "without wgmma.fence"),
    "stages are never free": ("release(previous, thread);", "", "deadlock"),
    "stages are free too early": ("      wgmma_wait_group<1>();", "", "about to write|nobody has written"),
    "no proxy fence": ("fence_proxy_async();\n        if (ONE", "if (ONE", "without fence.proxy.async"),
    "staging is not awaited": ("    if (thread == 0) cp_async_bulk_wait_group();", "", "exits while its bulk stores"),
    "no barrier before a store": ("bar_sync(barrier, 128);", "", "without fence|nobody has written|"),
    "pair: a block leaves early": ("if constexpr (CLUSTER > 1) wait_for_readers(pipe);", "", "which has exited"),
    "pair: nobody waits at first": ("if constexpr (CLUSTER > 1) barrier_cluster_relaxed();", "", "not initialised"),
    "turns: nobody goes first": ("if (consumer == 1) bar_arrive(TURN_BARRIER, 256);", "", "deadlock"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    line, instead, said = BROKEN[name]
    kernel = families.resolve(DENSE.problem, CONFIGS[name.split(":")[0] if ":" in name else "one"])
    assert line in kernel.source
    with device.emulated():
        (launch,) = kernel.call().launches
        image = device.compile_ptx(kernel.source.replace(line, instead or ";"), name=kernel.name, arch="sm_90a").image
        call = dataclasses.replace(kernel.call(), launches=(dataclasses.replace(launch, cubin=image),))
    arrays, expected = DENSE.data()
    found = []
    for seed in range(24):  # orders of threads, of which one at least is to show it
        machine = device.Machine(seed, (0, 1, 2, 8)[seed % 4])
        try:
            wrong = launches.wrong(launches.run(DENSE.problem, call, arrays, machine.execute), expected)
        except device.Fault as error:
            wrong = str(error)
        found.append(wrong)
        if wrong and re.search(said, wrong):
            return
    raise AssertionError(found)

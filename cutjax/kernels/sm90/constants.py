"""The fitted constants of the formula of a dense product's time (dense_cost.py)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """The fitted constants. Each means what is written here only roughly: they are good for ranking.

    Attributes:
      multiply: the time of wgmma over what its flops take.
      shared: over the time that its operands take through shared memory.
      k_block: microseconds of each k block beside that.
      least: microseconds of a k block at least: its barriers and the latency of wgmma.
      coop, narrow, deep, multicast: what a cooperative schedule, chunks narrower than a swizzle, stages of 128 (but of
        decoded weights) and a cluster add to the time of wgmma.
      hot: what long products add, in which the card is limited by power.
      load: bytes a nanosecond that enter one SM.
      saved: how much of what a cluster multicasts is saved.
      off, short: what rows off the lines of memory, and rows of less than a line, add to their bytes.
      turn: how many times a stage's multiplication its memory takes until it is filled again.
      latency: microseconds that it takes beside that.
      start, element: microseconds of an epilogue, and of each 32768 accumulators.
      fused: what the latter takes more for each instruction of an epilogue.
      few_rows: what a product of few rows adds to all but the launch.
      step, fragment: microseconds of decoding: of each step of a warpgroup, and of each 64 x 16 elements of a block.
      unpacked: what weights of 4 bits add to the latter.
      rescale: microseconds of multiplying a sum of a thread by a factor.
      factor, factor_f32: what multiplying elements by scales adds to it, and doing so in float32.
      beside: the exponent with which two warpgroups' decoding and multiplying add up; those of one do.
      sliced, by_three: the latter where four warpgroups decode, or three, over what it takes where two do.
      warps: the same where warps multiply by themselves.
      promoted, reread: what adding up the sums of each k block apart adds to the time of wgmma, in place of a cluster's
        multicast, and doing so in parts that each read an operand again, where nothing hides it.
      scaled: microseconds of a k block that their scales take.
      by_column: more of each 32768 accumulators where each column has a scale of its own, which threads read from
        shared memory beside wgmma.
      decoded_by_column: more of a k block beside decoded weights.
      twin: the part of an epilogue that two blocks on an SM do not hide.
      threads, transposed: what stores without TMA, and transposed ones, add to it.
      cluster: microseconds that a cluster costs.
      l2, read, write: bytes a nanosecond of L2, and in 1000 of memory.
      enough, crowd: megabytes that may be on their way to all stages, and what twice as many, or more, add to the time
        of reading memory.
      ragged: what rows of a tile off the lines of memory add to the bytes written.
      power: the exponent with which computing, L2 and memory add up.
      launch: microseconds of a launch.
      exchange, exchanged: microseconds, and bytes a nanosecond, of accumulators through distributed shared memory.
      height: the part of the former that a product of few rows takes for each 128 rows of a tile.
      join, joined: the same of tiles in parts through memory.
      apart: how much of what tiles in parts load comes from memory, as their neighbours are elsewhere in k.
      sum, summed: microseconds, and bytes in 1000 a nanosecond, of adding up splits.
    """

    multiply: float
    shared: float
    k_block: float
    least: float
    coop: float
    narrow: float
    deep: float
    multicast: float
    hot: float
    load: float
    saved: float
    off: float
    short: float
    turn: float
    start: float
    element: float
    twin: float
    threads: float
    transposed: float
    cluster: float
    l2: float
    read: float
    write: float
    ragged: float
    power: float
    launch: float
    exchange: float
    exchanged: float
    join: float
    joined: float
    apart: float
    sum: float
    summed: float
    fused: float
    few_rows: float
    step: float
    fragment: float
    unpacked: float
    rescale: float
    factor: float
    factor_f32: float
    beside: float
    sliced: float
    by_three: float
    warps: float
    promoted: float
    scaled: float
    by_column: float
    decoded_by_column: float
    reread: float
    height: float
    latency: float = 0.0
    enough: float = 1.0
    crowd: float = 0.0


# On an H200: benchmarks/results/sweeps/products-h200.json.
CONSTANTS = Constants(
    multiply=0.4556,
    shared=0.05653,
    k_block=0.0417,
    least=0.06823,
    coop=0.09051,
    narrow=1.127,
    deep=0.1326,
    multicast=0.1314,
    hot=0.7961,
    load=189.0,
    saved=0.6713,
    off=0.863,
    short=0.2089,
    turn=3.206,
    start=0.01872,
    element=1.654,
    twin=0.4692,
    threads=6.577,
    transposed=0.3249,
    cluster=0.7289,
    l2=22570.0,
    read=5.452,
    write=6.452,
    ragged=0.6102,
    power=1.469,
    launch=2.557,
    exchange=1.085,
    exchanged=12.5,
    join=5.092,
    joined=31.51,
    apart=0.285,
    sum=1.727,
    summed=11.61,
    fused=0.311,  # of 143 fused products, benchmarks/results/experiments/fused-sweep-h200.json
    step=0.0051,  # this, fragment and beside: 64 kernels of weights of 8 and 4 bits, to 7%, the faster ones the more
    fragment=0.00437,
    unpacked=0.65,  # this and the next three: 60 kernels of experiments/decoded-sums-h200.json, to 7%
    rescale=0.002,
    factor=0.85,
    factor_f32=2.5,
    beside=1.105,
    sliced=0.75,  # of the same: by 0.7 one pick of ten took 1.24 times the fastest; of 8 bits .45 to .7 were equal
    by_three=0.5,  # 3 dense products of experiments/gates-groups-h200.json, to 2%
    warps=0.6,  # of 15 kernels of experiments/decoded-again-h200.json: .81 to 1.11 of what they took
    # This, scaled, decoded_by_column and reread: 83 float8 kernels of 11 products of experiments/fp8-promoted-h200.json
    # beside XLA's time in the same run, to 7%. 0.343 fits best, and would have a kernel run that takes 1.04 times as
    # long as XLA.
    promoted=0.375,
    scaled=0.011,
    by_column=0.322,  # 30 kernels of 4 products of experiments/fp8-columns-h200.json, to 3%
    decoded_by_column=0.443,
    reread=0.14,
    few_rows=0.07,  # this and XLA's time of them: 125 products of salts report12 to report20
    height=1.0,
)
# Of products whose weights are a stream (`Problem.streams`): 14 of benchmarks/results/experiments/streams-h200.json.
STREAMS = dataclasses.replace(
    CONSTANTS,
    latency=0.79,
    turn=0.746,
    enough=8.58,
    crowd=0.305,
    read=6.1,
    power=1.55,
    exchange=1.094,
    height=0.883,
    launch=2.68,
    few_rows=0.0,
    sum=1.371,
    k_block=0.0342,
)

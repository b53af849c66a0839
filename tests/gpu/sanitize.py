"""One small problem of each schedule, layout and cluster shape, with tails: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

and the same with racecheck, synccheck and initcheck. It launches our kernels alone, so every finding is ours. Prints
"ok" and how many kernels ran, or what was wrong. ``--seconds`` ends it early; the most different kernels come first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# Each array in an allocation of its own: in one large pool, memcheck would not see an access past the end of an array.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import numpy as np
import problems

import cutjax

K = 136  # two whole k blocks and a tail
TILES = 280  # twice the SMs and more: every CTA walks several tiles


def cases() -> list[tuple[cutjax.Problem, cutjax.Config]]:
    """Each schedule and cluster shape first, then each of them in the other layouts; tile shapes vary along the way."""
    found = []
    for turn in range(4):
        for schedule_turn, schedule in enumerate(("coop", "pingpong")):
            for cluster_turn, cluster in enumerate(((1, 1), (2, 1), (1, 2))):
                number = turn + schedule_turn + cluster_turn
                layout = ("nn", "nt", "tn", "tt")[number % 4]
                dtype = problems._INPUTS[number % 2]
                out = (dtype, np.dtype(np.float32))[number % 3 == 2]
                probe = cutjax.Problem(4096, 4096, K, layout, dtype, dtype, out)
                served = [
                    config
                    for config in cutjax.candidates(probe)
                    if config.schedule == schedule and (config.cluster_m, config.cluster_n) == cluster
                ]
                config = sorted(served, key=lambda config: (config.bm, config.bn))[number * 7 % len(served)]
                # Two tiles along m and two along n, the second of each nearly empty.
                m, n = config.bm * config.cluster_m + 8, config.bn * config.cluster_n + 8
                batch = (TILES // 4,)
                found.append((cutjax.Problem(m, n, K, layout, dtype, dtype, out, batch, batch, (1,)), config))
    return found


def check(problem: cutjax.Problem, config: cutjax.Config) -> str | None:
    """What is wrong with the result, or None."""
    item = problems.Random(0, problem, True, None)
    a, b = problems.integers(item)
    executable = problems.compiled(problem, config, "cuda")
    out = np.asarray(executable(*jax.device_put((a, b, problems.poison(problem)))))
    expected = problems.reference(a, b, problem.layout, np.float32).astype(problem.out_dtype)
    return None if np.array_equal(out, expected) else problems.mismatch(out, expected)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further kernel after this long")
    args = parser.parse_args()
    start, wrong, done = time.monotonic(), 0, 0
    listed = cases()
    for problem, config in listed:
        if time.monotonic() - start > args.seconds:
            break
        found = check(problem, config)
        wrong += found is not None
        done += 1
        took = f"{time.monotonic() - start:5.1f} s"
        print(f"{took}  {config.name(problem)}  {problem}: {found or 'equal'}", flush=True)
    print(f"{'FAILED' if wrong else 'ok'}: {done} of {len(listed)} kernels ran, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Times of products that benchmarks/results/sweeps has."""

import functools
import json
import pathlib

import cutjax
from cutjax.kernels.device import device_of_kind

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


@functools.cache
def recorded_products(name):
    """[(problem, {config: us}, XLA's us)] of a recorded sweep."""
    recorded = json.loads((RESULTS / "sweeps" / f"{name}.json").read_text())
    configs = [cutjax.Config(**fields) for fields in recorded["configs"]]
    device = device_of_kind(recorded["device"], "sm_90a")
    found = []
    for row in recorded["products"]:
        batch = tuple(row["batch"])
        problem = cutjax.Problem.of(
            row["m"], row["n"], row["k"], row["layout"], batch=batch, a_batch=batch, b_batch=batch, device=device
        )
        found.append((problem, {configs[i]: us for i, us in row["times"]}, row["xla_us"]))
    return found

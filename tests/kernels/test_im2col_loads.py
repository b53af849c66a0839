"""Windows of images and taps of weights, as the sm_90 kernels load them: on the host, TMA being a stand-in."""

import gxx
import jax.numpy as jnp
import loads_host
import numpy as np
import pytest
from windows import KINDS, asked, product, shapes, view

from cutjax.kernels.prepared import make
from cutjax.kernels.sm90 import kernel as sm90
from cutjax.kernels.sm90.config import Config

pytestmark = pytest.mark.skipif(not gxx.installed(), reason="needs g++")

CONFIGS = {
    "alone": Config(64, 64, 64, 4),
    "deep": Config(64, 64, 128, 3),
    "beside": Config(64, 64, 64, 4, cluster_n=2),
    "below": Config(64, 64, 64, 4, cluster_m=2),
    "narrow": Config(64, 32, 64, 4),
    "wide": Config(128, 96, 64, 4),
    "streamed": Config(64, 64, 64, 4, stream_k=True),
    "in a cluster": Config(64, 64, 64, 8, cluster_k=3),
    "split": Config(64, 64, 64, 4, splits=3),
}
PIECES = view(2, (7, 9), (3, 2), 96, low=(1, 0), high=(1, 2))
CASES = [
    ("in order", "beside", view(3, (50,), (3,), 64, low=(1,), high=(1,))),
    ("weights", "below", view(2, (70,), (2,), 32, dilation=(40,), low=(40,))),
    ("flipped", "deep", view(2, (61,), (5,), 16, (3,), low=(2,), high=(1,))),
    ("in order", "streamed", PIECES),
    ("some taps", "split", PIECES),
    ("weights", "split", PIECES),
    ("flipped", "in a cluster", PIECES),
    ("weights", "beside", view(3, (15, 12), (3, 3), 32, (2, 3), (2, 1), low=(-1, 2), high=(3, -2))),
    ("some taps", "below", view(3, (15, 12), (3, 3), 32, (2, 3), (2, 1), low=(-1, 2), high=(3, -2))),
    ("in order", "wide", view(2, (6, 7), (2, 3), 24, low=(1, 1), high=(0, 1))),
    ("weights", "alone", view(2, (6, 7), (2, 3), 24, low=(1, 1), high=(0, 1))),
    ("flipped", "beside", view(2, (4, 5, 6), (2, 3, 2), 16, (1, 2, 1), low=(1, 1, 0), high=(0, 1, 1))),
    ("weights", "streamed", view(2, (4, 5, 6), (2, 3, 2), 64, (1, 2, 1), low=(1, 1, 0), high=(0, 1, 1))),
    ("flipped", "beside", view(2, (9, 8), (3, 3), 64, low=(2, 2), high=(1, 1), spread=(2, 2))),
    ("flipped", "alone", view(2, (9, 8), (3, 3), 64, low=(1, 1), high=(1, 1), spread=(2, 2))),
    ("in order", "below", view(2, (5, 9), (1, 2), 32, low=(1, 0), high=(1, 1), spread=(2, 3))),
    ("flipped", "alone", view(2, (9, 8), (3, 3), 56, low=(1, 2), high=(1, 1), spread=(2, 2))),
    ("in order", "beside", view(2, (9, 8), (3, 4), 56, low=(1, 2), high=(1, 2), spread=(2, 2))),
    ("flipped", "beside", view(2, (9, 8), (3, 3), 88, low=(1, 2), high=(2, 1), spread=(2, 2))),
    ("some taps", "alone", view(2, (3, 4, 8), (3, 3, 2), 88, low=(1, 1, 1), high=(1, 2, 1), spread=(2, 2, 2))),
    ("in order", "below", view(2, (5, 4, 6), (2, 4, 1), 88, low=(1, 1, 0), high=(0, 2, 1), spread=(1, 2, 2))),
    ("some taps", "deep", view(2, (40,), (4,), 56, low=(3,), high=(2,), spread=(2,))),
    ("in order", "alone", view(2, (19,), (1,), 56, low=(0,), high=(1,), spread=(2,))),
    ("in order", "alone", view(2, (5, 4), (3, 2), 24, (3, 1), low=(1, 0), high=(4, 3), spread=(2, 3))),
    ("some taps", "below", view(2, (23,), (2,), 32, dilation=(3,), low=(3,), high=(3,), spread=(4,))),
    ("in order", "alone", view(2, (13, 12), (5, 5), 3, (2, 2), low=(2, 2), high=(2, 2))),
    ("weights", "below", view(2, (13, 12), (5, 7), 3, (2, 2), (2, 1), low=(2, -1), high=(2, -1))),
    ("backwards", "beside", view(2, (6, 5, 7), (2, 3, 3), 4, low=(1, 1, 1), high=(0, 1, 1))),
    ("in order", "alone", view(3, (50,), (7,), 1, (4,), low=(3,), high=(3,))),
    *((kind, "narrow", view(2, (5, 6), (3, 2), 8, low=(1, 1), high=(1, 1), groups=8)) for kind in KINDS),
    ("in order", "alone", view(2, (5, 6), (3, 2), 5, low=(1, 1), high=(1, 1), groups=2)),
    ("weights", "alone", view(2, (5, 6), (3, 2), 5, low=(1, 1), high=(1, 1), groups=2)),
    *((kind, "beside", view(2, (7, 9), (3, 3), 32, low=(1, 1), high=(1, 1), groups=3)) for kind in KINDS[::-2]),
]


@pytest.mark.parametrize(("kind", "config", "of"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_all_that_tiles_multiply(kind, config, of, tmp_path):
    n = {1: 136, 3: 384}.get(of.groups, 64)
    n = {56: 32, 88: 16}.get(of.channels, n)  # short pixels
    problem = asked(of, n, kind)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 10, shape).astype(np.int16) for shape in shapes(problem)]
    kernel = sm90.resolved(problem, CONFIGS[config])
    expected = product(problem, *arrays)
    arrays = [np.asarray(x) for x in make(kernel.prepared, [jnp.asarray(x) for x in arrays])[0]]
    found = loads_host.multiplied(kernel, arrays, tmp_path)
    if kind != "weights":
        found = found.reshape(expected.shape)
    np.testing.assert_array_equal(kernel._summed(jnp.asarray(found.astype(np.float32))), expected)

"""Configs that leave SMs to what runs beside the kernel: the grid, the predicted time, refusals."""

from __future__ import annotations

import dataclasses

import pytest

import cutjax
from cutjax.kernels.sm90 import kernel as sm90

SQUARE = cutjax.Problem.of(4096, 4096, 4096)


def grid(problem, config):
    (launch,) = sm90.resolved(problem, config).call().launches
    return launch.grid[0]


def test_the_grid_is_that_of_so_many_sms():
    config = cutjax.Config(128, 256, cluster_m=2)
    assert grid(SQUARE, config) == 512  # clipped where it runs
    assert grid(SQUARE, dataclasses.replace(config, sms=124)) == 124
    assert grid(SQUARE, dataclasses.replace(config, sms=123)) == 122  # whole clusters
    assert grid(SQUARE, dataclasses.replace(config, sms=1)) == 2  # one at least
    assert grid(SQUARE, dataclasses.replace(config, sms=1000)) == 132
    assert grid(SQUARE, dataclasses.replace(config, sms=124, stream_k=True)) == 124
    small = dataclasses.replace(SQUARE, m=256)
    assert grid(small, dataclasses.replace(config, sms=124)) == 32  # fewer tiles than SMs
    two = cutjax.Config(64, 64, sms=100)  # two blocks on an SM
    assert grid(SQUARE, two) == 200


def test_the_predicted_time_is_that_of_fewer_sms():
    """Half of them take twice as long; some that the last wave leaves idle cost nothing."""
    config = cutjax.Config(128, 256)
    times = [
        sm90.resolved(SQUARE, dataclasses.replace(config, sms=n)).time_us(SQUARE.device) for n in (0, 132, 128, 66)
    ]
    assert times[0] == times[1]
    assert times[2] == pytest.approx(times[0], rel=0.02)  # 512 tiles are four waves of either
    assert 1.6 < times[3] / times[0] < 2.2


def test_the_kernel_is_the_same():
    config = cutjax.Config(128, 256)
    fewer = dataclasses.replace(config, sms=120)
    assert config.name(SQUARE) == fewer.name(SQUARE)
    assert sm90.resolved(SQUARE, config).source == sm90.resolved(SQUARE, fewer).source


def test_refusals():
    with pytest.raises(ValueError, match="sms=-1: a kernel runs on at least one SM"):
        cutjax.Config(sms=-1)
    with pytest.raises(ValueError, match="sms=64 with cluster_k=2: each cluster has one tile"):
        cutjax.Config(128, 128, cluster_k=2, sms=64)

"""The device's clock: what is read of a trace, and when there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from cutjax.tuning import clock

# As JAX 0.11 writes it: kernels on streams with the module that started them, a copy, and a line that sums them up.
TRACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)"
    events { metadata_id: 1 offset_ps: 3000000 duration_ps: 1500000 stats { metadata_id: 1 str_value: "jit_a" } }
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 2500000 stats { metadata_id: 1 str_value: "jit_a" } }
    events { metadata_id: 1 offset_ps: 6000000 duration_ps: 4000000 stats { metadata_id: 1 ref_value: 3 } }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 9000000 }
  }
  lines {
    name: "Stream #15(MemcpyD2D)"
    events { metadata_id: 4 offset_ps: 5000000 duration_ps: 500000 stats { metadata_id: 1 str_value: "jit_a" } }
  }
  lines {
    name: "XLA Modules"
    events { metadata_id: 3 offset_ps: 1000000 duration_ps: 4500000 stats { metadata_id: 1 str_value: "jit_a" } }
  }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  event_metadata { key: 2 value { id: 2 name: "reduce" } }
  event_metadata { key: 3 value { id: 3 name: "jit_a" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "jit_b" } }
}
planes {
  name: "/host:CPU"
  lines {
    name: "Stream of a host"
    events { metadata_id: 1 offset_ps: 1 duration_ps: 1 stats { metadata_id: 1 str_value: "jit_a" } }
  }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }
}
"""


def test_kernels_of_each_module_in_the_order_in_which_they_began():
    found = clock.read(jax.profiler.ProfileData.from_text_proto(TRACE))
    assert found == {"jit_a": [2.5, 1.5, 0.5], "jit_b": [4.0]}


def test_a_device_that_is_not_traced_has_no_kernels():
    calls = []
    run = jax.jit(lambda x: x + 1)
    assert clock.spans(lambda: calls.append(jax.block_until_ready(run(jnp.ones(4))))) == {}
    assert len(calls) == 1


def test_beside_a_trace_of_the_users_own_there_is_none(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        assert clock.spans(lambda: pytest.fail("it ran")) == {}
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_trace_ends_with_what_fails_in_it(tmp_path):
    def failing():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock.spans(failing)
    with jax.profiler.trace(str(tmp_path)):
        pass

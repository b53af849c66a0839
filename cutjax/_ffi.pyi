"""The native launcher; see ffi/."""

from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import CapsuleType

class _StateType(TypedDict):
    type_id: CapsuleType
    type_info: NotRequired[CapsuleType]

def handlers() -> dict[str, CapsuleType]:
    """The stages of the custom call ``cutjax_launch``, for ``jax.ffi.register_ffi_target``."""

def rehearsal_handlers() -> dict[str, CapsuleType]:
    """The same for platform "cpu", on the null stream: lets tests launch into a stand-in libcuda."""

def state_type() -> _StateType:
    """The type of the state the handlers share, for ``jax.ffi.register_ffi_type``."""

PLAN_FORMAT: int
"""The format number of the launch plans that the custom call reads."""

def check_plan(*, kernel: str, cubin: bytes, plan: NDArray[np.int64], format: int | None = None) -> str:
    """Decodes a launch's attributes as the custom call does and describes them; ValueError if they are malformed."""

def load_driver(path: str) -> None:
    """Opens ``path`` in place of libcuda.so.1 at first need; ValueError if a driver is open already. For tests."""

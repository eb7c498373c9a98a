"""GPUs that launches are worked out for where there is none, and what a GPU that is there has."""

from __future__ import annotations

from types import ModuleType
from typing import TypedDict

import pytest

from gpt2block.cuda import cupy
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY


class Gpu(TypedDict):
    """Multiprocessors, and bytes of shared memory that a block may ask for."""

    sms: int
    most_shared: int


H200: Gpu = {"sms": 132, "most_shared": 232448}
A100: Gpu = {"sms": 108, "most_shared": 166912}
RTX: Gpu = {"sms": 84, "most_shared": 101376}
GPUS = (("sm_80", A100), ("sm_90", H200), ("sm_120", RTX))


def cupy_with(capability: int = MMA_CAPABILITY) -> ModuleType:
    """CuPy, where the current GPU has mma.sync; with HOPPER_CAPABILITY where it has wgmma.

    The emulated device has mma.sync.
    """
    there = int(cupy.cuda.Device().compute_capability)
    if there < capability:
        pytest.skip(f"needs compute capability {capability / 10}, this GPU has {there / 10}")
    if capability == HOPPER_CAPABILITY != there:
        pytest.skip(f"wgmma needs compute capability 9.0, this GPU has {there / 10}")
    module: ModuleType = cupy
    return module


def this_gpu() -> Gpu:
    """The current one."""
    from gpt2block.cuda.arrays import device_attribute  # noqa: PLC0415

    return {
        "sms": device_attribute("MultiProcessorCount"),
        "most_shared": device_attribute("MaxSharedMemoryPerBlockOptin"),
    }

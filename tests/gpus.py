"""GPUs for which tests compute launches without having them, and requirements of tests on GPUs."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, cast

import numpy as np
import pytest

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import compute_capability

MMA_CAPABILITY, HOPPER_CAPABILITY = 75, 90  # the lowest with mma.sync of 16 bits; with wgmma


class Gpu(TypedDict):
    """Number of multiprocessors, and bytes of shared memory that a block may request."""

    sms: int
    max_shared: int


H200: Gpu = {"sms": 132, "max_shared": 232448}
A100: Gpu = {"sms": 108, "max_shared": 166912}
RTX: Gpu = {"sms": 84, "max_shared": 101376}
T4: Gpu = {"sms": 40, "max_shared": 65536}
GPUS = (("sm_80", A100), ("sm_90", H200), ("sm_120", RTX))
TURING = "sm_75", T4


def cupy_with(capability: int = MMA_CAPABILITY) -> ModuleType:
    """Return CuPy, or skip the test if the device lacks mma.sync, or wgmma for HOPPER_CAPABILITY.

    The emulated device has mma.sync, but not wgmma.
    """
    there = compute_capability()
    if there < capability:
        pytest.skip(f"needs compute capability {capability / 10}, this GPU has {there / 10}")
    if capability == HOPPER_CAPABILITY != there:
        pytest.skip(f"wgmma needs compute capability 9.0, this GPU has {there / 10}")
    return cast("ModuleType", cupy)


WAIT_S = 10.0  # seconds to wait until tests of other processes free memory
MARGIN = 2 << 30  # bytes left for tests of other processes
_lock = Path(tempfile.gettempdir()) / "gpt2block-tests-device-memory.lock"


@contextmanager
def large_memory(nbytes: int) -> Iterator[None]:
    """Reserve memory for a test that allocates many GB; no other process may do so meanwhile.

    Skip the test if the GPU has too little memory, or if tests of other processes use too much.
    """
    pool = cupy.get_default_memory_pool()
    if cupy.cuda.Device().mem_info[1] < nbytes + MARGIN:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of device memory")
    with _lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pool.free_all_blocks()
        end = time.monotonic() + WAIT_S
        while cupy.cuda.Device().mem_info[0] < nbytes + MARGIN:
            if time.monotonic() > end:
                pytest.skip(f"other processes leave less than {nbytes / 1e9:.0f} GB free")
            time.sleep(0.2)
        try:
            yield
        finally:
            pool.free_all_blocks()


SPIN = """extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}"""


def busy(ms: int = 50) -> None:
    """Keep CuPy's current stream busy for about `ms`; work that does not wait for it runs first."""
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(ms * 2_000_000),))


def context_problem() -> str | None:
    """Return the sticky error after which no CUDA call of this process succeeds, or None."""
    try:
        cupy.cuda.Device().synchronize()
        assert cupy.zeros(1, "int32").get().tolist() == [0]
    except Exception as error:
        if isinstance(error, MemoryError):
            return None
        return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture
def allocations(cp: ModuleType) -> Iterator[list[int]]:
    """Record the size of every allocation of device memory while the test runs."""
    sizes: list[int] = []
    pool = cp.get_default_memory_pool()

    def counting(size: int) -> Any:
        sizes.append(size)
        return pool.malloc(size)

    with cp.cuda.using_allocator(counting):
        yield sizes

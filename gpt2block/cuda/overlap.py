"""Launch kernels that overlap the previous kernel (kernels_cu/lib/overlap.cuh).

CuPy cannot set the launch attribute for this, so the driver's cuLaunchKernelEx is called directly.
Source: CUDA driver API, "Execution Control"; CUDA programming guide, "Programmatic Dependent
Launch".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from gpt2block.cuda import cupy, replaced
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.requests import Launch
from gpt2block.errors import DeviceError

OVERLAPS_FROM = 12030  # minimum version of the driver for graphs
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # value of CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute, with a single member of its 64-byte union."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """The struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("number_of_attributes", ctypes.c_uint),
    )


@cache
def _launch_kernel() -> Callable[..., int]:
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes = (
        ctypes.POINTER(_Config),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    )
    return call


def possible() -> bool:
    """Return whether the current device and driver support overlapped launches, in graphs too."""
    return cupy.cuda.runtime.driverGetVersion() >= OVERLAPS_FROM and gpu().has_overlap


def run(launch: Launch) -> None:
    """Run a launch that may start before the previous kernel on the stream has ended.

    The kernel itself must wait for the previous kernel, as lib/overlap.cuh describes. Requires
    compute capability 9.0 or newer. Raises DeviceError.
    """
    if replaced():  # launches then run one after the other
        Launch.run(launch)
        return
    values = [ctypes.create_string_buffer(arg.tobytes()) for arg in launch.values]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(
        grid=(*launch.grid, 1, 1)[:3],
        block=(*launch.block, 1, 1)[:3],
        shared_bytes=launch.shared,
        stream=cupy.cuda.get_current_stream().ptr,
        attributes=ctypes.pointer(attribute),
        number_of_attributes=1,
    )
    function = launch.function.kernel.ptr
    status = _launch_kernel()(ctypes.byref(config), function, pointers, None)
    if status:
        raise DeviceError(f"{launch.name}: cuLaunchKernelEx failed with CUDA error {status}")


def capture(launches: Iterable[Any], stream: Any, overlapping: bool) -> Any:
    """Capture a CUDA graph. overlapping: a kernel may start before the previous one has ended."""
    early = overlapping and possible()
    with stream:
        stream.begin_capture()
        try:
            for launch in launches:
                if early and isinstance(launch, Launch):
                    run(launch)
                else:
                    launch.run()
        finally:
            graph = stream.end_capture()
    return graph


class OverlappedLaunch(Launch):
    """A launch that may start before the previous kernel ends; the launched kernel waits for it."""

    def run(self) -> None:
        run(self)


def overlapped(launch: Launch) -> Launch:
    """Return an `OverlappedLaunch`, or the launch unchanged if overlapping is not supported."""
    if not possible():
        return launch
    return OverlappedLaunch(**{each.name: getattr(launch, each.name) for each in fields(launch)})

"""A replacement of the CuPy functions that gpt2block uses: NumPy arrays, and kernels on the engine.

`emulated()` replaces CuPy by this module. Code that launches kernels, from an operation's `bind` to
a whole model, then runs unchanged without a GPU: NVRTC compiles a kernel as for a GPU, and the
engine of `gpt2block.emulator.ptx` runs its PTX. Device memory is a list of live allocations. A
launch in which the engine finds an error raises EmulatorError. New arrays are filled with 0xFF
bytes, which are NaN.

Streams run every call immediately; a captured graph is a list of calls.
"""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a dtype's name)
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from gpt2block.cuda import kernels
from gpt2block.cuda.cards import CARDS, MAX_SHARED
from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.engine import Checks
from gpt2block.emulator.ptx.parse import Module
from gpt2block.emulator.ptx.tensor_maps import LAYOUT, TensorMap
from gpt2block.errors import DeviceError, lines

CAPABILITY = "80"
ALIGNMENT = 512  # bytes to which allocations are aligned, as in CuPy's pool
MULTIPROCESSORS = 4
ATTRIBUTES = {
    "MultiProcessorCount": MULTIPROCESSORS,
    MAX_SHARED: CARDS[int(CAPABILITY)].max_shared,
    "L2CacheSize": 1 << 20,
}
__version__ = "emulated"
Size = tuple[int, ...]  # the sizes of a grid or a block
Arguments = Sequence[object]  # the arguments of a launch
float32, float16, int32, uint8 = np.float32, np.float16, np.int32, np.uint8

# (address, id(owner)) → (weak reference to the owner, bytes). An owner is an array that keeps
# memory alive; memory of an object that is not an array can have several views as owners. Memory
# counts as allocated as long as one of its owners lives.
_memory: dict[tuple[int, int], tuple[weakref.ref[np.ndarray], int]] = {}
_latest: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}  # address → its newest owner


class MemoryPointer:
    """An address in device memory, and the object `mem` that keeps the memory alive."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, int(mem.ptr) + offset


class _Pointer:
    """The address of an array's data."""

    device_id = -1

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def memset(self, value: int, nbytes: int) -> None:
        ctypes.memset(self.ptr, value, nbytes)

    def copy_from_host_async(self, source: int, nbytes: int) -> None:
        ctypes.memmove(self.ptr, source, nbytes)

    def copy_from_device_async(self, source: MemoryPointer, nbytes: int) -> None:
        _now_or_captured(lambda: ctypes.memmove(self.ptr, source.ptr, nbytes))


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class ndarray(np.ndarray):  # noqa: N801  (CuPy's name)
    """A NumPy array with the additional methods of a CuPy array."""

    def __new__(
        cls,
        shape: int | Sequence[int],
        dtype: DTypeLike = "float64",
        memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
    ) -> ndarray:
        if memptr is None:
            return empty(shape, dtype)
        memory: Any = (ctypes.c_uint8 * memptr.mem.size).from_address(memptr.mem.ptr)
        memory.owner = memptr.mem.owner  # every view keeps the owner alive
        start = memptr.ptr - memptr.mem.ptr
        made: ndarray = np.ndarray(shape, np.dtype(dtype), memory, start, strides).view(cls)
        return made

    @property
    def data(self) -> Any:
        address = self.ctypes.data
        if _allocation(address) is None:  # memory that NumPy allocated for an expression's result
            adopt(self)
        return _Pointer(address)

    @property
    def device(self) -> Any:
        return Device()

    def get(self, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        if out is None:
            return np.array(self)
        out[...] = self
        return out

    def set(self, array: object) -> None:
        self[...] = np.asarray(array)


def empty(shape: int | Sequence[int], dtype: DTypeLike = "float64") -> ndarray:
    """Return a new array, aligned to 512 bytes, whose bytes are all 0xFF."""
    dtype = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    memory = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    _allocated(memory, memory.ctypes.data + start, nbytes)
    made: ndarray = np.ndarray(sizes, dtype, memory, start).view(ndarray)
    return made


def adopt(array: np.ndarray) -> ndarray:
    """Return a device array that shares the memory of a host array, if it is C-contiguous."""
    if not array.flags.c_contiguous:
        return asarray(array)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    _allocated(owner, owner.ctypes.data, owner.nbytes)
    return array.view(ndarray)


def _allocated(owner: np.ndarray, address: int, nbytes: int) -> None:
    """Allow kernels to read and write `nbytes` bytes at `address` as long as `owner` lives."""
    key = address, id(owner)
    found = weakref.ref(owner, lambda _: (_memory.pop(key, None), _latest.pop(address, None)))
    _memory[key] = _latest[address] = found, nbytes


def asarray(array: object, dtype: DTypeLike | None = None, order: str | None = None) -> ndarray:
    if hasattr(array, "__cuda_array_interface__"):
        return _shared(array.__cuda_array_interface__)
    host = np.asarray(array)
    dtype = host.dtype if dtype is None else np.dtype(dtype)
    ordered = order is None or host.flags.c_contiguous
    if isinstance(array, ndarray) and array.dtype == dtype and ordered:
        return array
    transposed = order is None and host.flags.f_contiguous  # CuPy also keeps Fortran order
    copy: Any = empty(host.shape[::-1], dtype).T if transposed else empty(host.shape, dtype)
    copy[...] = host
    return copy  # type: ignore[no-any-return]


def _shared(interface: dict[str, Any]) -> ndarray:
    """Return an array that shares memory with another library's `__cuda_array_interface__`."""
    dtype, shape = np.dtype(interface["typestr"]), interface["shape"]
    address = interface["data"][0]
    memory = UnownedMemory(address, int(np.prod(shape)) * dtype.itemsize, None)
    return ndarray(shape, dtype, MemoryPointer(memory, 0), interface["strides"])


def array(value: ArrayLike, dtype: DTypeLike | None = None) -> ndarray:
    return asarray(np.array(value, dtype), order="C")


def zeros(shape: int | Sequence[int], dtype: DTypeLike = "float64") -> ndarray:
    return full(shape, 0, dtype)


def full(shape: int | Sequence[int], value: object, dtype: DTypeLike = "float64") -> ndarray:
    array = empty(shape, dtype)
    array[...] = value
    return array


def empty_like(array: np.ndarray) -> ndarray:
    return empty(array.shape, array.dtype)


def ascontiguousarray(array: object) -> ndarray:
    return asarray(array, order="C")


def asnumpy(array: object) -> np.ndarray:
    return np.array(array)


def copyto(target: ndarray, source: ArrayLike) -> None:
    _now_or_captured(lambda: np.copyto(target, source))


def split(array: ndarray, ends: Sequence[int]) -> list[ndarray]:
    return np.split(array, ends)  # type: ignore[return-value]


class EmulatorError(Exception):
    """The engine has found an error in a launch. finding: the error."""

    def __init__(self, finding: engine.Finding) -> None:
        super().__init__(f"{finding.kernel}: {finding}")
        self.finding = finding


class CompileException(Exception):  # noqa: N818  (CuPy's name)
    """A source does not compile."""

    def get_message(self) -> str:
        return str(self)


USUAL = Checks()


class RawModule:
    """A replacement of cupy.RawModule, for code that `kernels.program` has returned."""

    def __init__(self, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._code, self._options = code, options
        self._arch = f"sm_{Device.compute_capability}"
        self._modules: dict[bool, Module] = {}

    def compile(self) -> None:
        self.module(_state.checks.debug)

    def module(self, debug: bool) -> Module:
        """Return the compiled module, whose variables keep their values between launches."""
        if debug not in self._modules:
            compiled = _compiled(self._code, self._options, self._arch, debug)
            self._modules[debug] = replace(compiled, memory={})
        return self._modules[debug]

    def get_function(self, name: str) -> EmulatedFunction:
        found = re.search(r'^#line 1 "(.*)"$', self._code, re.MULTILINE)
        assert found
        return EmulatedFunction(self, kernels.signatures(found[1])[name])


@cache
def _compiled(code: str, options: tuple[str, ...], arch: str, debug: bool) -> Module:
    chosen = [each.partition("=")[2] for each in options if each.startswith("-arch=")]
    own = [each for each in options if each.startswith("-I")]
    build = nvrtc.compile(
        code, name="kernel.cu", arch=(*chosen, arch)[0], options=[*own, *["-G"] * debug]
    )
    if isinstance(build, nvrtc.Refused):
        raise DeviceError(*lines(build.reason)) if build.reason else CompileException(build.log)
    return Module(build.ptx)


class EmulatedFunction:
    """A kernel; calling this object runs the kernel on the CPU."""

    shared_size_bytes = max_dynamic_shared_size_bytes = local_size_bytes = 0
    kernel = SimpleNamespace(ptr=0)

    def __init__(self, module: RawModule, signature: kernels.Signature) -> None:
        self.module, self.name, self._signature = module, signature.name, signature

    def __call__(self, grid: Size, block: Size, args: Arguments, shared_mem: int = 0) -> None:
        early = _state.early
        _now_or_captured(lambda: self._run(grid, block, args, shared_mem, early))

    def _run(
        self, grid: Size, block: Size, args: Arguments, shared: int, early: Collection[str] | None
    ) -> None:
        checks = _state.checks
        spans: dict[int, np.ndarray] = {}
        parameters = self._signature.parameters
        of_inputs = [(p.const and p.restrict) or p.name in (early or ()) for p in parameters]
        result = engine.launch(
            self.module.module(checks.debug),
            self.name,
            grid,
            block,
            [_value(self.name, arg, spans) for arg in args],
            shared=shared,
            order=_state.order,
            names=[each.name for each in parameters],
            early=None if early is None else of_inputs,
            checks=checks,
        )
        checks.seen(result)
        for finding in result.findings:
            if finding.fatal:
                raise EmulatorError(finding)


def encode_tensor_map(place: int, dtype: int, rank: int, address: int, *layout: Any) -> int:
    """Write a tensor map that holds an address of the host, instead of cuTensorMapEncodeTiled."""
    sizes, strides, box, _, _, swizzle, *_ = layout
    item, unused = {0: 1, 6: 2, 7: 4, 9: 2}[dtype], (0,) * (5 - rank)
    numbers = (0, item, *strides, *unused, *sizes, *unused, *box, *unused)
    ctypes.memmove(place, LAYOUT.pack(address, rank, item, 16 << swizzle, *numbers), LAYOUT.size)
    return 0


def _value(kernel: str, arg: object, spans: dict[int, np.ndarray]) -> object:
    """Return an argument in the form that the engine takes."""
    if isinstance(arg, np.void):
        address, rank, item, swizzle, _, *numbers = LAYOUT.unpack_from(arg.tobytes())
        if not address:
            return arg.tobytes()
        strides, sizes, box = (tuple(numbers[k : k + rank]) for k in (0, 5, 10))
        return TensorMap(*_span(kernel, address, spans), item, sizes, strides[1:], box, swizzle)
    if isinstance(arg, np.uintp):
        return engine.Pointer(*_span(kernel, int(arg), spans)) if arg else None
    return arg


def _span(kernel: str, address: int, spans: dict[int, np.ndarray]) -> tuple[np.ndarray, int]:
    """Return the allocation that contains an address, as an array, and the address's offset."""
    allocation = _allocation(address)
    if allocation is None:
        raise engine.LaunchError(f"{kernel}: an argument points to memory that is not allocated")
    start, nbytes = allocation
    if start not in spans:
        spans[start] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
    return spans[start], address - start


def _allocation(address: int) -> tuple[int, int] | None:
    """Return (first byte, size) of the live allocation that contains an address, or None."""
    if (latest := _latest.get(address)) and latest[0]() is not None:  # most pointers
        return address, latest[1]
    known = _memory.copy()  # the garbage collector may remove entries of _memory during the loop
    for (start, _), (owner, nbytes) in known.items():
        if start <= address < start + (nbytes or 1) and owner() is not None:
            return start, nbytes
    return None


class Stream:
    """A stream. Calls run at once, but are recorded between begin_capture and end_capture."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self._captured: list[Callable[[], object]] | None = None
        self._entered: list[Stream] = []

    def __enter__(self) -> Stream:
        self._entered.append(_state.stream)
        _state.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _state.stream = self._entered.pop()

    def begin_capture(self) -> None:
        self._captured = []

    def end_capture(self) -> _Graph:
        calls, self._captured = self._captured or [], None
        return _Graph(tuple(calls))

    def is_capturing(self) -> bool:
        return self._captured is not None

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Graph:
    def __init__(self, calls: tuple[Callable[[], object], ...]) -> None:
        self._calls = calls

    def upload(self, stream: Stream) -> None:
        pass

    def launch(self, stream: Stream | None = None) -> None:
        for call in self._calls:
            call()


class Event:
    ptr = 0

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Device:
    """The emulated device. There is only one."""

    id = -MULTIPROCESSORS - int(CAPABILITY) * 1000  # negative, unlike the index of a real device
    compute_capability = CAPABILITY
    attributes = ATTRIBUTES
    mem_info = (1 << 32, 1 << 32)  # (free bytes, total bytes)

    def __init__(self, index: int | None = None) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _State(threading.local):
    """The settings of launches, which each thread has for itself, and the current stream."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.order: engine.Order = "forward"
        self.early: Collection[str] | None = None
        self.checks = Checks()


_state = _State()


@contextmanager
def early_launches(early: Collection[str] | None = ()) -> Iterator[None]:
    """Make launches in this context overlap the previous kernel (programmatic dependent launch).

    An access before the wait for the previous kernel is then an error. early: names of parameters
    that are not const __restrict__ but may be accessed before the wait; None: no launch overlaps.
    """
    _state.early = early
    try:
        yield
    finally:
        _state.early = None


@contextmanager
def device(
    order: engine.Order, multiprocessors: int, checks: Checks = USUAL, capability: str = CAPABILITY
) -> Iterator[None]:
    """Set the order of threads, the checks of launches, and properties of the device.

    The index of the device depends on its properties, so that caches per device stay valid.
    """
    before = _state.order, _state.checks, Device.id, Device.compute_capability
    attributes = dict(ATTRIBUTES)
    _state.order, _state.checks = order, checks
    Device.id, Device.compute_capability = -multiprocessors - int(capability) * 1000, capability
    ATTRIBUTES["MultiProcessorCount"] = multiprocessors
    ATTRIBUTES[MAX_SHARED] = CARDS[int(capability)].max_shared
    try:
        yield
    finally:
        _state.order, _state.checks, Device.id, Device.compute_capability = before
        ATTRIBUTES.update(attributes)


def _now_or_captured(call: Callable[[], object]) -> None:
    captured = _state.stream._captured
    if captured is None:
        call()
    else:
        captured.append(call)


def get_default_memory_pool() -> SimpleNamespace:
    """Return a memory pool that caches no memory: its free_bytes() is always 0."""
    return SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)


class OutOfMemoryError(MemoryError):
    pass


cuda = SimpleNamespace(
    compiler=SimpleNamespace(CompileException=CompileException),
    Device=Device,
    Stream=Stream,
    Event=Event,
    MemoryPointer=MemoryPointer,
    UnownedMemory=UnownedMemory,
    get_current_stream=lambda: _state.stream,
    get_elapsed_time=lambda start, end: 1.0,
    alloc_pinned_memory=lambda size: empty(size, "uint8"),
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    nvrtc=SimpleNamespace(getVersion=lambda: (0, 0)),  # receipts of a GPU are refused
    nvtx=SimpleNamespace(RangePush=lambda name: None, RangePop=lambda: None),
    driver=SimpleNamespace(funcSetAttribute=lambda function, attribute, value: None),
    runtime=SimpleNamespace(
        getDevice=lambda: Device.id,
        driverGetVersion=lambda: 12030,
        runtimeGetVersion=lambda: 12000,
        getDeviceCount=lambda: 1,
        eventRecord=lambda event, stream: None,
        streamWaitEvent=lambda stream, event: None,
        streamIsCapturing=lambda stream: False,
    ),
)

"""Checks of CUDA arrays for all operations, and `Bound`, the result of binding an operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import gcd, prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import CudaArray as CudaArray  # noqa: PLC0414  (in this module)
from gpt2block.cuda import cupy
from gpt2block.cuda.cards import attribute_of, capability_of
from gpt2block.cuda.kernels import dtype_name
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self

AnyArray = np.ndarray | CudaArray  # an array in host or device memory
Shape = tuple[int, ...]
Read = Callable[[int, NDArray[np.uint8]], None]
PIECES, PIECE_BYTES = 2, 2**24  # maximum copies to the host that run at once; bytes per copy
READERS, READ_BYTES = 4, 2**22  # threads that read bytes for the GPU; bytes per read


class Bound(NamedTuple):
    """An operation with its checked arrays and launches; `run` executes the launches.

    `extra` holds outputs other than `out`, such as mean and rstd of a LayerNorm. The launches do
    not keep the arrays alive.
    """

    out: CudaArray
    launches: tuple[Launch, ...]
    extra: tuple[CudaArray, ...] = ()

    def run(self) -> CudaArray:
        """Run all launches on the current stream and return `out`."""
        for each in self.launches:
            each.run()
        return self.out


class Composite:
    """Base class of the matrices in `gpt2block.models.weights`, which consist of several arrays.

    PARTS: for each NumPy or CuPy array, (suffix of its name in messages, attribute); the attribute
    may be None.
    """

    PARTS: ClassVar[tuple[tuple[str, str], ...]]

    @classmethod
    def trusted(cls, **attributes: object) -> Self:
        """Create a matrix without checks, from attributes that are known to be consistent."""
        matrix = cls.__new__(cls)
        vars(matrix).update(attributes)
        return matrix

    def arrays(self) -> dict[str, CudaArray]:
        """Return a dict of the matrix's arrays; keys are suffixes of their names in messages."""
        return arrays_of("", self)

    def mapped(self, function: Callable[[Any], Any]) -> Self:
        """Apply a function to each array and return the matrix of the results.

        The function must keep shapes and dtypes.
        """
        parts = {part: getattr(self, part) for _, part in self.PARTS}
        results = {part: function(array) for part, array in parts.items() if array is not None}
        return self.trusted(**{**vars(self), **results})


ArrayArg = AnyArray | Composite | None  # an argument of an operation
ArrayArgs = tuple[ArrayArg, ...]


def arrays_of(name: str, value: Any) -> dict[str, CudaArray]:
    """Return {name in messages: array} for an argument, which can consist of several arrays."""
    if isinstance(value, Composite):
        found = ((name + suffix, getattr(value, part)) for suffix, part in value.PARTS)
        return {part: array for part, array in found if array is not None}
    return {} if value is None else {name: value}


def mapped(function: Callable[[Any], Any], value: object) -> Any:
    """Apply a function to an array, or to each array of a Composite matrix."""
    return value.mapped(function) if isinstance(value, Composite) else function(value)


class Expected(NamedTuple):
    """The arguments of `check`: an array, and the properties that the array must have."""

    name: str
    array: object
    dtype: str
    strided: bool = False
    multiple: int = 1


def check_each(arrays: Iterable[Expected]) -> None:
    """Call `check` for each array."""
    for name, array, dtype, strided, multiple in arrays:
        check(name, array, None, dtype, strided, multiple)


def check(
    name: str,
    array: object,
    shape: tuple[int, ...] | None = None,
    dtype: str = "float32",
    strided: bool = False,
    multiple: int = 1,
) -> None:
    """Raise InputError unless `array` is a C-contiguous CuPy array on the current device.

    The array must have exactly this `dtype`, this `shape` unless it is None, and at least one
    element. strided: whether it need not be contiguous. multiple: required alignment of its
    address in bytes.
    """
    if not isinstance(array, cupy.ndarray):
        raise InputError(
            f"{name}: expected a CuPy array, got {type(array).__name__}: use cupy.asarray"
        )
    if shape is not None and array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    if array.ndim == 0 or array.size == 0:
        raise InputError(f"{name}: expected at least one element, got shape {array.shape}")
    if dtype_name(array.dtype) != dtype:
        raise InputError(f"{name}: expected {dtype}, got {array.dtype}: use .astype('{dtype}')")
    check_alignment(name, array)
    if not strided and not array.flags.c_contiguous:
        raise InputError(f"{name}: expected a C-contiguous array: use cupy.ascontiguousarray")
    device = cupy.cuda.Device().id
    if array.device.id != device:
        raise InputError(
            f"{name}: expected an array on the current device {device}, it is on device "
            f"{array.device.id}: use `with cupy.cuda.Device({array.device.id}):`"
        )
    check_address(name, array, multiple)


def check_alignment(name: str, array: CudaArray) -> None:
    """Raise InputError unless the elements of the array are aligned to their size."""
    item = array.itemsize
    if array.data.ptr % item or (
        not array.flags.c_contiguous and any(s % item for s in array.strides)
    ):
        raise InputError(
            f"{name}: expected data aligned to its elements' {array.itemsize} bytes: pass a copy"
        )


def check_address(name: str, array: CudaArray, multiple: int = 16) -> None:
    """Raise InputError unless the first element is aligned to `multiple` bytes."""
    if array.data.ptr % multiple:
        raise InputError(
            f"{name}: expected data aligned to {multiple} bytes: pass a copy, {name}.copy()"
        )


def check_apart(
    name: str, out: ArrayArg, apart: Mapping[str, ArrayArg], in_place: Mapping[str, ArrayArg] = {}
) -> None:
    """Raise InputError if an output overlaps an input, which other thread blocks may still read.

    apart: inputs that `out` must not overlap, by name; arrays, WeightMatrix, HiLoMatrix or None.
    in_place: inputs that may be identical with `out`, but must not overlap it in part.
    """
    for written in arrays_of(name, out).values():
        first, last = _extent(written)
        for kind, inputs in (("", apart), (" in part", in_place)):
            for given, value in inputs.items():
                for part, array in arrays_of(given, value).items():
                    start, end = _extent(array)
                    overlap = first <= end and start <= last
                    if overlap and not (kind and same_memory(written, array)):
                        expected = f"{part} itself or another array" if kind else "another array"
                        raise InputError(f"{name}: overlaps {part}{kind}: expected {expected}")


def same_memory(a: CudaArray, b: CudaArray) -> bool:
    """Return whether both arrays have the same elements in the same memory."""
    return (a.data.ptr, a.shape, a.strides, a.dtype) == (b.data.ptr, b.shape, b.strides, b.dtype)


def element_strides(array: CudaArray) -> tuple[int, ...] | None:
    """Return the strides in elements of all axes except the last axis; 0 for axes of size 1.

    Return None if the last axis is not contiguous.
    """
    item = array.dtype.itemsize
    *strides, last = (s if n > 1 else 0 for n, s in zip(array.shape, array.strides, strict=True))
    if (array.shape[-1] > 1 and last != item) or any(stride % item for stride in strides):
        return None
    return tuple(stride // item for stride in strides)


def row_stride(name: str, x: CudaArray) -> int | None:
    """Return the distance between rows of x (..., K) in elements, or K if there is one row.

    Return None if rows are not contiguous or not equally spaced: kernels then need a contiguous
    copy. Raises InputError unless x is a CuPy array with at least one element.
    """
    if not isinstance(x, cupy.ndarray) or x.ndim == 0 or x.size == 0:
        check(name, x)
    strides = element_strides(x)
    if strides is None:
        return None
    distance, rows = 0, 1  # row stride and number of rows, over the axes processed so far
    for n, stride in zip(reversed(x.shape[:-1]), reversed(strides), strict=True):
        if n == 1:
            continue
        if rows == 1:
            distance = stride
        elif stride != distance * rows:
            return None
        rows *= n
    return distance if rows > 1 else int(x.shape[-1])


def checked_row_stride(name: str, x: CudaArray) -> int:
    """Return `row_stride` of x. Raises InputError if the stride is None."""
    stride = row_stride(name, x)
    if stride is None:
        raise InputError(
            f"{name}: expected equally spaced contiguous rows, got strides {x.strides} for shape "
            f"{x.shape}: use cupy.ascontiguousarray"
        )
    return stride


def in_rows(x: object) -> Any:
    """Return x, or a contiguous copy if x is a CuPy array without a `row_stride`."""
    if isinstance(x, cupy.ndarray) and x.size and row_stride("x", x) is None:
        return _copied(x)
    return x


def _extent(array: CudaArray) -> tuple[int, int]:
    """Return the addresses of the first and the last byte of an array."""
    if array.flags.c_contiguous:
        start = array.data.ptr
        return start, start + array.nbytes - 1
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = array.data.ptr + sum(step for step in steps if step < 0)
    last = array.data.ptr + sum(step for step in steps if step > 0) + array.dtype.itemsize - 1
    return first, last


def alignment(*addresses: int) -> int:
    """Return the largest power of two, up to 16, that divides all of these addresses or sizes."""
    return gcd(16, *addresses)


def row_alignment(n: int, *arrays: CudaArray | None) -> int:
    """Return the largest power of two, up to 16, that divides the byte address of every row.

    n: elements per row; rows are contiguous. None among the arrays is ignored.
    """
    present = [array for array in arrays if array is not None]
    return alignment(*(a.data.ptr for a in present), *(n * a.itemsize for a in present))


def device_attribute(name: str) -> int:
    """Return an attribute of the current device, such as "MultiProcessorCount"; cached."""
    return attribute_of(cupy.cuda.Device().id, name)


def multiprocessors() -> int:
    """Return the number of multiprocessors (SMs) of the current device."""
    return attribute_of(cupy.cuda.Device().id, "MultiProcessorCount")


def max_shared() -> int:
    """Return the bytes of shared memory that a block can have on the current device."""
    return attribute_of(cupy.cuda.Device().id, "MaxSharedMemoryPerBlockOptin")


def compute_capability() -> int:
    """Return the compute capability of the current device, such as 90; cached."""
    return capability_of()


def reserve_local_memory(nbytes: int) -> None:
    """Let kernels have `nbytes` bytes of local memory per thread on the current device.

    Otherwise, the launch of a kernel that needs more than earlier kernels waits until the device
    is idle.
    """
    runtime = cupy.cuda.runtime
    if nbytes and runtime.deviceGetLimit(runtime.cudaLimitStackSize) < nbytes:
        runtime.deviceSetLimit(runtime.cudaLimitStackSize, nbytes)


def pinned(shape: Shape, dtype: str = "int32") -> np.ndarray:
    """Allocate an array in pinned host memory, which the GPU reads and writes asynchronously."""
    count = prod(shape)
    memory = cupy.cuda.alloc_pinned_memory(np.dtype(dtype).itemsize * count)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def on_device(host: np.ndarray) -> CudaArray:
    """Return an array of the current device that is in the memory of `host`, a pinned array."""
    return _at(host.ctypes.data, host, cupy.cuda.Device().id)


def seen_from_here(array: CudaArray) -> CudaArray:
    """Return another GPU's array, whose memory this GPU can access, as an array of this GPU."""
    device = cupy.cuda.Device().id
    return array if array.device.id == device else _at(array.data.ptr, array, device)


def _at(address: int, array: AnyArray, device: int) -> CudaArray:
    owner = cupy.cuda.UnownedMemory(address, array.nbytes, array, device)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(owner, 0))


def to_host(parts: Iterable[CudaArray], rows: np.ndarray) -> None:
    """Copy the rows of 2-D arrays, one array after another, to the host array `rows`.

    `rows` may have fewer columns. The rows pass through pinned memory in pieces: the GPU copies a
    piece while the host takes the previous piece. All copies of a part are queued on the current
    stream before the next part, which may reuse the same device memory, is requested.
    """
    # waiting: copies in flight, each as (piece, event after the copy, first row of the piece)
    waiting: deque[tuple[np.ndarray, CudaArray, int]] = deque()

    def take() -> None:
        piece, copied, first = waiting.popleft()
        copied.synchronize()
        rows[first : first + len(piece)] = piece[:, : rows.shape[1]]

    first = 0
    for part in parts:
        at_once = max(1, PIECE_BYTES // (part.shape[1] * part.itemsize))
        for begin in range(0, len(part), at_once):
            if len(waiting) == PIECES:
                take()
            source = part[begin : begin + at_once]
            piece = pinned(source.shape, dtype_name(source.dtype))
            source.get(out=piece, blocking=False)
            copied = cupy.cuda.Event(disable_timing=True)
            copied.record()
            waiting.append((piece, copied, first))
            first += len(piece)
    while waiting:
        take()


def read_into(out: CudaArray, parts: Iterable[tuple[Read, int]]) -> None:
    """Fill the GPU array `out` with the bytes of `parts`, one part after another.

    parts: pairs of a function and a number of bytes; read(begin, array) fills the array with the
    part's bytes from `begin` on. Threads read pieces into pinned memory while the GPU copies
    earlier pieces.
    """
    reading: deque[tuple[Future[None], np.ndarray]] = deque()
    copying: deque[tuple[Any, np.ndarray]] = deque()  # (event after a copy, pinned memory)
    at = 0

    def copy() -> None:
        nonlocal at
        done, piece = reading.popleft()
        done.result()
        out[at : at + len(piece)].set(piece)
        at += len(piece)
        copied = cupy.cuda.Event(disable_timing=True)
        copied.record()
        copying.append((copied, piece))
        if len(copying) > PIECES:
            copying.popleft()[0].synchronize()

    with ThreadPoolExecutor(READERS) as pool:
        for read, size in parts:
            for begin in range(0, size, READ_BYTES):
                if len(reading) > READERS:
                    copy()
                piece = pinned((min(READ_BYTES, size - begin),), "uint8")
                reading.append((pool.submit(read, begin, piece), piece))
        while reading:
            copy()
    while copying:
        copying.popleft()[0].synchronize()


def contiguous(*arrays: object) -> tuple[Any, ...]:
    """Copy CuPy arrays that are not C-contiguous; return other arguments unchanged."""
    return tuple(
        _copied(array)
        if isinstance(array, cupy.ndarray) and not array.flags.c_contiguous
        else array
        for array in arrays
    )


def on_16_bytes(name: str, array: object) -> Any:
    """Return the array. Copy a CuPy array unless it is C-contiguous and aligned to 16 bytes."""
    if not isinstance(array, cupy.ndarray):
        return array
    if not array.flags.c_contiguous:
        return _copied(array)
    if array.data.ptr % 16:
        check_alignment(name, array)
        return array.copy()
    return array


def _copied(array: CudaArray) -> CudaArray:
    """Return a C-contiguous copy. Raises InputError for misaligned elements."""
    check_alignment("an input", array)
    return cupy.ascontiguousarray(array)

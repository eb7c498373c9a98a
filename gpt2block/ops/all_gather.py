"""Gather a matrix whose columns several GPUs have computed (`reference.all_gathered`).

Kernels: peers/all_gather.cu and, for an all-gather and the RMSNorm after it,
norms/rmsnorm_stream.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, multiprocessors, on_device, pinned, seen_from_here
from gpt2block.cuda.doctor import MAX_GPUS
from gpt2block.cuda.kernels import Defines, Geometry, Launch, dtype_name, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operands import LINE, Operand, check_operand, stored_defines, stored_scale
from gpt2block.ops.operation import REQUIRED, Operation, variant
from gpt2block.ops.rmsnorm import STREAM, stream_geometry

FILE = "peers/all_gather.cu"
KERNELS = "all_gather", "all_gather_rows", "rmsnorm_gathered"  # kernels that exchange words
THREADS = 512  # GATHER_THREADS of the kernel
MAX_BLOCKS = 2  # per multiprocessor, so that all blocks of an all-gather run at the same time
CAPACITY = 2**19  # entries in half of gather's area; an entry: a 4-byte word, its round's number
# maximum words that `all_gather` sends; all_gather_rows sends more, without round numbers
WORDS = 2**18
ROOM = 2**22  # words in half of all_gather_rows' area; also the area's size in entries of 8 bytes
HEADER = 16 + 7 * 1024  # entries before the areas of a peer buffer, with flags (lib/exchange.cuh)
MAX_ROWS, MAX_CHANNELS = 64, 8192  # maximum rows and channels of an all-gather with a norm
MAX_STORED_ROWS = 8  # maximum rows that a product or attention sends itself
STORE, LOAD = 1, 2  # parts of the kernel
# inputs after the residual
PEER_INPUTS = ("abort", "own", *(f"to_{n}" for n in range(1, MAX_GPUS)))


class PeerStores:
    """Columns of a matrix of N columns, from `first` on, that a product or attention also sends.

    The next all-gather on these peer buffers must receive them. peers: {name: array}, as
    `PeerBuffers.of` returns. args, defines: arguments of the kernel that sends (Peers in
    lib/exchange.cuh), and its macros. addresses: the addresses of the arrays in `peers`.
    """

    def __init__(self, peers: Mapping[str, CudaArray], N: int, first: int) -> None:
        boxes = {name: box for name, box in peers.items() if name != "abort"}
        self.args = {**boxes, "first_column": first, "all_columns": N, "capacity": CAPACITY}
        self.defines = _others(len(boxes) - 1)
        self._N, self._first = N, first
        self._peers = tuple(peers.get(name) for name in PEER_INPUTS)
        self.addresses = tuple(box.data.ptr for box in peers.values())

    def launch(self, columns: CudaArray) -> Launch:
        """Return a launch that only sends `columns`, the float32 output of a kernel that cannot."""
        M, S = columns.shape
        arrays = columns, None, columns, *self._peers
        return part_of(_with_numbers(arrays, M, S, self._N, self._first), STORE)


def _others(count: int) -> Defines:
    """Return the macro with the number of other GPUs."""
    return (("OTHERS", count),)


class PeerBuffers:
    """Memory through which several GPUs exchange words: a peer buffer on each GPU.

    devices: device numbers. Raises InputError if a GPU cannot access another GPU's memory.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        if len(devices) > MAX_GPUS:
            raise InputError(f"device: expected at most {MAX_GPUS} GPUs, got {len(devices)}")
        _connect(devices)
        self._abort = pinned((1,))
        self._abort[0] = 0
        self._devices, self._boxes = devices, list[CudaArray]()
        for device in devices:
            with cupy.cuda.Device(device):
                self._boxes.append(cupy.zeros(HEADER + 2 * CAPACITY + ROOM, "int64"))
                cupy.cuda.Device().synchronize()

    def of(self, me: int) -> dict[str, CudaArray]:
        """Return {name: array} of an all-gather's inputs on GPU number `me`, the current device."""
        count = len(self._devices)
        boxes = (seen_from_here(self._boxes[(me + n) % count]) for n in range(count))
        return dict(zip(PEER_INPUTS, (on_device(self._abort), *boxes), strict=False))

    @property
    def aborted(self) -> bool:
        """Whether all-gathers must end, because one waited too long or `abort` was called."""
        return bool(self._abort[0])

    def abort(self) -> None:
        """Make all-gathers that still wait for words end without a result, until `clear`."""
        self._abort[0] = 1

    def clear(self) -> None:
        """Permit all-gathers again after `abort`, when the launches of all GPUs have ended."""
        for device, box in zip(self._devices, self._boxes, strict=True):
            with cupy.cuda.Device(device):
                box.fill(0)
                cupy.cuda.Device().synchronize()
        self._abort[0] = 0


def _connect(devices: Sequence[int]) -> None:
    """Give each GPU access to the memory of all others. Raises InputError."""
    runtime = cupy.cuda.runtime
    for device in devices:
        for other in devices:
            if device == other:
                continue
            if not runtime.deviceCanAccessPeer(device, other):
                raise InputError(
                    f"device: cuda:{device} cannot access the memory of cuda:{other}: expected "
                    "GPUs that NVLink or PCIe connects: use one of them"
                )
            with cupy.cuda.Device(device), suppress(runtime.CUDARuntimeError):
                runtime.deviceEnablePeerAccess(other)  # raises if it is enabled already


@variant("words", FILE, "all_gather", "all_gather_rows")
def _all_gather(c: Call) -> tuple[Launch, ...]:
    """Launch all-gathers, each of as many rows as a peer buffer has room for."""
    shard, out, M = c.shard, c.output("out"), c.M
    if isinstance(shard, HiLoMatrix):  # two rows of parts for each row; all have one scale
        if shard.one_scale is None or out.one_scale != shard.one_scale or c.residual is not None:
            raise InputError("hi/lo rows: expected one scale, and no residual")
        shard, out, M = (*(each.parts.reshape(2 * M, -1) for each in (shard, out)), 2 * M)
    per_word = 4 // shard.itemsize
    S, N, first = c.S // per_word, c.N // per_word, c.first // per_word
    if c.S % per_word or c.N % per_word or c.first % per_word:
        raise InputError(f"columns {c.first} to {c.first + c.S} of {c.N}: expected even numbers")
    _check_columns(c.first, c.S, c.N)
    if c.sent and not can_store(M, N):
        raise InputError(f"{M:,} rows of {N:,} columns: expected fewer, or sent=False")
    flagged = M * N > WORDS and not any(n % 4 for n in (S, N, first))
    if c.to_operand and not stores_operand(M, N):
        raise InputError(f"{M:,} rows of {N:,} columns: expected floats, without to_operand")
    room = ROOM if flagged else CAPACITY
    if room < N:
        raise InputError(f"rows of {N:,} words: expected at most {room:,}")
    launches, at_once = [], room // N
    for row in range(0, M, at_once):
        rows = slice(row, min(M, row + at_once))
        residual = None if c.residual is None else c.residual[rows]
        arguments = (shard[rows], residual, out[rows], *_peers(c)), rows.stop - row, S, N, first
        launch = _with_flags(*arguments) if flagged else _with_numbers(*arguments, c.to_operand)
        launches.append(part_of(launch, LOAD) if c.sent else launch)
    return tuple(launches)


def can_store(M: int, N: int) -> bool:
    """Return whether kernels can send their columns of M rows of N floats (`PeerStores`)."""
    return M <= MAX_STORED_ROWS and M * N <= WORDS


def stores_operand(M: int, N: int) -> bool:
    """Return whether `all_gather` can store M rows of N columns as an `Operand`."""
    return M * N <= WORDS and N % LINE == 0


def _with_numbers(
    arrays: tuple[Any, ...], M: int, S: int, N: int, first: int, operand: Operand | None = None
) -> Launch:
    width = 1 if S % 2 or N % 2 or first % 2 else 2  # words that a thread sends at a time
    blocks = min(_max_blocks(), ceil(M * N / (width * THREADS)))
    geometry = Geometry("all_gather", (blocks,), (THREADS,), defines=(("GATHER_WIDTH", width),))
    defines = (*stored_defines("GATHER_OPERAND", operand), *_others_of(arrays))
    geometry = geometry.with_defines(defines)
    args = (*arrays, M, S, N, first, CAPACITY, stored_scale(operand), STORE | LOAD)
    return launch_at(FILE, geometry, args, storage=dtype_name(arrays[0].dtype))


def _with_flags(arrays: tuple[Any, ...], M: int, S: int, N: int, first: int) -> Launch:
    rows = ceil(M / _max_blocks())
    blocks, defines = ceil(M / rows), _others_of(arrays)
    geometry = Geometry("all_gather_rows", (blocks,), (THREADS,), defines=defines)
    args = (*arrays, M, S, N, first, CAPACITY, ROOM, rows, STORE | LOAD)
    return launch_at(FILE, geometry, args, storage=dtype_name(arrays[0].dtype))


def _others_of(arrays: tuple[object, ...]) -> Defines:
    """Return the macro with the number of other GPUs. arrays: end with the inputs PEER_INPUTS."""
    return _others(sum(box is not None for box in arrays[1 - MAX_GPUS :]))


def _max_blocks() -> int:
    return MAX_BLOCKS * multiprocessors()


def part_of(launch: Launch, parts: int) -> Launch:
    """Return a launch of an all-gather that only sends or only receives.

    launch: a launch of a kernel in KERNELS. parts: STORE or LOAD. The result runs only parts that
    `launch` runs.
    """
    return replace(launch, args=(*launch.args[:-1], launch.args[-1] & np.int32(parts)))


def _peers(c: Call) -> tuple[CudaArray | None, ...]:
    return tuple(getattr(c, name) for name in PEER_INPUTS)


def _check_columns(first: int, S: int, N: int) -> None:
    if first < 0 or first + S > N:
        raise InputError(f"columns {first} to {first + S}: expected columns of {N}")


def normalizes(M: int, N: int) -> bool:
    """Return whether `all_gather_norm` supports M rows of N columns. Borders of shards are even."""
    fits = M <= MAX_ROWS and N <= MAX_CHANNELS and M * N <= CAPACITY
    return fits and N % 4 == 0


@variant("normed", STREAM, "rmsnorm_gathered")
def _all_gather_norm(c: Call) -> Launch:
    _check_columns(c.first, c.S, c.N)
    if not normalizes(c.M, c.N) or c.first % 4 or c.S % 4:
        raise InputError(
            f"{c.M:,} rows of {c.N:,} columns, columns {c.first} to {c.first + c.S}: expected "
            f"multiples of 4 columns, at most {MAX_ROWS} rows of {MAX_CHANNELS:,} columns, and "
            f"at most {CAPACITY:,} values"
        )
    geometry = stream_geometry(c.M, c.N)._replace(kernel="rmsnorm_gathered")
    peers = _peers(c)
    defines = (*stored_defines("RS_OPERAND", c.to_operand), *_others_of(peers))
    scale = stored_scale(c.to_operand)
    sizes = c.S, c.first, CAPACITY, LOAD if c.sent else STORE | LOAD
    args = (c.shard, c.residual, c.weight, c.output("out"), scale, c.eps, *peers, *sizes)
    return launch_at(STREAM, geometry.with_defines(defines), args)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `all_gather` or `all_gather_norm`.

    to_operand: the `Operand` to store in out, with an even shard. sent: whether the products have
    sent the columns (`PeerStores`), so that the kernel only receives.
    """
    N, c = unchecked.options["N"], unchecked.checked()
    check_operand(c.to_operand, N, N)
    if c.to_operand and dtype_name(c.shard.dtype) != "float32":
        raise InputError(f"to_operand: expected float32, got {c.shard.dtype}")
    return c


ALL_GATHER_NORM = Operation(
    name="all_gather_norm",
    variants=(_all_gather_norm,),
    options={"N": REQUIRED, "first": REQUIRED, "eps": 1e-6, "to_operand": None, "sent": False},
    prepare=_prepare,
)
ALL_GATHER = Operation(
    name="all_gather",
    variants=(_all_gather,),
    options={"N": REQUIRED, "first": REQUIRED, "to_operand": None, "sent": False},
    prepare=_prepare,
)

"""Gather a matrix whose columns several GPUs have computed (`reference.gathered`).

Kernels: shares/gather.cu and, for a gather and the RMSNorm after it, norms/rmsnorm_stream.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, device_attribute, on_device, pinned, seen_from_here
from gpt2block.cuda.doctor import MOST_GPUS
from gpt2block.cuda.kernels import Defines, Geometry, dtype_name, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.models.weights.two_part import TwoPartMatrix
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operation import REQUIRED, Operation, variant
from gpt2block.ops.rmsnorm import STREAM, stream_geometry
from gpt2block.ops.terms import LINE, Terms, check_terms, stored_defines, stored_scale

FILE = "shares/gather.cu"
KERNELS = "gather", "gather_rows", "rmsnorm_gathered"  # kernels that exchange words
THREADS = 512  # GATHER_THREADS of the kernel
MOST_BLOCKS = 2  # per multiprocessor, so that all blocks of a gather run at the same time
CAPACITY = 2**19  # entries in half of gather's area; an entry: a 4-byte word, its round's number
WORDS = 2**18  # maximum words that `gather` sends; gather_rows sends more, without round numbers
ROOM = 2**22  # words in half of gather_rows' area; also the area's size in entries of 8 bytes
HEADER = 16 + 7 * 1024  # entries before the areas of a mailbox, with flags (lib/exchange.cuh)
MOST_ROWS, MOST_CHANNELS = 64, 8192  # maximum rows and channels of a gather with a norm
MOST_SENT = 8  # maximum rows that a product or attention sends itself
SEND, RECEIVE = 1, 2  # parts of the kernel
MAIL = ("abort", "own", *(f"to_{n}" for n in range(1, MOST_GPUS)))  # inputs after the residual


class Sends:
    """Columns of a matrix of N columns, from `first` on, that a product or attention also sends.

    The next gather on these mailboxes must receive them. mail: {name: array}, as `Mailboxes.of`
    returns. args, defines: arguments of the kernel that sends (Mail in lib/exchange.cuh), and its
    macros. addresses: the addresses of the arrays in `mail`.
    """

    def __init__(self, mail: Mapping[str, CudaArray], N: int, first: int) -> None:
        boxes = {name: box for name, box in mail.items() if name != "abort"}
        self.args = {**boxes, "first_column": first, "all_columns": N, "capacity": CAPACITY}
        self.defines = _others(len(boxes) - 1)
        self._mail = tuple(mail.get(name) for name in MAIL)
        self.addresses = tuple(box.data.ptr for box in mail.values())

    def launch(self, columns: CudaArray) -> Launch:
        """Return a launch that only sends `columns`, the float32 output of a kernel that cannot."""
        M, S = columns.shape
        N, first = self.args["all_columns"], self.args["first_column"]
        arrays = columns, None, columns, *self._mail
        return part_of(_with_numbers(arrays, M, S, N, first), SEND)


def _others(count: int) -> Defines:
    """Return the macro with the number of other GPUs."""
    return (("OTHERS", count),)


class Mailboxes:
    """Memory through which several GPUs exchange words: a mailbox on each GPU.

    devices: device numbers. Raises InputError if a GPU cannot access another GPU's memory.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        if len(devices) > MOST_GPUS:
            raise InputError(f"device: expected at most {MOST_GPUS} GPUs, got {len(devices)}")
        _connect(devices)
        self._abort = pinned((1,))
        self._abort[0] = 0
        self._devices, self._boxes = devices, list[CudaArray]()
        for device in devices:
            with cupy.cuda.Device(device):
                self._boxes.append(cupy.zeros(HEADER + 2 * CAPACITY + ROOM, "int64"))
                cupy.cuda.Device().synchronize()

    def of(self, me: int) -> dict[str, CudaArray]:
        """Return {name: array} of the inputs of a gather on GPU number `me`, the current device."""
        count = len(self._devices)
        boxes = (seen_from_here(self._boxes[(me + n) % count]) for n in range(count))
        return dict(zip(MAIL, (on_device(self._abort), *boxes), strict=False))

    @property
    def aborted(self) -> bool:
        """Whether gathers must end, because a gather waited too long or `abort` was called."""
        return bool(self._abort[0])

    def abort(self) -> None:
        """Make gathers that still wait for words end without a result, until `clear`."""
        self._abort[0] = 1

    def clear(self) -> None:
        """Make gathers possible again after `abort`, when all GPUs have ended their launches."""
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


@variant("words", FILE, "gather", "gather_rows")
def _gather(c: Call) -> tuple[Launch, ...]:
    """Launch gathers, each of as many rows as a mailbox has room for."""
    share, out, M = c.share, c.output("out"), c.M
    if isinstance(share, TwoPartMatrix):  # two rows of parts for each row; all have one scale
        if share.one_scale is None or out.one_scale != share.one_scale or c.residual is not None:
            raise InputError("two-part rows: expected one scale, and no residual")
        share, out, M = (*(each.parts.reshape(2 * M, -1) for each in (share, out)), 2 * M)
    per_word = 4 // share.itemsize
    S, N, first = c.S // per_word, c.N // per_word, c.first // per_word
    if c.S % per_word or c.N % per_word or c.first % per_word:
        raise InputError(f"columns {c.first} to {c.first + c.S} of {c.N}: expected even numbers")
    _check_columns(c.first, c.S, c.N)
    if c.sent and not can_send(M, N):
        raise InputError(f"{M:,} rows of {N:,} columns: expected fewer, or sent=False")
    flagged = M * N > WORDS and not any(n % 4 for n in (S, N, first))
    if c.to_terms and not stores_terms(M, N):
        raise InputError(f"{M:,} rows of {N:,} columns: expected floats, without to_terms")
    room = ROOM if flagged else CAPACITY
    if room < N:
        raise InputError(f"rows of {N:,} words: expected at most {room:,}")
    launches, at_once = [], room // N
    for row in range(0, M, at_once):
        rows = slice(row, min(M, row + at_once))
        residual = None if c.residual is None else c.residual[rows]
        given = (share[rows], residual, out[rows], *_mail(c)), rows.stop - row, S, N, first
        launch = _with_flags(*given) if flagged else _with_numbers(*given, c.to_terms)
        launches.append(part_of(launch, RECEIVE) if c.sent else launch)
    return tuple(launches)


def can_send(M: int, N: int) -> bool:
    """Return whether kernels can send their columns of M rows of N floats (`Sends`)."""
    return M <= MOST_SENT and M * N <= WORDS


def stores_terms(M: int, N: int) -> bool:
    """Return whether `gather` can store M rows of N columns as `Terms`."""
    return M * N <= WORDS and N % LINE == 0


def _with_numbers(
    arrays: tuple[Any, ...], M: int, S: int, N: int, first: int, terms: Terms | None = None
) -> Launch:
    width = 1 if S % 2 or N % 2 or first % 2 else 2  # words that a thread sends at a time
    blocks = min(_most_blocks(), ceil(M * N / (width * THREADS)))
    geometry = Geometry("gather", (blocks,), (THREADS,), defines=(("GATHER_WIDTH", width),))
    defines = (*stored_defines("GATHER_TERMS", terms), *_others_of(arrays))
    geometry = geometry.with_defines(defines)
    args = (*arrays, M, S, N, first, CAPACITY, stored_scale(terms), SEND | RECEIVE)
    return launch_at(FILE, geometry, args, storage=dtype_name(arrays[0].dtype))


def _with_flags(arrays: tuple[Any, ...], M: int, S: int, N: int, first: int) -> Launch:
    rows = ceil(M / _most_blocks())
    geometry = Geometry("gather_rows", (ceil(M / rows),), (THREADS,), defines=_others_of(arrays))
    args = (*arrays, M, S, N, first, CAPACITY, ROOM, rows, SEND | RECEIVE)
    return launch_at(FILE, geometry, args, storage=dtype_name(arrays[0].dtype))


def _others_of(arrays: tuple[Any, ...]) -> Defines:
    """Return the macro with the number of other GPUs. arrays: end with the inputs MAIL."""
    return _others(sum(box is not None for box in arrays[1 - MOST_GPUS :]))


def _most_blocks() -> int:
    return MOST_BLOCKS * device_attribute("MultiProcessorCount")


def part_of(launch: Launch, parts: int) -> Launch:
    """Return a launch of a gather that only sends or only receives.

    launch: a launch of a kernel in KERNELS. parts: SEND or RECEIVE. The result runs only parts that
    `launch` runs.
    """
    return replace(launch, args=(*launch.args[:-1], launch.args[-1] & np.int32(parts)))


def _mail(c: Call) -> tuple[CudaArray | None, ...]:
    return tuple(getattr(c, name) for name in MAIL)


def _check_columns(first: int, S: int, N: int) -> None:
    if first < 0 or first + S > N:
        raise InputError(f"columns {first} to {first + S}: expected columns of {N}")


def normalizes(M: int, N: int) -> bool:
    """Return whether `gather_norm` supports M rows of N columns. Borders of shares are even."""
    fits = M <= MOST_ROWS and N <= MOST_CHANNELS and M * N <= CAPACITY
    return fits and N % 4 == 0


@variant("normed", STREAM, "rmsnorm_gathered")
def _gather_norm(c: Call) -> Launch:
    _check_columns(c.first, c.S, c.N)
    if not normalizes(c.M, c.N) or c.first % 4 or c.S % 4:
        raise InputError(
            f"{c.M:,} rows of {c.N:,} columns, columns {c.first} to {c.first + c.S}: expected "
            f"multiples of 4 columns, at most {MOST_ROWS} rows of {MOST_CHANNELS:,} columns, and "
            f"at most {CAPACITY:,} values"
        )
    geometry = stream_geometry(c.M, c.N)._replace(kernel="rmsnorm_gathered")
    mail = _mail(c)
    defines = (*stored_defines("RS_TERMS", c.to_terms), *_others_of(mail))
    scale = stored_scale(c.to_terms)
    sizes = c.S, c.first, CAPACITY, RECEIVE if c.sent else SEND | RECEIVE
    args = (c.share, c.residual, c.weight, c.output("out"), scale, c.eps, *mail, *sizes)
    return launch_at(STREAM, geometry.with_defines(defines), args)


def _prepare_norm(unchecked: UncheckedCall) -> Call:
    """Check a call of `gather_norm`.

    to_terms is as in variant stream of `rmsnorm`. sent: whether the products have sent the columns
    (`Sends`), so that the kernel only receives.
    """
    N = unchecked.options["N"]
    check_terms(unchecked.options["to_terms"], N, N)
    return unchecked.checked()


def _prepare_gather(unchecked: UncheckedCall) -> Call:
    """Check a call of `gather`.

    to_terms: the `Terms` to store in out, with an even share. sent: as in `gather_norm`.
    """
    N, c = unchecked.options["N"], unchecked.checked()
    check_terms(c.to_terms, N, N)
    if c.to_terms and dtype_name(c.share.dtype) != "float32":
        raise InputError(f"to_terms: expected float32, got {c.share.dtype}")
    return c


GATHER_NORM = Operation(
    name="gather_norm",
    variants=(_gather_norm,),
    options={"N": REQUIRED, "first": REQUIRED, "eps": 1e-6, "to_terms": None, "sent": False},
    prepare=_prepare_norm,
)
GATHER = Operation(
    name="gather",
    variants=(_gather,),
    options={"N": REQUIRED, "first": REQUIRED, "to_terms": None, "sent": False},
    prepare=_prepare_gather,
)

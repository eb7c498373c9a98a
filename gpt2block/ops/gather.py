"""Gather a matrix whose columns several GPUs have computed (`reference.gathered`).

Kernel: shares/gather.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, device_attribute, on_device, pinned, seen_from_here
from gpt2block.cuda.kernels import Geometry, dtype_name, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops.call import Call
from gpt2block.ops.operation import REQUIRED, Operation, variant
from gpt2block.weights.two_part import TwoPartMatrix

FILE = "shares/gather.cu"
MOST_GPUS = 8
THREADS = 512  # GATHER_THREADS of the kernel
MOST_BLOCKS = 2  # per multiprocessor, so that all blocks of a gather run at the same time
CAPACITY = 2**21  # entries of half a mailbox: a word (4 bytes) and the number of its round each
HEADER = 16  # entries before the halves of a mailbox
SEND, RECEIVE = 1, 2  # parts of the kernel
MAIL = ("abort", "own", *(f"to_{n}" for n in range(1, MOST_GPUS)))  # inputs after the residual


class Mailboxes:
    """Memory through which several GPUs exchange words: a mailbox on each GPU.

    devices: device numbers. Raises InputError if a GPU cannot access another one's memory.
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
                self._boxes.append(cupy.zeros(HEADER + 2 * CAPACITY, "int64"))
                cupy.cuda.Device().synchronize()

    def of(self, me: int) -> dict[str, CudaArray]:
        """Return {name: array} of the inputs of a gather on GPU number `me`, the current device."""
        count = len(self._devices)
        boxes = (seen_from_here(self._boxes[(me + n) % count]) for n in range(count))
        return dict(zip(MAIL, (on_device(self._abort), *boxes), strict=False))

    @property
    def aborted(self) -> bool:
        """Whether gathers were told to end, by one that waited too long or by `abort`."""
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


@variant("words", FILE, "gather")
def _gather(c: Call) -> tuple[Launch, ...]:
    """Launch a gather for as many rows as a mailbox has room for, and further ones for the rest."""
    share, out, M = c.share, c.out, c.M
    if isinstance(share, TwoPartMatrix):  # two rows of parts for each row; all have one scale
        if share.one_scale is None or out.one_scale != share.one_scale or c.residual is not None:
            raise InputError("two-part rows: expected one scale, and no residual")
        share, out, M = (*(each.parts.reshape(2 * M, -1) for each in (share, out)), 2 * M)
    per_word = 4 // share.itemsize
    S, N, first = c.S // per_word, c.N // per_word, c.first // per_word
    if c.S % per_word or c.N % per_word or c.first % per_word:
        raise InputError(f"columns {c.first} to {c.first + c.S} of {c.N}: expected even numbers")
    if c.first < 0 or c.first + c.S > c.N:
        raise InputError(f"columns {c.first} to {c.first + c.S}: expected columns of {c.N}")
    if N > CAPACITY:
        raise InputError(f"rows of {N:,} words: expected at most {CAPACITY:,}")
    width = 1 if S % 2 or N % 2 or first % 2 else 2  # words of a thread at a time
    most = MOST_BLOCKS * device_attribute("MultiProcessorCount")
    launches, at_once = [], CAPACITY // N
    for row in range(0, M, at_once):
        rows = slice(row, min(M, row + at_once))
        residual = None if c.residual is None else c.residual[rows]
        mail = [getattr(c, name) for name in MAIL]
        sizes = (rows.stop - row, S, N, first, CAPACITY, SEND | RECEIVE)
        blocks = min(most, ceil(sizes[0] * N / (width * THREADS)))
        geometry = Geometry("gather", (blocks,), (THREADS,), defines=(("GATHER_WIDTH", width),))
        args = (share[rows], residual, out[rows], *mail, *sizes)
        launches.append(launch_at(FILE, geometry, args, storage=dtype_name(share.dtype)))
    return tuple(launches)


GATHER = Operation(
    name="gather",
    variants=(_gather,),
    options={"N": REQUIRED, "first": REQUIRED},
)
